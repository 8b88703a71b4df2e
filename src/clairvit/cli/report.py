"""`clairvit report`: the results of a study as one self-contained page."""

from __future__ import annotations

from clairvit.cli import options
from clairvit.cli.arguments import split_names
from clairvit.cli.command import Command
from clairvit.cli.console import print_line, print_message
from clairvit.cli.declare import argument, option
from clairvit.errors import BadInput

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
    if formats and not any(text.strip(" ,") for text in formats):
        raise BadInput("No format was given; write e.g. --format html,csv.")
    from clairvit.bench.store import Store
    from clairvit.bench.worker import Worker
    from clairvit.reports.build import ReportOptions, build_report
    from clairvit.reports.files import output_files, write

    base, endings = output_files(out, split_names(formats, "--format") if formats else ())
    store = Store.open(run, create=False)
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
