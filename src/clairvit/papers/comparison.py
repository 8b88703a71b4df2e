"""Comparison: a paper's numbers next to ours, with ranks, their agreement, and tests of the paper's claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from clairvit.metrics.confidence_intervals import LEVEL, fewest_values
from clairvit.metrics.radar import area_under_radar, radar
from clairvit.metrics.score import Score, leads
from clairvit.numerics import average_ranks
from clairvit.papers.paper import Claim, MethodEntry, Paper, Table
from clairvit.selection import stats

NamedScores = Mapping[tuple[str, str], Score]  # (the paper's name of a method, of a measure) -> our score
MIN_METHODS = 5  # for the orders of two measures to be compared


@dataclass(frozen=True)
class Cell:
    """One number of the paper and ours, in the paper's unit; NaN where there is none."""

    paper: float
    ours: float
    error: float = math.nan  # standard error of ours
    interval: tuple[float, float] = (math.nan, math.nan)
    images: int = 0
    paper_rank: float = math.nan
    our_rank: float = math.nan


Cells = Mapping[str, Mapping[str, Cell]]  # method -> measure -> cell


@dataclass(frozen=True)
class Row:
    """A method with its cells by measure, the area last where the paper has one."""

    entry: MethodEntry
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Agreement:
    """How far two orders of the same methods agree."""

    measure: str
    data: str  # which numbers of the paper, or the other measure
    methods: int
    alike: int  # of `pairs` without ties, those that both orders rank the same way
    pairs: int
    rho: float  # Spearman's; NaN where all are equal, and of two methods, for which it is always 1 or −1


@dataclass(frozen=True)
class ClaimResult:
    """How many comparisons of a claim come out as it says, and how many of them significantly."""

    claim: Claim
    comparisons: int
    true: int
    surely: int  # true and significant: p < 5 % by `stats.corrected` over the claim's comparisons
    surely_not: int  # significant in the other direction
    missing: int  # without numbers of ours
    images: int = 0  # of the comparison with most of them
    fewest: int = 0  # images from which on a comparison of this claim can be significant

    @property
    def verdict(self) -> str:
        """Return "holds", "holds in part", "does not hold", or "cannot be said" without any comparison."""
        if not self.comparisons:
            return "cannot be said"
        if self.true == self.comparisons:
            return "holds"
        return "does not hold" if 2 * self.true <= self.comparisons else "holds in part"


def ranks(values: Sequence[float], better: str) -> list[float]:
    """Return ranks, 1 for the best; equal values share their mean rank, NaN has none."""
    sign = -1 if better == "higher" else 1
    return [float(rank) for rank in average_ranks(sign * torch.tensor(values, dtype=torch.float64))]


def agreement(measure: str, data: str, first: Sequence[float], second: Sequence[float]) -> Agreement:
    """Compare two orders of the methods that have both values."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if not (math.isnan(a) or math.isnan(b))]
    gaps = [((a - c), (b - d)) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    same = [(a > 0) == (b > 0) for a, b in gaps if a != 0 and b != 0]
    rho = stats.spearman(np.array(first, dtype=np.float64), np.array(second, dtype=np.float64))
    return Agreement(measure, data, len(pairs), sum(same), len(same), rho)


def compare_rows(paper: Paper, scores: NamedScores, table: Table | None) -> list[Row]:
    """Return the paper's methods in its order, then those for comparison; only the paper's methods have ranks."""
    cells: dict[str, dict[str, Cell]] = {entry.name: {} for entry in paper.methods_and_baselines}
    names = [entry.name for entry in paper.methods if not entry.extra]
    for measure in paper.measures:
        if not any(key[1] == measure.name for key in scores):
            continue
        for name in cells:
            cell = Cell(math.nan if table is None else table.value(measure.name, name), math.nan)
            score = scores.get((name, measure.name))
            if score is not None:
                low, high = sorted(measure.as_printed(edge) for edge in score.interval)
                error = abs(measure.factor) * score.standard_error
                cell = Cell(cell.paper, measure.as_printed(score.mean), error, (low, high), score.n_valid)
            cells[name][measure.name] = cell
        _add_ranks(cells, names, measure.name, measure.better)
    if paper.area is not None:
        ours = areas(paper, cells, names)
        for name in names:
            printed = math.nan if table is None else table.value(paper.area, name)
            cells[name][paper.area] = Cell(printed, ours.get(name, math.nan))
        _add_ranks(cells, names, paper.area, "higher")
    return [Row(entry, cells[entry.name]) for entry in paper.methods_and_baselines]


def _add_ranks(cells: dict[str, dict[str, Cell]], names: Sequence[str], measure: str, better: str) -> None:
    """Set the ranks of the paper's values and of ours among the named methods."""
    column = [cells[name][measure] for name in names]
    paper_ranks = ranks([cell.paper for cell in column], better)
    our_ranks = ranks([cell.ours for cell in column], better)
    for name, cell, paper_rank, our_rank in zip(names, column, paper_ranks, our_ranks, strict=True):
        cells[name][measure] = replace(cell, paper_rank=paper_rank, our_rank=our_rank)


