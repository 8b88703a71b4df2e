"""Occlusion and PAMI: occlusion is captum's and exact on a linear model; PAMI is its formula by brute force."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.methods.occlusion import box_masks, multi_scale_boxes, sliding_boxes
from clairvit.perturbation.probe import probing
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same
from helpers.tiny_models import double
from parity.mask_cases import OCCLUSIONS
from parity.peers_models import TARGETS, vit

FIXTURE = Path(__file__).parent.parent / "fixtures" / "masks.npz"


@functools.cache
def theirs(name: str) -> Tensor:
    with np.load(FIXTURE) as arrays:
        return torch.from_numpy(arrays[name])


def explained(model: cv.Model, image: Tensor, name: str, target: Any = 1, **more: Any) -> cv.Explanation:
    return cv.explain(model, image, name, target=target, score="logit", **more)


# Occlusion


@pytest.mark.parametrize(("window", "stride"), OCCLUSIONS)
def test_occlusion_is_captums(window: int, stride: int) -> None:
    """Windows cut off at the border, a patch the mean of those that cover it; each window's whole loss."""
    module, images = vit()
    maps = explained(cv.wrap(module), images, "occlusion", TARGETS, window=window, stride=stride, share=False).maps
    reference = theirs(f"occlusion {window} {stride}")  # [B, 3, H, W], the same for all pixels of a patch
    assert torch.equal(
        reference, reference[:, :1, 2::4, 2::4].repeat_interleave(4, 2).repeat_interleave(4, 3).expand_as(reference)
    )
    expected = reference[:, 0, 2::4, 2::4]
    assert_same(maps, expected, growth=4)  # computed in float64, stored in float32 as differences of scores


def window_sums(patch_effects: Tensor, window: int, stride: int, share: bool) -> Tensor:
    """By hand: the mean over windows of what they hold."""
    total, times = torch.zeros_like(patch_effects), torch.zeros_like(patch_effects)
    starts = [range(0, math.ceil((side - window) / stride) * stride + 1, stride) for side in patch_effects.shape]
    for top in starts[0]:
        for left in starts[1]:
            inside = patch_effects[top : top + window, left : left + window]
            total[top : top + window, left : left + window] += inside.mean() if share else inside.sum()
            times[top : top + window, left : left + window] += 1
    return total / times


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (2, 1), (3, 1), (3, 2), (3, 3)])
def test_occlusion_on_a_linear_model(window: int, stride: int, share: bool) -> None:
    model, image = linear((5, 7))
    maps = explained(model, image, "occlusion", window=window, stride=stride, share=share).maps[0]
    expected_effects = effects(model, image, 1)
    total = float(expected_effects.abs().sum())
    assert_same(maps, window_sums(expected_effects, window, stride, share), magnitude=total)
    if window == 1:
        assert_same(maps, expected_effects, magnitude=total)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*is the same everywhere")
def test_shared_losses_are_exact_where_all_patches_matter_alike(stride: int) -> None:
    """Also where the last windows are cut off."""
    model, image = linear((5, 7))
    model.module.weights.data[1] = 0.7
    maps = explained(model, torch.ones_like(image), "occlusion", window=3, stride=stride).maps[0]
    assert_same(maps, torch.full((5, 7), 0.7, dtype=torch.float64))


@pytest.mark.parametrize("removal", ["token", "blur"])
def test_a_window_of_one_patch_is_leave_one_out(removal: str) -> None:
    model, image = double("timm-vit")
    explanation = cv.explain(model, image, "occlusion", 3, window=1, removal=removal)
    expected = cv.explain(model, image, "leave-one-out", 3, removal=removal).maps
    assert_same(explanation.maps, expected, magnitude=1)  # differences of probabilities
    assert explanation.cost.forwards == 17


