"""Overlays: colour scales of maps, their enlargement to pixels, and blending with the photo that the model saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clairvit.errors import UnknownName, did_you_mean
from clairvit.models.images import displayed
from clairvit.models.preprocess import Preprocess
from clairvit.plotting.style import PlotStyle

Array: TypeAlias = NDArray[np.float64]

SEQUENTIAL = "inferno"  # perceptually uniform
DIVERGING = "RdBu_r"  # white middle, red for, blue against; safe for colour-blind readers
LUMA = np.array([0.299, 0.587, 0.114])
DESATURATION = 0.85  # of the photo: colour in the picture should come from the map
SEQUENTIAL_RISE = 1.5  # exponent of the opacity: low values, whose colours are dark, leave the photo visible


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on a colour map; where `low == high` (a constant map) everything is neutral."""

    low: float
    high: float
    cmap: str
    diverging: bool
    clipped: tuple[bool, bool] = (False, False)  # there are values below `low`, above `high`

    @property
    def neutral(self) -> float:
        """Return the value without evidence: 0 on a diverging scale, the lowest one otherwise."""
        return 0.0 if self.diverging else self.low

    @property
    def flat(self) -> bool:
        """Return whether the scale has no extent."""
        return not self.high > self.low

    def position(self, values: Array) -> Array:
        """Return the position on the colour map, 0 to 1; values beyond the ends are clipped, NaN is neutral."""
        if self.flat:
            return np.full_like(values, 0.5 if self.diverging else 0.0)
        finite = np.nan_to_num(values, nan=self.neutral, posinf=self.high, neginf=self.low)
        # Halves, because high - low may overflow where neither of them does.
        return np.clip((finite / 2 - self.low / 2) / (self.high / 2 - self.low / 2), 0.0, 1.0)

    def strength(self, values: Array) -> Array:
        """Return the distance from the neutral value, 0 to 1."""
        position = self.position(values)
        return np.abs(2 * position - 1) if self.diverging else position

    def colours(self, values: Array) -> Array:
        """Return RGB colours: […] -> […, 3]."""
        return np.asarray(matplotlib.colormaps[self.cmap](self.position(values)), dtype=np.float64)[..., :3]


def scale_of(values: Array, signed: bool, style: PlotStyle | None = None) -> Scale:
    """Return the scale that fits these values (one map, or several that share it).

    Sequential from the lowest to the highest value, or diverging and symmetric around 0 for signed maps.
    """
    style = style or PlotStyle()
    finite = values[np.isfinite(values)]
    low, high = _limits(finite, signed, style.robust)
    clipped = (bool((finite < low).any()), bool((finite > high).any()))
    return Scale(low, high, _check_cmap(style.cmap or (DIVERGING if signed else SEQUENTIAL)), signed, clipped)


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


def _check_cmap(cmap: str) -> str:
    if cmap not in matplotlib.colormaps:
        near = did_you_mean(cmap, list(matplotlib.colormaps))
        raise UnknownName(f"'{cmap}' is not a matplotlib colour map; try '{SEQUENTIAL}' or '{DIVERGING}'.{near}")
    return cmap


def denormalised_photo(pixels: Tensor, preprocess: Preprocess) -> Array:
    """Return the photo as the model saw it: normalised [C, H, W] -> red, green, blue [H, W, 3] from 0 to 1."""
    return to_numpy(displayed(pixels, preprocess)).transpose(1, 2, 0)


def to_numpy(tensor: Tensor) -> Array:
    """Return a tensor from any device and dtype as a float64 array."""
    return np.asarray(tensor.detach().to("cpu", torch.float64).numpy())


def enlarge(values: Array, size: tuple[int, int], smooth: bool = True) -> Array:
    """Return [H, W] from [rows, cols], bicubic within the range of the values; every patch covers its own pixels.

    Bilinear interpolation of a coarse grid draws diamonds around single patches. Bicubic interpolation overshoots
    (torch: cubic convolution with a = −0.75, align_corners=False), so it is clipped to the range of the values.
    """
    grid = torch.from_numpy(np.ascontiguousarray(values))[None, None]
    if smooth:
        pixels = torch.nn.functional.interpolate(grid, size, mode="bicubic", align_corners=False)[0, 0]
        return to_numpy(pixels).clip(values.min(), values.max())
    return to_numpy(torch.nn.functional.interpolate(grid, size, mode="nearest")[0, 0])


def overlay(photo: Array, values: Array, scale: Scale, opacity: float = 0.8, smooth: bool = True) -> Array:
    """Return a grey photo [H, W, 3] coloured by a map [rows, cols], the stronger the more."""
    # Clip before enlarging, or one patch beyond the scale becomes a blob with a hard edge.
    finite = np.nan_to_num(values, nan=scale.neutral, posinf=scale.high, neginf=scale.low)
    pixel_values = enlarge(finite.clip(scale.low, scale.high), (photo.shape[0], photo.shape[1]), smooth)
    grey = np.repeat((photo @ LUMA)[..., None], 3, axis=-1)
    return blend(photo * (1 - DESATURATION) + grey * DESATURATION, pixel_values, scale, opacity)


def blend(background: Array, pixel_values: Array, scale: Scale, opacity: float = 0.8) -> Array:
    """Return colours over a background, the more opaque the stronger the value; colour bars use it too.

    alpha = opacity · strength^r: nothing is drawn where the map is neutral. r = 1 on a diverging scale, whose weak
    colours are pale; SEQUENTIAL_RISE on a sequential one, whose weak colours are dark.
    """
    rise = 1.0 if scale.diverging else SEQUENTIAL_RISE
    alpha = opacity * scale.strength(pixel_values)[..., None] ** rise
    return np.clip(background * (1 - alpha) + scale.colours(pixel_values) * alpha, 0.0, 1.0)
