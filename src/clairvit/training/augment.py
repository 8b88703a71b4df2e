"""Augment: crop, flip, rotation and colours of a whole batch, from numbers that were drawn before.

Crop, flip and rotation are one resampling, so that a picture is smoothed once, and what a rotation brings in from
outside the crop is picture where there is some, its mirror image elsewhere, never a black corner.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.perturbation.rng import make_generator
from clairvit.training.training_config import TrainingConfig

_DRAWS = 7  # down, right, flip, turn, brightness, contrast, saturation
_GREY = (0.299, 0.587, 0.114)  # how bright red, green and blue are (ITU-R BT.601)


def order(count: int, seed: int, epoch: int) -> Tensor:
    """In which order an epoch goes through the images."""
    return torch.randperm(count, generator=make_generator(seed, 2 * epoch))


def batches(rows: Tensor, size: int) -> list[Tensor]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def draws(count: int, seed: int, epoch: int) -> Tensor:
    """Numbers in 0..1 [count, 7]: those of an image depend on its place in the set, not on the batch it is in."""
    return torch.rand(count, _DRAWS, generator=make_generator(seed, 2 * epoch + 1))


def shaken(pictures: Tensor, size: tuple[int, int], recipe: TrainingConfig, lots: Tensor) -> Tensor:
    """uint8 [B, 3, R, C] -> 0..1 [B, 3, rows, columns], each image as its lots [B, 7] say."""
    values = pictures.float() / 255
    lots = lots.to(values.device)
    moved = F.grid_sample(values, _places(values, size, recipe, lots), padding_mode="reflection", align_corners=False)
    return _recoloured(moved, 1 + recipe.jitter * (2 * lots[:, 4:7] - 1)) if recipe.jitter else moved


def centred(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [B, 3, R, C] -> 0..1 [B, 3, rows, columns], the middle, as the finished model will see it."""
    top, left = ((whole - cut) // 2 for whole, cut in zip(pictures.shape[-2:], size, strict=True))
    return pictures[..., top : top + size[0], left : left + size[1]].float() / 255


def _places(pictures: Tensor, size: tuple[int, int], recipe: TrainingConfig, lots: Tensor) -> Tensor:
    """Where in the picture each pixel of the crop comes from: [B, rows, columns, 2] in −1..1."""
    rows, columns = pictures.shape[-2:]
    # the crop begins at a whole pixel: unturned, it is copied, not smoothed
    down = (lots[:, 0] * (rows - size[0] + 1)).floor() + size[0] / 2
    right = (lots[:, 1] * (columns - size[1] + 1)).floor() + size[1] / 2
    mirror = torch.where(lots[:, 2] < 0.5, -1.0, 1.0) if recipe.flip else torch.ones_like(right)
    turn = (2 * lots[:, 3] - 1) * math.radians(recipe.rotation)
    cos, sin = turn.cos(), turn.sin()
    across, along = size[1] / columns, size[0] / rows  # the crop's share of the picture
    matrix = torch.stack(
        [
            torch.stack([cos * mirror * across, -sin * size[0] / columns, 2 * right / columns - 1], -1),
            torch.stack([sin * mirror * size[1] / rows, cos * along, 2 * down / rows - 1], -1),
        ],
        1,
    )  # [B, 2, 3]
    return F.affine_grid(matrix, [len(pictures), 3, *size], align_corners=False)


def _recoloured(pictures: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast and saturation by factors [B, 3] around 1."""
    weights = torch.tensor(_GREY, device=pictures.device)[:, None, None]
    bright, contrast, colourful = factors[:, :, None, None, None].unbind(1)
    pictures = (pictures * bright).clamp(0, 1)
    mean = (pictures * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    pictures = (mean + (pictures - mean) * contrast).clamp(0, 1)
    grey = (pictures * weights).sum(1, keepdim=True)
    return (grey + (pictures - grey) * colourful).clamp(0, 1)
