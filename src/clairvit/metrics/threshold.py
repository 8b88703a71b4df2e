"""Threshold: from a map to a yes or no for each pixel, and from two masks to counts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Threshold = Literal["half", "mean", "otsu"]


def min_max(maps: Tensor) -> Tensor:
    """[B, H, W] scaled to 0…1 image by image; a constant map becomes zero."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - low) / torch.where(high == low, torch.ones_like(high), high - low)


def steady(maps: Tensor) -> Tensor:
    """[B, H, W] whose values are equal where only round-off makes them differ: upsampling makes plateaus."""
    return min_max(maps).round(decimals=9)


def binary(maps: Tensor, threshold: Threshold) -> Tensor:
    """bool [B, H, W]: more than 0.5 after min-max, than the map's mean, or than Otsu's split of its histogram."""
    scaled = min_max(maps)
    if threshold == "half":
        return scaled > 0.5
    if threshold == "mean":
        return scaled > scaled.mean((1, 2), keepdim=True)
    return torch.stack([one > otsu(one) for one in scaled])


def otsu(values: Tensor, bins: int = 256) -> Tensor:
    """The split of a map in 0…1 that leaves the least spread within its two parts."""
    counts = torch.histc(values.flatten(), bins, 0, 1)
    middles = (torch.arange(bins, dtype=values.dtype, device=values.device) + 0.5) / bins
    below, above = counts.cumsum(0)[:-1], counts.flip(0).cumsum(0).flip(0)[1:]
    mass = counts * middles
    low = mass.cumsum(0)[:-1] / below.clamp(min=1)
    high = mass.flip(0).cumsum(0).flip(0)[1:] / above.clamp(min=1)
    return middles[(below * above * (low - high) ** 2).argmax()]


def confusion(found: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
    """bool [B, H, W] twice -> [B, 4]: true and false positives, false and true negatives; void pixels count nowhere."""
    counts = torch.ones_like(masks) if void is None else ~void
    parts = (found & masks, found & ~masks, ~found & masks, ~found & ~masks)
    return torch.stack([(part & counts).flatten(1).sum(1) for part in parts], 1).double()