def radar_radii(paper: Paper, cells: Cells, names: Sequence[str], printed: bool) -> Mapping[str, tuple[float, ...]]:
    """Return the radius of each method on each axis, 0 the worst of these methods and 1 the best.

    `printed`: of the values that the paper prints instead of ours. Methods that lack a value are left out.
    """
    axes = [measure for measure in paper.measures if all(measure.name in cells[name] for name in names)]
    values = {
        name: [cells[name][axis.name].paper if printed else cells[name][axis.name].ours for axis in axes]
        for name in names
    }
    complete = {name: row for name, row in values.items() if row and not any(map(math.isnan, row))}
    if len(complete) < 2:
        return {}
    radii = radar(
        torch.tensor(list(complete.values()), dtype=torch.float64),
        ["higher" if axis.better == "higher" else "lower" for axis in axes],
    )
    return dict(zip(complete, (tuple(row) for row in radii.tolist()), strict=True))


def areas(paper: Paper, cells: Cells, names: Sequence[str]) -> dict[str, float]:
    """Return the area under the radar of our values; it depends on which methods are compared."""
    radii = radar_radii(paper, cells, names, printed=False)
    if not radii or len(next(iter(radii.values()))) < 3:
        return {}
    values = area_under_radar(torch.tensor(list(radii.values()), dtype=torch.float64)).tolist()
    return dict(zip(radii, values, strict=True))


def agreements(paper: Paper, rows: Sequence[Row]) -> list[Agreement]:
    """Compare our order of the methods with that of each of the paper's tables, for each measure."""
    rows = [row for row in rows if not row.entry.extra]
    results = []
    for table in paper.tables:
        for measure in rows[0].cells:
            printed = [table.value(measure, row.entry.name) for row in rows]
            result = agreement(measure, table.data, printed, [row.cells[measure].ours for row in rows])
            if result.methods > 1:
                results.append(result)
    return results


def measure_agreements(paper: Paper, rows: Sequence[Row]) -> list[Agreement]:
    """Compare the orders that every two of our measures give; none with fewer than `MIN_METHODS` methods."""
    cells = [row.cells for row in rows if not row.entry.extra]
    if len(cells) < MIN_METHODS:
        return []
    measures = [name for name in cells[0] if name != paper.area]
    return [
        agreement(first, second, [row[first].our_rank for row in cells], [row[second].our_rank for row in cells])
        for first, second in itertools.combinations(measures, 2)
    ]


def evaluate_claims(paper: Paper, scores: NamedScores, rows: Sequence[Row]) -> list[ClaimResult]:
    """Test each claim of the paper on our scores."""
    cells = {row.entry.name: row.cells for row in rows}
    return [_test_claim(paper, claim, scores, cells) for claim in paper.claims]


def _test_claim(paper: Paper, claim: Claim, scores: NamedScores, cells: Cells) -> ClaimResult:
    comparisons = [(pair, measure) for measure in claim.measures for pair in claim.pairs]
    gaps: list[float] = []  # positive: as the claim says
    tested: list[NDArray[np.float64]] = []  # paired differences by image
    seed = 0
    for (winner, loser), measure in comparisons:
        if measure == paper.area:  # one number for all images, so no test
            gaps.append(cells[winner][measure].ours - cells[loser][measure].ours)
        elif (winner, measure) in scores and (loser, measure) in scores:
            seed = scores[winner, measure].seed
            differences = leads(scores[winner, measure], scores[loser, measure])
            gaps.append(float(differences.mean()) if len(differences) else math.nan)
            if len(differences):
                tested.append(differences)
    gaps = [gap for gap in gaps if not math.isnan(gap)]
    p_values = stats.corrected(tested, seed)
    significant = [differences.mean() > 0 for differences, p in zip(tested, p_values, strict=True) if p < LEVEL]
    return ClaimResult(
        claim=claim,
        comparisons=len(gaps),
        true=sum(gap > 0 for gap in gaps),
        surely=int(sum(significant)),
        surely_not=len(significant) - int(sum(significant)),
        missing=len(comparisons) - len(gaps),
        images=max(map(len, tested), default=0),
        fewest=fewest_values(len(tested)) if tested else 0,
    )
