"""`clairvit report`: the results of a study as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clairvit.cli import options
from clairvit.cli.arguments import split_names
from clairvit.cli.command import Command
from clairvit.cli.console import print_line, print_message
from clairvit.cli.declare import argument, option
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
    run: str = argument(..., "The folder that a study wrote.", "RUN"),
    out: str = options.out("report.html", "A file, or a folder for report.html."),
    *,
    formats: list[str] | None = option(
        None,
        "What to write; default: what --out ends in. A CSV file for each kind of table.",
        "html,md,csv",
        "--format",
        panel=options.RESULT,
    ),
    no_gallery: bool = option(False, "Do not load the models and images for examples.", panel=options.RESULT),
    device: str | None = options.DEVICE,
    output: options.OutputOptions,
) -> None:
    base, endings = output_files(out, formats)  # refused, if misspelt, before anything is read
    from clairvit.bench.store import Store

    store = Store.open(run, create=False)
    from clairvit.bench.worker import Worker
    from clairvit.report.build import ReportOptions, build_report

    command = Command("report", None, output)
    with command.progress("report"):
        document = build_report(store, ReportOptions(not no_gallery, lambda study: Worker(study, device)))
    files = write(document, base, endings)
    for sentence in document.warnings:  # also with --quiet: the numbers may be of a part of the study
        print_message(f"warning: {sentence}")
    about = {"store": str(store.path), "warnings": list(document.warnings), "files": [str(file) for file in files]}

    def show() -> None:
        for file in files:
            print_line(f"Wrote {file}")

    command.finish(1, lambda: {**about, "tables": document.tables()}, show)


report.__doc__ = f"Report a study on one page: ranking, curves, examples, agreement, cost and warnings.\n\n{EXAMPLES}"


def output_files(out: str, formats: list[str] | None) -> tuple[Path, list[str]]:
    """Return the path without its ending, and the endings of the files to write."""
    path = Path(out)
    if out.endswith(("/", "\\")) or path.is_dir() or not path.suffix:
        path = path / "report.html"
    ending = {".htm": "html"}.get(path.suffix.lower(), path.suffix.lower().lstrip("."))
    if ending not in FORMATS:
        raise BadInput(
            f"'{out}' ends in '{path.suffix}'; write to a name that ends in .html, .md or .csv, or to a folder."
        )
    if not formats:
        return path.with_suffix(""), [ending]
    if not any(text.strip(" ,") for text in formats):
        raise BadInput("No format was given; write e.g. --format html,csv.")
    endings = [name.lower() for name in split_names(formats, "--format")]
    for word in endings:
        if word not in FORMATS:
            raise UnknownName(
                f"There is no format '{word}'; expected {', '.join(FORMATS)}.{did_you_mean(word, FORMATS)}"
            )
    return path.with_suffix(""), list(dict.fromkeys(endings))


def write(document: Document, base: Path, endings: list[str]) -> list[Path]:
    """Write report.html, report.md, report-ranking.csv, report-classes.csv, …"""
    from clairvit._io import write_text
    from clairvit.report.render import to_csv, to_html, to_markdown

    files = []
    if "html" in endings:
        files.append(write_text(to_html(document), with_ending(base, ".html")))
    if "md" in endings:
        files.append(write_text(to_markdown(document), with_ending(base, ".md")))
    if "csv" in endings:
        tables = {kind: records for kind, records in document.tables().items() if records}
        if not tables:
            raise BadInput("There is no table in this report, so no CSV; the store has no results yet.")
        files += [write_text(to_csv(records), with_ending(base, f"-{kind}.csv")) for kind, records in tables.items()]
    return files


def with_ending(base: Path, ending: str) -> Path:
    """Return the path with an ending; unlike `with_suffix` it keeps the '.2' of 'v1.2'."""
    return base.parent / f"{base.name}{ending}"
