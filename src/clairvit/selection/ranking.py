"""Verdict: a ranking of methods with how sure one may be of it, and the sentences that say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.inference import standard_deviation
from clairvit.selection.stats import (
    EVERYWHERE,
    LEVEL,
    Array,
    alike,
    all_pairs,
    draws_for,
    fewest_images,
    holm_after_picking,
    images_needed,
    is_pareto_optimal,
    mean_p,
    paired_interval,
)

ROUGH = 20  # images below which intervals are rough
AGREE = 0.5  # Spearman's rho below which two metrics tell different stories
BACKWARD = 2  # a backward is about two forwards


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
    apart: bool  # significantly worse than the best
    on_front: bool  # nobody is as good in faithfulness, localisation and cost, and better in one of them
    means: Mapping[str, float]  # by metric
    cost: Cost  # of one map


@dataclass(frozen=True, eq=False)
class Measures:
    """What a ranking is made from: methods × images, by what it is ranked by."""

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
        """The values, higher is better."""
        return self.values if self.better == "higher" else -self.values


@dataclass(frozen=True, eq=False)
class Ranking:
    """Rows, best first, and which neighbours in the ranking no test tells apart."""

    rows: tuple[Row, ...]
    best: Row
    groups: tuple[tuple[str, ...], ...]
    close: Row | None  # the first behind the best that cannot be told from it
    needed: int | None  # images that would tell these two apart

    @property
    def rivals(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row is not self.best)

    @property
    def clear(self) -> bool:
        """Is the best significantly better than all others?"""
        return all(row.apart and row.gap > 0 for row in self.rivals)

    @property
    def tied(self) -> tuple[Row, ...]:
        """Those that cannot be told from the best."""
        return tuple(row for row in self.rivals if not row.apart)


def judge(measures: Measures) -> Ranking:
    """The best is the method with the highest mean that is no baseline; it is tested against all others."""
    upward = measures.upward
    means = np.array([_mean(row) for row in upward])
    order = sorted(range(len(means)), key=lambda one: (math.isnan(means[one]), -means[one]))
    best = next(one for one in order if measures.methods[one] not in BASELINES)
    if math.isnan(means[best]):
        raise BadInput(
            f"No method has a score by {measures.by} on any of the {upward.shape[1]} images, so none can be chosen; "
            "expected images (and masks, where it compares with them) for which it is defined, or another metric."
        )
    rivals = [one for one in order if one != best]
    gaps = upward[best] - upward  # [K, n]
    raw = mean_p(gaps[rivals], measures.seed, draws_for(math.comb(len(means), 2)))
    p = dict(zip(rivals, holm_after_picking(raw).tolist(), strict=True))
    shown = _on_front(measures)
    rows = {
        one: _row(measures, one, place, gaps[one], p.get(one), bool(shown[one])) for place, one in enumerate(order, 1)
    }
    named = [tuple(measures.methods[one] for one in own) for own in alike(order, all_pairs(upward, measures.seed))]
    close = next((one for one in rivals if not rows[one].apart and rows[one].gap >= 0), None)
    needed = None if close is None else images_needed(gaps[close])
    return Ranking(
        rows=tuple(rows.values()),
        best=rows[best],
        groups=tuple(named),
        close=None if close is None else rows[close],
        needed=None if needed is None else max(needed, fewest_images(len(means))),
    )


def _row(measures: Measures, one: int, place: int, gaps: Array, p: float | None, on_front: bool) -> Row:
    """`gaps` [n] to the best; the best itself has no p."""
    values = measures.values[one]
    return Row(
        rank=place,
        method=measures.methods[one],
        baseline=measures.methods[one] in BASELINES,
        mean=_mean(values),
        standard_error=_error(values),
        interval=paired_interval(values, measures.seed, measures.span),
        n=int(np.isfinite(values).sum()),
        gap=_mean(gaps),
        gap_interval=(0.0, 0.0) if p is None else paired_interval(gaps, measures.seed),
        p=1.0 if p is None else p,
        apart=p is not None and p < LEVEL,
        on_front=on_front,
        means={metric: float(own[one]) for metric, own in measures.means.items()},
        cost=measures.costs[one],
    )


def _on_front(measures: Measures) -> list[bool]:
    """Of the methods; a baseline is a yardstick, not a choice."""
    effort = np.array([-(cost.forwards + BACKWARD * cost.backwards) for cost in measures.costs], dtype=np.float64)
    own = np.array([text not in BASELINES for text in measures.methods])
    found = np.zeros(len(own), dtype=bool)
    found[own] = is_pareto_optimal(np.column_stack([*measures.goals.values(), effort])[own])
    return [bool(one) for one in found]


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _error(values: Array) -> float:
    known = values[np.isfinite(values)]
    return standard_deviation(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan


def sentences(verdict: Ranking, by: str, agreement: Mapping[tuple[str, str], float], goals: Sequence[str]) -> list[str]:
    """The answer in words: the best, whom it beats, whether it beats luck, and what else one should know."""
    best, rivals = verdict.best, verdict.rivals
    said = [_winner(verdict, by), *_luck(best, rivals)]
    fewest = fewest_images(len(verdict.rows))
    if best.n < fewest:
        said.append(
            f"{_count(best.n)} too few for {len(verdict.rows)} methods: no difference can be significant with fewer "
            f"than {fewest}. Give more images (or fewer methods), better 50 than {fewest}."
        )
    elif best.n < ROUGH:
        said.append(f"{_count(best.n)} few, so the intervals are rough; give {ROUGH} or more.")
    if verdict.close is not None and verdict.needed is not None and verdict.needed > best.n:
        close = verdict.close.method
        about = f"{float(f'{verdict.needed:.2g}'):.0f}"  # it is no better known than that
        said.append(f"If the gap to {close} is what it seems, about {about} images would show it.")
    listed = join([row.method for row in verdict.rows if row.on_front])
    said.append(f"On the front of {join([*goals, 'cost'])} (nobody is as good in all and better in one): {listed}.")
    for (one, other), rho in agreement.items():
        if rho < AGREE:
            said.append(
                f"{one} and {other} rank methods differently (Spearman {rho:.2f}): the choice depends on the metric."
            )
    return said


def _winner(verdict: Ranking, by: str) -> str:
    best = verdict.best
    low, high = best.interval
    sure = f"{best.mean:.4g}" + (f" [{low:.4g}, {high:.4g}]" if math.isfinite(low) else "")
    if not verdict.rivals:
        return f"{best.method}: {by} {sure}."
    above = [row.method for row in verdict.rivals if row.gap < 0]
    runner = next((row for row in verdict.rivals if row.gap >= 0), None)
    next_one = (
        "" if runner is None else f"; runner-up {runner.method}: gap {_gap(runner)}, corrected p = {runner.p:.2g}"
    )
    if verdict.clear:
        return (
            f"{best.method} is the best by {by}: {sure} over {best.n} images, significantly better than each of the "
            f"{len(verdict.rivals)} others{next_one}."
        )
    if above:
        more = "score" if len(above) > 1 else "scores"
        return (
            f"No winner: the best method by {by} is {best.method}, {sure}, and {join(above)} {more} higher on the same "
            "images."
        )
    tied = [row.method for row in verdict.tied]
    return (
        f"No significant winner: {best.method} comes first by {by}, {sure} over {best.n} image{'s' * (best.n != 1)}, "
        f"and cannot be told from {join(tied)}{next_one}."
    )


def _luck(best: Row, rivals: Sequence[Row]) -> list[str]:
    """Does it beat maps that know nothing?"""
    lost = [row for row in rivals if row.baseline and not (row.apart and row.gap > 0)]
    if not lost:
        return [f"It beats {join([row.method for row in rivals if row.baseline])} significantly."]
    numbers = join([f"{row.method} (gap {_gap(row)}, corrected p = {row.p:.2g})" for row in lost])
    return [f"Beware: {best.method} does not beat {numbers} significantly: its maps may be no better than that."]


def _gap(row: Row) -> str:
    low, high = row.gap_interval
    return f"{row.gap:.2g}" + (f" [{low:.2g}, {high:.2g}]" if math.isfinite(low) else "")


def _count(n: int) -> str:
    return "1 image is" if n == 1 else f"{n} images are"


def join(names: Sequence[str]) -> str:
    """'a, b and c'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "none"
