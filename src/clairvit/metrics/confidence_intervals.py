"""Inference: tests and intervals of a mean of n values, exact or corrected for small n. Pure functions on arrays.

Two tests ask whether a mean is mu, and a claim needs both to reject at 5 %:

* sign flips: if x − mu is symmetric, its signs are coin tosses, so the sum is compared with the sums under all 2^n
  tosses. Exact for every n and every symmetric law. Two methods that are alike give symmetric paired differences.
* Hall's t: Student's t with the skewness taken out (Hall 1992). A mean of 0 with a long tail is not symmetric; sign
  flips and Student's t alone then claim a difference in up to 16 % of null cases at n = 12. As much skewness is taken
  out as leaves no edge of the interval further from the mean than `REACH` = 2.5 times Student's t: Hall's inverse grows
  without reason beyond its inflection, up to 4 times (benchmarks/intervals.py counts what that costs in coverage).

The interval of a mean holds every mu that is not rejected by both, so it leaves out 0 exactly where the p-value is
below 5 %. p is never below 2^(1 − n), so with fewer than `FEWEST` = 6 values nothing is claimed and no interval given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.05
REACH = 2.5  # an edge of an interval is at most so many times as far from the mean as Student's t has it
FEWEST = 6  # values: 2^(1 − 6) = 0.031 is the first smallest p below 5 %
EXACT = 12  # values up to which all 2^n sign flips are enumerated
DRAWS = 20_000  # random sign flips of a test, for more values
INTERVAL_DRAWS = 2_000  # random sign flips of an interval, for more values
FLIPS_PER_CHUNK = 2_000  # flips in memory
OUTSIDE = 1e-5  # relative: how far beyond its span a value is no rounding any more
EVERYWHERE = (-math.inf, math.inf)
SLACK = 1e-9  # relative: sums that differ by rounding are equal


def smallest_p(n: int) -> float:
    """Return 2^(1 − n), the smallest p-value that a test of n differences can give, however large they are."""
    return 2.0 ** (1 - n) if n else 1.0


def fewest_values(comparisons: int = 1) -> int:
    """Return the smallest n at which a difference can be significant after a correction for so many comparisons."""
    return next(n for n in itertools.count(1) if comparisons * smallest_p(n) < LEVEL)


@lru_cache(maxsize=EXACT + 1)
def _all_signs(n: int) -> Array:
    """Return all sign vectors [2^n, n]; read-only, for they are shared."""
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=n))).reshape(2**n, n)
    signs.flags.writeable = False
    return signs


def _signs(n: int, draws: int, seed: int) -> Iterator[Array]:
    """Yield sign vectors [D, n]: all 2^n of them up to `EXACT` values, else `draws` random ones."""
    if n <= EXACT:
        yield _all_signs(n)
        return
    generator = np.random.default_rng(seed)
    for start in range(0, draws, FLIPS_PER_CHUNK):
        yield np.asarray(
            generator.integers(0, 2, (min(FLIPS_PER_CHUNK, draws - start), n)) * 2.0 - 1.0, dtype=np.float64
        )


def sign_flips(differences: Array, seed: int = 0, draws: int = DRAWS) -> Array:
    """Return two-sided p-values [K] of the sign-flip test that the mean of each row of differences [K, n] is 0.

    p = (number of sign vectors s with |Σ s_i d_i| ≥ |Σ d_i|) / 2^n, exact up to 12 values; (1 + number) / (1 + draws)
    over random sign vectors beyond. Unlike Wilcoxon's test it asks about the mean, which is what rankings are by.
    NaN: the value is left out.
    """
    if differences.shape[1] == 0:
        return np.ones(len(differences))
    filled = np.where(np.isfinite(differences), differences, 0.0)
    n = filled.shape[1]
    observed = np.abs(filled.sum(1)) - SLACK * np.abs(filled).sum(1)  # [K]
    reached = np.zeros(len(filled))
    for signs in _signs(n, draws, seed):
        reached += (np.abs(signs @ filled.T) >= observed).sum(0)
    return np.asarray(reached / 2**n if n <= EXACT else (1 + reached) / (1 + draws))


def skewed_t(differences: Array) -> Array:
    """Return two-sided p-values [K] of Hall's skewness-corrected t-test that the mean of each row [K, n] is 0.

    g(t) = t + a (t²/3 + 1/6) + a² t³/27 with t = √n · mean / sd and a = skewness / √n has Student's law with n − 1
    degrees of freedom up to O(1/n) for skewed values too; a is at most `_most_skewed`. NaN: the value is left out;
    fewer than 3 values: p = 1.
    """
    from scipy.stats import t as student

    finite = np.isfinite(differences)
    n = finite.sum(1)  # [K]
    filled = np.where(finite, differences, 0.0)
    enough = n >= 3
    count = np.maximum(n, 3)
    mean = filled.sum(1) / count
    level = rounding_level(filled) if filled.size else np.zeros(len(filled))
    centred = np.where(finite, differences - mean[:, None], 0.0)
    variance, third = (centred**2).sum(1) / count, (centred**3).sum(1) / count
    spread = np.sqrt(variance * count / (count - 1))
    flat = spread <= level
    safe = np.where(flat, 1.0, variance)
    skewness = np.where(flat, 0.0, third / safe**1.5) * np.sqrt(count * (count - 1)) / (count - 2)
    t = np.sqrt(count) * mean / np.where(flat, 1.0, spread)
    most = _most_skewed(student.ppf(1 - LEVEL / 2, count - 1))
    a = np.clip(skewness / np.sqrt(count), -most, most)
    p = 2 * student.sf(np.abs(_hall(t, a)), count - 1)
    constant = np.where(np.abs(mean) > level, 0.0, 1.0)  # all differences equal: certain, unless they are 0
    return np.asarray(np.where(enough, np.where(flat, constant, p), 1.0))


def _hall(t: Array, a: Array) -> Array:
    """Return Hall's g(t), whose slope (1 + a t / 3)² is never negative."""
    return np.asarray(t + a * (t**2 / 3 + 1 / 6) + a**2 * t**3 / 27)


