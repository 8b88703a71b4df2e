"""Similarities of maps against scipy and scikit-image, pair by pair, and where they are undefined."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from skimage.feature import hog as their_hog
from skimage.metrics import structural_similarity
from torch import Tensor

from clairvit.metrics import similarity
from clairvit.metrics.similarity import flat_ssim, histogram_entropy, hog, pearson, spearman, ssim
from helpers.rounding import assert_same, growth


def pairs(rows: int = 9, cols: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 3, rows, cols] twice, signed, half alike."""
    chance = torch.Generator().manual_seed(0)
    a, noise = torch.randn(2, 2, 3, rows, cols, generator=chance, dtype=torch.float64)
    return a, 0.6 * a + noise


@pytest.mark.parametrize("tied", [False, True])
def test_correlations_are_scipys(tied: bool) -> None:
    a, b = pairs()
    if tied:
        a, b = a.round(), b.round()
    for ours, theirs in ((spearman, scipy.stats.spearmanr), (pearson, scipy.stats.pearsonr)):
        actual = ours(a.flatten(2), b.flatten(2))
        assert actual.shape == (2, 3)
        for place in np.ndindex(2, 3):
            expected = theirs(a[place].flatten().numpy(), b[place].flatten().numpy()).statistic
            assert float(actual[place]) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(("rows", "cols", "window"), [(14, 14, 7), (9, 11, 7), (4, 4, 3), (5, 9, 5)])
def test_ssim_is_scikit_images(rows: int, cols: int, window: int) -> None:
    a, b = pairs(rows, cols)
    actual = ssim(a, b, 3.0)
    for place in np.ndindex(2, 3):
        expected = structural_similarity(a[place].numpy(), b[place].numpy(), win_size=window, data_range=3.0)
        assert float(actual[place]) == pytest.approx(float(expected), abs=1e-12)


def map_similarity(kind: str, a: Tensor, b: Tensor, *, signed: bool = True) -> Tensor:
    """Return the similarity of maps; `ssim-flat` is Quantus's."""
    if kind == "ssim-flat":
        return flat_ssim(a, b) if signed else flat_ssim(a.abs(), b.abs())
    return similarity.map_similarity(kind, a, b, signed=signed)


@pytest.mark.parametrize("kind", ["spearman", "pearson", "ssim", "ssim-flat"])
def test_scale_does_not_count_and_the_sign_only_if_asked(kind: str) -> None:
    a, b = pairs()
    assert_same(map_similarity(kind, a, a), torch.ones(2, 3, dtype=torch.float64))
    if kind.startswith("ssim"):
        assert (map_similarity(kind, a, a) == 1).all(), "no round-off above the span"
    assert_same(map_similarity(kind, a, 7 * b), map_similarity(kind, a, b))
    # SSIM is no correlation: brightness and structure of the negative are both negative, so their product is not.
    assert (map_similarity(kind, a, -a) < (0.9 if kind.startswith("ssim") else -0.99)).all()
    assert_same(map_similarity(kind, a, -a, signed=False), torch.ones(2, 3, dtype=torch.float64))
    assert_same(map_similarity(kind, a, b, signed=False), map_similarity(kind, a.abs(), b.abs(), signed=False))


def test_ssim_scales_each_map_by_its_largest_value() -> None:
    a, b = pairs()
    for signed, span in ((True, 2), (False, 1)):
        first, second = (x[0, 1].numpy() if signed else x[0, 1].abs().numpy() for x in (a, b))
        expected = structural_similarity(first / abs(first).max(), second / abs(second).max(), data_range=span)
        assert float(map_similarity("ssim", a, b, signed=signed)[0, 1]) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("rows", "cols", "cell"), [(14, 14, 4), (9, 11, 3), (4, 4, 1), (37, 37, 12), (64, 48, 16), (2, 5, 1)]
)
def test_hog_is_scikit_images(rows: int, cols: int, cell: int) -> None:
    a, _ = pairs(rows, cols)
    a[0, 0, 0] = 0  # gradients along the axes too
    a[0, 1] = a[0, 1].round()
    descriptor = hog(a)
    block = (min(3, rows // cell), min(3, cols // cell))
    for place in np.ndindex(2, 3):
        expected = their_hog(a[place].numpy(), pixels_per_cell=(cell, cell), cells_per_block=block)
        # Theirs adds up the cell × cell pixels of a cell in single precision, one after the other.
        assert_same(descriptor[place], expected, magnitude=1.0, growth=growth(1, cell * cell), dtype=torch.float32)


def test_similarity_of_hogs() -> None:
    a, b = pairs(14, 14)
    actual = map_similarity("hog", a, b)
    first, second = (their_hog((x[1, 2] / x[1, 2].abs().max()).numpy(), pixels_per_cell=(4, 4)) for x in (a, b))
    assert_same(
        actual[1, 2], np.corrcoef(first, second)[0, 1], magnitude=1.0, growth=growth(1, 4 * 4), dtype=torch.float32
    )
    assert_same(map_similarity("hog", a, a), torch.ones(2, 3, dtype=torch.float64))
    assert_same(
        map_similarity("hog", a, -a), torch.ones(2, 3, dtype=torch.float64), label="up and down are one direction"
    )
    assert_same(map_similarity("hog", 7 * a, b), actual)
    assert (actual < 0.95).all()
    assert not torch.allclose(map_similarity("hog", a, b, signed=False), actual)


def test_flat_ssim_runs_along_the_rows() -> None:
    a, b = pairs()
    for signed in (True, False):
        first, second = (x[0, 1].flatten() if signed else x[0, 1].flatten().abs() for x in (a, b))
        first, second = first / first.abs().max(), second / second.abs().max()
        span = float(torch.cat([first, second]).max() - torch.cat([first, second]).min())
        expected = structural_similarity(first.numpy(), second.numpy(), data_range=span)
        assert float(map_similarity("ssim-flat", a, b, signed=signed)[0, 1]) == pytest.approx(
            float(expected), abs=1e-12
        )


@pytest.mark.parametrize("kind", ["spearman", "pearson", "ssim", "ssim-flat", "hog"])
@pytest.mark.parametrize("value", [0.0, 0.1, math.nan])
def test_constant_and_broken_maps_have_no_similarity(kind: str, value: float) -> None:
    a, b = pairs()
    a[1, 2] = value
    if math.isnan(value):
        a[1, 2] = b[1, 2]
        a[1, 2, 0, 0] = value
    for similarities in (map_similarity(kind, a, b), map_similarity(kind, b, a)):
        assert math.isnan(similarities[1, 2])
        assert int(similarities.isnan().sum()) == 1


def test_entropy_of_histograms() -> None:
    values = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    entropy = histogram_entropy(values, 100)
    for place in np.ndindex(2, 3):
        expected = scipy.stats.entropy(np.histogram(values[place].numpy(), bins=100)[0])
        assert float(entropy[place]) == pytest.approx(expected, rel=1e-12)
    assert float(histogram_entropy(torch.arange(100.0), 100)) == pytest.approx(np.log(100))
    assert float(histogram_entropy(torch.full((9,), 0.1), 100)) == 0
    assert histogram_entropy(torch.tensor([0.0, 1.0, torch.nan]), 100).isnan()
