"""A paper on several data sets as tables, as a document, as JSON values and as one figure with a radar for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from clairvit._version import __version__
from clairvit.papers.figures import FigureContent
from clairvit.papers.joined import JoinedReproduction, JoinedRun
from clairvit.plotting.labels import ARROWS, UNDEFINED
from clairvit.plotting.radar import radar_figure
from clairvit.reports.blocks import Block, Cell, Chart, Charts, Column, Document, Row, Section, Table
from clairvit.reports.paper_figures import figures_section
from clairvit.reports.svg import inline_svg
from clairvit.reports.text_tables import short_number, text_table


def joined_tables(joined: JoinedReproduction) -> Iterator[Table]:
    """Yield the numbers by data set, measure and method, then the claims by data set."""
    yield _number_table(joined)
    if any(run.verdicts for run in joined.runs):
        yield _claim_table(joined)


def joined_report(joined: JoinedReproduction, figures: Sequence[FigureContent] = ()) -> Document:
    """Return the tables, the radars, and the figures that show photos of all data sets."""
    blocks: list[Block] = list(joined_tables(joined))
    figure = joined_radars(joined)
    if figure is not None:
        svg = inline_svg(figure, f"Radar charts of {joined.paper.name}", "The numbers are in the tables.")
        blocks.append(Charts((Chart("The outer ring is the best of these methods, the centre the worst.", svg),)))
    sections = [Section("All data sets", blocks), *([figures_section(figures)] if figures else [])]
    return Document(joined.paper.title, joined.paper.citation, tuple(sections))


def joined_json(joined: JoinedReproduction) -> dict[str, Any]:
    """Return the documents of all runs, in their order."""
    return {
        "clairvit": __version__,
        "command": "reproduce",
        "paper": {"name": joined.paper.name, "title": joined.paper.title, "citation": joined.paper.citation},
        "data": [run.name for run in joined.runs],
        "runs": [dict(document) for document in joined.documents],
    }


def joined_radars(joined: JoinedReproduction) -> Figure | None:
    """Return a radar per data set, ours above the paper's; None where measures are too few for a polygon."""
    measures = [measure.name for measure in joined.paper.measures]
    axes = [name for name in measures if all(name in run.better and _has(run, name) for run in joined.runs)]
    ours = {f"{run.name}, {run.images} images": joined.radii(run, printed=False) for run in joined.runs}
    if len(axes) < 3 or not all(ours.values()):
        return None
    printed = {f"the paper, {run.printed}": joined.radii(run, printed=True) for run in joined.runs if run.printed}
    panels: dict[str, Mapping[str, Sequence[float]]] = {**ours, **{name: row for name, row in printed.items() if row}}
    title = f"{joined.paper.name}: outside is the best of these methods, the middle the worst"
    return radar_figure(panels, axes, title, columns=len(joined.runs))


def _has(run: JoinedRun, measure: str) -> bool:
    return any(measure in cells for cells in run.cells.values())


def _number_table(joined: JoinedReproduction) -> Table:
    """Return a row per data set and measure, a column per method; the best of the paper's methods is marked."""
    rows = []
    for run in joined.runs:
        for measure, better in run.better.items():
            if not _has(run, measure):
                continue
            best = run.best(measure, joined.ranked)
            cells = tuple(_cell(run, measure, method, method in best) for method in joined.methods)
            rows.append(Row((Cell(run.name), Cell(f"{measure} {ARROWS[better]}"), *cells)))
    columns = ("data", "measure", *joined.methods)
    headings = tuple(Column(title, number=index > 1) for index, title in enumerate(columns))
    starts = [f"{run.name} m* = {run.tuned}" for run in joined.runs if run.tuned is not None]
    images = ", ".join(f"{run.name} {run.images} images of {run.model}" for run in joined.runs)
    caption = f"{joined.paper.title}: {images}; in brackets the paper's numbers where it has this data"
    caption += f"; {', '.join(starts)}" if starts else ""
    return Table("", caption, headings, tuple(rows), grouped=True)


def _cell(run: JoinedRun, measure: str, method: str, best: bool) -> Cell:
    """Return "0.024 (0.0005)"."""
    printed = run.value(measure, method, printed=True)
    text = short_number(run.value(measure, method), 3)
    return Cell(text if math.isnan(printed) else f"{text} ({printed:g})", best=best)


def _claim_table(joined: JoinedReproduction) -> Table:
    claims = dict.fromkeys(claim for run in joined.runs for claim in run.verdicts)
    rows = [(claim, *(run.verdicts.get(claim, UNDEFINED) for run in joined.runs)) for claim in claims]
    caption = "What the paper says, tested on each data set (comparisons that come out so)"
    return text_table(caption, ("the paper says", *(run.name for run in joined.runs)), rows)
