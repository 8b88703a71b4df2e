"""Curves pixel by pixel and by accuracy, against loops that paint one image at a time; the papers' presets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics.metric import ask
from clairvit.perturb.removal import background
from tiny import pixels, wrapped

KIND = "timm-vit"
MODEL, IMAGES = wrapped(KIND), pixels(KIND, 2)
EX = cv.explain(MODEL, IMAGES, "ixg", target=[1, 4])
# A fine map without ties, so that there is one order only.
FINE = replace(EX, maps=torch.rand(2, 32, 32, generator=torch.Generator().manual_seed(3)))


def by_hand(parts: list[float], removal: str, shown: bool, reverse: bool = False) -> Tensor:
    """[B, S] probabilities of the targets, one painted image after the other."""
    ground = background(removal, IMAGES, MODEL.preprocess, 0)
    found = []
    for image, (target, fine) in enumerate(zip([1, 4], FINE.maps, strict=True)):
        order = fine.flatten().argsort(descending=not reverse)
        row = []
        for part in parts:
            mask = torch.zeros(32 * 32, dtype=torch.bool)
            mask[order[: round(part * 1024)]] = True
            mask = (mask if shown else ~mask).reshape(32, 32)
            seen = torch.where(mask, IMAGES[image], ground[image])
            with torch.no_grad():
                row.append(MODEL.logits(seen[None]).double().softmax(-1)[0, target])
        found.append(torch.stack(row))
    return torch.stack(found)


def area(y: Tensor) -> Tensor:
    """RISE's: (sum − (first + last)/2) / n."""
    return (y.sum(1) - (y[:, 0] + y[:, -1]) / 2) / (y.shape[1] - 1)


@pytest.mark.parametrize(("metric", "removal", "shown"), [("deletion", "mean", False), ("insertion", "blur", True)])
def test_rises_preset(metric: str, removal: str, shown: bool) -> None:
    parts = [k / 28 for k in range(29)]
    expected = by_hand(parts, removal, shown)
    score = cv.evaluate(MODEL, IMAGES, FINE, f"{metric}(preset=rise)")
    assert torch.allclose(score.curve.y, expected, atol=1e-5)
    assert score.curve.x.tolist() == pytest.approx(parts)
    assert torch.allclose(score.values, area(expected), atol=1e-5)
    assert score.cost.forwards == 28, "the whole image is known"


def test_the_worst_first() -> None:
    expected = by_hand([k / 10 for k in range(10)], "black", shown=False, reverse=True)
    score = cv.evaluate(MODEL, IMAGES, FINE, "deletion(preset=chefer)", reverse=True, score="prob")
    assert torch.allclose(score.curve.y, expected, atol=1e-5)


def test_accuracy_is_whether_the_target_is_the_answer() -> None:
    predicted = MODEL.logits(IMAGES).argmax(1).tolist()
    ex = cv.explain(MODEL, IMAGES, "ixg", target=predicted)
    score = cv.evaluate(MODEL, IMAGES, ex, "deletion(preset=skipplus)")
    prob = cv.evaluate(MODEL, IMAGES, ex, "deletion")
    assert set(score.curve.y.flatten().tolist()) <= {0.0, 1.0}
    assert score.curve.y[:, 0].tolist() == [1, 1]
    assert (prob.curve.y[score.curve.y == 1] > 1 / 7).all(), "the answer has more than its share"
    contrast = cv.explain(MODEL, IMAGES, "ixg", target=cv.contrast(1, 2))
    with pytest.raises(BadInput, match="score=accuracy was given, and the target is no class"):
        cv.evaluate(MODEL, IMAGES, contrast, "deletion", target=cv.contrast(1, 2), score="accuracy")


def test_both_ends() -> None:
    """Everything gone is the same for every map, and nothing shown is that too."""
    deleted = cv.evaluate(MODEL, IMAGES, EX, "deletion(ends=true,removal=mean)")
    inserted = cv.evaluate(MODEL, IMAGES, EX, "insertion(ends=true,removal=mean)")
    assert deleted.curve.x.tolist() == pytest.approx(inserted.curve.x.tolist())
    assert torch.allclose(deleted.curve.y[:, -1], inserted.curve.y[:, 0], atol=1e-6)
    assert torch.allclose(deleted.curve.y[:, 0], inserted.curve.y[:, -1], atol=1e-6)


def test_pixels_cannot_be_dropped() -> None:
    with pytest.raises(BadInput, match="granularity=pixel was given with removal=token"):
        cv.evaluate(MODEL, IMAGES, EX, "deletion(granularity=pixel)")
    with pytest.raises(BadInput, match="steps=0 was given; expected 1 or more"):
        cv.evaluate(MODEL, IMAGES, EX, "deletion(steps=0)")


@pytest.mark.parametrize("preset", ["rise", "coporan", "chefer", "skipplus"])
def test_presets_are_settled(preset: str) -> None:
    asked = ask(f"deletion(preset={preset})")
    assert asked != ask("deletion")
    assert ask(asked.text) == asked
