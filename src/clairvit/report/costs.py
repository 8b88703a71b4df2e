"""Costs: what maps and scores take, in passes through the model and in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from clairvit.methods.explanation import Cost
from clairvit.methods.registry import USUAL_PATCHES
from clairvit.methods.spec import resolve_method
from clairvit.report.blocks import Cell, Column, Row, Section, Table
from clairvit.report.numbers import seconds
from clairvit.report.study_results import Findings

PASSES = ("forwards", "backwards")


def cost_section(findings: Findings) -> Section:
    return Section("Cost", [_of_methods(findings), _of_metrics(findings)])


def _of_methods(findings: Findings) -> Table:
    """A map alone, as the method declares it, and all its scores, as they were counted."""
    patches = max((int(score.settings.get("patches", 0)) for score in findings.scores.values()), default=0)
    rows, records = [], []
    for method in (*findings.methods, *findings.baselines):
        alone = resolve_method(method).cost_for(patches or USUAL_PATCHES)
        scoring = [score.cost for (other, _), score in findings.scores.items() if other == method]
        passes = [alone.forwards, alone.backwards, *(sum(getattr(one, word) for one in scoring) for word in PASSES)]
        time = sum(one.seconds for one in scoring)
        rows.append(Row((Cell(method), *_cells(passes, time)), method in findings.baselines))
        names = (*PASSES, *(f"scoring_{word}" for word in PASSES))
        about = {"what": "method", "name": method, "seconds": time, **dict(zip(names, passes, strict=True))}
        records.append({**findings.names(), **about})
    columns = [Column(word, note=note) for note in ("one map", "scoring it") for word in PASSES]
    size = f"{patches} patches" if patches else f"{USUAL_PATCHES} patches (how many the model has is not in the store)"
    note = (
        f"One map: what a method takes alone, for an image of {size}. Scoring it: what all metrics together took for "
        "one map, as counted. What methods share is divided among them, in passes and in seconds."
    )
    heads = (Column("method", number=False), *columns, Column("time", note="all images"))
    return Table("cost", "Cost of the methods", heads, tuple(rows), tuple(records), (note,))


def _of_metrics(findings: Findings) -> Table:
    rows, records = [], []
    for metric in findings.metrics:
        own: list[Cost] = [score.cost for (_, other), score in findings.scores.items() if other == metric]
        passes = [max(getattr(one, word) for one in own) for word in PASSES]
        time = sum(one.seconds for one in own)
        rows.append(Row((Cell(metric), *_cells(passes, time))))
        about = {"what": "metric", "name": metric, "seconds": time, **dict(zip(PASSES, passes, strict=True))}
        records.append({**findings.names(), **about})
    columns = [Column(word, note="one map") for word in PASSES]
    heads = (Column("metric", number=False), *columns, Column("time", note="all maps"))
    return Table("cost", "Cost of the metrics", heads, tuple(rows), tuple(records))


def _cells(passes: Sequence[int], time: float) -> list[Cell]:
    return [*(Cell(str(count), order=count) for count in passes), Cell(seconds(time), order=time)]
