"""Augmentation: crop, flip, rotation and colour jitter of a whole batch, from random numbers that were drawn before.

Crop, flip and rotation are one resampling, so that an image is interpolated once. A rotated crop takes its corners from
the rest of the image, and beyond its edges from the mirrored image (reflection padding).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._rng import make_generator
from clairvit.training.training_config import TrainingConfig

_NUMBERS = 7  # row, column, flip, rotation, brightness, contrast, saturation
_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the images in an epoch, [count]."""
    return torch.randperm(count, generator=make_generator(seed, "training/crops", 2 * epoch), device="cpu")


def batches(rows: Tensor, size: int) -> list[Tensor]:
    """Split row indices [N] into batches of at most `size`."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def draw_augmentations(count: int, seed: int, epoch: int) -> Tensor:
    """Return uniform numbers in 0..1, [count, 7]; those of an image do not depend on the batch that it is in."""
    return torch.rand(
        count,
        _NUMBERS,
        generator=make_generator(seed, "training/crops", 2 * epoch + 1),
        dtype=torch.float32,
        device="cpu",
    )


def augment(images: Tensor, size: tuple[int, int], config: TrainingConfig, draws: Tensor) -> Tensor:
    """Return augmented crops in 0..1, [B, 3, rows, columns], of uint8 images [B, 3, R, C] with draws [B, 7]."""
    values = images.float() / 255
    draws = draws.to(values.device)
    grid = _sampling_grid(values, size, config, draws)
    crops = F.grid_sample(values, grid, padding_mode="reflection", align_corners=False)
    return _jitter_colours(crops, 1 + config.jitter * (2 * draws[:, 4:7] - 1)) if config.jitter else crops


def center_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the middle of uint8 images [B, 3, R, C] in 0..1, [B, 3, rows, columns], as the model will crop them."""
    top, left = ((side - crop) // 2 for side, crop in zip(images.shape[-2:], size, strict=True))
    return images[..., top : top + size[0], left : left + size[1]].float() / 255


def _sampling_grid(images: Tensor, size: tuple[int, int], config: TrainingConfig, draws: Tensor) -> Tensor:
    """Return where in the image each pixel of the crop is sampled: [B, rows, columns, 2] in −1..1."""
    rows, columns = images.shape[-2:]
    # the crop begins at a whole pixel: without rotation it is copied, not smoothed
    centre_row = (draws[:, 0] * (rows - size[0] + 1)).floor() + size[0] / 2
    centre_column = (draws[:, 1] * (columns - size[1] + 1)).floor() + size[1] / 2
    flip = torch.where(draws[:, 2] < 0.5, -1.0, 1.0) if config.flip else torch.ones_like(centre_column)
    angle = (2 * draws[:, 3] - 1) * math.radians(config.rotation)
    cos, sin = angle.cos(), angle.sin()
    width, height = size[1] / columns, size[0] / rows  # of the crop, as a share of the image
    matrix = torch.stack(
        [
            torch.stack([cos * flip * width, -sin * size[0] / columns, 2 * centre_column / columns - 1], -1),
            torch.stack([sin * flip * size[1] / rows, cos * height, 2 * centre_row / rows - 1], -1),
        ],
        1,
    )  # [B, 2, 3]
    return F.affine_grid(matrix, [len(images), 3, *size], align_corners=False)


def _jitter_colours(images: Tensor, factors: Tensor) -> Tensor:
    """Return images [B, 3, H, W] with brightness, contrast and saturation changed by factors [B, 3] around 1."""
    weights = torch.tensor(_LUMINANCE, device=images.device)[:, None, None]
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    images = (images * brightness).clamp(0, 1)
    mean = (images * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    images = (mean + (images - mean) * contrast).clamp(0, 1)
    grey = (images * weights).sum(1, keepdim=True)
    return (grey + (images - grey) * saturation).clamp(0, 1)
