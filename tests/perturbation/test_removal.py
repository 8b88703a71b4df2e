"""What is painted over a removed patch, against the numbers of the RISE code, scipy and plain arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve, gaussian_filter
from torch import Tensor

import clairvit as cv
from clairvit.errors import UnknownName
from clairvit.models.preprocess import Preprocess
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import (
    REMOVALS,
    background,
    check_removal,
    gaussian_blur,
    patches_to_pixels,
    rise_kernel,
)
from helpers.rounding import assert_same
from helpers.tiny_models import ZOO, double, fresh, pixels

USUAL = Preprocess()


def images(rows: int = 40, cols: int = 28, count: int = 2) -> Tensor:
    return torch.randn(count, 3, rows, cols, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_rise_kernel_is_the_one_of_the_paper_s_code() -> None:
    kernel = rise_kernel()
    assert kernel.shape == (11, 11)
    assert round(kernel[5, 5].item(), 5) == 0.00883
    assert [round(kernel[i, j].item(), 5) for i in (0, -1) for j in (0, -1)] == [0.00774] * 4
    assert kernel.sum().item() == pytest.approx(1, abs=1e-12)
    assert_same(kernel, kernel.T)
    assert_same(kernel, kernel.flip(0))


def test_blur_pads_with_the_mean_colour() -> None:
    photo = images()
    backgrounds = background("blur", photo, USUAL, 0)
    kernel = rise_kernel().numpy()
    expected = np.stack([[convolve(c, kernel, mode="constant", cval=0) for c in image] for image in photo.numpy()])
    assert_same(backgrounds, expected)
    plain = background("blur", torch.ones(1, 3, 40, 28, dtype=torch.float64), USUAL, 0)[0, 0]
    assert plain[20, 14].item() == pytest.approx(1, abs=1e-12)
    assert plain[0, 0].item() == pytest.approx(rise_kernel()[5:, 5:].sum().item(), abs=1e-12)  # about a quarter is left
    assert 0.25 < plain[0, 0] < 0.32


@pytest.mark.parametrize("size", [(40, 28), (64, 64), (16, 50)])
def test_gaussian_blur_is_scipy_s(size: tuple[int, int]) -> None:
    """Torch's "reflect" is scipy's "mirror"; where an image is shorter than four sigmas, scipy is cut as we are."""
    photo = images(*size)
    rows, cols = (min(20, side - 1) for side in size)
    expected = np.stack([[_scipy(c, rows, cols) for c in image] for image in photo.numpy()])
    assert_same(gaussian_blur(photo), expected)


def _scipy(channel: np.ndarray, rows: int, cols: int) -> np.ndarray:
    return gaussian_filter(channel, 5, mode="mirror", radius=(rows, cols))


def test_black_is_black_and_mean_is_the_mean_colour() -> None:
    photo = images()
    mean, std = (torch.tensor(t, dtype=torch.float64)[:, None, None] for t in (USUAL.mean, USUAL.std))
    black = background("black", photo, USUAL, 0)
    assert black.shape == photo.shape
    assert (black * std + mean).abs().max() < 1e-15
    assert torch.equal(background("black", photo.bfloat16(), USUAL, 0), black.bfloat16())  # rounded once
    assert not background("mean", photo, USUAL, 0).any()


def test_the_minimum_is_each_image_s_own_over_all_channels() -> None:
    photo = images()
    backgrounds = background("minimum", photo, USUAL, 0)
    assert backgrounds.shape == photo.shape
    for image, under in zip(photo, backgrounds, strict=True):
        assert under.unique().tolist() == [float(image.min())]
    assert backgrounds[0, 0, 0, 0] != backgrounds[1, 0, 0, 0]


def test_the_image_mean_is_the_mean_colour_of_each_image() -> None:
    photo = images()
    backgrounds = background("image-mean", photo, USUAL, 0)
    assert backgrounds.shape == photo.shape
    for image, under in zip(photo, backgrounds, strict=True):
        for channel, painted in zip(image, under, strict=True):
            assert_same(painted, torch.full_like(channel, channel.sum().item() / channel.numel()), magnitude=1.0)
    assert backgrounds[0, 0, 0, 0] != backgrounds[1, 0, 0, 0]


def test_noise_is_of_the_seed_and_the_image_alone() -> None:
    photo = images(64, 64)
    noise = background("noise", photo, USUAL, 0)
    count = noise.numel()
    assert abs(noise.mean()) < 4 / math.sqrt(count)
    assert abs(noise.std() - 1) < 4 / math.sqrt(2 * count)
    assert torch.equal(background("noise", photo[1:], USUAL, 0), noise[1:])
    assert torch.equal(background("noise", photo.flip(0), USUAL, 0), noise.flip(0))
    assert torch.equal(background("noise", photo, USUAL, 0), noise)
    assert not torch.equal(background("noise", photo, USUAL, 1), noise)
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize(
    ("grid", "size"), [((3, 5), (24, 40)), ((4, 4), (30, 30)), ((7, 7), (50, 33)), ((2, 3), (7, 7))]
)
def test_every_pixel_has_its_patch_s_value(grid: tuple[int, int], size: tuple[int, int]) -> None:
    """The patch that the middle of the pixel lies in, also where the image is no multiple of the grid."""
    cells = torch.randn(2, *grid, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, cols = ([int((i + 0.5) * n / side) for i in range(side)] for n, side in zip(grid, size, strict=True))
    assert torch.equal(patches_to_pixels(cells, size), cells[:, rows][:, :, cols]), "float64 is not rounded"
    assert patches_to_pixels(cells.bfloat16(), size).dtype == patches_to_pixels(cells > 0, size).dtype == torch.float32


@pytest.mark.parametrize("removal", [name for name in REMOVALS if name not in ("token", "road")])
def test_a_removed_patch_shows_the_background_and_no_other_pixel_changes(removal: str) -> None:
    name = "timm-vit-nonsquare"
    trace = cv.trace(fresh(name), pixels(name), target=3)
    keep = torch.ones(1, 1, 15, dtype=torch.bool)
    keep[0, 0, 7] = False  # row 1, column 2
    seen: list[Tensor] = []
    trace.recording.model.module.patch_embed.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with probing(trace, removal, label="test", forwards=1, seed=3) as probe:
        probe.score_kept(keep)
        under = probe.background
    assert torch.equal(under, background(removal, trace.pixels, trace.recording.model.preprocess, 3))
    expected = trace.pixels.clone()
    expected[:, :, 8:16, 16:24] = under[:, :, 8:16, 16:24]
    assert torch.equal(seen[0], expected)
    assert not torch.equal(seen[0], trace.pixels)
    assert ZOO[name].grid == (3, 5)


def test_masks_between_0_and_1_mix_the_image_and_its_background() -> None:
    model, image = double("timm-vit")
    trace = cv.trace(model, image, target=3)
    masks = torch.rand(1, 4, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with probing(trace, "blur", label="test", forwards=4) as probe:
        assert probe.paints
        blended = probe.blend(masks)
        expected = masks[:, :, None] * probe.pixels[:, None] + (1 - masks[:, :, None]) * probe.background[:, None]
    assert blended.shape == (2, 4, 3, 32, 32)
    assert_same(blended, expected)
    assert torch.equal(probe.blend(torch.ones(1, 1, 32, 32))[:, 0], trace.pixels)
    assert torch.equal(probe.blend(torch.zeros(1, 1, 32, 32))[:, 0], probe.background)


def test_a_removal_that_does_not_exist_is_named() -> None:
    with pytest.raises(UnknownName, match=r"'blurr'; expected one of token, mean, .*blur"):
        check_removal("blurr")
