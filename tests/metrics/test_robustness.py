"""Robustness: closed forms for methods that do not look, by hand for one that does, and shared passes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit._rng import image_seeds, make_generator
from clairvit.compat.quantus import numpy_generator, replace_zeros
from clairvit.errors import BadInput
from clairvit.metrics.registry import METRICS, list_metrics
from clairvit.metrics.robustness import away_from_zero, scaled_noise, steepest_slope
from helpers.rounding import assert_same, rounding_bound
from helpers.tiny_models import double, pixels, wrapped

KIND = "timm-vit"
NAMES = [metric.name for metric in list_metrics() if metric.family == "robustness"]


@pytest.mark.parametrize("name", NAMES)
def test_a_map_that_ignores_the_image_does_not_change(name: str) -> None:
    score = cv.evaluate(wrapped(KIND), pixels(KIND, 2), "center", name, target=3, samples=3)
    assert score.values.tolist() == [0, 0]


def noise(images: torch.Tensor, k: int, kind: str) -> torch.Tensor:
    drawn = []
    for mark in image_seeds(images, 0):
        chance = make_generator(mark, "robustness/noise", k)
        shape = images.shape[1:]
        drawn.append(
            2 * torch.rand(shape, generator=chance) - 1 if kind == "uniform" else torch.randn(shape, generator=chance)
        )
    return torch.stack(drawn).to(images)


def test_sensitivity_by_hand() -> None:
    model, images = double(KIND, 2)
    usual = cv.explain(model, images, "genatt", target=3).maps.flatten(1)
    changes = []
    for k in range(4):
        other = cv.explain(model, images + 0.2 * noise(images, k, "uniform"), "genatt", target=3).maps.flatten(1)
        changes.append((usual - other).norm(dim=1) / usual.norm(dim=1))
    for name, expected in (("max", torch.stack(changes).amax(0)), ("avg", torch.stack(changes).mean(0))):
        score = cv.evaluate(model, images, "genatt", f"{name}-sensitivity(samples=4)", target=3)
        assert_same(score.values, expected)
    assert (score.cost.forwards, score.cost.backwards) == (2, 2), "four of each, shared with two baselines"


def test_lipschitz_and_relative_stability_by_hand() -> None:
    model, images = double(KIND, 2)
    drawn = 0.1 * noise(images, 0, "normal")
    plain_maps, noisy_maps = (cv.explain(model, x, "ixg", target=3).maps for x in (images, images + drawn))
    over = [maps / maps.abs().amax((1, 2), keepdim=True) for maps in (plain_maps, noisy_maps)]
    slope = (over[0] - over[1]).flatten(1).norm(dim=1) / drawn.flatten(1).norm(dim=1)
    score = cv.evaluate(model, images, "ixg", "local-lipschitz(samples=1)", target=3)
    assert_same(score.values, slope)
    change = ((plain_maps - noisy_maps) / plain_maps).flatten(1).norm(dim=1)
    with torch.no_grad():
        moved = (model.logits(images + drawn) - model.logits(images)).norm(dim=1)
    score = cv.evaluate(model, images, "ixg", "relative-stability(samples=1,of=output)", target=3)
    assert_same(score.values, change / moved)
    inputs = (drawn / images).flatten(1).norm(dim=1)
    score = cv.evaluate(model, images, "ixg", "relative-stability(samples=1)", target=3)
    assert_same(score.values, change / inputs)


def test_more_samples_never_lower_a_maximum_and_batches_agree() -> None:
    model, images = double(KIND, 3)
    few, many = (cv.evaluate(model, images, "genatt", "max-sensitivity", target=3, samples=n) for n in (2, 5))
    assert (many.values >= few.values - rounding_bound(float(few.values.max()))).all()
    alone = cv.evaluate(model, images[1:2], "genatt", "max-sensitivity", target=3, samples=5)
    assert_same(alone.values[0], many.values[1])


def test_no_noise_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="samples=0 was given; expected 1 or more noisy copies, such as samples=10"):
        cv.evaluate(wrapped(KIND), pixels(KIND, 1), "genatt", "max-sensitivity", target=3, samples=0)


@pytest.mark.parametrize("method", ["rise(samples=24)", "lime(samples=24)", "kernelshap(samples=24)"])
def test_a_method_that_draws_may_draw_anew_for_each_copy(method: str) -> None:
    """With noise that hardly changes the image, all of the change is the method's own chance."""
    model, images = double(KIND, 3)
    for name in ("max-sensitivity", "avg-sensitivity"):
        same, anew = (
            cv.evaluate(model, images, method, name, target=3, samples=2, radius=1e-4, redraw=redraw)
            for redraw in (False, True)
        )
        assert (anew.values > 0.1).all()
        assert (anew.values > 20 * same.values).all()
    alone = cv.evaluate(model, images[1:2], method, name, target=3, samples=2, radius=1e-4, redraw=True)
    assert_same(alone.values[0], anew.values[1], label="the same in any batch")


