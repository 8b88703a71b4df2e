"""Baselines: closed forms, and no order where there is none."""

from __future__ import annotations

import math

import pytest
import torch

import clairvit as cv
from helpers.rounding import assert_same
from helpers.tiny_models import ZOO, fresh, pixels, wrapped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["timm-vit", "timm-vit-nonsquare"])
def test_center_is_a_gaussian_whose_mirrored_patches_tie_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    """Rounding must not order patches that mirror each other, or the order of removal differs between CPUs."""
    maps = cv.explain(wrapped(name, dtype), pixels(name, 2, dtype=dtype), "center", target=3).maps
    assert maps.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(maps, maps.flip(1))
    assert torch.equal(maps, maps.flip(2))
    rows, cols = ZOO[name].grid
    if rows == cols:
        assert torch.equal(maps, maps.mT)
    expected = [
        [
            math.exp(-(((i + 0.5) / rows - 0.5) ** 2 + ((j + 0.5) / cols - 0.5) ** 2) / (2 * 0.25**2))
            for j in range(cols)
        ]
        for i in range(rows)
    ]
    assert_same(maps[1], expected, growth=8)


def test_random_is_the_same_in_every_precision() -> None:
    """Of an image that bfloat16 holds exactly; float64 maps for a float64 model."""
    images = pixels("timm-vit", 2).bfloat16()
    maps = {
        dtype: cv.explain(fresh("timm-vit", dtype), images.to(dtype), "random", target=3).maps
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    assert torch.equal(maps[torch.bfloat16], maps[torch.float32])
    assert torch.equal(maps[torch.float64], maps[torch.float32].double())
    assert maps[torch.float64].dtype == torch.float64
