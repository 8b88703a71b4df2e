"""`clairvit report`: a study written up, on one page that can be handed to somebody."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit._version import __version__
from clairvit.cli import options
from clairvit.cli.console import line, progress, say
from clairvit.errors import BadInput, UnknownName, did_you_mean

if TYPE_CHECKING:
    from clairvit.report.blocks import Document

FORMATS = ("html", "md", "csv")
EXAMPLES = """[bold]Examples[/bold]

clairvit report runs/pets

clairvit report runs/pets --out pets.html --format html,md,csv

clairvit report runs/pets --no-gallery --json
"""


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder that a study wrote.", show_default=False)],
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", metavar="PATH", help="A file, or a folder for report.html.", rich_help_panel="Result"
        ),
    ] = "report.html",
    formats: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="html,md,csv",
            help="What to write; default: what --out ends in. A CSV file for each kind of table.",
            rich_help_panel="Result",
        ),
    ] = None,
    no_gallery: Annotated[
        bool,
        typer.Option("--no-gallery", help="Do not load the models and images for examples.", rich_help_panel="Result"),
    ] = False,
    device: options.Device = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    base, wanted = where(out, formats)  # refused, if misspelt, before anything is read
    from clairvit.bench.store import Store

    store = Store.open(run, create=False)
    from clairvit.bench.worker import Worker
    from clairvit.report.build import ReportOptions, build_report

    with progress("report", 1, hidden=as_json or quiet):
        document = build_report(store, ReportOptions(not no_gallery, lambda study: Worker(study, device)))
    files = write(document, base, wanted)
    for sentence in document.warnings:  # also with --quiet: the numbers must not be taken for the whole study's
        say(f"warning: {sentence}")
    if as_json:
        from clairvit._io import dumps_json

        about: dict[str, Any] = {"clairvit": __version__, "command": "report", "store": str(store.path)}
        about["warnings"] = list(document.warnings)
        print(dumps_json({**about, "files": [str(file) for file in files], "tables": document.tables()}))
    elif not quiet:
        for file in files:
            line(f"Wrote {file}")


report.__doc__ = f"Write up a study: ranking, curves, examples, agreement, cost and warnings on one page.\n\n{EXAMPLES}"


def where(out: str, formats: str | None) -> tuple[Path, list[str]]:
    """The path without its ending, and what is to be written there."""
    path = Path(out)
    if out.endswith(("/", "\\")) or path.is_dir() or not path.suffix:
        path = path / "report.html"
    ending = {".htm": "html"}.get(path.suffix.lower(), path.suffix.lower().lstrip("."))
    if ending not in FORMATS:
        raise BadInput(
            f"'{out}' ends in '{path.suffix}'; write to a name that ends in .html, .md or .csv, or to a folder."
        )
    if formats is None:
        return path.with_suffix(""), [ending]
    wanted = [word.strip().lower() for word in formats.split(",") if word.strip()]
    for word in wanted:
        if word not in FORMATS:
            raise UnknownName(
                f"There is no format '{word}'; expected {', '.join(FORMATS)}.{did_you_mean(word, FORMATS)}"
            )
    if not wanted:
        raise BadInput("No format was given; write e.g. --format html,csv.")
    return path.with_suffix(""), list(dict.fromkeys(wanted))


def write(document: Document, base: Path, wanted: list[str]) -> list[Path]:
    """report.html, report.md, report-ranking.csv, report-classes.csv, …"""
    from clairvit._io import write_text
    from clairvit.report.render import to_csv, to_html, to_markdown

    files = []
    if "html" in wanted:
        files.append(write_text(to_html(document), named(base, ".html")))
    if "md" in wanted:
        files.append(write_text(to_markdown(document), named(base, ".md")))
    if "csv" in wanted:
        tables = {kind: records for kind, records in document.tables().items() if records}
        if not tables:
            raise BadInput("There is no table in this report, so no CSV; the store has no results yet.")
        files += [write_text(to_csv(records), named(base, f"-{kind}.csv")) for kind, records in tables.items()]
    return files


def named(base: Path, ending: str) -> Path:
    """Not with_suffix: a base such as 'v1.2' must keep its '.2'."""
    return base.parent / f"{base.name}{ending}"
