"""A map laid over the photo the model saw."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from clairvit.models.preprocess import Preprocess
from clairvit.plotting.colour import Array, Scale

GREY = np.array([0.299, 0.587, 0.114])  # luma weights
FADED = 0.85  # how grey the photo becomes: colour in the picture should mean the map, not the cat
VEIL = 0.15  # opacity where the map says nothing, so that cold places look cold


def photo_of(pixels: Tensor, preprocess: Preprocess) -> Array:
    """[3, H, W] as the model saw it, normalised -> [H, W, 3] from 0 to 1."""
    image: Array = numbers(pixels).transpose(1, 2, 0) * np.array(preprocess.std) + np.array(preprocess.mean)
    return np.nan_to_num(image).clip(0.0, 1.0)


def numbers(tensor: Tensor) -> Array:
    """A tensor from any device and dtype as a float64 array."""
    return np.asarray(tensor.detach().to("cpu", torch.float64).numpy())


def enlarge(values: Array, size: tuple[int, int], smooth: bool = True) -> Array:
    """[rows, cols] -> [H, W]; every patch covers its own pixels (align_corners=False)."""
    grid = torch.from_numpy(np.ascontiguousarray(values))[None, None]
    if smooth:
        return numbers(torch.nn.functional.interpolate(grid, size, mode="bilinear", align_corners=False)[0, 0])
    return numbers(torch.nn.functional.interpolate(grid, size, mode="nearest")[0, 0])


def overlay(photo: Array, values: Array, scale: Scale, opacity: float = 0.8, smooth: bool = True) -> Array:
    """[H, W, 3] and [rows, cols] -> [H, W, 3]: a grey photo on which the map glows where it has something to say."""
    # Cut off what is beyond the scale before enlarging, or one hot patch becomes a blob with a hard edge.
    sane = np.nan_to_num(values, nan=scale.rest, posinf=scale.high, neginf=scale.low).clip(scale.low, scale.high)
    fine = enlarge(sane, (photo.shape[0], photo.shape[1]), smooth)
    grey = np.repeat((photo @ GREY)[..., None], 3, axis=-1)
    return blend(photo * (1 - FADED) + grey * FADED, fine, scale, opacity)


def blend(ground: Array, fine: Array, scale: Scale, opacity: float = 0.8) -> Array:
    """Colours over `ground`, the more opaque the stronger the value; the colour bar is drawn by the same rule."""
    veil = min(VEIL, opacity)
    # A steeper rise shows weak values better; around the zero of a signed map it would draw dark seams instead.
    steepness = 1.0 if scale.diverging else 0.7
    alpha = veil + (opacity - veil) * scale.strength(fine)[..., None] ** steepness
    return np.clip(ground * (1 - alpha) + scale.colours(fine) * alpha, 0.0, 1.0)
