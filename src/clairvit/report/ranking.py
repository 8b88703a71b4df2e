"""Ranking: who is better than whom, by how much, and whether the metrics agree. Pure functions of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from clairvit.metrics.radar import area_under_radar, radar
from clairvit.metrics.registry import resolve_metric
from clairvit.metrics.score import Score, Scores, pooled
from clairvit.selection import stats

Array = NDArray[np.float64]
FOCUSVIT = ("faithfulness-correlation", "max-sensitivity", "sparseness", "mprt")  # in the order of its tables


def ranks(scores: Scores, methods: Sequence[str], metrics: Sequence[str]) -> Array:
    """[methods, metrics]: 1 is the best, ties share their mean, NaN where there is no mean."""
    found = np.full((len(methods), len(metrics)), np.nan)
    for column, metric in enumerate(metrics):
        own = [scores.get((method, metric)) for method in methods]
        good = np.array([math.nan if one is None else turned(one, one.mean) for one in own])
        found[:, column] = np.where(np.isfinite(good), stats.ranks(good), np.nan)
    return found


def mean_ranks(found: Array) -> Array:
    """[methods, metrics] -> [methods], over the metrics that a method has a score by."""
    there = np.isfinite(found)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(there, found, 0).sum(1) / there.sum(1))


def turned(score: Score, value: float) -> float:
    """So that more is better."""
    return value if score.better == "higher" else -value


def differs(interval: tuple[float, float]) -> bool:
    """Does it leave out 0?"""
    return interval[0] > 0 or interval[1] < 0


def agreement(scores: Scores, methods: Sequence[str], metrics: Sequence[str]) -> Array:
    """[metrics, metrics]: Spearman's correlation over methods; NaN where fewer than 3 have both.

    `metrics` are turned so that more is better: 1 means that two metrics order the methods alike.
    """
    columns = ranks(scores, methods, metrics).T
    return np.array([[stats.spearman(one, other) for other in columns] for one in columns])


@dataclass(frozen=True, eq=False)
class RadarData:
    """A radar chart's numbers."""

    axes: tuple[str, ...]  # metrics
    methods: tuple[str, ...]
    r: Array  # [methods, axes]
    areas: Array  # [methods]
    left_out: tuple[str, ...]  # methods without a score on one of the axes
    focusvit: bool  # the axes are FocusViT's four


def star(scores: Scores, methods: Sequence[str], metrics: Sequence[str]) -> RadarData | str:
    """FocusViT's four metrics where all were run, else all there are; or the sentence that says why there is none."""
    named = {resolve_metric(metric).metric.name: metric for metric in reversed(metrics)}
    four = all(name in named for name in FOCUSVIT)
    axes = tuple(named[name] for name in FOCUSVIT) if four else tuple(metrics)
    # An axis on which nobody has a score would leave out everybody.
    axes = tuple(axis for axis in axes if any(_mean(scores, method, axis) is not None for method in methods))
    if len(axes) < 3:
        return f"A radar chart needs three metrics or more; {_count(len(axes), 'has', 'have')} scores here."
    whole = tuple(m for m in methods if all(_mean(scores, m, axis) is not None for axis in axes))
    if len(whole) < 2:
        return (
            "A radar chart compares two methods or more, for each axis goes from the worst to the best of them; "
            f"{_count(len(whole), 'has', 'have')} a score on all {len(axes)} axes here."
        )
    values = torch.tensor([[_mean(scores, method, axis) for axis in axes] for method in whole], dtype=torch.float64)
    better = [scores[whole[0], axis].better for axis in axes]
    r = radar(values, ["higher" if word == "higher" else "lower" for word in better])
    left = tuple(method for method in methods if method not in whole)
    return RadarData(axes, whole, r.numpy(), area_under_radar(r).numpy(), left, four and len(axes) == len(FOCUSVIT))


def _mean(scores: Scores, method: str, metric: str) -> float | None:
    score = scores.get((method, metric))
    return None if score is None or not math.isfinite(score.mean) else score.mean


def _count(count: int, one: str, several: str) -> str:
    return f"{count or 'none'} {one if count == 1 else several}"


def by_class(score: Score, classes: Mapping[str, int]) -> dict[int, tuple[float, int]]:
    """Class -> the mean of its images that have a score, and how many these are."""
    counted = score.parts
    there = np.isfinite(score.values.double().cpu().numpy())
    found = {}
    for number in sorted(set(classes.values())):
        own = [place for place, name in enumerate(score.names) if classes.get(name) == number and there[place]]
        found[number] = (float(pooled(counted[own].sum(0))) if own else math.nan, len(own))
    return found
