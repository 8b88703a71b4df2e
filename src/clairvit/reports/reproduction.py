"""A reproduction of a paper as tables, as a document, as JSON values and as a radar chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from clairvit._version import __version__
from clairvit.papers.comparison import Cell as Comparison
from clairvit.papers.comparison import ClaimResult, radar_radii
from clairvit.papers.comparison import Row as MethodRow
from clairvit.papers.figures import FigureContent
from clairvit.papers.paper import Finding, Paper
from clairvit.papers.reproduce import Reproduction
from clairvit.plotting.labels import ARROWS, UNDEFINED
from clairvit.plotting.radar import radar_figure
from clairvit.reports.blocks import Block, Chart, Charts, Document, Item, Items, Section, Table
from clairvit.reports.multiverse import multiverse_chart
from clairvit.reports.paper_figures import figures_section
from clairvit.reports.reproduction_parts import extra_json, extra_tables
from clairvit.reports.svg import inline_svg
from clairvit.reports.text_tables import short_number as _number
from clairvit.reports.text_tables import text_table as _table

MOST_POLYGONS = 8  # in one radar; more cannot be told apart


def reproduction_report(result: Reproduction, figures: Sequence[FigureContent] = ()) -> Document:
    """Return every table, the radar, the figures, and what differs from the paper."""
    paper = result.config.paper
    blocks: list[Block] = list(result_tables(result))
    figure = reproduction_radar(result)
    if figure is not None:
        svg = inline_svg(figure, f"Radar chart of {paper.name}", "The numbers are in the tables.")
        blocks.append(Charts((Chart("The outer ring is the best of these methods, the centre the worst.", svg),)))
    multiverse = multiverse_chart(result)
    if multiverse is not None:
        svg = inline_svg(multiverse, f"Multiverse of {paper.name}", "The numbers are in the tables.")
        blocks.append(Charts((Chart("A column is a universe: its effect, and below it what it chose.", svg),)))
    items = [Item(sentence, f"{about}:") for about, sentence in result.differences]
    items += [Item(error, "failed:") for error in result.failed]
    differences = Section("What is not as in the paper", [Items(tuple(items))])
    drawn = [figures_section(figures)] if figures else []
    return Document(paper.title, paper.citation, (Section("Results", blocks), *drawn, differences))


def result_tables(result: Reproduction) -> Iterator[Table]:
    """Yield the tables of numbers, agreement, claims, start layers and names."""
    yield _paper_table(result) if result.table is not None else _own_table(result)
    if result.agreements:
        yield _agreement_table(result)
    if result.measure_agreements:
        yield _metric_agreement_table(result)
    if result.claim_results:
        yield _claims_table(result)
    if result.sweeps:
        yield _start_layer_table(result)
    yield from extra_tables(result)
    yield _names_table(result)


def check_table(paper: Paper, findings: Sequence[Finding]) -> Table:
    """Return which of the numbers that a paper prints hold when they are computed again."""
    rows = [
        ("yes" if finding.holds else "NO", finding.statement, finding.source, finding.numbers) for finding in findings
    ]
    held = sum(finding.holds for finding in findings)
    caption = f"{paper.citation}: {held} of {len(findings)} hold when computed again"
    return _table(caption, ("holds", "what", "where", "numbers"), rows)


def _paper_table(result: Reproduction) -> Table:
    """Return the paper's numbers next to ours, a row per measure and method."""
    assert result.table is not None
    rows = [
        (
            f"{measure} {arrow}",
            row.entry.name,
            _number(row.cells[measure].paper),
            _rank(row.cells[measure].paper_rank),
            _own_number(row.cells[measure]),
            _rank(row.cells[measure].our_rank),
        )
        for measure, arrow in _measures(result)
        for row in result.rows
        if measure in row.cells
    ]
    columns = ("measure", "method", "paper", "rank", "ours", "our rank")
    caption = f"{result.config.paper.title}: {result.images} images, {result.model}; the paper on {result.table.data}"
    return _table(caption, columns, rows, ("paper", "rank", "our rank"), grouped=True)


