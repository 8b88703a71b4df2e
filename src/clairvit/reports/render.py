"""Write a document as one self-contained HTML page, as Markdown, and its records as CSV."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from clairvit._io import csv_text
from clairvit.errors import importing
from clairvit.reports.blocks import Cell, Column, Document

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

ONE_SHEET = 24  # rows of a table that is kept together when it is printed
_MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]|#~])")


def to_html(document: Document) -> str:
    """Return a page that loads nothing: style, script, images and charts are inside.

    The content security policy lets the page show its own images and run its own script, and nothing else.
    """
    environment = _environment("html")
    style, script = (_source(environment, name) for name in ("style.css", "sort.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    template = environment.get_template("report.html.j2")
    return template.render(document=document, style=style, script=script, policy=policy, one_sheet=ONE_SHEET)


def to_markdown(document: Document) -> str:
    """Return the text and tables; charts are left out, because their numbers are in the tables."""
    text = _environment("markdown").get_template("report.md.j2").render(document=document)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per record and a column for each key that occurs; None is an empty field."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    values = ([record.get(name) for name in columns] for record in records)  # csv writes None as an empty field
    return csv_text([columns, *values])


@cache
def _environment(language: str) -> Environment:
    """Return an environment that escapes every value, for HTML or for Markdown."""
    with importing("A report", extra="study"):  # here, and not above: `cv.report` is imported without the extra
        from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("clairvit.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=escape_markdown if language == "markdown" else None,
    )
    environment.filters |= {"break_points": _break_points, "classes": _classes}
    return environment


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def escape_markdown(value: Any) -> Markup:
    """Return `value` on one line, with every letter that Markdown or HTML would read as markup escaped."""
    from markupsafe import Markup  # comes with Jinja2

    if isinstance(value, Markup):
        return value
    line = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(_MARKDOWN_SPECIAL.sub(r"\\\1", line))


def _break_points(text: str) -> list[str]:
    """Split a long name such as 'deletion(removal=blur,score=logit)' where a line may be broken."""
    return re.split(r"(?<=,)|(?=[(+])", text)


def _classes(cell: Cell, column: Column) -> str:
    """Return the CSS classes of a cell."""
    classes = ["number"] * column.number + ["best"] * cell.best
    if cell.tint:
        classes += ["with" if cell.tint > 0 else "against", f"tint-{round(4 * abs(cell.tint))}"]
    return " ".join(classes)
