"""A reproduction as sheets of text (for a terminal or Markdown), as one JSON document, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clairvit._version import __version__
from clairvit.papers.comparison import Cell, ClaimResult, Row, radar_of
from clairvit.papers.paper import Finding, Paper
from clairvit.papers.reproduce import Reproduction
from clairvit.plotting.measures import ARROWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = 8  # polygons in one circle; more cannot be told apart


@dataclass(frozen=True)
class Sheet:
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    grouped: bool = False  # rows with the same first cell belong together


def sheets(result: Reproduction) -> list[Sheet]:
    """Numbers, agreement, claims, sweeps."""
    found = [_beside(result) if result.table is not None else _alone(result)]
    if result.agreements:
        found.append(_agreement(result))
    if result.among:
        found.append(_among(result))
    if result.verdicts:
        found.append(_claims(result))
    if result.sweeps:
        found.append(_sweeps(result))
    return [*found, _methods(result)]


def _beside(result: Reproduction) -> Sheet:
    assert result.table is not None
    rows = []
    for measure, arrow in _measures(result):
        for row in result.rows:
            if measure in row.cells:
                cell = row.cells[measure]
                rows.append(
                    (
                        f"{measure} {arrow}",
                        row.entrant.name,
                        _number(cell.paper),
                        _rank(cell.paper_rank),
                        _ours(cell),
                        _rank(cell.our_rank),
                    )
                )
    columns = ("measure", "method", "paper", "rank", "ours", "our rank")
    title = f"{result.wish.preset.title}: {result.images} images, {result.model}; the paper on {result.table.data}"
    return Sheet(title, columns, tuple(rows), ("paper", "rank", "our rank"), grouped=True)


def _alone(result: Reproduction) -> Sheet:
    """A paper without printed numbers: a row a method, with its rank by each measure."""
    measures = list(_measures(result))
    rows = []
    for row in result.rows:
        cells = [row.cells.get(measure) for measure, _ in measures]
        shown = [
            "–" if cell is None else f"{_number(cell.ours)} ± {_number(cell.error, 2)} ({_rank(cell.our_rank)})"
            for cell in cells
        ]
        ranks = [cell.our_rank for cell in cells if cell is not None]
        mean = sum(ranks) / len(ranks) if ranks else math.nan
        rows.append((row.entrant.name, *shown, _number(mean, 3)))
    columns = ("method", *(f"{measure} {arrow}" for measure, arrow in measures), "mean rank")
    title = f"{result.wish.preset.title}: {result.images} images, {result.model}; value ± standard error (rank)"
    return Sheet(title, columns, tuple(rows), ("mean rank",))


def _agreement(result: Reproduction) -> Sheet:
    rows = []
    for one in result.agreements:
        beside = "beside ours above" if result.table is not None and one.data == result.table.data else ""
        alike = f"{one.alike} of {one.pairs}"
        rows.append((one.data, one.measure, str(one.methods), alike, _number(one.rho, 2), beside))
    columns = ("the paper on", "measure", "methods", "pairs in the same order", "Spearman's ρ", "")
    title = "Do the paper's order of the methods and ours agree?"
    return Sheet(title, columns, tuple(rows), ("methods", "pairs in the same order", "Spearman's ρ"), grouped=True)


def _among(result: Reproduction) -> Sheet:
    rows = [
        (one.measure, one.data, str(one.methods), f"{one.alike} of {one.pairs}", _number(one.rho, 2))
        for one in result.among
    ]
    columns = ("measure", "and", "methods", "pairs in the same order", "Spearman's ρ")
    remark = f" (The paper, {result.wish.preset.remark}.)" if result.wish.preset.remark else ""
    return Sheet(
        f"Do the measures agree with each other here?{remark}", columns, tuple(rows), columns[2:], grouped=True
    )


def _claims(result: Reproduction) -> Sheet:
    rows = [
        (
            one.claim.statement,
            one.claim.source,
            one.word,
            f"{one.true} of {one.comparisons}",
            *_sure(one),
        )
        for one in result.verdicts
    ]
    columns = ("the paper says", "where", "here", "comparisons so", "surely so", "surely not")
    title = (
        "What the paper says, tested here (surely: p < 0.05 in a paired test, corrected for the claim's comparisons)"
    )
    return Sheet(title, columns, tuple(rows), columns[3:])


def _sure(one: ClaimResult) -> tuple[str, str]:
    """Return how many comparisons are significant either way, or why none can be."""
    if not one.fewest:
        return "–", "–"  # no comparison is of values by image
    if one.images < one.fewest:
        return (f"too few images (< {one.fewest})",) * 2
    return str(one.surely), str(one.surely_not)


def _sweeps(result: Reproduction) -> Sheet:
    layers = len(result.sweeps[0].values)
    rows = []
    for one in result.sweeps:
        lost = abs(one.values[one.best] - one.values[one.middle])
        cells = [_number(value, 3) for value in one.values]
        rows.append((one.method, one.measure.name, *cells, str(one.best), _number(lost, 2)))
    last = f"lost by starting at {result.sweeps[0].middle}"
    columns = ("method", "measure", *(str(layer) for layer in range(layers)), "best", last)
    return Sheet("Summed from which layer on?", columns, tuple(rows), columns[2:], grouped=True)


def _methods(result: Reproduction) -> Sheet:
    preset, effort = result.wish.preset, result.wish.effort
    rows = [(one.name, preset.at_effort(effort, one.method)) for one in preset.methods]
    rows += [(one.name, preset.at_effort(effort, one.metric)) for one in preset.measures]
    return Sheet("What is what", ("in the table", "in ClairViT"), tuple(rows))


def _measures(result: Reproduction) -> Iterable[tuple[str, str]]:
    preset = result.wish.preset
    for one in preset.measures:
        if any(one.name in row.cells for row in result.rows):
            yield one.name, ARROWS[one.better]
    if preset.area is not None:
        yield preset.area, ARROWS["higher"]


def _method(result: Reproduction, row: Row) -> str:
    return result.wish.preset.at_effort(result.wish.effort, row.entrant.method)


def _number(value: float, digits: int = 4) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}g}"


def _ours(cell: Cell) -> str:
    if math.isnan(cell.ours):
        return "undefined"
    if math.isnan(cell.interval[0]):
        return _number(cell.ours)
    low, high = cell.interval
    return f"{_number(cell.ours)} ± {_number(cell.error, 2)} [{_number(low, 3)}, {_number(high, 3)}]"


def _rank(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:g}"


def check_sheet(preset: Paper, findings: Sequence[Finding]) -> Sheet:
    rows = tuple(("yes" if one.holds else "NO", one.what, one.source, one.seen) for one in findings)
    held = sum(one.holds for one in findings)
    title = f"{preset.citation}: {held} of {len(findings)} hold when computed again"
    return Sheet(title, ("holds", "what", "where", "numbers"), rows)


def markdown(result: Reproduction) -> str:
    """Every sheet, then what is not as in the paper."""
    preset = result.wish.preset
    parts = [f"# {preset.title}\n\n{preset.citation}\n"]
    parts += [_as_markdown(sheet) for sheet in sheets(result)]
    lines = [f"* **{about}**: {sentence}" for about, sentence in result.differences]
    lines += [f"* **failed**: {error}" for error in result.failed]
    parts.append("## What is not as in the paper\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _as_markdown(sheet: Sheet) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rule = ["--:" if column in sheet.right else "---" for column in sheet.columns]
    return "\n".join([f"## {sheet.title}\n", line(sheet.columns), line(rule), *map(line, sheet.rows)]) + "\n"


def document(result: Reproduction) -> dict[str, Any]:
    """All that is known, null where there is no number."""
    wish = result.wish
    return {
        "clairvit": __version__,
        "command": "reproduce",
        "paper": {"name": wish.preset.name, "title": wish.preset.title, "citation": wish.preset.citation},
        "model": result.model,
        **result.model_record,
        "data": wish.data.spec,
        "images": result.images,
        "effort": wish.effort,
        "seed": wish.seed,
        "numbers_on": None if result.table is None else result.table.data,
        "source": None if result.table is None else result.table.source,
        "rows": [
            {
                "method": row.entrant.name,
                "ours": _method(result, row),
                "in_paper": not row.entrant.extra,
                "cells": {measure: _cell(cell) for measure, cell in row.cells.items()},
            }
            for row in result.rows
        ],
        "agreement": [{**vars(one), "rho": _plain(one.rho)} for one in result.agreements],
        "among_measures": [
            {"measure": one.measure, "other": one.data, "alike": one.alike, "pairs": one.pairs, "rho": _plain(one.rho)}
            for one in result.among
        ],
        "claims": [
            {
                "claim": one.claim.statement,
                "source": one.claim.source,
                "verdict": one.word,
                **{key: value for key, value in vars(one).items() if key != "claim"},
            }
            for one in result.verdicts
        ],
        "sweeps": [
            {
                "method": one.method,
                "measure": one.measure.name,
                "values": [_plain(value) for value in one.values],
                "best": one.best,
                "middle": one.middle,
            }
            for one in result.sweeps
        ],
        "differences": [{"about": about, "what": sentence} for about, sentence in result.differences],
        "failed": list(result.failed),
        "seconds": round(result.seconds, 1),
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "paper": _plain(cell.paper),
        "ours": _plain(cell.ours),
        "standard_error": _plain(cell.error),
        "interval": [_plain(edge) for edge in cell.interval],
        "images": cell.images,
        "paper_rank": _plain(cell.paper_rank),
        "our_rank": _plain(cell.our_rank),
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def radar_picture(result: Reproduction) -> Figure | None:
    """Ours, and the paper's numbers where it has them all; None where there are too few measures or methods."""
    from clairvit.plotting.radar import radar_figure

    preset = result.wish.preset
    cells = {row.entrant.name: row.cells for row in result.rows}
    names = _best(result)
    ours = radar_of(preset, cells, names, paper=False)
    axes = [measure for measure, _ in _measures(result) if measure != preset.area]
    if not ours or len(axes) < 3:
        return None
    panels: dict[str, Mapping[str, Sequence[float]]] = {f"here, {result.images} images": ours}
    printed = radar_of(preset, cells, names, paper=True)
    if printed and result.table is not None:
        panels[f"the paper, {result.table.data}"] = printed
    return radar_figure(panels, axes, f"{preset.name}: outside is the best of these methods, the middle the worst")


def _best(result: Reproduction) -> list[str]:
    """The paper's methods; where there are many, those with the best mean rank."""
    own = [row for row in result.rows if not row.entrant.extra]

    def mean_rank(row: Row) -> float:
        ranks = [cell.our_rank for cell in row.cells.values()]
        return math.inf if not ranks or any(map(math.isnan, ranks)) else sum(ranks) / len(ranks)

    chosen = own if len(own) <= DRAWN else sorted(own, key=mean_rank)[:DRAWN]
    return [row.entrant.name for row in chosen]