def _own_table(result: Reproduction) -> Table:
    """Return a row per method, with its rank by each measure: of a paper without printed numbers."""
    measures = list(_measures(result))
    rows = []
    for row in result.rows:
        cells = [row.cells.get(measure) for measure, _ in measures]
        texts = [
            UNDEFINED if cell is None else f"{_number(cell.ours)} ± {_number(cell.error, 2)} ({_rank(cell.our_rank)})"
            for cell in cells
        ]
        ranks = [cell.our_rank for cell in cells if cell is not None]
        mean = sum(ranks) / len(ranks) if ranks else math.nan
        rows.append((row.entry.name, *texts, _number(mean, 3)))
    columns = ("method", *(f"{measure} {arrow}" for measure, arrow in measures), "mean rank")
    caption = f"{result.config.paper.title}: {result.images} images, {result.model}; value ± standard error (rank)"
    return _table(caption, columns, rows, ("mean rank",))


def _agreement_table(result: Reproduction) -> Table:
    rows = []
    for agreement in result.agreements:
        note = "next to ours above" if result.table is not None and agreement.data == result.table.data else ""
        alike = f"{agreement.alike} of {agreement.pairs}"
        rows.append((agreement.data, agreement.measure, str(agreement.methods), alike, _number(agreement.rho, 2), note))
    columns = ("the paper on", "measure", "methods", "pairs in the same order", "Spearman's ρ", "")
    caption = "Do the paper's order of the methods and ours agree?"
    return _table(caption, columns, rows, columns[2:5], grouped=True)


def _metric_agreement_table(result: Reproduction) -> Table:
    rows = [
        (
            agreement.measure,
            agreement.data,
            str(agreement.methods),
            f"{agreement.alike} of {agreement.pairs}",
            _number(agreement.rho, 2),
        )
        for agreement in result.measure_agreements
    ]
    columns = ("measure", "and", "methods", "pairs in the same order", "Spearman's ρ")
    remark = f" (The paper, {result.config.paper.remark}.)" if result.config.paper.remark else ""
    return _table(f"Do the measures agree with each other here?{remark}", columns, rows, columns[2:], grouped=True)


def _claims_table(result: Reproduction) -> Table:
    rows = [
        (
            claim_result.claim.statement,
            claim_result.claim.source,
            claim_result.verdict,
            f"{claim_result.true} of {claim_result.comparisons}",
            *_significant(claim_result),
        )
        for claim_result in result.claim_results
    ]
    columns = ("the paper says", "where", "here", "comparisons so", "surely so", "surely not")
    caption = (
        "What the paper says, tested here (surely: p < 0.05 in a paired test, corrected for the claim's comparisons)"
    )
    return _table(caption, columns, rows, columns[3:])


def _significant(claim: ClaimResult) -> tuple[str, str]:
    """Return how many comparisons are significant either way, or why none can be."""
    if not claim.fewest:
        return UNDEFINED, UNDEFINED  # no comparison is of values by image
    if claim.images < claim.fewest:
        return (f"too few images (< {claim.fewest})",) * 2
    return str(claim.surely), str(claim.surely_not)


def _start_layer_table(result: Reproduction) -> Table:
    first = result.sweeps[0]
    rows = []
    for sweep in result.sweeps:
        lost = abs(sweep.values[sweep.best] - sweep.values[sweep.middle])
        values = [_number(value, 3) for value in sweep.values]
        rows.append((sweep.method, sweep.measure.name, *values, str(sweep.best), _number(lost, 2)))
    layers = [str(layer) for layer in range(len(first.values))]
    columns = ("method", "measure", *layers, "best", f"lost by starting at {first.middle}")
    return _table("Summed from which layer on?", columns, rows, columns[2:], grouped=True)


def _names_table(result: Reproduction) -> Table:
    paper, effort = result.config.paper, result.config.effort
    rows = [(entry.name, paper.at_effort(effort, entry.method)) for entry in paper.methods]
    rows += [(measure.name, paper.at_effort(effort, measure.metric)) for measure in paper.measures]
    return _table("What is what", ("in the table", "in ClairViT"), rows)


def _measures(result: Reproduction) -> Iterator[tuple[str, str]]:
    """Yield the name and the arrow of each measure that has numbers, the area last."""
    paper = result.config.paper
    for measure in paper.measures:
        if any(measure.name in row.cells for row in result.rows):
            yield measure.name, ARROWS[measure.better]
    if paper.area is not None:
        yield paper.area, ARROWS["higher"]


