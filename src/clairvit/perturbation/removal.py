"""Removal: what it means to take a patch away. Either its token goes, or its pixels are painted over.

token           the patch's token is dropped after the position embedding: the model sees a shorter sequence
mean            zero in normalised space: the mean colour of the data the model was trained on
black           zero in pixel space
minimum         the smallest value of the image itself, in every channel: what Quantus calls black
blur            RISE's 11 × 11 kernel (nearly a box; its zero padding fades the border into the mean colour)
gaussian-blur   a true Gaussian, sigma 5 pixels
noise           normal noise with the mean and spread of the training data, fixed by seed and image
road            noisy linear imputation: each pixel the weighted mean of its neighbours (see road.py)
"""

from __future__ import annotations

import functools
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import UnknownName, did_you_mean
from clairvit.models.preprocess import Preprocess
from clairvit.perturbation.rng import image_seeds, make_generator

Removal = Literal["token", "mean", "black", "minimum", "blur", "gaussian-blur", "noise", "road"]
REMOVALS: tuple[str, ...] = get_args(Removal)
SIGMA = 5.0  # pixels, of both blurs


def check_removal(name: str) -> None:
    if name not in REMOVALS:
        raise UnknownName(
            f"There is no removal '{name}'; expected one of {', '.join(REMOVALS)}.{did_you_mean(name, REMOVALS)}"
        )


def background(removal: str, pixels: Tensor, preprocess: Preprocess, seed: int) -> Tensor:
    """What lies under the patches that are taken away, [B, 3, H, W], normalised as the images are."""
    if removal == "black":
        black = [-mean / std for mean, std in zip(preprocess.mean, preprocess.std, strict=True)]
        return pixels.new_tensor(black)[:, None, None].expand_as(pixels)
    if removal == "minimum":
        return pixels.amin((1, 2, 3), keepdim=True).expand_as(pixels)
    if removal == "blur":
        kernel = rise_kernel().to(pixels).expand(pixels.shape[1], 1, -1, -1)
        return F.conv2d(pixels, kernel, padding=kernel.shape[-1] // 2, groups=pixels.shape[1])
    if removal == "gaussian-blur":
        return gaussian_blur(pixels)
    if removal == "noise":
        marks = image_seeds(pixels, seed)
        return torch.stack([torch.randn(pixels.shape[1:], generator=make_generator(mark)) for mark in marks]).to(pixels)
    return torch.zeros_like(pixels)  # mean; road where nothing is left to look at


@functools.cache
def rise_kernel() -> Tensor:
    """[11, 11]: a point, smoothed with sigma 5 inside its own window, whose borders reflect."""
    from scipy.ndimage import gaussian_filter

    point = np.zeros((11, 11))
    point[5, 5] = 1
    return torch.from_numpy(gaussian_filter(point, SIGMA))


def gaussian_blur(pixels: Tensor) -> Tensor:
    """Four sigmas each way, borders reflected."""
    for axis, size in ((-1, pixels.shape[-1]), (-2, pixels.shape[-2])):
        radius = min(int(4 * SIGMA), size - 1)
        distance = torch.arange(-radius, radius + 1, dtype=torch.float64)
        weights = torch.exp(-(distance**2) / (2 * SIGMA**2))
        row = (weights / weights.sum()).to(pixels).expand(pixels.shape[1], 1, 1, -1)  # [3, 1, 1, n]
        pad = (radius, radius, 0, 0) if axis == -1 else (0, 0, radius, radius)
        kernel = row if axis == -1 else row.transpose(-2, -1)
        pixels = F.conv2d(F.pad(pixels, pad, mode="reflect"), kernel, groups=pixels.shape[1])
    return pixels


def on_pixels(cells: Tensor, size: tuple[int, int]) -> Tensor:
    """[n, rows, cols] -> [n, H, W]: every pixel has its patch's value, in float32 at least."""
    wide = cells.to(torch.promote_types(cells.dtype, torch.float32))
    return F.interpolate(wide[:, None], size=size, mode="nearest-exact")[:, 0]
