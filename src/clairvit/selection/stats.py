"""Statistics of methods that were scored on the same images: corrections for many comparisons, ranks, Pareto front.

All tests are paired: they are about the difference of two methods on an image, not about how hard the image is. Tests
of one mean are in `metrics/confidence_intervals.py`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from clairvit.metrics import similarity
from clairvit.metrics.confidence_intervals import (
    DRAWS,
    EVERYWHERE,
    FEWEST,
    LEVEL,
    Array,
    fewest_values,
    mean_interval,
    mean_p,
    rounding_level,
)
from clairvit.numerics import average_ranks

POWER = 0.8  # of the number of images that `choose` names
POWER_DRAWS = 4_000  # of which it is the share
MOST_IMAGES = 10**8  # beyond which no number is named


def fewest_images(methods: int) -> int:
    """Return the smallest number of images at which the best of so many methods can be significantly better."""
    return fewest_values(math.comb(methods, 2))


def draws_for(comparisons: int) -> int:
    """Return the number of sign flips that let the smallest p survive a correction for so many comparisons."""
    return max(DRAWS, 100 * comparisons)


def corrected(differences: Sequence[Array], seed: int = 0) -> Array:
    """Return Holm's p-values [m] of m comparisons, each given by its paired differences [n] (n may vary).

    The chance that any of the comparisons without a true difference comes out below `LEVEL` is at most `LEVEL`.
    """
    return holm(mean_p(_padded(differences), seed, draws_for(len(differences))))


def corrected_after_picking(differences: Sequence[Array], seed: int = 0) -> Array:
    """Return p-values [m] of the best of m + 1 methods against each other one, `holm_after_picking`."""
    pairs = math.comb(len(differences) + 1, 2)
    return holm_after_picking(mean_p(_padded(differences), seed, draws_for(pairs)))


def _padded(differences: Sequence[Array]) -> Array:
    """Return m arrays [n] as one [m, largest n], filled up with NaN."""
    padded = np.full((len(differences), max(map(len, differences), default=0)), np.nan)
    for row, values in zip(padded, differences, strict=True):
        row[: len(values)] = values
    return padded


def holm(p: Array) -> Array:
    """Return p-values [m] adjusted by Holm's step-down: the smallest times m, the next times m − 1, …, monotone."""
    return _step_down(p, np.arange(len(p), 0, -1.0))


def holm_after_picking(p: Array) -> Array:
    """Return p-values [m] of the best of m + 1 methods against each other one, adjusted for having picked the best.

    The best was found on the same images, so that any pair of methods might have been the one that is tested. Holm's
    step-down then counts, at each step, the pairs among the methods that are not yet rejected: m(m + 1)/2 at first, 1
    for the last rival. If s methods are equally good, none of them is wrongly rejected before a step that counts all
    their pairs.
    """
    return _step_down(p, _pairs_left(len(p)))


def _pairs_left(rivals: int) -> Array:
    """Return the pairs among the best and the rivals that are left, [rivals]: with all of them first, 1 at last."""
    return np.array([math.comb(left + 1, 2) for left in range(rivals, 0, -1)], dtype=np.float64)


def _step_down(p: Array, counts: Array) -> Array:
    """Return p-values [m], the j-th smallest times counts[j], at least as large as the ones before, at most 1."""
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * counts))
    return adjusted


def paired_interval(values: Array, seed: int = 0, span: tuple[float, float] = EVERYWHERE) -> tuple[float, float]:
    """Return the 95 % interval of a mean or mean difference, over the images where it is defined; NaN below 6."""
    return mean_interval(values[np.isfinite(values)], seed, span)


def all_pairs(values: Array, seed: int = 0) -> Array:
    """Return p-values [K, K] of all pairs of methods with values [K, n], corrected by Holm; 1 on the diagonal."""
    count = len(values)
    p_values = np.ones((count, count))
    pairs = list(itertools.combinations(range(count), 2))
    if pairs:
        gaps = np.stack([values[i] - values[j] for i, j in pairs])
        adjusted = holm(mean_p(gaps, seed, draws_for(len(pairs))))
        for (i, j), p in zip(pairs, adjusted, strict=True):
            p_values[i, j] = p_values[j, i] = p
    return p_values


