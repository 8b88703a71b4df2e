"""Threshold: from a map to a yes or no for each pixel, and from two masks to counts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Threshold = Literal["half", "mean", "otsu", "sweep", "best"]
SWEEP = tuple(k / 20 for k in range(1, 20))  # of the map in 0 … 1: 0.05, 0.10 … 0.95


def min_max(maps: Tensor) -> Tensor:
    """[B, H, W] scaled to 0…1 image by image; a constant map becomes zero."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - low) / torch.where(high == low, torch.ones_like(high), high - low)


def steady(maps: Tensor) -> Tensor:
    """[B, H, W] whose values are equal where only round-off makes them differ: upsampling makes plateaus."""
    return min_max(maps).round(decimals=9)


def binary(maps: Tensor, threshold: Threshold) -> Tensor:
    """bool [T, B, H, W]: more than the threshold, after min-max.

    One threshold (T = 1) is 0.5, the map's mean or Otsu's split of its histogram; `sweep` and `best` try those of
    SWEEP.
    """
    scaled = min_max(maps)
    if threshold in ("sweep", "best"):
        return torch.stack([scaled > edge for edge in SWEEP])
    if threshold == "half":
        return (scaled > 0.5)[None]
    if threshold == "mean":
        return (scaled > scaled.mean((1, 2), keepdim=True))[None]
    return torch.stack([one > otsu(one) for one in scaled])[None]


def otsu(values: Tensor, bins: int = 256) -> Tensor:
    """The split of a map in 0…1 that leaves the least spread within its two parts."""
    counts = torch.histc(values.flatten(), bins, 0, 1)
    middles = (torch.arange(bins, dtype=values.dtype, device=values.device) + 0.5) / bins
    below, above = counts.cumsum(0)[:-1], counts.flip(0).cumsum(0).flip(0)[1:]
    mass = counts * middles
    low = mass.cumsum(0)[:-1] / below.clamp(min=1)
    high = mass.flip(0).cumsum(0).flip(0)[1:] / above.clamp(min=1)
    return middles[(below * above * (low - high) ** 2).argmax()]


def confusion(found: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
    """bool […, H, W] three times -> […, 4]: true and false positives, false and true negatives of what counts."""
    parts = (found & objects, found & ~objects, ~found & objects, ~found & ~objects)
    return torch.stack([(part & counts).flatten(-2).sum(-1) for part in parts], -1).double()
