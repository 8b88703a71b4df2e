"""RISE, and what it shares with occlusion and PAMI (test_occlusion.py).

Proved: RISE's masks and maps are those of its authors' own file, its map is the closed form on a linear model and its
standard error is the spread over seeds. None of the three depends on batch sizes.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import avg_pool2d

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.methods import rise
from clairvit.methods.rise import RandomMasks, binarise, random_masks, shifted_weights
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import REMOVALS
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same, growth
from helpers.tiny_models import cnn, double, pixels, wrapped
from parity.mask_cases import KEPT_EVERY, RISES
from parity.peers_models import TARGETS, vit

FIXTURE = Path(__file__).parent.parent / "fixtures" / "masks.npz"


@functools.cache
def theirs(name: str) -> Tensor:
    with np.load(FIXTURE) as arrays:
        return torch.from_numpy(arrays[name])


def with_their_numbers(name: str) -> RandomMasks:
    """Our masks from the coarse grids and shifts that the authors' file drew."""
    size, _, cells, _ = RISES[name]
    rows, cols = (shifted_weights(side, cells) for side in size)
    return RandomMasks(theirs(f"{name} coarse").double(), *theirs(f"{name} shifts").T, rows, cols)


def even(image: Tensor, patch: int = 8) -> Tensor:
    """The image with one colour a patch, so that a patch seen through a mask is its own mean times the mask's."""
    return avg_pool2d(image, patch).repeat_interleave(patch, -1).repeat_interleave(patch, -2)


def explained(model: cv.Model, image: Tensor, name: str, target: Any = 1, **more: Any) -> cv.Explanation:
    return cv.explain(model, image, name, target=target, score="logit", **more)


# RISE's masks


@pytest.mark.parametrize("name", RISES)
def test_masks_are_those_of_the_authors(name: str) -> None:
    every = KEPT_EVERY[name]
    actual = with_their_numbers(name)(range(RISES[name][1]))[:, ::every, ::every]
    # theirs are float32: two reductions over the two nearest cells, and the places of these
    assert_same(actual, theirs(f"{name} masks"), growth=growth(depth=4, width=2))


