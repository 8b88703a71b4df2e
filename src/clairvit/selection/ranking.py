"""Ranking: methods in the order of their scores, which differences are significant, and the answer in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clairvit._cost import Cost
from clairvit.errors import BadInput
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.confidence_intervals import EVERYWHERE, LEVEL, Array, mean_p, standard_deviation
from clairvit.selection.stats import (
    all_pairs,
    draws_for,
    fewest_images,
    holm_after_picking,
    images_needed,
    indistinguishable_groups,
    is_pareto_optimal,
    paired_interval,
)

ROUGH = 20  # images below which intervals are rough
AGREE = 0.5  # Spearman's rho below which two metrics disagree
BACKWARD = 2  # forward passes that a backward pass costs, about


@dataclass(frozen=True)
class Row:
    """One method in the ranking. A gap is how much better the best is, whichever direction is good."""

    rank: int
    method: str
    baseline: bool
    mean: float
    standard_error: float
    interval: tuple[float, float]
    n: int  # images with a value
    gap: float
    gap_interval: tuple[float, float]
    p: float  # of the gap, corrected; 1 for the best itself
    differs_from_best: bool  # significantly different from the best
    is_pareto_optimal: bool  # Pareto-optimal in faithfulness, localisation and cost
    means: Mapping[str, float]  # by metric
    cost: Cost  # of one map


@dataclass(frozen=True, eq=False)
class RankingInput:
    """Values of K methods on n images by the criterion, their means by all metrics, and their costs."""

    methods: tuple[str, ...]
    values: Array  # [K, n]
    by: str
    better: str
    means: Mapping[str, Array]  # metric -> [K]
    goals: Mapping[str, Array]  # "faithfulness", "localisation" -> [K], higher is better
    costs: tuple[Cost, ...]
    seed: int
    span: tuple[float, float] = EVERYWHERE  # of a value

    @property
    def upward(self) -> Array:
        """Return the values, higher is better."""
        return self.values if self.better == "higher" else -self.values


@dataclass(frozen=True, eq=False)
class Ranking:
    """Rows, best first, and which neighbours do not differ significantly."""

    rows: tuple[Row, ...]
    best: Row
    groups: tuple[tuple[str, ...], ...]
    needed: int | None  # images that would show with 80 % power that the best is better than those it is tied with

    @property
    def rivals(self) -> tuple[Row, ...]:
        """Return all rows but the best."""
        return tuple(row for row in self.rows if row is not self.best)

    @property
    def clear(self) -> bool:
        """Return whether the best is significantly better than all others."""
        return all(row.differs_from_best and row.gap > 0 for row in self.rivals)

    @property
    def tied(self) -> tuple[Row, ...]:
        """Return the rows that do not differ significantly from the best."""
        return tuple(row for row in self.rivals if not row.differs_from_best)


def rank_methods(data: RankingInput) -> Ranking:
    """Rank methods by their means and test the best, which is no baseline, against all others.

    Raises:
        BadInput: If no method has a value on any image.
    """
    upward = data.upward
    means = np.array([_mean(row) for row in upward])
    order = sorted(range(len(means)), key=lambda index: (math.isnan(means[index]), -means[index]))
    best = next(index for index in order if data.methods[index] not in BASELINES)
    if math.isnan(means[best]):
        raise BadInput(
            f"No method has a score by {data.by} on any of the {upward.shape[1]} images, so none can be chosen; "
            "expected images (and masks, where it compares with them) for which it is defined, or another metric."
        )
    rivals = [index for index in order if index != best]
    gaps = upward[best] - upward  # [K, n]
    raw = mean_p(gaps[rivals], data.seed, draws_for(math.comb(len(means), 2)))
    p = dict(zip(rivals, holm_after_picking(raw).tolist(), strict=True))
    optimal = _pareto_optimal(data)
    rows = {
        index: _row(data, index, rank, gaps[index], p.get(index), optimal[index]) for rank, index in enumerate(order, 1)
    }
    groups = indistinguishable_groups(order, all_pairs(upward, data.seed))
    tied = [index for index in rivals if not rows[index].differs_from_best]
    needed = images_needed(gaps[tied], data.seed) if tied else None
    return Ranking(
        rows=tuple(rows.values()),
        best=rows[best],
        groups=tuple(tuple(data.methods[index] for index in group) for group in groups),
        needed=None if needed is None else max(needed, fewest_images(len(means))),
    )


def _row(data: RankingInput, index: int, rank: int, gaps: Array, p: float | None, optimal: bool) -> Row:
    """Return the row of a method with gaps [n] to the best; the best itself has no p."""
    values = data.values[index]
    return Row(
        rank=rank,
        method=data.methods[index],
        baseline=data.methods[index] in BASELINES,
        mean=_mean(values),
        standard_error=_standard_error(values),
        interval=paired_interval(values, data.seed, data.span),
        n=int(np.isfinite(values).sum()),
        gap=_mean(gaps),
        gap_interval=(0.0, 0.0) if p is None else paired_interval(gaps, data.seed),
        p=1.0 if p is None else p,
        differs_from_best=p is not None and p < LEVEL,
        is_pareto_optimal=optimal,
        means={metric: float(means[index]) for metric, means in data.means.items()},
        cost=data.costs[index],
    )


def _pareto_optimal(data: RankingInput) -> list[bool]:
    """Return which methods are Pareto-optimal in the goals and in cost; baselines are not compared."""
    cost = np.array([-(cost.forwards + BACKWARD * cost.backwards) for cost in data.costs], dtype=np.float64)
    compared = np.array([method not in BASELINES for method in data.methods])
    optimal = np.zeros(len(compared), dtype=bool)
    optimal[compared] = is_pareto_optimal(np.column_stack([*data.goals.values(), cost])[compared])
    return [bool(value) for value in optimal]


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _standard_error(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return standard_deviation(finite) / math.sqrt(len(finite)) if len(finite) > 1 else math.nan


def summarise(ranking: Ranking, by: str, agreement: Mapping[tuple[str, str], float], goals: Sequence[str]) -> list[str]:
    """Return the answer in sentences: the best, which methods it beats, and what limits the conclusion."""
    best = ranking.best
    sentences = [_winner_sentence(ranking, by), _baseline_sentence(best, ranking.rivals)]
    fewest = fewest_images(len(ranking.rows))
    if best.n < fewest:
        sentences.append(
            f"{_count(best.n)} too few for {len(ranking.rows)} methods: no difference can be significant with fewer "
            f"than {fewest}. Give more images (or fewer methods), better 50 than {fewest}."
        )
    elif best.n < ROUGH:
        sentences.append(f"{_count(best.n)} few, so the intervals are rough; give {ROUGH} or more.")
    if ranking.needed is not None and ranking.needed > best.n:
        tied = [row.method for row in ranking.tied]
        gaps, others = "gaps are what they seem", "each of them"
        if len(tied) == 1:
            gaps, others = "gap is what it seems", tied[0]
        about = f"{float(f'{ranking.needed:.2g}'):.0f}"  # it is not known more precisely
        sentences.append(
            f"If the {gaps}, about {about} images would show with 80 % power that {best.method} is better than "
            f"{others}."
        )
    listed = join([row.method for row in ranking.rows if row.is_pareto_optimal])
    sentences.append(f"Pareto-optimal in {join([*goals, 'cost'])}: {listed}.")
    for (first, second), rho in agreement.items():
        if rho < AGREE:
            sentences.append(
                f"{first} and {second} rank methods differently (Spearman {rho:.2f}): the choice depends on the metric."
            )
    return sentences


def _winner_sentence(ranking: Ranking, by: str) -> str:
    best = ranking.best
    low, high = best.interval
    value = f"{best.mean:.4g}" + (f" [{low:.4g}, {high:.4g}]" if math.isfinite(low) else "")
    if not ranking.rivals:
        return f"{best.method}: {by} {value}."
    above = [row.method for row in ranking.rivals if row.gap < 0]
    runner_up = next((row for row in ranking.rivals if row.gap >= 0), None)
    following = (
        ""
        if runner_up is None
        else f"; runner-up {runner_up.method}: gap {_gap(runner_up)}, corrected p = {runner_up.p:.2g}"
    )
    if ranking.clear:
        return (
            f"{best.method} is the best by {by}: {value} over {best.n} images, significantly better than each of the "
            f"{len(ranking.rivals)} others{following}."
        )
    if above:
        verb = "score" if len(above) > 1 else "scores"
        return (
            f"No winner: the best method by {by} is {best.method}, {value}, and {join(above)} {verb} higher on the "
            "same images."
        )
    tied = [row.method for row in ranking.tied]
    return (
        f"No significant winner: {best.method} comes first by {by}, {value} over {best.n} image{'s' * (best.n != 1)}, "
        f"and cannot be told from {join(tied)}{following}."
    )


def _baseline_sentence(best: Row, rivals: Sequence[Row]) -> str:
    """Return whether the best method is significantly better than the baselines."""
    baselines = [row for row in rivals if row.baseline]
    not_beaten = [row for row in baselines if not (row.differs_from_best and row.gap > 0)]
    if not not_beaten:
        return f"It beats {join([row.method for row in baselines])} significantly."
    numbers = join([f"{row.method} (gap {_gap(row)}, corrected p = {row.p:.2g})" for row in not_beaten])
    return f"Beware: {best.method} does not beat {numbers} significantly: its maps may be no better than that."


def _gap(row: Row) -> str:
    low, high = row.gap_interval
    return f"{row.gap:.2g}" + (f" [{low:.2g}, {high:.2g}]" if math.isfinite(low) else "")


def _count(n: int) -> str:
    return "1 image is" if n == 1 else f"{n} images are"


def join(names: Sequence[str]) -> str:
    """Return "a, b and c"; "none" for no names."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "none"
