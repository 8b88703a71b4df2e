"""How well a map predicts what hiding random sets of patches does to a score.

With only the patches of a set kept, a map w predicts the score Z w, Z the rows of 0 and 1. Contrasts within blocks of
sets of one size take out what the number of patches does: K = C Z, v = C · scores. The correlation of K w with v is 1
for the true weights of an additive model, and about 0 for a map that says nothing. Freed of what a map of the middle
and a map of the photo's edges predict, it is about what the map says beyond "an object is there".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.numerics import pool_to_grid, widened

WIDTH = 0.25  # of the bell of `center`, in parts of a side
FREE = 1e-5  # of a vector's length: what is left of it when freed of others is rounding, of float32 maps too


def correlation(predicted: Tensor, values: Tensor) -> float:
    """Return the cosine of two vectors of contrasts [n], whose mean is 0 by design; 0 where one of them is 0."""
    length = float(predicted.norm() * values.norm())
    return float(predicted @ values) / length if length else 0.0


def partial_correlation(predicted: Tensor, values: Tensor, controls: Tensor) -> float:
    """Return the correlation of two vectors [n] after both are freed, by least squares, of controls [n, k]."""
    return correlation(freed(predicted, controls), freed(values, controls))


def freed(values: Tensor, controls: Tensor) -> Tensor:
    """Return what least squares on controls [n, k] leave of a vector [n]; exactly 0 where that is rounding."""
    scaled = F.normalize(controls, dim=0)
    left: Tensor = values - scaled @ (torch.linalg.pinv(scaled) @ values)
    return left if float(left.norm()) > FREE * float(values.norm()) else torch.zeros_like(values)


def edge_map(pixels: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return the mean length of the Sobel gradient in each patch, [B, patches], of images or of each frame of clips.

    It is that of the mean of the channels: where edges are, whatever the model makes of them.
    """
    grey = widened(pixels).double().mean(1)  # [B, (T,) H, W]
    frames = grey.reshape(-1, 1, *grey.shape[-2:])
    across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], dtype=torch.float64).to(frames)
    padded = F.pad(frames, (1, 1, 1, 1), mode="replicate")
    lengths = F.conv2d(padded, torch.stack([across, across.mT])[:, None]).norm(dim=1)
    return pool_to_grid(lengths.reshape(grey.shape), grid).flatten(1)


def middle_maps(grid: tuple[int, ...]) -> Tensor:
    """Return [patches, 3] of the distance d of each patch from the middle of its frame, in parts of a side.

    They are d, d² and exp(−d² / 2σ²) with σ = 0.25, the map of the method `center`: least squares on them fits what
    falls off from the middle, whatever its width.
    """
    *frames, rows, columns = grid
    down, across = (torch.linspace(-0.5, 0.5, 2 * side + 1, dtype=torch.float64)[1::2] for side in (rows, columns))
    squared = (down[:, None] ** 2 + across**2).expand(*frames, rows, columns).flatten()
    return torch.stack([squared.sqrt(), squared, torch.exp(-squared / (2 * WIDTH**2))], 1)
