"""Count how often 95 % intervals of a mean miss it, and how far they reach, for several methods, laws and sizes.

    OMP_NUM_THREADS=1 python benchmarks/intervals.py                          # 2,000 trials per cell, about 4 minutes
    python benchmarks/intervals.py --trials 500 --sizes 6 12 --laws normal

Prints two Markdown tables. The first has the share of intervals, in percent, that miss the mean; the standard error of
each cell is that of a binomial share, and the caption says how large it can be. The second has how far the further edge
lies from the mean at most, in units of Student's half width, and the median width in the same unit. `ours` is
`mean_interval`, which `evaluate`, `bench` and `choose` print; `uncapped` is the same with all of the sample's skewness
taken out, as ClairViT did up to 0.2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from clairvit.metrics import confidence_intervals
from clairvit.metrics.confidence_intervals import LEVEL, mean_interval

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]
Interval = Callable[[Array, np.random.Generator], tuple[Array, Array]]  # of each row [T, n]: edges [T], [T]
SIZES = (6, 8, 10, 12, 20, 50, 100, 200)
RESAMPLES = 1000
CHUNKS = 20  # of the trials; the trials of a chunk share their resamples


@dataclass(frozen=True)
class Law:
    """A law of values with its mean."""

    draw: Draw
    mean: float


def _bimodal(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Draw 0.9 in nine of ten cases and 0.1 in the tenth, each with a little noise."""
    modes = np.where(generator.random(shape) < 0.9, 0.9, 0.1)
    return np.asarray(modes + generator.normal(0, 0.03, shape))


LAWS = {
    "normal": Law(lambda generator, shape: generator.normal(size=shape), 0.0),
    "exponential": Law(lambda generator, shape: generator.exponential(size=shape), 1.0),
    "beta(0.4, 2)": Law(lambda generator, shape: generator.beta(0.4, 2, size=shape), 0.4 / 2.4),
    "t(3)": Law(lambda generator, shape: generator.standard_t(3, size=shape), 0.0),
    "log-normal(0.7)": Law(lambda generator, shape: generator.lognormal(0, 0.7, size=shape), math.exp(0.7**2 / 2)),
    "log-normal(1)": Law(lambda generator, shape: generator.lognormal(0, 1, size=shape), math.exp(0.5)),
    "bimodal": Law(_bimodal, 0.82),
}


def half_width(values: Array) -> Array:
    """Return Student's half width [T] of rows [T, n]."""
    n = values.shape[1]
    return np.asarray(stats.t.ppf(1 - LEVEL / 2, n - 1) * values.std(1, ddof=1) / math.sqrt(n))