def test_a_mask_by_hand() -> None:
    """Pixel by pixel: the four nearest cells of the stretched grid, mirrored at its borders."""
    size, cells = (30, 41), 4
    masks = random_masks(3, cells, 0.5, size, seed=5)
    cell = [math.ceil(side / cells) for side in size]

    def value(k: int, y: int, x: int) -> float:
        total = 0.0
        place = [(at + 0.5) * cells / ((cells + 1) * side) - 0.5 for at, side in zip((y, x), cell, strict=True)]
        low = [math.floor(at) for at in place]
        for dy in (0, 1):
            for dx in (0, 1):
                at = [low[0] + dy, low[1] + dx]
                weight = (1 - abs(place[0] - at[0])) * (1 - abs(place[1] - at[1]))
                inside = [-a if a < 0 else 2 * (cells - 1) - a if a >= cells else a for a in at]
                total += weight * float(masks.coarse[k, inside[0], inside[1]])
        return total

    rows = range(0, size[0], 3)
    expected = [
        [[value(k, y + int(masks.row_shifts[k]), x + int(masks.col_shifts[k])) for x in range(size[1])] for y in rows]
        for k in range(3)
    ]
    assert_same(masks(range(3))[:, ::3], expected)


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_masks_have_the_right_mean_range_and_shifts(p: float) -> None:
    """Every pixel is let through with the same chance, borders too; every shift less than a cell happens."""
    masks = random_masks(4000, 5, p, (33, 24), seed=1)
    mask_values = masks(range(4000))
    assert mask_values.shape == (4000, 33, 24)
    assert mask_values.min() >= 0
    assert mask_values.max() <= 1
    assert set(masks.row_shifts.tolist()) == set(range(7))  # ceil(33 / 5)
    assert set(masks.col_shifts.tolist()) == set(range(5))
    standard_error = mask_values.std(0) / math.sqrt(4000)
    assert ((mask_values.mean(0) - p) / standard_error).abs().max() < 5
    assert set(masks.coarse.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(("size", "grid"), [((32, 48), (4, 6)), ((33, 50), (4, 7))])
def test_masks_on_patches_are_means_of_pixels(size: tuple[int, int], grid: tuple[int, int]) -> None:
    masks = random_masks(20, 7, 0.5, size, seed=0)
    expected = torch.nn.functional.adaptive_avg_pool2d(masks(range(20)), grid)
    assert_same(masks.pooled(grid)(range(20)), expected)
    assert_same(masks(range(3, 9)), masks(range(20))[3:9], label="whichever are asked for")


def test_hard_masks_keep_a_patch_with_the_masks_own_chance() -> None:
    smooth = torch.tensor([[[0.0, 0.3], [0.8, 1.0]]], dtype=torch.float64).expand(20000, -1, -1)
    kept = binarise(smooth, seed=3).double().mean(0)
    assert kept[0, 0] == 0
    assert kept[1, 1] == 1
    assert torch.allclose(kept, smooth[0], atol=5 * 0.5 / math.sqrt(20000))


# RISE's map


def test_maps_are_those_of_the_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their whole run: masks, passes in float32, sums. Only the random numbers are handed over."""
    module, images = vit()
    (_, samples, cells, p), requests = RISES["small"], []

    def given(*what: Any) -> RandomMasks:
        requests.append(what[:4])
        return with_their_numbers("small")

    monkeypatch.setattr(rise, "random_masks", given)
    options = {"samples": samples, "cells": cells, "p": p}
    explanation = cv.explain(cv.wrap(module), images, "rise", TARGETS, level="pixel", **options)
    assert requests == [(samples, cells, p, (12, 20))]
    assert explanation.score == "prob"
    expected = theirs("small map")
    assert expected.flatten(1).std(1).min() > 1e-3
    assert_same(explanation.maps, expected, growth=growth(depth=1, width=samples))  # theirs is a float32 mean of scores
    pooled = cv.explain(cv.wrap(module), images, "rise", TARGETS, **options).maps
    assert_same(pooled, avg_pool2d(explanation.maps, 4))


def expected_rise(patch_effects: Tensor, size: tuple[int, int], cells: int, p: float) -> Tensor:
    """E[f M_j] / p for f = sum_k e_k M_k, in closed form: cells are independent, shifts are averaged over."""
    rows, cols = (
        torch.nn.functional.adaptive_avg_pool1d(shifted_weights(side, cells).transpose(1, 2), count).transpose(1, 2)
        for side, count in zip(size, patch_effects.shape, strict=True)
    )  # [shifts, rows, cells]
    down, right = (torch.einsum("sac,sbc->ab", part, part) / len(part) for part in (rows, cols))
    covariance = p * (1 - p) * torch.einsum("ab,cd->acbd", down, right).flatten(0, 1).flatten(1)  # [patches, patches]
    return ((covariance + p * p) @ patch_effects.double().flatten() / p).reshape(patch_effects.shape)


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_rise_is_its_expectation_on_a_linear_model(p: float) -> None:
    """Off by as much as its own standard error says, everywhere."""
    model, image = linear((4, 5))
    image = even(image)
    explanation = explained(model, image, "rise", samples=3000, cells=5, p=p)
    expected = expected_rise(effects(model, image, 1), (32, 40), 5, p)
    assert explanation.standard_error is not None
    off = (explanation.maps[0] - expected) / explanation.standard_error[0]
    assert off.abs().max() < 4
    assert explanation.standard_error.max() < 0.15 * (expected.max() - expected.min())  # so that it could have failed


def smooth_weights(grid: tuple[int, int], seed: int) -> Tensor:
    """Random weights that change over more than a cell of RISE's and add up to nothing."""
    drawn = torch.randn(1, grid[0] + 6, grid[1] + 6, generator=torch.Generator().manual_seed(seed))
    for _ in range(3):
        drawn = avg_pool2d(drawn, 3, 1)
    return (drawn - drawn.mean())[0] / drawn.std()


def test_rise_ranks_the_weights_of_a_linear_model() -> None:
    """With its default samples, on the mean of six models: 4000 masks leave some noise in each.

    A RISE map is the weights seen through a blur of a cell, here of about one patch: it can only rank what changes more
    slowly than that. The weights add up to nothing, as patches at the border have fewer neighbours whose effect spills
    over to them.
    """
    correlations = []
    for seed in range(6):
        model, image = linear((8, 8))
        model.module.weights.data[1] = smooth_weights((8, 8), seed)
        explanation = explained(model, image, "rise")
        assert explanation.cost.forwards == 4001
        correlations.append(spearmanr(explanation.maps[0].flatten(), effects(model, image, 1).flatten()).statistic)
    assert sum(correlations) / len(correlations) > 0.95
    assert min(correlations) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"normalise_by_mask_sum": True}, {"removal": "road"}, {"removal": "road", "normalise_by_mask_sum": True}],
    ids=str,
)
def test_standard_error_is_the_spread_over_seeds(options: dict[str, Any]) -> None:
    model, image = linear((3, 3), patch=4)
    runs = 40 if "removal" in options else 150
    explanations = [explained(model, image, "rise", samples=60, cells=4, seed=seed, **options) for seed in range(runs)]
    spread = torch.stack([explanation.maps[0] for explanation in explanations]).double().std(0)
    reported_error = (
        torch.stack([explanation.standard_error[0] for explanation in explanations]).double().square().mean(0).sqrt()
    )
    # The spread of so many runs is itself known to 1/sqrt(2 runs) only, and patches share their masks.
    assert (reported_error / spread).log().mean().abs() < 1.5 / math.sqrt(2 * runs)
    assert (reported_error / spread).log().abs().max() < 5 / math.sqrt(2 * runs)


def by_hand(scores: Tensor, seen: Tensor, p: float | None) -> tuple[Tensor, Tensor]:
    """One patch after the other, from the definitions."""
    value, error = (torch.zeros(seen.shape[1:], dtype=torch.float64) for _ in range(2))
    for place in np.ndindex(*seen.shape[1:]):
        m = seen[(slice(None), *place)].double()
        if p is None:
            value[place] = (scores * m).sum() / m.sum()
            rest = m * (scores - value[place]) / m.mean()
        else:
            value[place] = (scores * m).sum() / (len(m) * p)
            rest = scores * m / p
        error[place] = rest.std() / math.sqrt(len(m))
    return value, error