def test_a_method_without_chance_has_none_to_draw() -> None:
    model, images = double(KIND, 2)
    still, usual = (
        cv.evaluate(model, images, "genatt", "max-sensitivity(samples=2)", target=3, redraw=redraw)
        for redraw in (True, False)
    )
    assert torch.equal(still.values, usual.values)


def test_redrawn_copies_by_hand() -> None:
    model, images = double(KIND, 2)
    usual = cv.explain(model, images, "random", target=3).maps.flatten(1)
    changes = []
    for k in range(3):
        seed = int(torch.randint(2**31, (), generator=make_generator(0, "robustness/method seeds", k)))
        copies = images + 0.2 * noise(images, k, "uniform")
        other = cv.explain(model, copies, "random", target=3, seed=seed).maps.flatten(1)
        changes.append((usual - other).norm(dim=1) / usual.norm(dim=1))
    score = cv.evaluate(model, images, "random", "max-sensitivity(samples=3,redraw=true)", target=3)
    assert_same(score.values, torch.stack(changes).amax(0))


@pytest.mark.parametrize(("distance", "p"), [("euclidean", 2), ("manhattan", 1)])
def test_pixels_of_a_patch_count_each(distance: str, p: int) -> None:
    model, images = double(KIND, 2)

    def slope(context: cv.extend.EvalContext, resolution: Literal["patch", "pixel"] = "patch") -> Tensor:
        return steepest_slope(context, 2, scaled_noise(context, "normal", 0.1), distance, resolution)

    with METRICS.restored():
        cv.metric("slope", better="lower")(slope)
        patch, pixel = (
            cv.evaluate(model, images, "ixg", "slope", target=3, resolution=resolution)
            for resolution in ("patch", "pixel")
        )
    grid = cv.explain(model, images, "ixg", target=3).maps.shape[1:]
    pixels_a_patch = images.shape[-1] * images.shape[-2] / (grid[0] * grid[1])
    assert_same(pixel.values, patch.values * pixels_a_patch ** (1 / p))


def test_copies_of_another_class_are_kept_left_out_or_nan() -> None:
    """Noise so large that some copies change their class, and some do not."""
    model, images = double(KIND, 3)
    kept, left = (
        cv.evaluate(model, images, "ixg", "relative-stability(samples=6,radius=1.5)", target=3, changed=word)
        for word in ("keep", "leave")
    )
    with torch.no_grad():
        before = model.logits(images).argmax(1)
        after = torch.stack([model.logits(images + 1.5 * noise(images, k, "normal")).argmax(1) for k in range(6)])
    moved = after != before
    assert moved.any(0).any(), "some image changes its class"
    assert (~moved).any(0).any(), "and some copy does not"
    assert torch.equal(left.values.isnan(), moved.all(0))
    there = ~left.values.isnan()
    assert (left.values[there] <= kept.values[there]).all()
    unmoved = ~moved.any(0)
    assert torch.equal(kept.values[unmoved], left.values[unmoved])
    assert kept.values.isfinite().all()


@pytest.mark.parametrize("of", ["input", "output"])
def test_quantus_has_no_score_where_a_copy_is_of_another_class(of: str) -> None:
    model, images = double(KIND, 3)
    text = f"relative-stability(preset=quantus,samples=6,radius=0.3,of={of})"
    kept, strict = (cv.evaluate(model, images, "ixg", text, target=3, changed=word) for word in ("keep", "nan"))
    generator = numpy_generator(0)
    noises = [torch.from_numpy(generator.uniform(0.02, 0.3, images.shape[1:])) for _ in range(6)]
    with torch.no_grad():
        before = model.logits(images).argmax(1)
        moved = torch.stack([model.logits(images + noise).argmax(1) for noise in noises]) != before
    assert torch.equal(strict.values.isnan(), moved.any(0))
    assert torch.equal(kept.values[~moved.any(0)], strict.values[~moved.any(0)])
    assert kept.values.isfinite().all()


def test_a_radius_below_the_least_noise_is_refused() -> None:
    with pytest.raises(BadInput, match=r"radius=0\.01 was given; expected more than 0\.02, such as radius=0\.2\."):
        cv.evaluate(wrapped(KIND), pixels(KIND, 1), "ixg", "relative-stability(compat=quantus,radius=0.01)", target=3)


def test_what_relative_changes_are_taken_of() -> None:
    values = torch.tensor([[[0.0, 1e-9], [-1e-9, -2.0]]], dtype=torch.float64)
    assert replace_zeros(values).flatten().tolist() == [1e-6, 1e-9, -1e-9, -2]
    assert away_from_zero(values, (1, 2)).flatten().tolist() == pytest.approx([2e-6, 2e-6, 2e-6, -2])
