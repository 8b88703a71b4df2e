"""Plain: a document as Markdown, and its records as CSV, one file for each kind of table."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from clairvit.report.blocks import Block, Cell, Document, Facts, Figure, Figures, Items, Section, Table, Text

_SPECIAL = re.compile(r"([\\`*_\[\]|#~])")


def to_markdown(document: Document) -> str:
    parts = [f"# {_safe(document.title)}", _safe(document.about)]
    parts += ["\n>\n".join(f"> **{_safe(sentence)}**" for sentence in document.warnings)]
    for section in document.sections:
        parts += _section(section, 2)
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section, level: int) -> list[str]:
    parts = [f"{'#' * level} {_safe(section.title)}", *(_block(block) for block in section.blocks)]
    for one in section.sections:
        parts += _section(one, level + 1)
    return parts


def _safe(text: str) -> str:
    """As it is read, whatever letters it has."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", line)


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return _safe(text)
        case Items(items):
            return "\n".join(f"- {_item(item)}" for item in items)
        case Facts(pairs):
            return "\n".join(f"- **{_safe(term)}**: {_safe(said)}" for term, said in pairs)
        case Table():
            return _table(block)
        case Figure() if block.tiles:
            tiles = "; ".join(f"{_safe(tile.text)} {_safe(tile.more)}" for tile in block.tiles)
            return f"- {_safe(block.caption)} {tiles}"
        case Figure() | Figures():
            return ""  # charts are on the page; their numbers are in the tables


def _item(item: str) -> str:
    head, tab, rest = item.partition("\t")
    return f"**{_safe(head)}** {_safe(rest)}" if tab else _safe(item)


def _table(table: Table) -> str:
    heads = "| " + " | ".join(_safe(column.title) for column in table.columns) + " |"
    line = "|" + "|".join("---:" if column.number else "---" for column in table.columns) + "|"
    rows = ["| " + " | ".join(_cell(cell) for cell in row.cells) + " |" for row in table.rows]
    notes = [_safe(note) for note in table.notes]
    return "\n\n".join([f"**{_safe(table.caption)}**", "\n".join([heads, line, *rows]), *notes])


def _cell(cell: Cell) -> str:
    text = f"**{_safe(cell.text)}**" if cell.best else _safe(cell.text)
    return f"{text} {_safe(cell.more)}".strip()


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """A line a record, empty where nothing is known; a column for whatever any of them has."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    paper = io.StringIO()
    writer = csv.DictWriter(paper, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in record.items()} for record in records)
    return paper.getvalue()