def _rank(value: float) -> str:
    return UNDEFINED if math.isnan(value) else f"{value:g}"


def _own_number(cell: Comparison) -> str:
    """Return '42.9 ± 1.2 [40.1, 45.2]'."""
    if math.isnan(cell.ours):
        return "undefined"
    if math.isnan(cell.interval[0]):
        return _number(cell.ours)
    low, high = cell.interval
    return f"{_number(cell.ours)} ± {_number(cell.error, 2)} [{_number(low, 3)}, {_number(high, 3)}]"


def reproduction_json(result: Reproduction) -> dict[str, Any]:
    """Return everything that is known; `dumps_json` writes null where there is no number."""
    config = result.config
    return {
        "clairvit": __version__,
        "command": "reproduce",
        "paper": {"name": config.paper.name, "title": config.paper.title, "citation": config.paper.citation},
        "model": result.model,
        **result.model_record,
        "data": config.data.spec,
        "images": result.images,
        "effort": config.effort,
        "seed": config.seed,
        "numbers_on": None if result.table is None else result.table.data,
        "source": None if result.table is None else result.table.source,
        "rows": [_row_json(result, row) for row in result.rows],
        "agreement": [dict(vars(agreement)) for agreement in result.agreements],
        "among_measures": [
            {
                "measure": agreement.measure,
                "other": agreement.data,
                "alike": agreement.alike,
                "pairs": agreement.pairs,
                "rho": agreement.rho,
            }
            for agreement in result.measure_agreements
        ],
        "claims": [
            {
                "claim": claim_result.claim.statement,
                "source": claim_result.claim.source,
                "verdict": claim_result.verdict,
                **{key: value for key, value in vars(claim_result).items() if key != "claim"},
            }
            for claim_result in result.claim_results
        ],
        "sweeps": [
            {
                "method": sweep.method,
                "measure": sweep.measure.name,
                "values": list(sweep.values),
                "best": sweep.best,
                "middle": sweep.middle,
            }
            for sweep in result.sweeps
        ],
        **extra_json(result),
        "differences": [{"about": about, "what": sentence} for about, sentence in result.differences],
        "failed": list(result.failed),
        "seconds": round(result.seconds, 1),
    }


def _row_json(result: Reproduction, row: MethodRow) -> dict[str, Any]:
    return {
        "method": row.entry.name,
        "ours": result.config.paper.at_effort(result.config.effort, row.entry.method),
        "in_paper": not row.entry.extra,
        "cells": {
            measure: {
                "paper": cell.paper,
                "ours": cell.ours,
                "standard_error": cell.error,
                "interval": list(cell.interval),
                "images": cell.images,
                "paper_rank": cell.paper_rank,
                "our_rank": cell.our_rank,
            }
            for measure, cell in row.cells.items()
        },
    }


def reproduction_radar(result: Reproduction) -> Figure | None:
    """Return radars of our numbers and of the paper's where it has all; None where measures or methods are too few."""
    paper = result.config.paper
    cells = {row.entry.name: row.cells for row in result.rows}
    names = _best_methods(result)
    ours = radar_radii(paper, cells, names, printed=False)
    axes = [measure for measure, _ in _measures(result) if measure != paper.area]
    if not ours or len(axes) < 3:
        return None
    panels: dict[str, Mapping[str, Sequence[float]]] = {f"here, {result.images} images": ours}
    printed = radar_radii(paper, cells, names, printed=True)
    if printed and result.table is not None:
        panels[f"the paper, {result.table.data}"] = printed
    return radar_figure(panels, axes, f"{paper.name}: outside is the best of these methods, the middle the worst")


def _best_methods(result: Reproduction) -> list[str]:
    """Return the paper's methods; where there are many, those with the best mean rank."""
    rows = [row for row in result.rows if not row.entry.extra]

    def mean_rank(row: MethodRow) -> float:
        ranks = [cell.our_rank for cell in row.cells.values()]
        return math.inf if not ranks or any(map(math.isnan, ranks)) else sum(ranks) / len(ranks)

    best = rows if len(rows) <= MOST_POLYGONS else sorted(rows, key=mean_rank)[:MOST_POLYGONS]
    return [row.entry.name for row in best]
