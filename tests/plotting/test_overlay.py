from __future__ import annotations

import numpy as np
import torch

from clairvit.models.preprocess import Preprocess
from clairvit.plotting.overlay import denormalised_photo, enlarge, overlay, scale_of
from helpers.rounding import assert_same


def test_the_photo_is_un_normalised() -> None:
    preprocess = Preprocess(size=(2, 3))
    image = torch.rand(3, 2, 3, dtype=torch.float64)
    mean, std = torch.tensor([preprocess.mean, preprocess.std], dtype=torch.float64)
    pixels = (image - mean[:, None, None]) / std[:, None, None]
    assert_same(denormalised_photo(pixels, preprocess), image.permute(1, 2, 0))


def test_half_precision_pixels_are_drawn_too() -> None:
    assert denormalised_photo(torch.zeros(3, 2, 2, dtype=torch.bfloat16), Preprocess()).dtype == np.float64


def test_patches_keep_their_place_when_enlarged() -> None:
    fine = enlarge(np.array([[0.0, 1.0], [0.0, 0.0]]), (8, 8))
    assert fine.shape == (8, 8)
    assert np.unravel_index(fine.argmax(), fine.shape)[0] < 4 <= np.unravel_index(fine.argmax(), fine.shape)[1]
    assert fine.max() == 1.0
    assert fine.min() == 0.0
    coarse = enlarge(np.array([[0.0, 1.0], [0.0, 0.0]]), (8, 8), smooth=False)
    assert set(coarse.ravel()) == {0.0, 1.0}


def test_the_overlay_glows_where_the_map_is_hot_and_nowhere_else() -> None:
    photo = np.full((32, 32, 3), 0.5)
    values = np.zeros((4, 4))
    values[0, 0] = 1.0
    cold = overlay(photo, np.zeros((4, 4)), scale_of(values, signed=False))
    drawn = overlay(photo, values, scale_of(values, signed=False))
    change = np.abs(drawn - cold).sum(-1)
    assert change[:6, :6].min() > 0.3
    assert change[20:, 20:].max() == 0.0, "bicubic interpolation reaches two patches"


def test_for_and_against_have_opposite_colours() -> None:
    photo = np.full((16, 16, 3), 0.5)
    values = np.array([[1.0, 0.0], [0.0, -1.0]])
    drawn = overlay(photo, values, scale_of(values, signed=True))
    assert drawn[0, 0, 0] > drawn[0, 0, 2], "for the class is red"
    assert drawn[-1, -1, 2] > drawn[-1, -1, 0], "against it is blue"


def test_a_patch_that_is_not_finite_stays_cold_and_does_not_spread() -> None:
    photo = np.full((16, 16, 3), 0.5)
    values = np.array([[1.0, 0.0], [0.0, np.nan]])
    scale = scale_of(values, signed=False)
    np.testing.assert_array_equal(overlay(photo, values, scale), overlay(photo, np.nan_to_num(values), scale))


def test_opacity_0_shows_the_photo_alone() -> None:
    photo = np.full((8, 8, 3), 0.25)
    values = np.eye(2)
    np.testing.assert_allclose(overlay(photo, values, scale_of(values, signed=False), opacity=0.0), photo)


def test_a_neutral_map_leaves_the_photo_visible() -> None:
    """No colour is laid over low values: the grey photo itself is there."""
    photo = np.random.default_rng(0).random((16, 16, 3))
    values = np.array([[0.0, 0.0], [0.0, 1.0]])
    for signed in (False, True):
        drawn = overlay(photo, values, scale_of(values, signed), smooth=False)
        bare = overlay(photo, values, scale_of(values, signed), opacity=0.0, smooth=False)
        np.testing.assert_array_equal(drawn[:8, :8], bare[:8, :8])
        assert np.abs(drawn - bare)[8:, 8:].min(-1).max() > 0.1


def test_enlarged_values_stay_in_their_range() -> None:
    values = np.random.default_rng(1).normal(size=(5, 7))
    fine = enlarge(values, (50, 70))
    assert fine.min() >= values.min()
    assert fine.max() <= values.max()
    np.testing.assert_allclose(enlarge(np.full((3, 3), 0.25), (9, 9)), 0.25, rtol=1e-15)