@pytest.mark.parametrize("by_sum", [False, True])
@pytest.mark.parametrize("removal", ["token", "blur", "noise"])
def test_rise_is_its_definition_on_a_vit(removal: str, by_sum: bool) -> None:
    """Masks painted or patches dropped: each variant by itself, then the sums, mask by mask."""
    model, image = double("timm-vit", batch=1)
    options: dict[str, Any] = {"samples": 30, "cells": 3, "p": 0.4, "removal": removal}
    explanation = explained(model, image, "rise", 3, seed=2, normalise_by_mask_sum=by_sum, **options)
    masks = random_masks(30, 3, 0.4, (32, 32), seed=2)
    smooth = masks.pooled((4, 4))(range(30))
    trace = cv.trace(model, image, target=3)
    with probing(trace, removal, label="test", forwards=30, seed=2) as probe:
        if removal == "token":
            smooth = binarise(smooth, seed=2)
            scores = [probe.score_kept(keep.reshape(1, 1, -1)) for keep in smooth]
        else:
            paint = masks(range(30))
            scores = [
                probe.target(model.logits(m * image + (1 - m) * probe.background))[:, None]
                for m in paint[:, None, None]
            ]
    value, error = by_hand(torch.cat(scores, 1)[0].double(), smooth, None if by_sum else 0.4)
    assert_same(explanation.maps[0], value)
    assert explanation.standard_error is not None
    assert_same(explanation.standard_error[0], error)


def test_hard_masks_at_pixel_level_are_patches() -> None:
    model, image = double("timm-vit")
    fine = explained(model, image, "rise", samples=20, removal="token", level="pixel")
    coarse = explained(model, image, "rise", samples=20, removal="token")
    assert_same(fine.maps, coarse.maps.repeat_interleave(8, -1).repeat_interleave(8, -2))
    assert fine.standard_error is not None
    assert fine.standard_error.shape == fine.maps.shape


def test_large_sums_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = linear()
    whole = explained(model, image, "rise", samples=50)
    monkeypatch.setattr(rise, "NUMBERS_AT_ONCE", 100)
    pieces = explained(model, image, "rise", samples=50)
    assert_same(pieces.maps, whole.maps)
    assert_same(pieces.standard_error, whole.standard_error)


# All three


@pytest.mark.parametrize("removal", ["mean", "token"])
@pytest.mark.parametrize("name", ["rise(samples=70)", "rise(samples=70,level=pixel)", "occlusion", "pami"])
def test_the_same_map_for_any_batch_size(name: str, removal: str) -> None:
    model, image = double("timm-vit")
    maps = [cv.explain(model, image, name, 3, batch_size=n, removal=removal).maps for n in (1, 7, 64)]
    for other in maps[1:]:
        assert_same(other, maps[0], magnitude=1)  # probabilities, and differences of them


def test_images_share_their_masks() -> None:
    """So that an image has the same map alone as in a batch with others."""
    model, image = linear()
    two = torch.cat([image, image.flip(-1)])
    together = explained(model, two, "rise", samples=200).maps
    assert_same(together[1:], explained(model, two[1:], "rise", samples=200).maps)


@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("name", ["rise(samples=12)", "occlusion", "pami"])
def test_every_removal_works(name: str, removal: str) -> None:
    explanation = cv.explain(wrapped("timm-vit"), pixels("timm-vit"), name, 3, removal=removal)
    assert explanation.maps.shape == (2, 4, 4)
    assert explanation.maps.isfinite().all()
    assert explanation.maps.flatten(1).std(1).min() > 0


@pytest.mark.parametrize("name", ["rise(samples=12)", "occlusion", "pami"])
def test_networks_without_tokens_are_explained_too(name: str) -> None:
    explanation = cv.explain(*_network(), name, 3)
    assert explanation.maps.ndim == 3
    assert explanation.maps.flatten(1).std(1).min() > 0


def _network() -> tuple[cv.Model, Tensor]:
    return cv.wrap(cnn()), pixels("timm-vit")


@pytest.mark.parametrize(
    ("method", "seen", "say"),
    [
        ("rise(samples=1)", "samples=1", "2 or more masks"),
        ("rise(cells=1)", "cells=1", "cells=7"),
        ("rise(p=0)", "p=0", "p=0.5"),
        ("rise(p=1.0)", "p=1", "p=0.5"),
        ("occlusion(window=0)", "window=0", "window=1"),
        ("occlusion(stride=0)", "stride=0", "stride=1"),
        ("occlusion(window=2,stride=3)", "stride=3 was given with window=2", "Use stride=2"),
        ("pami(scales=0)", "scales=0", "scales="),
    ],
)
def test_bad_options_are_refused(method: str, seen: str, say: str) -> None:
    model, image = linear()
    with pytest.raises(BadInput, match=f"(?s){seen}.*expected.*{say}"):
        explained(model, image, method)
