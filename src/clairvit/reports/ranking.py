"""Ranks of methods, agreement of metrics and radar data. Pure functions of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from clairvit.metrics.radar import area_under_radar, radar
from clairvit.metrics.registry import MetricSpec, resolve_metric
from clairvit.metrics.score import Score, Scores, pooled
from clairvit.selection import stats

Array = NDArray[np.float64]
FOCUSVIT = ("faithfulness-correlation", "max-sensitivity", "sparseness", "mprt")  # in the order of its tables


def ranks(scores: Scores, methods: Sequence[str], metrics: Sequence[str]) -> Array:
    """Return [methods, metrics]: 1 is the best, ties share their mean, NaN where there is no mean."""
    table = np.full((len(methods), len(metrics)), np.nan)
    for column, metric in enumerate(metrics):
        column_scores = [scores.get((method, metric)) for method in methods]
        values = np.array(
            [math.nan if score is None else higher_is_better(score, score.mean) for score in column_scores]
        )
        table[:, column] = np.where(np.isfinite(values), stats.ranks(values), np.nan)
    return table


def mean_ranks(table: Array) -> Array:
    """Return [methods] from [methods, metrics]: the mean over the metrics that a method has a score by."""
    defined = np.isfinite(table)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(defined, table, 0).sum(1) / defined.sum(1))


def higher_is_better(score: Score, value: float) -> float:
    """Return the value, negated where lower is better."""
    return value if score.better == "higher" else -value


def excludes_zero(interval: tuple[float, float]) -> bool:
    """Return whether 0 is outside the interval."""
    return interval[0] > 0 or interval[1] < 0


def agreement(scores: Scores, methods: Sequence[str], metrics: Sequence[str]) -> Array:
    """Return [metrics, metrics]: Spearman's correlation over methods; NaN where fewer than 3 have both.

    Metrics are oriented so that higher is better: 1 means that two metrics order the methods alike.
    """
    columns = ranks(scores, methods, metrics).T
    return np.array([[stats.spearman(column, other) for other in columns] for column in columns])


@dataclass(frozen=True, eq=False)
class RadarData:
    """The numbers of a radar chart."""

    axes: tuple[str, ...]  # metrics
    methods: tuple[str, ...]
    r: Array  # [methods, axes]
    areas: Array  # [methods]
    left_out: tuple[str, ...]  # methods without a score on one of the axes
    focusvit: bool  # the axes are FocusViT's four


def radar_data(scores: Scores, methods: Sequence[str], metrics: Sequence[str | MetricSpec]) -> RadarData | str:
    """Return radar data of FocusViT's four metrics where all were run, else of all; or why there is no radar."""
    by_name = {resolve_metric(metric).metric.name: str(metric) for metric in reversed(metrics)}
    has_four = all(name in by_name for name in FOCUSVIT)
    axes = tuple(by_name[name] for name in FOCUSVIT) if has_four else tuple(map(str, metrics))
    # An axis on which no method has a score would leave out all methods.
    axes = tuple(axis for axis in axes if any(_mean(scores, method, axis) is not None for method in methods))
    if len(axes) < 3:
        return f"A radar chart needs three metrics or more; {_count(len(axes), 'has', 'have')} scores here."
    complete = tuple(method for method in methods if all(_mean(scores, method, axis) is not None for axis in axes))
    if len(complete) < 2:
        return (
            "A radar chart compares two methods or more, for each axis goes from the worst to the best of them; "
            f"{_count(len(complete), 'has', 'have')} a score on all {len(axes)} axes here."
        )
    values = torch.tensor([[_mean(scores, method, axis) for axis in axes] for method in complete], dtype=torch.float64)
    r = radar(values, ["higher" if scores[complete[0], axis].better == "higher" else "lower" for axis in axes])
    left_out = tuple(method for method in methods if method not in complete)
    focusvit = has_four and len(axes) == len(FOCUSVIT)
    return RadarData(axes, complete, r.numpy(), area_under_radar(r).numpy(), left_out, focusvit)


def _mean(scores: Scores, method: str, metric: str) -> float | None:
    score = scores.get((method, metric))
    return None if score is None or not math.isfinite(score.mean) else score.mean


def _count(count: int, singular: str, plural: str) -> str:
    return f"{count or 'none'} {singular if count == 1 else plural}"


def class_means(score: Score, classes: Mapping[str, int]) -> dict[int, tuple[float, int]]:
    """Return class -> the mean of its images that have a score, and how many these are."""
    defined = np.isfinite(score.values.double().cpu().numpy())
    means = {}
    for index in sorted(set(classes.values())):
        rows = [row for row, name in enumerate(score.names) if classes.get(name) == index and defined[row]]
        means[index] = (float(pooled(score.parts[rows].sum(0))) if rows else math.nan, len(rows))
    return means
