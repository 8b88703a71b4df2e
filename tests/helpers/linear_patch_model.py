"""A model that is linear in its patches, so that every perturbation method has a known result.

f_c(x) = sum_p w_c,p · mean(pixels of patch p): with removal=mean a removed patch counts 0, so that
f_c(kept S) = sum_{p in S} effects(c)[p], exactly. Explain it with score="logit".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clairvit as cv

CLASSES = 3


class LinearPatches(nn.Module):
    """One convolution that averages each patch, one weight per patch and class."""

    def __init__(self, grid: tuple[int, int], patch: int, smooth: bool, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Conv2d(3, 1, patch, patch, bias=False, dtype=torch.float64)
        weights = torch.randn(CLASSES, 1, *grid, generator=generator, dtype=torch.float64)
        if smooth:  # neighbouring patches weigh about the same, as in photos
            weights = nn.functional.avg_pool2d(weights, 3, 1, 1, count_include_pad=False)
        with torch.no_grad():
            self.embed.weight.fill_(1 / (3 * patch * patch))
        self.weights = nn.Parameter(weights[:, 0] / weights.std())

    def forward(self, image: Tensor) -> Tensor:
        return torch.einsum("brc,krc->bk", self.embed(image)[:, 0], self.weights)


def linear(
    grid: tuple[int, int] = (4, 4),
    patch: int = 8,
    *,
    smooth: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[cv.Model, Tensor]:
    """Return the model, and one image [1, 3, H, W] whose patches are all far from zero.

    Both are drawn in float64, whose normal draws are the same on every CPU (float32's differ between SSE and AVX), and
    are float64 unless `dtype` says otherwise, so that sums by hand agree to rounding.
    """
    size = (grid[0] * patch, grid[1] * patch)
    module = LinearPatches(grid, patch, smooth, seed).to(dtype).eval()
    model = cv.wrap(module, name="linear", size=size, layout=cv.Layout(grid, 0, "avg"))
    noise = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return model, (1 + 0.3 * noise).to(dtype)


def effects(model: cv.Model, image: Tensor, target: int) -> Tensor:
    """Return what each patch adds to the logit of a class, [rows, cols]."""
    module = model.module
    assert isinstance(module, LinearPatches)
    with torch.no_grad():
        return (module.embed(image)[0, 0] * module.weights[target]).detach()
