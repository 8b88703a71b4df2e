"""Ranks are SciPy's, ties and NaN included, with no tensor larger than the values themselves; scaling and pooling."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from scipy.stats import rankdata

import clairvit as cv
from clairvit.methods.ensembles import combined, scaled_ranks
from clairvit.metrics.similarity import spearman
from clairvit.numerics import (
    average_ranks,
    is_constant,
    min_max,
    over_largest,
    pool_to_grid,
    positive_over_largest,
    spread_evenly,
    wide_product,
)
from clairvit.papers import comparison as beside
from clairvit.selection import stats
from helpers.operations import LargestResult
from helpers.rounding import assert_same, growth

SIDE = 224
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 50), (2, 3, 40), (0, 5), (4, 0)], ids=str)
def test_average_ranks_are_those_of_scipy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.randint(0, 2 if dtype == torch.bool else 6, shape, generator=generator).to(dtype)  # many ties
    expected = rankdata(values.double().numpy(), axis=-1) if values.numel() else np.empty(shape)
    ranked = average_ranks(values)
    assert ranked.dtype == torch.float64
    assert np.array_equal(ranked.numpy(), expected)


def test_values_that_are_not_contiguous() -> None:
    values = torch.randint(0, 9, (20, 3), generator=torch.Generator().manual_seed(0)).double().T
    assert np.array_equal(average_ranks(values).numpy(), rankdata(values.numpy(), axis=-1))


def test_infinities_have_ranks_and_nan_has_none() -> None:
    values = np.array([[np.inf, np.nan, 1, np.inf, -np.inf, np.nan, 1], [np.nan] * 7, [3, 2, 1, 0, 1, 2, np.nan]])
    ranked = average_ranks(torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(ranked, rankdata(values, axis=-1, nan_policy="omit"))


def test_every_user_keeps_its_treatment_of_nan() -> None:
    """Scores of studies put NaN last; a table of a paper gives it no rank; a correlation with NaN is undefined."""
    values = [0.1, float("nan"), 0.5]
    assert stats.ranks(np.array(values)).tolist() == [2, 3, 1]
    np.testing.assert_array_equal(beside.ranks(values, "higher"), [2, np.nan, 1])
    assert spearman(torch.tensor(values), torch.arange(3.0)).isnan()
    assert scaled_ranks(torch.tensor([values]))[0].isnan().tolist() == [False, True, False]


def test_no_intermediate_is_larger_than_the_map() -> None:
    """All pairs of 224² values are 2.5e9 numbers, 22 GB; sorted, no tensor has more than one number a pixel."""
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(2, SIDE, SIDE, generator=generator) for _ in range(2)]
    with LargestResult() as largest:
        merged = combined(maps)
        scores = spearman(maps[0].flatten(1), maps[1].flatten(1))
        studied = stats.ranks(maps[0].flatten(1).double().numpy())
    assert largest.elements <= len(maps) * maps[0].numel(), largest.operation
    expected = sum(rankdata(heatmap.flatten(1).numpy(), axis=1) - 1 for heatmap in maps) / 2 / (SIDE**2 - 1)
    np.testing.assert_allclose(merged.flatten(1).numpy(), expected, rtol=0, atol=torch.finfo(torch.float32).eps)
    assert scores.abs().max() < 0.05
    assert np.array_equal(studied, rankdata(-maps[0].flatten(1).numpy(), axis=1))


def test_an_ensemble_of_pixel_maps_runs_at_224() -> None:
    size = {"patch_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = cv.wrap(timm.create_model("vit_tiny_patch16_224", **size))
    image = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with LargestResult() as largest:
        explanation = cv.explain(model, image, "ensemble(saliency(level=pixel),lrp(level=pixel))", target=1)
    assert explanation.maps.shape == (1, SIDE, SIDE)
    assert largest.elements < 100 * SIDE**2, largest.operation


def test_min_max_and_over_largest_scale_each_row_by_itself() -> None:
    values = torch.tensor([[-4.0, 0.0, 2.0], [3.0, 3.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(min_max(values, 1), torch.tensor([[0, 4 / 6, 1], [0, 0, 0], [0, 0, 0]], dtype=torch.float64))
    assert torch.equal(over_largest(values, 1), torch.tensor([[-1, 0, 0.5], [1, 1, 1], [0, 0, 0]], dtype=torch.float64))
    assert torch.equal(min_max(values.reshape(3, 1, 3), (1, 2))[:, 0], min_max(values, 1))
    assert is_constant(values, 1).tolist() == [False, True, True]
    assert not is_constant(torch.tensor([float("nan")] * 3), 0)


def test_pool_to_grid_averages_cells() -> None:
    maps = torch.arange(16.0).reshape(1, 4, 4)
    assert pool_to_grid(maps, (2, 2)).tolist() == [[[2.5, 4.5], [10.5, 12.5]]]
    assert pool_to_grid(maps, (4, 4)) is maps


def test_scaling_to_the_range_and_to_the_largest_value() -> None:
    rows = torch.tensor([[1.0, 3.0, 2.0], [4.0, 4.0, 4.0], [-2.0, -1.0, -4.0], [-2.0, 4.0, 1.0]])
    assert min_max(rows)[0].tolist() == [0, 1, 0.5]
    assert min_max(rows)[1].tolist() == [0, 0, 0], "equal values"
    assert positive_over_largest(rows)[2].tolist() == [0, 0, 0], "no positive value"
    assert positive_over_largest(rows)[3].tolist() == [0, 1, 0.25]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_pixels_are_pooled_to_patches(dtype: torch.dtype) -> None:
    pixels = torch.arange(2 * 4 * 6).reshape(2, 4, 6).to(dtype)
    sums = pixels.double().reshape(2, 2, 2, 3, 2).sum((2, 4))  # patches of 2 × 2
    assert pool_to_grid(pixels, (2, 3), "sum").tolist() == sums.tolist()
    assert pool_to_grid(pixels, (2, 3), "mean").tolist() == (sums / 4).tolist()
    assert pool_to_grid(pixels, (2, 3), "mean").dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(("size", "grid"), [((2, 3), (4, 6)), ((2, 3), (5, 7)), ((7, 7), (7, 7)), ((3, 1), (7, 4))])
def test_spreading_evenly_is_an_integral_over_areas(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Independent: a fine raster on which both grids fall on whole cells, summed over the target's cells."""
    cells = torch.rand(2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fine = (size[0] * grid[0], size[1] * grid[1])
    raster = cells.repeat_interleave(grid[0], -2).repeat_interleave(grid[1], -1) / (grid[0] * grid[1])
    expected = raster.reshape(2, grid[0], fine[0] // grid[0], grid[1], fine[1] // grid[1]).sum((2, 4))
    assert_same(spread_evenly(cells, grid), expected, magnitude=float(cells.sum()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_of_half_precision_are_rounded_to_float32_at_least(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 3, *shape, generator=generator).to(dtype) for shape in ((5, 7), (7, 4)))
    product = wide_product(a.clone().requires_grad_(), b)
    assert product.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not product.requires_grad
    exact, largest = a.double() @ b.double(), float(a.abs().max() * b.abs().max())
    assert_same(product, exact, magnitude=largest, growth=growth(depth=1, width=7), dtype=product.dtype)
