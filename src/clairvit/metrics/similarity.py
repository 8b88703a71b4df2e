"""Similarity of two maps, for many pairs at once: rank and linear correlation, the structure of windows, disorder."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.numerics import average_ranks

Similarity = Literal["spearman", "pearson", "ssim", "ssim-flat", "hog"]
CELL, BLOCK, DIRECTIONS = 16, 3, 9  # of histograms of oriented gradients
WINDOW = 7  # patches on a side, as in the paper's usual code; smaller maps are one window


def alike(kind: Similarity, a: Tensor, b: Tensor, *, signed: bool = True) -> Tensor:
    """[…, rows, cols] twice -> […] in −1 … 1; of the absolute maps unless `signed`. NaN where a map is constant.

    SSIM is not blind to scale as correlations are, so each map is over its own largest |value| first. `ssim-flat` is
    Quantus's: of the rows one after the other, with the span of both maps. `hog` is Pearson's correlation of the
    histograms of oriented gradients.
    """
    if not signed:
        a, b = a.abs(), b.abs()
    if kind == "ssim":
        return ssim(_over_largest(a), _over_largest(b), 2.0 if signed else 1.0)
    if kind == "ssim-flat":
        return _flat_ssim(_over_largest(a).flatten(-2), _over_largest(b).flatten(-2))
    if kind == "hog":
        broken = _broken(a.flatten(-2)) | _broken(b.flatten(-2))
        return pearson(hog(_over_largest(a)), hog(_over_largest(b))).masked_fill(broken, math.nan)
    correlation: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"spearman": spearman, "pearson": pearson}
    return correlation[kind](a.flatten(-2), b.flatten(-2))


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """[…, n] twice -> […]: the correlation of the ranks; equal values share the mean of theirs."""
    return pearson(average_ranks(a), average_ranks(b)).masked_fill(_broken(a) | _broken(b), math.nan)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """[…, n] twice -> […]: NaN where one of them is constant."""
    a, b = a.double(), b.double()
    undefined = _constant(a) | _constant(b)
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    found: Tensor = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    return found.clamp(-1, 1).masked_fill(undefined, math.nan)


def ssim(a: Tensor, b: Tensor, span: float) -> Tensor:
    """[…, rows, cols] twice -> […]: structural similarity (Wang et al., 2004), the mean over all windows inside.

    `span` is the distance between the largest and the smallest value there can be. Windows are 7 × 7 and uniform, or
    the largest odd square that fits.
    """
    side: int = min(WINDOW, *a.shape[-2:])
    side -= 1 - side % 2
    return _windowed(a, b, torch.as_tensor(span, dtype=torch.float64), (side, side))


def _flat_ssim(a: Tensor, b: Tensor) -> Tensor:
    """[…, n] twice -> […]: windows of 7 neighbours, the span from the smallest to the largest value of both."""
    both = torch.cat([a, b], -1)
    return _windowed(a[..., None, :], b[..., None, :], both.amax(-1) - both.amin(-1), (1, min(WINDOW, a.shape[-1])))


def _windowed(a: Tensor, b: Tensor, span: Tensor, window: tuple[int, int]) -> Tensor:
    """[…, rows, cols] twice, and the span of each or of all -> […]"""
    shape = a.shape[:-2]
    span = span.to(a.device).expand(shape).reshape(-1, 1, 1, 1)
    a, b = (x.double().reshape(-1, 1, *x.shape[-2:]) for x in (a, b))

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, window, stride=1)

    size = window[0] * window[1]
    sample = size / max(size - 1, 1)  # covariance of a sample, not of a population

    def shared(x: Tensor, y: Tensor) -> Tensor:
        return (mean(x * y) - mean(x) * mean(y)) * sample

    # Added up so that equal maps give exactly 1.
    low, high = (0.01 * span) ** 2, (0.03 * span) ** 2
    light = (2 * (mean(a) * mean(b)) + low) / (mean(a) * mean(a) + mean(b) * mean(b) + low)
    structure = (2 * shared(a, b) + high) / (shared(a, a) + shared(b, b) + high)
    found: Tensor = (light * structure).mean((1, 2, 3))
    return found.reshape(shape)


def hog(maps: Tensor) -> Tensor:
    """[…, rows, cols] -> […, n]: histograms of oriented gradients (Dalal & Triggs, 2005).

    Adebayo's cells are 16 × 16 pixels of 224 × 224, blocks 3 × 3 cells; on smaller maps cells are a third of the
    shorter side, so that there is a block. Nine directions, up and down alike, blocks of length 1 clipped at 0.2.
    """
    cell = max(1, min(CELL, min(maps.shape[-2:]) // BLOCK))
    histograms = _oriented(maps.double(), cell)  # […, cell rows, cell cols, 9]
    block = [min(BLOCK, side) for side in histograms.shape[-3:-1]]
    blocks = histograms.unfold(-3, block[0], 1).unfold(-3, block[1], 1)  # […, rows, cols, 9, block, block]
    flat = blocks.movedim(-3, -1).flatten(-3)
    flat = _unit_length(_unit_length(flat).clamp(max=0.2))
    return flat.flatten(-3)


def _oriented(maps: Tensor, cell: int) -> Tensor:
    """[…, rows, cols] -> […, cell rows, cell cols, 9]: the mean size of the gradients in each direction."""
    down, right = torch.zeros_like(maps), torch.zeros_like(maps)
    down[..., 1:-1, :] = maps[..., 2:, :] - maps[..., :-2, :]
    right[..., 1:-1] = maps[..., 2:] - maps[..., :-2]
    size = torch.hypot(down, right)
    angle = torch.rad2deg(torch.atan2(down, right)) % 180
    direction = (angle / (180 / DIRECTIONS)).nan_to_num().long().clamp(max=DIRECTIONS - 1)
    split = F.one_hot(direction, DIRECTIONS) * size[..., None]  # […, rows, cols, 9]
    rows, cols = (side // cell for side in maps.shape[-2:])
    whole = split[..., : rows * cell, : cols * cell, :]
    return whole.reshape(*maps.shape[:-2], rows, cell, cols, cell, DIRECTIONS).mean((-4, -2))


def _unit_length(blocks: Tensor) -> Tensor:
    """Nearly: an empty block stays empty."""
    return blocks / (blocks.square().sum(-1, keepdim=True) + 1e-10).sqrt()


def histogram_entropy(values: Tensor, bins: int) -> Tensor:
    """[…, n] -> […], in nats: of the histogram with so many bins between the smallest and the largest value.

    0 for a constant row, NaN for one with NaN or infinity.
    """
    broken = ~values.isfinite().all(-1)
    values = values.double().masked_fill(broken[..., None], 0)
    least = values.amin(-1, keepdim=True)
    width = values.amax(-1, keepdim=True) - least
    place = (values - least) / torch.where(width == 0, torch.ones_like(width), width) * bins
    place = place.long().clamp(max=bins - 1)
    counts = torch.zeros(*values.shape[:-1], bins, dtype=torch.float64, device=values.device)
    counts.scatter_add_(-1, place, torch.ones_like(values))
    parts = counts / values.shape[-1]
    return -torch.xlogy(parts, parts).sum(-1).masked_fill(broken, math.nan)


def _over_largest(maps: Tensor) -> Tensor:
    """Largest |value| 1; a constant map says nothing and becomes NaN."""
    maps = maps.double()
    scaled = maps / maps.abs().amax((-2, -1), keepdim=True)
    return scaled.masked_fill(_constant(maps.flatten(-2))[..., None, None], math.nan)


def _constant(values: Tensor) -> Tensor:
    return values.amax(-1) == values.amin(-1)


def _broken(values: Tensor) -> Tensor:
    """NaN and infinity have ranks, but no meaning."""
    return ~values.isfinite().all(-1)
