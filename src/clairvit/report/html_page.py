"""Page: a document as one HTML file that needs nothing else, no network and no script. Everything is escaped here."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby

from clairvit.report.blocks import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Figure,
    Figures,
    Items,
    Row,
    Section,
    Table,
    Text,
)

ONE_SHEET = 24  # rows of a table that is kept together when it is printed


def to_html(document: Document) -> str:
    style, script = _asset("style.css"), _asset("sort.js")
    seal = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The page may show its own pictures and run its own script; whatever a label smuggles in may not, nor call home.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{seal}'"
    anchors = _Anchors()
    named = [(section, anchors.next()) for section in document.sections]
    body = "\n".join(_section(section, 2, anchor, anchors) for section, anchor in named)
    contents = "".join(f'<li><a href="#{anchor}">{escape(section.title)}</a></li>' for section, anchor in named)
    title = escape(document.title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="ClairViT">
<link rel="icon" href="data:,">
<title>{title} · {escape(document.about)}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="about">{escape(document.about)}</p>
{_warnings(document)}<nav aria-label="Contents"><ol>{contents}</ol></nav>
</header>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""


def _warnings(document: Document) -> str:
    """A box before everything else, where something is missing."""
    if not document.warnings:
        return ""
    first, *rest = (escape(sentence) for sentence in document.warnings)
    items = "".join(f"<li>{sentence}</li>" for sentence in rest)
    return f'<div class="warning" role="alert"><p>{first}</p>{f"<ul>{items}</ul>" if items else ""}</div>\n'


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


class _Anchors:
    """Numbered, so that no title can make a bad one."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> str:
        self.count += 1
        return f"part-{self.count}"


def _section(section: Section, level: int, anchor: str, anchors: _Anchors) -> str:
    heading = f'<h{level} id="{anchor}">{escape(section.title)}</h{level}>'
    inside = [_block(block) for block in section.blocks]
    inside += [_section(one, level + 1, anchors.next(), anchors) for one in section.sections]
    return (
        f'<section class="level-{level}" aria-labelledby="{anchor}">\n{heading}\n' + "\n".join(inside) + "\n</section>"
    )


def _block(block: Block) -> str:
    match block:
        case Text(text, lead):
            return f"<p{' class=lead' if lead else ''}>{escape(text)}</p>"
        case Items():
            return _items(block)
        case Facts(pairs):
            inside = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(said)}</dd></div>" for term, said in pairs)
            return f"<dl>{inside}</dl>"
        case Figure():
            return _figure(block)
        case Figures(figures):
            return f'<div class="figures">{"".join(_figure(one) for one in figures)}</div>'
        case Table():
            return _table(block)


def _items(block: Items) -> str:
    found = []
    for item in block.items:
        head, tab, rest = item.partition("\t")
        found.append(f"<li><b>{escape(head)}</b> {escape(rest)}</li>" if tab else f"<li>{escape(item)}</li>")
    return f"<ul>{''.join(found)}</ul>"


def _figure(figure: Figure) -> str:
    keys = "".join(
        f'<li><svg class="swatch" viewBox="0 0 24 8" width="24" height="8" aria-hidden="true">'
        f'<path class="line {key.stroke}" d="M1 4H23"/></svg> {escape(key.text)} '
        f'<span class="value">{escape(key.more)}</span></li>'
        for key in figure.keys
    )
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    tiles = "".join(
        f'<div class="tile"><img src="{escape(tile.source)}" alt="{escape(tile.alternative)}">'
        f'<b>{_name(tile.text)}</b><span class="value">{escape(tile.more)}</span></div>'
        for tile in figure.tiles
    )
    kind = "example" if tiles else "chart"
    shown = f'<div class="tiles">{tiles}</div>' if tiles else figure.drawing
    return f'<figure class="{kind}">{shown}{legend}<figcaption>{escape(figure.caption)}</figcaption></figure>'


def _table(table: Table) -> str:
    heads = "".join(_head(column) for column in table.columns)
    bodies = []
    for apart, rows in groupby(table.rows, key=lambda row: row.apart):
        inside = "".join(_row(row, table.columns) for row in rows)
        bodies.append(f"<tbody{' class=apart' if apart else ''}>{inside}</tbody>")
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    kind = "table short" if len(table.rows) <= ONE_SHEET else "table"
    # A table that is too wide is scrolled by itself; with a keyboard, only if it can have the focus.
    return (
        f'<div class="{kind}"><div class="scroll" role="region" tabindex="0" aria-label="{escape(table.caption)}">'
        f"<table><caption>{escape(table.caption)}</caption><thead><tr>{heads}</tr></thead>{''.join(bodies)}</table></div>"
        f"{notes}</div>"
    )


def _name(text: str) -> str:
    """A long name such as 'deletion(removal=blur,score=logit)' may be broken where a person would break it."""
    return re.sub(r"(?<=,)|(?=[(+])", "<wbr>", escape(text))


def _head(column: Column) -> str:
    note = f"<small>{escape(column.note)}</small>" if column.note else ""
    return f'<th scope="col"{" class=number" if column.number else ""}>{_name(column.title)}{note}</th>'


def _row(row: Row, columns: tuple[Column, ...]) -> str:
    first, *rest = row.cells
    cells = [f'<th scope="row">{_name(first.text)}</th>']
    cells += [_cell(cell, column) for cell, column in zip(rest, columns[1:], strict=True)]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(cell: Cell, column: Column) -> str:
    classes = ["number"] * column.number + ["best"] * cell.best
    if cell.tint:
        classes.append("with" if cell.tint > 0 else "against")
        classes.append(f"tint-{round(4 * abs(cell.tint))}")
    kind = f' class="{" ".join(classes)}"' if classes else ""
    order = "" if cell.order is None or cell.order != cell.order else f' data-order="{cell.order:.9g}"'
    more = f"<small>{escape(cell.more)}</small>" if cell.more else ""
    return f"<td{kind}{order}>{escape(cell.text)}{more}</td>"
