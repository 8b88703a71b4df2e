"""Score: a metric's value for each image, with how sure one may be of the mean and what luck would have scored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clairvit.methods.explanation import Cost
from clairvit.metrics.inference import mean_interval, standard_deviation

Counts = NDArray[np.float64]  # [n, K, 2]


@dataclass(frozen=True, eq=False)
class Curve:
    """What a score was computed from: one line an image."""

    x: Tensor  # [S], e.g. the part of the image that was taken away (or shown)
    y: Tensor  # [B, S]
    meaning: str  # of y, e.g. "prob"
    across: str = "part of the image"  # the meaning of x


@dataclass(frozen=True, eq=False)
class Score:
    """One metric of one method on a set of images. Undefined values are NaN and are counted, never replaced."""

    metric: str  # canonical, e.g. "deletion(removal=black)"
    method: str
    values: Tensor  # [B], float64
    better: str  # "higher" or "lower"
    span: tuple[float, float]
    degenerate: Tensor  # bool [B]: the map was constant, so that an order of its patches is a lottery
    names: tuple[str, ...]
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # every choice that the number depends on
    seed: int = 0
    cost: Cost = field(default_factory=Cost)
    curve: Curve | None = None
    baselines: Mapping[str, Score] = field(default_factory=dict)  # random and centre maps on the same images
    notes: tuple[str, ...] = ()
    counts: Tensor | None = None  # [B, K, 2]: parts and wholes, for a score of the set that is no mean over images

    @property
    def valid(self) -> NDArray[np.float64]:
        values = self.values.double().cpu().numpy()
        return np.asarray(values[np.isfinite(values)])

    @property
    def n_valid(self) -> int:
        return len(self.valid)

    @property
    def n_invalid(self) -> int:
        return len(self.values) - self.n_valid

    @property
    def n_degenerate(self) -> int:
        return int(self.degenerate.sum())

    @property
    def mean(self) -> float:
        """Over images; where parts and wholes were counted, of all images together."""
        return float(pooled(self._counted.sum(0))) if self._enough(1) else math.nan

    @property
    def standard_error(self) -> float:
        """Of the mean; of pooled counts by linearisation. Exactly 0 where the values differ by rounding alone."""
        return standard_deviation(self._spread) / math.sqrt(self.n_valid) if self._enough(2) else math.nan

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean (`inference.mean_interval`); NaN for fewer than 6 images."""
        return mean_interval(self._spread, self.seed, self.span)

    @property
    def _spread(self) -> NDArray[np.float64]:
        """[n_valid], of which the score is the mean."""
        return self.valid if self.counts is None else contributions(self._counted)

    def _enough(self, images: int) -> bool:
        return self.n_valid >= images

    @property
    def parts(self) -> Counts:
        """Of every image, NaN where it has no score; a plain value is a part of a whole of 1."""
        values = self.values.double().cpu().numpy()
        if self.counts is None:
            return with_ones(values)
        counts = self.counts.double().cpu().numpy().copy()
        counts[~np.isfinite(values)] = np.nan
        return np.asarray(counts)

    @property
    def _counted(self) -> Counts:
        """Of the valid images."""
        return np.asarray(self.parts[np.isfinite(self.values.double().cpu().numpy())])

    def __repr__(self) -> str:
        low, high = self.interval
        sure = "" if math.isnan(low) else f" [{low:.4g}, {high:.4g}]"
        return f"Score({self.metric} of {self.method}: {self.mean:.4g}{sure}, n = {self.n_valid})"


def with_ones(values: NDArray[np.float64]) -> Counts:
    """[n] -> [n, 1, 2], of which the pooled score is the mean."""
    return np.stack([values, np.ones_like(values)], -1)[:, None]


def pooled(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """[…, K, 2] sums of parts and wholes -> […], the mean of the K shares; NaN where a whole is nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums[..., 0] / sums[..., 1]).mean(-1))


def contributions(counts: Counts) -> NDArray[np.float64]:
    """[n, K, 2] parts and wholes -> [n], what each image adds to the pooled score, which is their mean.

    score + mean_k (part_k − share_k · whole_k) / mean(whole_k): the pooled score linearised at the observed shares.
    """
    sums = counts.sum(0)  # [K, 2]
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = sums[:, 0] / sums[:, 1]
        moved = (counts[..., 0] - shares * counts[..., 1]) / (sums[:, 1] / len(counts))  # [n, K]
    return np.asarray(pooled(sums) + moved.mean(-1))


def differences(one: Score, other: Score) -> NDArray[np.float64]:
    """[n], the difference on each image where both are defined; of pooled counts, of their `contributions`.

    What is hard for both does not count as noise.
    """
    places = {name: place for place, name in enumerate(other.names)}
    pairs = [(place, places[name]) for place, name in enumerate(one.names) if name in places]
    if one.names == other.names:  # also where two images have the same name
        pairs = [(place, place) for place in range(len(one.names))]
    ours, theirs = (score.parts[[pair[side] for pair in pairs]] for side, score in enumerate((one, other)))
    both = np.isfinite(ours).all((1, 2)) & np.isfinite(theirs).all((1, 2))
    if not both.any():
        return np.empty(0)
    if one.counts is None and other.counts is None:
        return np.asarray(ours[both, 0, 0] - theirs[both, 0, 0])
    return contributions(ours[both]) - contributions(theirs[both])


def leads(one: Score, other: Score) -> NDArray[np.float64]:
    """[n], by how much one is better than the other on each image: `differences`, turned so that more is better."""
    return differences(one, other) * (1.0 if one.better == "higher" else -1.0)


def paired(one: Score, other: Score) -> tuple[float, tuple[float, float]]:
    """The mean difference on the images where both are defined, whichever else either has, and its 95 % interval."""
    gaps = differences(one, other)
    return (float(gaps.mean()) if len(gaps) else math.nan), mean_interval(gaps, one.seed)


def lead(one: Score, other: Score) -> tuple[float, tuple[float, float]]:
    """By how much one is better than the other, and the interval: `paired`, turned so that more is better."""
    gap, (low, high) = paired(one, other)
    return (gap, (low, high)) if one.better == "higher" else (-gap, (-high, -low))