def _hall_inverse(q: float, a: float) -> float:
    """Return the t with g(t) = q; g(t) = ((1 + a t / 3)³ − 1) / a + a / 6."""
    return q if abs(a) < 1e-8 else 3 / a * (float(np.cbrt(1 + a * (q - a / 6))) - 1)


def _most_skewed(quantile: Array) -> Array:
    """Return the a = skewness / √n at which the further edge of Hall's interval is `REACH` times as far as Student's q.

    g(−R q) = −q, that is (1 − R q a / 3)³ = 1 − q a − a² / 6: of the two roots a > 0 the smaller one.
    """
    q, reach = quantile, REACH
    square, linear = (reach * q) ** 3 / 27, (reach * q) ** 2 / 3 + 1 / 6
    return np.asarray((linear - np.sqrt(linear**2 - 4 * square * (reach - 1) * q)) / (2 * square))


def mean_p(differences: Array, seed: int = 0, draws: int = DRAWS) -> Array:
    """Return two-sided p-values [K] that the mean of each row of differences [K, n] is 0, for any shape of their law.

    The larger one of `sign_flips` and `skewed_t`, for both must reject.
    """
    return np.maximum(sign_flips(differences, seed, draws), skewed_t(differences))


def mean_interval(values: Array, seed: int = 0, span: tuple[float, float] = EVERYWHERE) -> tuple[float, float]:
    """Return the 95 % interval of the mean of values [n], NaN with fewer than `FEWEST` of them.

    Every mu in `span`, the range of a value, that `mean_p(values − mu)` does not reject: the hull of the sign-flip
    interval, whose edges are order statistics of the means of all subsets of values (Hartigan's typical values), and
    of Hall's interval. If a value lies in 0..1 and all are 0 or 1, `share_interval`. The mean is always inside: an edge
    of `span` that it lies beyond is none.
    """
    n = len(values)
    if n < FEWEST or not np.isfinite(values).all():
        return math.nan, math.nan
    if span == (0, 1) and np.isin(values, (0.0, 1.0)).all():
        return share_interval(int(values.sum()), n)
    mean, spread = float(values.mean()), standard_deviation(values)
    if spread == 0:
        return mean, mean
    low, high = _subset_interval(values, seed)
    lower, upper = _hall_interval(values, mean, spread)
    low, high = min(low, lower), max(high, upper)
    return (max(span[0], low) if span[0] <= mean else low), (min(span[1], high) if mean <= span[1] else high)


