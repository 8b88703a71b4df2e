"""Similarity of maps, for many pairs at once: correlations, SSIM, histograms of oriented gradients; and entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.numerics import average_ranks, is_constant, min_max, over_largest
from clairvit.option_types import Doc

Similarity = Annotated[
    Literal["spearman", "pearson", "ssim", "hog"],
    Doc("how two maps are compared: rank or linear correlation, SSIM, or HOG"),
]
CELL, BLOCK, DIRECTIONS = 16, 3, 9  # of histograms of oriented gradients
WINDOW = 7  # patches on a side, as in the paper's usual code; smaller maps are one window


def map_similarity(kind: Similarity, a: Tensor, b: Tensor, *, signed: bool = True) -> Tensor:
    """Return the similarity in −1 … 1, […], of maps […, rows, cols]; of |a| and |b| unless `signed`.

    NaN where a map is constant. SSIM depends on scale, unlike correlations, so that each map is divided by its largest
    |value| first. `hog` is Pearson's correlation of histograms of oriented gradients.
    """
    if not signed:
        a, b = a.abs(), b.abs()
    if kind == "ssim":
        return ssim(_scaled(a), _scaled(b), 2.0 if signed else 1.0)
    if kind == "hog":
        invalid = _not_finite(a.flatten(-2)) | _not_finite(b.flatten(-2))
        return pearson(hog(_scaled(a)), hog(_scaled(b))).masked_fill(invalid, math.nan)
    correlation: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"spearman": spearman, "pearson": pearson}
    return correlation[kind](a.flatten(-2), b.flatten(-2))


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Return Spearman's rank correlation […] of […, n]; ties have average ranks. NaN where a value is not finite."""
    return pearson(average_ranks(a), average_ranks(b)).masked_fill(_not_finite(a) | _not_finite(b), math.nan)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Return Pearson's correlation […] of […, n]; NaN where one of them is constant."""
    a, b = a.double(), b.double()
    undefined = is_constant(a, -1) | is_constant(b, -1)
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    correlation: Tensor = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    return correlation.clamp(-1, 1).masked_fill(undefined, math.nan)


def ssim(a: Tensor, b: Tensor, value_range: float) -> Tensor:
    """Return the structural similarity (Wang et al., 2004) […] of […, rows, cols], the mean over all windows inside.

    `value_range` is the largest minus the smallest possible value. Windows are 7 × 7 and uniform, or the largest odd
    square that fits.
    """
    side: int = min(WINDOW, *a.shape[-2:])
    side -= 1 - side % 2
    return _windowed_ssim(a, b, torch.as_tensor(value_range, dtype=torch.float64), (side, side))