def indistinguishable_groups(order: Sequence[int], p: Array, level: float = LEVEL) -> list[tuple[int, ...]]:
    """Return runs of neighbours in the ranking `order` of which no two differ significantly by p [K, K].

    They are the bars of a critical-difference diagram. Runs inside a longer one and runs of one are left out.
    """
    groups: list[tuple[int, ...]] = []
    reached = 0
    for start in range(len(order)):
        end = start + 1
        while end < len(order) and all(p[order[end], order[member]] >= level for member in range(start, end)):
            end += 1
        if end - start > 1 and end > reached:
            groups.append(tuple(order[start:end]))
        reached = max(reached, end)
    return groups


def ranks(values: Array) -> Array:
    """Return ranks of values […, K], 1 for the highest; equal values share their mean rank, NaN comes last."""
    filled = np.where(np.isnan(values), -np.inf, values)
    return np.asarray(average_ranks(torch.from_numpy(-filled)).numpy())


def mean_ranks(values: Array) -> Array:
    """Return the mean over metrics of the rank on an image, [K, n], of values [M metrics, K methods, n images].

    Higher values are better. A metric that is undefined for all methods on an image is left out there; NaN where all
    metrics are.
    """
    ranked = np.swapaxes(ranks(np.swapaxes(values, 1, 2)), 1, 2)
    defined = ~np.isnan(values).all(1, keepdims=True) & np.ones_like(values, dtype=bool)
    counts = defined.sum(0)
    total = np.where(defined, ranked, 0.0).sum(0)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)


def spearman(first: Array, second: Array) -> float:
    """Return the rank correlation of two scores of the same methods [K], over the methods that have both.

    NaN if all scores are equal, and with fewer than 3 methods: two can only give ±1, which is their order.
    """
    has_both = np.isfinite(first) & np.isfinite(second)
    if has_both.sum() < 3:
        return math.nan
    return float(similarity.spearman(torch.from_numpy(first[has_both]), torch.from_numpy(second[has_both])))


def is_pareto_optimal(values: Array) -> NDArray[np.bool_]:
    """Return which of K methods with values [K, goals] are Pareto-optimal, [K]; higher is better.

    No other method is at least as good in all goals and better in one. NaN in a goal is worse than any number.
    """
    filled = np.where(np.isnan(values), -np.inf, values)
    no_worse = (filled[:, None] >= filled[None]).all(-1)  # [i, j]: i is at least as good as j everywhere
    better = (filled[:, None] > filled[None]).any(-1)
    return np.asarray(~(no_worse & better).any(0))


def images_needed(gaps: Array, seed: int = 0) -> int | None:
    """Return about how many images show, with 80 % power, that the best is better than each of its closest rivals.

    `gaps` [m, n] are its leads over the m rivals that it cannot be told from, image by image. If they are what they
    seem, z of N images is normal with mean √N · mean / sd and the gaps' correlations; all m must be rejected by
    `holm_after_picking`, which counts their pairs. None where a gap is not positive, or is known on one image only.
    """
    from scipy.stats import norm

    complete = gaps[:, np.isfinite(gaps).all(0)]  # [m, n]
    if complete.shape[1] < 2 or (complete.mean(1) <= 0).any():
        return None
    spread = np.maximum(complete.std(1, ddof=1), rounding_level(complete))
    effect = complete.mean(1) / spread
    correlation = np.cov(complete / spread[:, None]).reshape(len(gaps), len(gaps))
    generator = np.random.default_rng(seed)
    noise = generator.multivariate_normal(np.zeros(len(gaps)), correlation, POWER_DRAWS, method="eigh")  # [draws, m]

    def power(images: int) -> float:
        z = noise + math.sqrt(images) * effect
        p = np.sort(2 * norm.sf(np.abs(z)), axis=1)
        return float(((p * _pairs_left(len(gaps)) < LEVEL).all(1) & (z > 0).all(1)).mean())

    most = FEWEST
    while power(most) < POWER:
        most *= 2
        if most > MOST_IMAGES:
            return None
    return FEWEST + bisect.bisect_left(range(FEWEST, most), POWER, key=power)
