"""Score: a metric's value for each image, with how sure one may be of the mean and what luck would have scored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clairvit.methods.explanation import Cost

RESAMPLES = 2000
AT_ONCE = 1_000_000  # values drawn
SURE = 0.95
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
        if not self._enough(2):
            return math.nan
        if self.counts is None:
            return float(self.valid.std(ddof=1) / math.sqrt(self.n_valid))
        return float(resampled(self._counted, self.seed).std(ddof=1))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of bootstrap means over images lie in it; NaN where one image or none cannot say how sure it is."""
        return bootstrap(self._counted, self.seed)

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
        return f"Score({self.metric} of {self.method}: {self.mean:.4g} [{low:.4g}, {high:.4g}], n = {self.n_valid})"


def with_ones(values: NDArray[np.float64]) -> Counts:
    """[n] -> [n, 1, 2], of which the pooled score is the mean."""
    return np.stack([values, np.ones_like(values)], -1)[:, None]


def pooled(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """[…, K, 2] sums of parts and wholes -> […], the mean of the K shares; NaN where a whole is nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums[..., 0] / sums[..., 1]).mean(-1))


def resampled(counts: Counts, seed: int) -> NDArray[np.float64]:
    """[n, K, 2] -> the score of so many sets of n images, drawn with replacement; memory does not grow with n."""
    dice = np.random.default_rng(seed)
    n = len(counts)
    at_once = max(1, AT_ONCE // n)
    found = []
    for start in range(0, RESAMPLES, at_once):
        drawn = dice.integers(0, n, (min(at_once, RESAMPLES - start), n))
        found.append(pooled(counts[drawn].sum(1)))
    return np.concatenate(found)


def bootstrap(values: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """The percentile interval, of the mean of [n] or the pooled score of [n, K, 2]."""
    if len(values) < 2:
        return math.nan, math.nan
    scores = resampled(values if values.ndim > 1 else with_ones(values), seed)
    low, high = np.quantile(scores, [(1 - SURE) / 2, (1 + SURE) / 2])
    return float(low), float(high)


def paired(one: Score, other: Score) -> tuple[float, tuple[float, float]]:
    """The difference on the images where both are defined, whichever else either has, and its interval.

    Images are drawn for both together, so that what is hard for both does not count as noise.
    """
    places = {name: place for place, name in enumerate(other.names)}
    pairs = [(place, places[name]) for place, name in enumerate(one.names) if name in places]
    if one.names == other.names:  # also where two images have the same name
        pairs = [(place, place) for place in range(len(one.names))]
    ours, theirs = (score.parts[[pair[side] for pair in pairs]] for side, score in enumerate((one, other)))
    both = np.isfinite(ours).all((1, 2)) & np.isfinite(theirs).all((1, 2))
    ours, theirs = ours[both], theirs[both]
    if len(ours) == 0:
        return math.nan, (math.nan, math.nan)
    gap = float(pooled(ours.sum(0)) - pooled(theirs.sum(0)))
    if len(ours) == 1:
        return gap, (math.nan, math.nan)
    drawn = resampled(ours, one.seed) - resampled(theirs, one.seed)  # the same seed: the same images
    low, high = np.quantile(drawn, [(1 - SURE) / 2, (1 + SURE) / 2])
    return gap, (float(low), float(high))


def lead(one: Score, other: Score) -> tuple[float, tuple[float, float]]:
    """By how much one is better than the other, and the interval: `paired`, turned so that more is better."""
    gap, (low, high) = paired(one, other)
    return (gap, (low, high)) if one.better == "higher" else (-gap, (-high, -low))
