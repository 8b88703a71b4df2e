"""`clairvit reproduce all`: every paper on the same data, as one page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clairvit.cli.console import print_json, print_line, print_message, table
from clairvit.cli.hints import with_options
from clairvit.cli.reproduce_runs import RunSettings, run_folders, run_one
from clairvit.errors import BadInput, ClairError

if TYPE_CHECKING:
    from clairvit.papers.paper import Paper
    from clairvit.papers.setup import ReproductionConfig
    from clairvit.reports.all_papers import PaperRun

OFFLINE_IMAGES = 12  # scenes, where no data is named


def run_all(configs: Sequence[ReproductionConfig], settings: RunSettings, out: str | None) -> None:
    """Reproduce each paper on each data set, and write one page; a paper that the data does not suit is listed.

    Args:
        configs: One for each paper and data set, the papers in their order.
        settings: What all runs share.
        out: The folder; None keeps nothing.
    """
    from clairvit.reports.all_papers import PaperRun

    output = settings.command.output
    runs: list[PaperRun] = []
    started = time.monotonic()
    for number, config in enumerate(configs, start=1):
        paper, spec = config.paper, config.data.spec
        if not output.hidden:
            print_message(
                f"{number} of {len(configs)}: {paper.name} on {spec}{_remaining(started, number - 1, len(configs))}"
            )
        folder = _folder(out, paper, [entry.data.spec for entry in configs if entry.paper is paper], spec)
        try:
            run = run_one(config, folder, settings if paper.costs else settings.without_cost())
        except ClairError as error:
            runs.append(PaperRun(paper, spec, missing=with_options(error)))
            print_message(f"{paper.name} on {spec} is left out: {runs[-1].missing}")
            continue
        runs.append(PaperRun(paper, spec, run.result, run.figures))
        if folder is not None:
            from clairvit.cli.reproduce import write

            write(run, folder)
    _finish(runs, settings, out)


def _folder(out: str | None, paper: Paper, specs: Sequence[str], spec: str) -> Path | None:
    """Return where one paper's run on one data set keeps its files."""
    return None if out is None else run_folders(str(Path(out) / paper.name), specs)[specs.index(spec)]


def _remaining(started: float, done: int, total: int) -> str:
    """Return ", about 3 min left if the others take as long"."""
    from clairvit.plotting.labels import format_seconds

    if not done:
        return ""
    seconds = (time.monotonic() - started) / done * (total - done)
    return f", about {format_seconds(seconds)} left if the others take as long"


def _finish(runs: Sequence[PaperRun], settings: RunSettings, out: str | None) -> None:
    """Write and print what all runs give, and end with status 2 where numbers could not be computed."""
    from clairvit._io import write_json, write_text
    from clairvit.reports.all_papers import all_json, all_report, summary_table
    from clairvit.reports.render import to_html

    output, content, files = settings.command.output, all_json(runs), []
    if out is not None:
        files = [
            write_text(to_html(all_report(runs)), Path(out) / "papers.html"),
            write_json(content, Path(out) / "papers.json"),
        ]
    if output.as_json:
        print_json({**content, "files": [str(file) for file in files]})
    elif not output.quiet:
        summary = summary_table(runs)
        table(
            summary.caption,
            [c.title for c in summary.columns],
            [[c.text for c in row.cells] for row in summary.rows],
            [],
        )
        for file in files:
            print_line(f"Wrote {file}")
        if not files:
            print_line("Nothing was kept; --out DIR keeps the page, the numbers and the figures.")
    failed = [error for run in runs if run.result is not None for error in run.result.failed]
    for error in failed:
        print_message(f"some numbers could not be computed: {error}")
    if failed:
        raise typer.Exit(2)
    if all(run.result is None for run in runs):
        raise BadInput(f"No paper could be reproduced: {runs[0].missing}")
