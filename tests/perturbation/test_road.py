"""ROAD's imputation: pytorch-grad-cam's imputer, a dense system written down pixel by pixel, and the limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

import clairvit as cv
from clairvit.perturbation import removal
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import ROAD_NOISE, impute
from helpers.rounding import assert_same
from helpers.tiny_models import fresh, pixels

THEIRS = np.load(Path(__file__).parent.parent / "fixtures" / "road.npz")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "ROAD_NOISE", 0.0)


def image(rows: int, cols: int, count: int = 1) -> Tensor:
    return torch.randn(count, 3, rows, cols, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("mask", ["scattered", "patches", "nearly all"])
def test_the_same_as_pytorch_grad_cam(mask: str) -> None:
    """Also at the border: it renormalises the weights of the neighbours that exist, as we do."""
    gone = torch.from_numpy(THEIRS[f"{mask} gone"])
    imputed = impute(torch.from_numpy(THEIRS["image"]).double()[None], gone[None], [0])[0]
    np.testing.assert_allclose(imputed.numpy(), THEIRS[mask], atol=1e-6)


@pytest.mark.usefixtures("silent")
def test_each_gap_is_the_weighted_mean_of_the_neighbours_that_it_has() -> None:
    """One equation a pixel, known pixels included, in a dense matrix."""
    photo, rows, cols = image(12, 10)[0].numpy(), 12, 10
    gone = np.random.default_rng(0).random((rows, cols)) < 0.6
    gone[:3, :4] = True  # a corner
    system, right = np.eye(rows * cols), np.zeros((rows * cols, 3))
    for y in range(rows):
        for x in range(cols):
            here = y * cols + x
            if not gone[y, x]:
                right[here] = photo[:, y, x]
                continue
            around = {
                (v, u): 2.0 if v == y or u == x else 1.0
                for v in range(max(0, y - 1), min(rows, y + 2))
                for u in range(max(0, x - 1), min(cols, x + 2))
                if (v, u) != (y, x)
            }
            for (v, u), weight in around.items():
                system[here, v * cols + u] = -weight / sum(around.values())
    expected = np.linalg.solve(system, right).T.reshape(3, rows, cols)
    imputed = impute(torch.from_numpy(photo)[None], torch.from_numpy(gone)[None], [0])[0]
    assert_same(imputed, expected)


def test_nothing_removed_is_the_image_and_everything_removed_the_mean_colour() -> None:
    photo = image(12, 10)
    nothing, everything = (torch.full((1, 12, 10), gone) for gone in (False, True))
    assert torch.equal(impute(photo, nothing, [0]), photo)
    assert impute(photo, everything, [0]).abs().max() < 6 * ROAD_NOISE


def test_one_factorisation_serves_all_channels_and_all_images_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    solver = scipy.sparse.linalg.splu

    def counted(matrix: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(matrix.shape[0])
        return solver(matrix, *args, **kwargs)

    monkeypatch.setattr(scipy.sparse.linalg, "splu", counted)
    generator = torch.Generator().manual_seed(0)
    two = torch.rand(2, 12, 10, generator=generator) < 0.5
    together = impute(image(12, 10, 4), two[[0, 1, 0, 1]], [1, 2, 3, 4])
    assert calls == [int(mask.sum()) for mask in two]
    for k in range(4):
        alone = impute(image(12, 10, 4)[k : k + 1], two[k % 2][None], [k + 1])
        assert_same(alone[0], together[k])  # the noise too


def test_noise_is_small_fixed_and_only_on_the_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    photo = image(64, 64)
    gone = torch.rand(1, 64, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    first, again, other = (impute(photo, gone, [mark]) for mark in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    monkeypatch.setattr(removal, "ROAD_NOISE", 0.0)
    noise = (first - impute(photo, gone, [5]))[0]
    assert not noise[:, ~gone[0]].any()
    grains = noise[:, gone[0]]
    assert abs(grains.std() / 0.01 - 1) < 4 / (2 * grains.numel()) ** 0.5
    assert abs(grains.mean()) < 4 * 0.01 / grains.numel() ** 0.5


def test_the_probe_imputes_the_patches_that_are_not_kept() -> None:
    trace = cv.trace(fresh("timm-vit"), pixels("timm-vit"), target=3)
    seen: list[Tensor] = []
    trace.recording.model.module.patch_embed.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    keep = torch.ones(2, 1, 16, dtype=torch.bool)
    keep[0, 0, 5], keep[1, 0, 6] = False, False
    with probing(trace, "road", label="test", forwards=1, seed=3) as probe:
        assert not probe.paints
        probe.score_kept(keep)
    gone = torch.zeros(2, 32, 32, dtype=torch.bool)
    gone[0, 8:16, 8:16] = gone[1, 8:16, 16:24] = True
    assert torch.equal(seen[0] != trace.pixels, gone[:, None].expand(-1, 3, -1, -1))
    assert torch.equal(seen[0], impute(trace.pixels, gone, probe.image_seeds))
