"""Tables of text, and numbers with few digits, as the reports of reproductions print them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from clairvit.plotting.labels import UNDEFINED
from clairvit.reports.blocks import Cell, Column, Row, Table


def text_table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    grouped: bool = False,
) -> Table:
    """Return a table of text; the columns named in `right` are aligned as numbers."""
    headings = tuple(Column(title, number=title in right) for title in columns)
    return Table("", caption, headings, tuple(Row(tuple(map(Cell, row))) for row in rows), grouped=grouped)


def short_number(value: float, digits: int = 4) -> str:
    """Return a number with so many digits, "–" for NaN."""
    return UNDEFINED if math.isnan(value) else f"{value:.{digits}g}"