def ours(values: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return what ClairViT prints."""
    edges = np.array([mean_interval(row) for row in values])
    return edges[:, 0], edges[:, 1]


def uncapped(values: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return `ours` with all skewness taken out."""
    cap = confidence_intervals._most_skewed
    confidence_intervals._most_skewed = lambda quantile: np.asarray(np.inf)
    try:
        return ours(values, generator)
    finally:
        confidence_intervals._most_skewed = cap


def student(values: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return Student's t interval."""
    return values.mean(1) - half_width(values), values.mean(1) + half_width(values)


def johnson(values: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return Johnson's (1978): Student's, moved by a (1 + 2 q²) / 6 standard errors with a = skewness / √n."""
    n = values.shape[1]
    a = stats.skew(values, axis=1, bias=False) / math.sqrt(n)
    q = stats.t.ppf(1 - LEVEL / 2, n - 1)
    centre = values.mean(1) + half_width(values) / q * a * (1 + 2 * q**2) / 6
    return centre - half_width(values), centre + half_width(values)


def bootstrap_t(values: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return the bootstrap-t interval; a resample of equal values has t = ±∞."""
    edges = []
    for part in np.array_split(values, CHUNKS):
        weights = _resamples(generator, part.shape[1])
        means = weights @ part.T
        spread = np.sqrt(np.maximum(weights @ part.T**2 - means**2, 0))
        shift = means - part.mean(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(spread > 0, shift / spread, np.sign(shift) * np.inf)
        low, high = np.quantile(np.nan_to_num(t, nan=0.0), [LEVEL / 2, 1 - LEVEL / 2], axis=0, method="nearest")
        edges.append((part.mean(1) - part.std(1) * high, part.mean(1) - part.std(1) * low))
    return np.concatenate([low for low, _ in edges]), np.concatenate([high for _, high in edges])


def bias_corrected(values: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return the BCa bootstrap interval (Efron 1987)."""
    edges: tuple[list[Array], list[Array]] = [], []
    for part in np.array_split(values, CHUNKS):
        means = np.sort(_resamples(generator, part.shape[1]) @ part.T, axis=0)
        mean = part.mean(1)
        below = ((means < mean).sum(0) + (means == mean).sum(0) / 2) / RESAMPLES
        bias = stats.norm.ppf(np.clip(below, 1 / RESAMPLES, 1 - 1 / RESAMPLES))
        centred = part - mean[:, None]
        acceleration = (centred**3).sum(1) / (6 * (centred**2).sum(1) ** 1.5)
        for side, quantile in zip(edges, stats.norm.ppf([LEVEL / 2, 1 - LEVEL / 2]), strict=True):
            level = stats.norm.cdf(bias + (bias + quantile) / (1 - acceleration * (bias + quantile)))
            side.append(means[np.clip((level * RESAMPLES).astype(int), 0, RESAMPLES - 1), np.arange(len(part))])
    return np.concatenate(edges[0]), np.concatenate(edges[1])


def _resamples(generator: np.random.Generator, n: int) -> Array:
    """Return how often each of n values is drawn in a resample, over n: [RESAMPLES, n]."""
    return np.asarray(generator.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n)


INTERVALS: dict[str, Interval] = {
    "ours": ours,
    "uncapped": uncapped,
    "Student": student,
    "Johnson": johnson,
    "bootstrap-t": bootstrap_t,
    "BCa": bias_corrected,
}


def measure(law: Law, n: int, trials: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Return the share of misses, the longest reach and the median width of each method, on the same values."""
    values = law.draw(np.random.default_rng([seed, n]), (trials, n))
    unit, mean = half_width(values), values.mean(1)
    cells = {}
    for name, interval in INTERVALS.items():
        low, high = interval(values, np.random.default_rng([seed, n, 1]))
        misses = float(((low > law.mean) | (high < law.mean)).mean())
        reach = float((np.maximum(high - mean, mean - low) / unit).max())
        cells[name] = misses, reach, float(np.median((high - low) / (2 * unit)))
    return cells


def print_row(cells: Sequence[Any]) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = {(law, n): measure(LAWS[law], n, args.trials, args.seed) for law in args.laws for n in args.sizes}
    errors = [100 * math.sqrt(p * (1 - p) / args.trials) for p in (LEVEL, 0.1, 0.5)]
    print(
        f"Misses of the mean in percent, {args.trials} trials per cell; standard error of a cell "
        f"{errors[0]:.1f} where 5 % miss, {errors[1]:.1f} where 10 % do, {errors[2]:.1f} where half do:\n"
    )
    print_row(["values", "n", *INTERVALS])
    print_row(["---", *["--:"] * (1 + len(INTERVALS))])
    for (law, n), cells in results.items():
        print_row([law, n, *(f"{100 * misses:.1f}" for misses, _, _ in cells.values())])
    print("\nLongest reach from the mean / median width, in half widths and widths of Student's interval:\n")
    print_row(["values", "n", *INTERVALS])
    print_row(["---", *["--:"] * (1 + len(INTERVALS))])
    for (law, n), cells in results.items():
        print_row([law, n, *(f"{reach:.1f} / {width:.2f}" for _, reach, width in cells.values())])


if __name__ == "__main__":
    main()