def test_windows_reach_the_border_and_never_leave_it() -> None:
    boxes = sliding_boxes((5, 4), (2, 3), 2)
    assert boxes == [(top, left, 2, 3) for top in (0, 2, 4) for left in (0, 2)]
    inside = box_masks(boxes, (5, 4))
    assert inside.any(0).all()
    assert inside.sum((1, 2)).tolist() == [6, 4, 6, 4, 3, 2]


def test_a_window_leaves_something_to_see() -> None:
    model, image = linear((2, 4))
    explanation = explained(model, image, "occlusion", window=6, stride=4)
    expected_effects = effects(model, image, 1)
    assert any("cut to 3" in note for note in explanation.notes)
    assert explanation.cost.forwards == 1 + 2 * 2
    assert_same(
        explanation.maps[0, :, 0], expected_effects[:, :3].mean(1), magnitude=float(expected_effects.abs().sum())
    )


# PAMI


def test_parts_are_of_several_sizes_and_cover_the_image() -> None:
    boxes = multi_scale_boxes((14, 14), 4)
    assert len(boxes) == len(set(boxes)) == 9 + 25 + 49 + 81
    assert {box[2:] for box in boxes} == {(7, 7), (5, 5), (4, 4), (3, 3)}
    for size in ((7, 7), (5, 5), (4, 4), (3, 3)):
        inside = box_masks([box for box in boxes if box[2:] == size], (14, 14))
        assert inside.any(0).all()
        assert inside.sum((1, 2)).eq(size[0] * size[1]).all()  # none is cut off
    assert sorted({top for top, _, height, _ in boxes if height == 7}) == [0, 4, 7]


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (1, 6), (2, 2), (1, 1), (16, 9)])
def test_parts_of_any_grid(grid: tuple[int, int]) -> None:
    boxes = multi_scale_boxes(grid, 5)
    assert len(boxes) == len(set(boxes)) <= sum((2 * k + 1) ** 2 for k in range(1, 6))
    assert box_masks(boxes, grid).any(0).all()
    assert all(top + height <= grid[0] and left + width <= grid[1] for top, left, height, width in boxes)


def mean_of_parts(value: Callable[[int, int, int, int], float], grid: tuple[int, int], scales: int) -> Tensor:
    """sum_k P_k m_k / sum_k m_k, patch by patch."""
    boxes = multi_scale_boxes(grid, scales)
    means = torch.zeros(grid, dtype=torch.float64)
    for r in range(grid[0]):
        for c in range(grid[1]):
            covering = [value(*b) for b in boxes if b[0] <= r < b[0] + b[2] and b[1] <= c < b[1] + b[3]]
            means[r, c] = sum(covering) / len(covering)
    return means


@pytest.mark.parametrize("scales", [1, 3])
def test_pami_on_a_linear_model(scales: int) -> None:
    """A part alone has the sum of its effects."""
    model, image = linear((5, 6))
    expected_effects = effects(model, image, 1)
    maps = explained(model, image, "pami", scales=scales, removal="mean").maps[0]
    expected = mean_of_parts(lambda t, l, h, w: float(expected_effects[t : t + h, l : l + w].sum()), (5, 6), scales)  # noqa: E741
    assert_same(maps, expected, magnitude=float(expected_effects.abs().sum()))


def test_pami_hides_all_but_one_part_by_blur() -> None:
    """By brute force on a ViT, with images pasted together by hand."""
    model, image = double("timm-vit", 1)
    explanation = cv.explain(model, image, "pami", 3)
    with probing(cv.trace(model, image), "blur", label="test", forwards=1) as probe:
        blurred = probe.background

    def value(top: int, left: int, height: int, width: int) -> float:
        seen = blurred.clone()
        rows, cols = slice(8 * top, 8 * (top + height)), slice(8 * left, 8 * (left + width))
        seen[..., rows, cols] = image[..., rows, cols]
        with torch.no_grad():
            return float(model.logits(seen).softmax(-1)[0, 3])

    assert explanation.score == "prob"
    assert_same(explanation.maps[0], mean_of_parts(value, (4, 4), 4))
