"""Blocks: what a report is made of before it becomes HTML, Markdown or CSV. All text is plain, to be escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Cell:
    """One place of a table; `more` is set smaller under the text, `order` is what a column is sorted by."""

    text: str
    more: str = ""
    best: bool = False
    order: float | None = None
    tint: float = 0.0  # -1 … 1, of a matrix


@dataclass(frozen=True)
class Column:
    title: str
    number: bool = True  # right-aligned
    note: str = ""  # smaller, under the title


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]  # the first is what the row is about
    apart: bool = False  # below a line of its own: a baseline


@dataclass(frozen=True)
class Table:
    """`records` hold the same numbers unrounded; tables of one `kind` share a CSV file."""

    kind: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    records: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    text: str
    lead: bool = False  # the sentence a hurried reader reads


@dataclass(frozen=True)
class Items:
    """A list; the words before a '\\t' are set bold."""

    items: tuple[str, ...]
    kind: str = ""
    records: tuple[Mapping[str, Any], ...] = ()  # as a table has them


@dataclass(frozen=True)
class Facts:
    """Terms and what they are here."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tile:
    """One picture of an example."""

    source: str  # a data URI
    alternative: str
    text: str
    more: str = ""


@dataclass(frozen=True)
class Key:
    """One line of a chart's legend: which stroke is whose."""

    stroke: str  # a class of the style sheet
    text: str
    more: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing (SVG of our own making, all its text escaped) or tiles, and what they show."""

    caption: str
    drawing: str = ""
    keys: tuple[Key, ...] = ()
    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True)
class Figures:
    """Charts side by side where there is room."""

    figures: tuple[Figure, ...]


Block: TypeAlias = "Table | Text | Items | Facts | Figure | Figures"


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block] = ()
    sections: Sequence[Section] = field(default=())


@dataclass(frozen=True)
class Document:
    title: str
    about: str
    sections: tuple[Section, ...]
    warnings: tuple[str, ...] = ()  # shown before everything else: the study is not complete

    def tables(self) -> dict[str, list[Mapping[str, Any]]]:
        """Kind -> records, of all sections."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        waiting = list(self.sections)
        while waiting:
            section = waiting.pop(0)
            waiting = [*section.sections, *waiting]
            for block in section.blocks:
                if isinstance(block, Table | Items) and block.kind:
                    found.setdefault(block.kind, []).extend(block.records)
        return found
