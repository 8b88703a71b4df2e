"""Beside: a paper's numbers and ours in one table, with ranks, how far they agree, and what became of its claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from clairvit.metrics.radar import area_under_radar, radar
from clairvit.metrics.score import Score, leads
from clairvit.papers.paper import Claim, MethodEntry, Paper, Table
from clairvit.selection import stats

Found = Mapping[tuple[str, str], Score]  # (the paper's name of a method, of a measure) -> score of ours
NOTHING = (math.nan, math.nan)
ENOUGH = 5  # methods, for an order by one measure to be compared with that by another


@dataclass(frozen=True)
class Cell:
    """One number of the paper and ours, as the paper writes it; NaN where there is none."""

    paper: float
    ours: float
    error: float = math.nan
    interval: tuple[float, float] = NOTHING
    images: int = 0
    paper_rank: float = math.nan
    our_rank: float = math.nan


@dataclass(frozen=True)
class Row:
    """A method: its cells by measure, the area last where the paper has one."""

    entrant: MethodEntry
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Agreement:
    """How far two orders of the same methods agree."""

    measure: str
    data: str  # the paper's numbers that are meant, or the other measure
    methods: int
    alike: int  # of `pairs` that are no ties, those that both put in the same order
    pairs: int
    rho: float  # Spearman's; NaN where all are equal, and of two methods, for which it is always 1 or −1


@dataclass(frozen=True)
class ClaimResult:
    """What became of a claim: of so many comparisons, how many come out as it says, and how sure that is."""

    claim: Claim
    comparisons: int
    true: int
    surely: int  # true, and significant: p < 5 % by `stats.corrected` over the claim's comparisons
    surely_not: int
    missing: int  # without numbers of ours
    images: int = 0  # of the comparison with most of them
    fewest: int = 0  # images from which on a comparison of this claim can be significant at all

    @property
    def word(self) -> str:
        if not self.comparisons:
            return "cannot be said"
        if self.true == self.comparisons:
            return "holds"
        return "does not hold" if 2 * self.true <= self.comparisons else "holds in part"


def ranks(values: Sequence[float], better: str) -> list[float]:
    """1 is the best; equal ones share the mean of their places; NaN has none."""
    good = np.array(values, dtype=np.float64) * (1 if better == "higher" else -1)
    return [float(one) for one in np.where(np.isnan(good), math.nan, stats.ranks(good))]


def agreement(measure: str, data: str, one: Sequence[float], other: Sequence[float]) -> Agreement:
    """Over the methods that have both numbers."""
    both = [(a, b) for a, b in zip(one, other, strict=True) if not (math.isnan(a) or math.isnan(b))]
    gaps = [((a - c), (b - d)) for (a, b), (c, d) in itertools.combinations(both, 2)]
    untied = [(a > 0) == (b > 0) for a, b in gaps if a != 0 and b != 0]
    rho = stats.spearman(np.array(one, dtype=np.float64), np.array(other, dtype=np.float64))
    return Agreement(measure, data, len(both), sum(untied), len(untied), rho)


def line_up(preset: Paper, scores: Found, table: Table | None) -> list[Row]:
    """The paper's methods in its order, then what is shown for comparison; ranks are among the paper's methods."""
    measures = [one for one in preset.measures if any(key[1] == one.name for key in scores)]
    cells: dict[str, dict[str, Cell]] = {one.name: {} for one in preset.everyone}
    own = [one.name for one in preset.entrants if not one.extra]
    for measure in measures:
        for entrant in preset.everyone:
            printed = math.nan if table is None else table.of(measure.name, entrant.name)
            cell = Cell(printed, math.nan)
            score = scores.get((entrant.name, measure.name))
            if score is not None:
                edges = sorted(measure.written(edge) for edge in score.interval)
                error = abs(measure.factor) * score.standard_error
                cell = Cell(printed, measure.written(score.mean), error, (edges[0], edges[1]), score.n_valid)
            cells[entrant.name][measure.name] = cell
        _rank(cells, own, measure.name, measure.better)
    if preset.area is not None:
        ours = areas(preset, cells, own)
        for name in own:
            printed = math.nan if table is None else table.of(preset.area, name)
            cells[name][preset.area] = Cell(printed, ours.get(name, math.nan))
        _rank(cells, own, preset.area, "higher")
    return [Row(one, cells[one.name]) for one in preset.everyone]


def _rank(cells: dict[str, dict[str, Cell]], own: Sequence[str], measure: str, better: str) -> None:
    printed = ranks([cells[name][measure].paper for name in own], better)
    ours = ranks([cells[name][measure].ours for name in own], better)
    for name, theirs, place in zip(own, printed, ours, strict=True):
        old = cells[name][measure]
        cells[name][measure] = Cell(old.paper, old.ours, old.error, old.interval, old.images, theirs, place)


def radar_of(
    preset: Paper, cells: Mapping[str, Mapping[str, Cell]], names: Sequence[str], paper: bool
) -> Mapping[str, tuple[float, ...]]:
    """name -> its place on each axis, 0 the worst of these and 1 the best; methods that lack one are left out."""
    axes = [one for one in preset.measures if all(one.name in cells[name] for name in names)]
    table = {
        name: [cells[name][one.name].paper if paper else cells[name][one.name].ours for one in axes] for name in names
    }
    whole = {name: row for name, row in table.items() if row and not any(map(math.isnan, row))}
    if len(whole) < 2:
        return {}
    r = radar(
        torch.tensor(list(whole.values()), dtype=torch.float64),
        ["higher" if one.better == "higher" else "lower" for one in axes],
    )
    return dict(zip(whole, (tuple(row) for row in r.tolist()), strict=True))


def areas(preset: Paper, cells: Mapping[str, Mapping[str, Cell]], names: Sequence[str]) -> dict[str, float]:
    """Of ours; they depend on which methods there are."""
    r = radar_of(preset, cells, names, paper=False)
    if not r or len(next(iter(r.values()))) < 3:
        return {}
    found = area_under_radar(torch.tensor(list(r.values()), dtype=torch.float64)).tolist()
    return dict(zip(r, found, strict=True))


def agreements(preset: Paper, rows: Sequence[Row]) -> list[Agreement]:
    """Of ours with each of the paper's tables, measure by measure."""
    own = [row for row in rows if not row.entrant.extra]
    found = []
    for table in preset.tables:
        for measure in own[0].cells:
            printed = [table.of(measure, row.entrant.name) for row in own]
            ours = [row.cells[measure].ours for row in own]
            one = agreement(measure, table.data, printed, ours)
            if one.methods > 1:
                found.append(one)
    return found


