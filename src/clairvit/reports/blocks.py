"""The content of a report before it becomes HTML, Markdown or CSV. All text is plain; templates escape it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

from clairvit._io import to_json


@dataclass(frozen=True)
class Cell:
    """A table cell; `detail` is set smaller under the text, columns are sorted by `sort_key`."""

    text: str
    detail: str = ""
    best: bool = False
    sort_key: float | None = None
    tint: float = 0.0  # -1 … 1, background of a cell of a matrix


@dataclass(frozen=True)
class Column:
    """A column heading; `note` is set smaller under the title."""

    title: str
    number: bool = True  # right-aligned
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A table row; the first cell is its heading, baselines stand below a line of their own."""

    cells: tuple[Cell, ...]
    baseline: bool = False


@dataclass(frozen=True)
class Table:
    """A table; `records` hold the same numbers unrounded, and tables of one `kind` share a CSV file."""

    block: ClassVar[str] = "table"
    kind: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    records: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    grouped: bool = False  # rows with the same first cell belong together

    @property
    def row_groups(self) -> list[tuple[bool, list[Row]]]:
        """Return neighbouring rows that are baselines, or are not, together."""
        return [(baseline, list(rows)) for baseline, rows in groupby(self.rows, key=lambda row: row.baseline)]


@dataclass(frozen=True)
class Text:
    """A paragraph; `lead` marks the sentence that sums up a section."""

    block: ClassVar[str] = "text"
    text: str
    lead: bool = False


@dataclass(frozen=True)
class Item:
    """A list item that may begin with a term, set bold."""

    text: str
    term: str = ""


@dataclass(frozen=True)
class Items:
    """A bulleted list, with records as a table has them."""

    block: ClassVar[str] = "items"
    items: tuple[Item, ...]
    kind: str = ""
    records: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Facts:
    """Pairs of a term and its value."""

    block: ClassVar[str] = "facts"
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tile:
    """A small image with a name and a value; `source` is a data URI."""

    source: str
    alternative: str
    text: str
    detail: str = ""
    diverging: bool | None = None  # the colour scale of a map; None for a photo


@dataclass(frozen=True)
class Badge:
    """How far a map can be trusted: 'supported', 'weak' or 'chance', the words for it, and the sentence."""

    kind: str
    text: str
    sentence: str


@dataclass(frozen=True)
class Example:
    """Images side by side: a photo and its maps."""

    block: ClassVar[str] = "example"
    caption: str
    tiles: tuple[Tile, ...]
    badge: Badge | None = None


@dataclass(frozen=True)
class ColourBars:
    """Legends of maps; each is the colours from low to high (CSS), and the words at its ends."""

    block: ClassVar[str] = "bars"
    bars: tuple[tuple[tuple[str, ...], str, str], ...]


@dataclass(frozen=True)
class LegendEntry:
    """A line of a chart's legend; `style` is CSS for its stroke."""

    style: str
    text: str
    value: str = ""


@dataclass(frozen=True)
class Chart:
    """An inline SVG, its caption and its legend."""

    caption: str
    svg: str
    legend: tuple[LegendEntry, ...] = ()


@dataclass(frozen=True)
class Charts:
    """Charts side by side where the page is wide enough."""

    block: ClassVar[str] = "charts"
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Picture:
    """A picture as wide as the page allows; `source` is a data URI."""

    block: ClassVar[str] = "picture"
    source: str
    alternative: str
    caption: str


Block: TypeAlias = "Table | Text | Items | Facts | Example | ColourBars | Charts | Picture"


@dataclass(frozen=True)
class Section:
    """A heading, blocks, and sections below it."""

    title: str
    blocks: Sequence[Block] = ()
    sections: Sequence[Section] = field(default=())


@dataclass(frozen=True)
class Document:
    """A whole report; `warnings` are shown before everything else."""

    title: str
    about: str
    sections: tuple[Section, ...]
    warnings: tuple[str, ...] = ()

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the records of all sections by kind, None for numbers that are not finite."""
        records: dict[str, list[dict[str, Any]]] = {}
        remaining = list(self.sections)
        while remaining:
            section = remaining.pop(0)
            remaining = [*section.sections, *remaining]
            for block in section.blocks:
                if isinstance(block, Table | Items) and block.kind:
                    records.setdefault(block.kind, []).extend(to_json(record) for record in block.records)
        return records
