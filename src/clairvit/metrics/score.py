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
SURE = 0.95


@dataclass(frozen=True, eq=False)
class Curve:
    """What a score was computed from: one line an image."""

    x: Tensor  # [S], the part of the image that was taken away (or shown)
    y: Tensor  # [B, S]
    meaning: str  # of y, e.g. "probability"


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
        return float(self.valid.mean()) if self.n_valid else math.nan

    @property
    def standard_error(self) -> float:
        return float(self.valid.std(ddof=1) / math.sqrt(self.n_valid)) if self.n_valid > 1 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of bootstrap means over images lie in it."""
        return bootstrap(self.valid, self.seed)

    def __repr__(self) -> str:
        low, high = self.interval
        return f"Score({self.metric} of {self.method}: {self.mean:.4g} [{low:.4g}, {high:.4g}], n = {self.n_valid})"


def bootstrap(values: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """The percentile interval of the mean; NaN where one value or none cannot say how sure it is."""
    if len(values) < 2:
        return math.nan, math.nan
    dice = np.random.default_rng(seed)
    means = values[dice.integers(0, len(values), (RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means, [(1 - SURE) / 2, (1 + SURE) / 2])
    return float(low), float(high)


def paired(one: Score, other: Score) -> tuple[float, tuple[float, float]]:
    """The mean difference on the images where both are defined, and its interval."""
    gap = (one.values.double() - other.values.double()).cpu().numpy()
    gap = gap[np.isfinite(gap)]
    return (float(gap.mean()) if len(gap) else math.nan), bootstrap(gap, one.seed)