def flat_ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return SSIM […] of flattened maps […, rows, cols] in windows of 7 neighbours, with the value range of both."""
    a, b = (_scaled(maps).flatten(-2) for maps in (a, b))
    both = torch.cat([a, b], -1)
    window = (1, min(WINDOW, a.shape[-1]))
    return _windowed_ssim(a[..., None, :], b[..., None, :], both.amax(-1) - both.amin(-1), window)


def _windowed_ssim(a: Tensor, b: Tensor, value_range: Tensor, window: tuple[int, int]) -> Tensor:
    """Return SSIM […] of […, rows, cols] with a value range per pair […], or one for all."""
    shape = a.shape[:-2]
    value_range = value_range.to(a.device).expand(shape).reshape(-1, 1, 1, 1)
    a, b = (x.double().reshape(-1, 1, *x.shape[-2:]) for x in (a, b))

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, window, stride=1)

    size = window[0] * window[1]
    unbiased = size / max(size - 1, 1)  # covariance of a sample, not of a population

    def covariance(x: Tensor, y: Tensor) -> Tensor:
        return (mean(x * y) - mean(x) * mean(y)) * unbiased

    # Summed in this order, equal maps give exactly 1.
    c1, c2 = (0.01 * value_range) ** 2, (0.03 * value_range) ** 2
    luminance = (2 * (mean(a) * mean(b)) + c1) / (mean(a) * mean(a) + mean(b) * mean(b) + c1)
    structure = (2 * covariance(a, b) + c2) / (covariance(a, a) + covariance(b, b) + c2)
    similarity: Tensor = (luminance * structure).mean((1, 2, 3))
    return similarity.reshape(shape)


def hog(maps: Tensor) -> Tensor:
    """Return histograms of oriented gradients (Dalal & Triggs, 2005) […, n] of […, rows, cols].

    Adebayo's cells are 16 × 16 pixels of 224 × 224, blocks 3 × 3 cells; on smaller maps cells are a third of the
    shorter side, so that there is a block. Nine unsigned directions; blocks are normalised and clipped at 0.2 (L2-Hys).
    """
    cell = max(1, min(CELL, min(maps.shape[-2:]) // BLOCK))
    histograms = _cell_histograms(maps.double(), cell)  # […, cell rows, cell cols, 9]
    block = [min(BLOCK, side) for side in histograms.shape[-3:-1]]
    blocks = histograms.unfold(-3, block[0], 1).unfold(-3, block[1], 1)  # […, rows, cols, 9, block, block]
    flat = blocks.movedim(-3, -1).flatten(-3)
    flat = _unit_length(_unit_length(flat).clamp(max=0.2))
    return flat.flatten(-3)


def _cell_histograms(maps: Tensor, cell: int) -> Tensor:
    """Return the mean gradient magnitude per direction, […, cell rows, cell cols, 9], of […, rows, cols]."""
    down, right = torch.zeros_like(maps), torch.zeros_like(maps)
    down[..., 1:-1, :] = maps[..., 2:, :] - maps[..., :-2, :]
    right[..., 1:-1] = maps[..., 2:] - maps[..., :-2]
    magnitude = torch.hypot(down, right)
    angle = torch.rad2deg(torch.atan2(down, right)) % 180
    direction = (angle / (180 / DIRECTIONS)).nan_to_num().long().clamp(max=DIRECTIONS - 1)
    split = F.one_hot(direction, DIRECTIONS) * magnitude[..., None]  # […, rows, cols, 9]
    rows, cols = (side // cell for side in maps.shape[-2:])
    full_cells = split[..., : rows * cell, : cols * cell, :]
    return full_cells.reshape(*maps.shape[:-2], rows, cell, cols, cell, DIRECTIONS).mean((-4, -2))


def _unit_length(blocks: Tensor) -> Tensor:
    """Return blocks of nearly unit length; an empty block stays empty."""
    return blocks / (blocks.square().sum(-1, keepdim=True) + 1e-10).sqrt()


def histogram_entropy(values: Tensor, bins: int) -> Tensor:
    """Return the entropy […] in nats of the histogram of […, n], with bins between the smallest and the largest value.

    0 for a constant row, NaN for one with NaN or infinity.
    """
    invalid = _not_finite(values)
    values = values.double().masked_fill(invalid[..., None], 0)
    bin_index = (min_max(values, -1) * bins).long().clamp(max=bins - 1)
    counts = torch.zeros(*values.shape[:-1], bins, dtype=torch.float64, device=values.device)
    counts.scatter_add_(-1, bin_index, torch.ones_like(values))
    p = counts / values.shape[-1]
    return -torch.xlogy(p, p).sum(-1).masked_fill(invalid, math.nan)


def _scaled(maps: Tensor) -> Tensor:
    """Return maps over their largest |value|; constant maps, which rank nothing, become NaN."""
    maps = maps.double()
    return over_largest(maps, (-2, -1)).masked_fill(is_constant(maps, (-2, -1))[..., None, None], math.nan)


def _not_finite(values: Tensor) -> Tensor:
    """Return which rows of […, n] have NaN or infinity, bool […]."""
    return ~values.isfinite().all(-1)