def among_measures(preset: Paper, rows: Sequence[Row]) -> list[Agreement]:
    """How far two measures of ours put the paper's methods in the same order, best first; too few say nothing."""
    own = [row.cells for row in rows if not row.entrant.extra]
    if len(own) < ENOUGH:
        return []
    names = [name for name in own[0] if name != preset.area]
    return [
        agreement(one, other, [c[one].our_rank for c in own], [c[other].our_rank for c in own])
        for one, other in itertools.combinations(names, 2)
    ]


def verdicts(preset: Paper, scores: Found, rows: Sequence[Row]) -> list[ClaimResult]:
    values = {row.entrant.name: row.cells for row in rows}
    return [_verdict(preset, claim, scores, values) for claim in preset.claims]


def _verdict(preset: Paper, claim: Claim, scores: Found, values: Mapping[str, Mapping[str, Cell]]) -> ClaimResult:
    asked = [(pair, measure) for measure in claim.measures for pair in claim.pairs]
    gaps: list[float] = []
    tested: list[NDArray[np.float64]] = []  # paired differences by image, more is better for the claim
    seed = 0
    for (winner, loser), measure in asked:
        if measure == preset.area:  # one number for all images, so no test
            gaps.append(values[winner][measure].ours - values[loser][measure].ours)
        elif (winner, measure) in scores and (loser, measure) in scores:
            seed = scores[winner, measure].seed
            own = leads(scores[winner, measure], scores[loser, measure])
            gaps.append(float(own.mean()) if len(own) else math.nan)
            if len(own):
                tested.append(own)
    known = [gap for gap in gaps if not math.isnan(gap)]
    sure = [own.mean() > 0 for own, p in zip(tested, stats.corrected(tested, seed), strict=True) if p < stats.LEVEL]
    return ClaimResult(
        claim=claim,
        comparisons=len(known),
        true=sum(gap > 0 for gap in known),
        surely=int(sum(sure)),
        surely_not=len(sure) - int(sum(sure)),
        missing=len(asked) - len(known),
        images=max(map(len, tested), default=0),
        fewest=stats.fewest_values(len(tested)) if tested else 0,
    )