def _subset_interval(values: Array, seed: int) -> tuple[float, float]:
    """Return the interval of the sign-flip test: mu is rejected where too few subsets have a mean beyond it.

    |Σ s_i (x_i − mu)| ≥ |Σ (x_i − mu)| holds for mu below the mean exactly if the values with s = −1, or those with
    s = +1, have a mean ≤ mu.
    """
    n, total = len(values), float(values.sum())
    means = []
    for signs in _signs(n, INTERVAL_DRAWS, seed):
        chosen = signs < 0
        count = chosen.sum(1)
        sums = chosen @ values
        inside = count[count > 0], sums[count > 0]
        means.append(inside[1] / inside[0])
        if n > EXACT:  # the complements; all subsets have them already
            outside = n - count[count < n], total - sums[count < n]
            means.append(outside[1] / outside[0])
    ordered = np.sort(np.concatenate(means))
    # p(mu) = 2 (1 + c) / 2^n, or (1 + c) / (1 + draws), for c subsets with a mean ≤ mu; kept from p = 5 % on.
    outcomes = 2 ** (n - 1) if n <= EXACT else 1 + INTERVAL_DRAWS
    rank = max(1, math.ceil(LEVEL * outcomes) - 1)
    return float(ordered[rank - 1]), float(ordered[-rank])


def _hall_interval(values: Array, mean: float, spread: float) -> tuple[float, float]:
    from scipy.stats import t as student

    n = len(values)
    centred = values - mean
    skewness = float((centred**3).mean() / (centred**2).mean() ** 1.5) * math.sqrt(n * (n - 1)) / (n - 2)
    edge = float(student.ppf(1 - LEVEL / 2, n - 1))
    most = float(_most_skewed(np.asarray(edge)))
    a = min(max(skewness / math.sqrt(n), -most), most)
    step = spread / math.sqrt(n)
    return mean - step * _hall_inverse(edge, a), mean - step * _hall_inverse(-edge, a)


def outside(values: Array, span: tuple[float, float]) -> Array:
    """Return the finite values that lie outside a span by more than what float32 may add up to."""
    finite = values[np.isfinite(values)]
    inside = np.clip(finite, *span)
    return np.asarray(finite[np.abs(finite - inside) > OUTSIDE * (1 + np.abs(inside))])


def share_interval(hits: int, n: int) -> tuple[float, float]:
    """Return Clopper and Pearson's exact 95 % interval of a probability of which n trials hit so often.

    Where all of n values are 0 or 1 their spread says nothing of those that were not drawn: 6 hits of 6 are
    [0.54, 1], not [1, 1]. NaN with fewer than `FEWEST` trials.
    """
    from scipy.stats import beta

    if n < FEWEST:
        return math.nan, math.nan
    low = float(beta.ppf(LEVEL / 2, hits, n - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - LEVEL / 2, hits + 1, n - hits)) if hits < n else 1.0
    return low, high


def rounding_level(values: Array) -> Array:
    """Return eps · n · max |x| over the last axis of […, n]: a spread below it is rounding, not a difference."""
    return np.asarray(np.finfo(np.float64).eps * values.shape[-1] * np.abs(values).max(-1))


def standard_deviation(values: Array) -> float:
    """Return the standard deviation (n − 1) of values [n]; exactly 0 where they differ by rounding alone."""
    spread = float(values.std(ddof=1))
    return 0.0 if spread <= float(rounding_level(values)) else spread
