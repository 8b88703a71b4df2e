"""Robustness: closed forms for methods that do not look, by hand for one that does, and shared passes."""

from __future__ import annotations

import pytest
import torch

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics.metric import metrics
from clairvit.perturb.chance import dice, fingerprints
from tiny import pixels, wrapped

KIND = "timm-vit"
NAMES = [metric.name for metric in metrics() if metric.family == "robustness"]


@pytest.mark.parametrize("name", NAMES)
def test_a_map_that_ignores_the_image_does_not_change(name: str) -> None:
    score = cv.evaluate(wrapped(KIND), pixels(KIND, 2), "center", name, target=3, samples=3)
    assert score.values.tolist() == [0, 0]


def noise(images: torch.Tensor, k: int, kind: str) -> torch.Tensor:
    drawn = []
    for mark in fingerprints(images, 0):
        chance = dice(mark, k)
        shape = images.shape[1:]
        drawn.append(
            2 * torch.rand(shape, generator=chance) - 1 if kind == "uniform" else torch.randn(shape, generator=chance)
        )
    return torch.stack(drawn)


def test_sensitivity_by_hand() -> None:
    model, images = wrapped(KIND), pixels(KIND, 2)
    usual = cv.explain(model, images, "genatt", target=3).maps.double().flatten(1)
    changes = []
    for k in range(4):
        other = (
            cv.explain(model, images + 0.2 * noise(images, k, "uniform"), "genatt", target=3).maps.double().flatten(1)
        )
        changes.append((usual - other).norm(dim=1) / usual.norm(dim=1))
    for name, expected in (("max", torch.stack(changes).amax(0)), ("avg", torch.stack(changes).mean(0))):
        found = cv.evaluate(model, images, "genatt", f"{name}-sensitivity(samples=4)", target=3)
        assert torch.allclose(found.values, expected, rtol=1e-4)
    assert (found.cost.forwards, found.cost.backwards) == (2, 2), "four of each, shared with two baselines"


def test_lipschitz_and_relative_stability_by_hand() -> None:
    model, images = wrapped(KIND), pixels(KIND, 2)
    drawn = 0.1 * noise(images, 0, "normal")
    one, other = (cv.explain(model, x, "ixg", target=3).maps.double() for x in (images, images + drawn))
    over = [maps / maps.abs().amax((1, 2), keepdim=True) for maps in (one, other)]
    slope = (over[0] - over[1]).flatten(1).norm(dim=1) / drawn.double().flatten(1).norm(dim=1)
    found = cv.evaluate(model, images, "ixg", "local-lipschitz(samples=1)", target=3)
    assert torch.allclose(found.values, slope, rtol=1e-4)
    change = ((one - other) / one).flatten(1).norm(dim=1)
    with torch.no_grad():
        moved = (model.logits(images + drawn) - model.logits(images)).double().norm(dim=1)
    found = cv.evaluate(model, images, "ixg", "relative-stability(samples=1,of=output)", target=3)
    assert torch.allclose(found.values, change / moved, rtol=1e-3)
    inputs = (drawn.double() / images.double()).flatten(1).norm(dim=1)
    found = cv.evaluate(model, images, "ixg", "relative-stability(samples=1)", target=3)
    assert torch.allclose(found.values, change / inputs, rtol=1e-3)


def test_more_samples_never_lower_a_maximum_and_batches_agree() -> None:
    model, images = wrapped(KIND), pixels(KIND, 3)
    few, many = (cv.evaluate(model, images, "genatt", "max-sensitivity", target=3, samples=n) for n in (2, 5))
    assert (many.values >= few.values).all()
    alone = cv.evaluate(model, images[1:2], "genatt", "max-sensitivity", target=3, samples=5)
    assert float(alone.values) == pytest.approx(float(many.values[1]), rel=1e-4)


def test_no_noise_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match=r"samples=0 and radius=0\.2 were given"):
        cv.evaluate(wrapped(KIND), pixels(KIND, 1), "genatt", "max-sensitivity", target=3, samples=0)
