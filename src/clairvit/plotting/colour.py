"""Which colour a value gets. Sequential from lowest to highest, or diverging and symmetric around 0 for signed maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import matplotlib
import numpy as np
from numpy.typing import NDArray

from clairvit.errors import UnknownName, did_you_mean
from clairvit.plotting.style import PlotStyle

Array: TypeAlias = NDArray[np.float64]

SEQUENTIAL = "inferno"  # perceptually uniform; its dark end lets the photo through
DIVERGING = "RdBu_r"  # white middle, red for, blue against; safe for colour-blind readers


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on a colour map; where `low == high` (a constant map) nothing lights up."""

    low: float
    high: float
    cmap: str
    diverging: bool
    beyond: tuple[bool, bool] = (False, False)  # there are values below `low`, above `high`

    @property
    def rest(self) -> float:
        """The value that says nothing: 0 on a diverging scale, the lowest one otherwise."""
        return 0.0 if self.diverging else self.low

    @property
    def flat(self) -> bool:
        return not self.high > self.low

    def position(self, values: Array) -> Array:
        """Where on the colour map, 0 to 1; what is beyond the ends (or not finite) stays at the end (or at rest)."""
        if self.flat:
            return np.full_like(values, 0.5 if self.diverging else 0.0)
        sane = np.nan_to_num(values, nan=self.rest, posinf=self.high, neginf=self.low)
        # Halves, because high - low may overflow where neither of them does.
        return np.clip((sane / 2 - self.low / 2) / (self.high / 2 - self.low / 2), 0.0, 1.0)

    def strength(self, values: Array) -> Array:
        """How much a value has to say, 0 to 1: its distance from `rest`."""
        position = self.position(values)
        return np.abs(2 * position - 1) if self.diverging else position

    def colours(self, values: Array) -> Array:
        """[…] -> […, 3]"""
        return np.asarray(matplotlib.colormaps[self.cmap](self.position(values)), dtype=np.float64)[..., :3]


def scale_of(values: Array, signed: bool, style: PlotStyle | None = None) -> Scale:
    """The scale that fits these values (one map, or several that share it)."""
    style = style or PlotStyle()
    finite = values[np.isfinite(values)]
    low, high = _limits(finite, signed, style.robust)
    beyond = (bool((finite < low).any()), bool((finite > high).any()))
    return Scale(low, high, _known(style.cmap or (DIVERGING if signed else SEQUENTIAL)), signed, beyond)


def _limits(finite: Array, signed: bool, robust: float) -> tuple[float, float]:
    if finite.size == 0:
        return 0.0, 0.0
    if signed:
        bound = float(np.percentile(np.abs(finite), 100 - robust))
        low, high = -bound, bound
    else:
        low, high = (float(end) for end in np.percentile(finite, [robust, 100 - robust]))
    if robust and not high > low:  # a single patch that is not zero is the whole map, not an outlier
        return _limits(finite, signed, robust=0.0)
    return low, high


def _known(cmap: str) -> str:
    if cmap not in matplotlib.colormaps:
        near = did_you_mean(cmap, list(matplotlib.colormaps))
        raise UnknownName(f"'{cmap}' is not a matplotlib colour map; try '{SEQUENTIAL}' or '{DIVERGING}'.{near}")
    return cmap
