"""Curves pixel by pixel and by accuracy, against the papers' own loops written out; their schedules, areas, directions.

The loops take pixels away one lot after the other from one running image, where the metric starts from the clean one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics.curves import RemovalSchedule, area_under_curve, passes
from clairvit.metrics.registry import find_metric, resolve_metric
from clairvit.perturbation.removal import background
from helpers.linear_patch_model import linear
from helpers.rounding import assert_same
from helpers.tiny_models import double

KIND = "timm-vit"
MODEL, IMAGES = double(KIND, 2)
EX = cv.explain(MODEL, IMAGES, "ixg", target=[1, 4])
# Real size, a model that costs nothing, and a fine map without ties, so that there is one order only.
BIG, PHOTO = linear((14, 14), 16, seed=5)
PHOTO = PHOTO + 0.2 * torch.randn(1, 3, 1, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
TARGET = int(BIG.logits(PHOTO).argmax())
ORDER = torch.randperm(224 * 224, generator=torch.Generator().manual_seed(3))
FINE = torch.linspace(1, 0, 224 * 224, dtype=torch.float64)[ORDER.argsort()].reshape(1, 224, 224)


def of_photo(metric: str, **more: object) -> cv.Score:
    ex = replace(cv.explain(BIG, PHOTO, "random", target=TARGET), maps=FINE)
    score = cv.evaluate(BIG, PHOTO, ex, metric, **more)
    assert isinstance(score, cv.Score)
    return score


def probability(image: Tensor) -> float:
    with torch.no_grad():
        return float(BIG.logits(image).softmax(-1)[0, TARGET])


def lots(order: Tensor, size: int, count: int) -> Iterable[Tensor]:
    return (order[k * size : (k + 1) * size] for k in range(count))


def replaced(start: Tensor, finish: Tensor, parts: Iterable[Tensor]) -> list[float]:
    """Probabilities as lots of pixels of `start` turn into those of `finish`."""
    now, curve = start.clone().flatten(2), [probability(start)]
    for places in parts:
        now[:, :, places] = finish.flatten(2)[:, :, places]
        curve.append(probability(now.reshape(start.shape)))
    return curve


@pytest.mark.parametrize(("preset", "step", "points"), [("rise", 1792, 29), ("rise-demo", 224, 225)])
def test_rise(preset: str, step: int, points: int) -> None:
    """(sum − (first + last)/2) / n over so many pixels at a time, from all to nothing and from blur to all."""
    mean, blur = (background(name, PHOTO, BIG.preprocess, 0) for name in ("mean", "blur"))
    for metric, start, finish in (("deletion", PHOTO, mean), ("insertion", blur, PHOTO)):
        expected = replaced(start, finish, lots(ORDER, step, math.ceil(224 * 224 / step)))
        assert len(expected) == points
        score = of_photo(f"{metric}(preset={preset})")
        assert score.curve is not None
        assert_same(score.curve.y[0], expected)
        assert score.curve.x.tolist() == pytest.approx([k / (points - 1) for k in range(points)])
        assert_same(score.mean, (sum(expected) - (expected[0] + expected[-1]) / 2) / (points - 1))
        assert score.cost.forwards == points - 1, "the whole image is known"


def test_coporan() -> None:
    """100 lots of 501 pixels turn black; the last 76 pixels never do."""
    expected = replaced(PHOTO, background("black", PHOTO, BIG.preprocess, 0), lots(ORDER, 501, 100))
    score = of_photo("deletion(preset=coporan)")
    assert score.curve is not None
    assert_same(score.curve.y[0], expected)
    assert score.curve.x.tolist() == pytest.approx([k / 100 for k in range(101)])
    assert_same(score.mean, (sum(expected) - (expected[0] + expected[-1]) / 2) / 100)
    assert RemovalSchedule(99, ends=True, counting="equal").fractions_and_counts(224 * 224)[1][-1] == 224 * 224 - 76
    assert "coporan" not in find_metric("insertion").presets


@pytest.mark.parametrize(("preset", "better"), [("chefer", "lower"), ("chefer-negative", "higher")])
def test_chefer(preset: str, better: str) -> None:
    """int(q · 50 176) pixels turn black, q = 10 … 90 %; nothing at 0, and the area is over 10 … 90 %."""
    order = ORDER if better == "lower" else ORDER.flip(0)
    black = background("black", PHOTO, BIG.preprocess, 0)
    counts = [5017, 10035, 15052, 20070, 25088, 30105, 35123, 40140, 45158]
    expected = []
    for count in counts:
        now = PHOTO.clone().flatten(2)
        now[:, :, order[:count]] = black.flatten(2)[:, :, order[:count]]
        expected.append(probability(now.reshape(PHOTO.shape)))
    score = of_photo(f"deletion(preset={preset})", score="prob")
    assert score.curve is not None
    assert_same(score.curve.y[0], expected)
    assert score.curve.x.tolist() == pytest.approx([k / 10 for k in range(1, 10)])
    assert_same(score.mean, (sum(expected) - (expected[0] + expected[-1]) / 2) / 8)
    assert score.better == better
    right = of_photo(f"deletion(preset={preset})")
    assert right.curve is not None
    assert set(right.curve.y.flatten().tolist()) <= {0.0, 1.0}
    assert RemovalSchedule(counting="down").fractions_and_counts(224 * 224)[1][1:-1] == counts
    assert RemovalSchedule(counting="down").fractions_and_counts(99)[1][1] == 9, "cut off, not rounded"


def by_patches(shown: bool) -> list[float]:
    """Probabilities with 10 … 90 % of the patches of a mean map away, or there alone."""
    order = FINE.unfold(1, 16, 16).unfold(2, 16, 16).mean((3, 4)).flatten().argsort(descending=True)
    curve = []
    for k in range(1, 10):
        first = torch.zeros(196).scatter_(0, order[: round(k * 19.6)], 1) > 0
        left = (first if shown else ~first).reshape(14, 14).repeat_interleave(16, 0).repeat_interleave(16, 1)
        curve.append(probability(torch.where(left, PHOTO, 0.0)))
    return curve


@pytest.mark.parametrize("shown", [False, True])
def test_skipplus(shown: bool) -> None:
    """Falls of the probability and of its logarithm, in [0, 1] units; the area is over a width of 0.9, not divided."""
    whole = probability(PHOTO)
    p = [*by_patches(shown), whole] if shown else [whole, *by_patches(shown)]
    metric, better = ("insertion", "lower") if shown else ("deletion", "higher")
    falls = {
        "skipplus-aopc": [whole - p_left for p_left in p],
        "skipplus-log-odds": [math.log(whole) - math.log(p_left) for p_left in p],
    }
    for preset, expected in falls.items():
        score = of_photo(f"{metric}(preset={preset})", removal="mean")
        assert score.curve is not None
        assert_same(score.curve.y[0], expected)
        assert_same(score.mean, sum(a + b for a, b in pairwise(expected)) / 20, magnitude=max(map(abs, expected)))
        assert score.better == better
        assert score.curve.x.tolist() == pytest.approx([k / 10 for k in (range(1, 11) if shown else range(10))])
    accuracy = of_photo(f"{metric}(preset=skipplus)", removal="mean")
    assert accuracy.better == ("higher" if shown else "lower")
    assert accuracy.curve is not None
    assert set(accuracy.curve.y.flatten().tolist()) <= {0.0, 1.0}


def test_two_turns_undo_each_other() -> None:
    texts = ("reverse=true", "score=drop", "reverse=true,score=drop")
    assert [resolve_metric(f"deletion({text})").better for text in texts] == ["higher", "higher", "lower"]


def test_the_logarithm_of_nothing_is_that_of_1e_12() -> None:
    model, image = linear((6, 6), 4)
    with torch.no_grad():
        model.module.weights.mul_(1000)
    best = int(model.logits(image).argmax())
    ex = cv.explain(model, image, "ixg", target=best)
    score = cv.evaluate(model, image, ex, "deletion(score=log-odds,removal=mean)")
    assert_same(score.curve.y.max(), -math.log(1e-12))
    assert score.curve.y.isfinite().all()


def test_accuracy_is_whether_the_target_is_the_answer() -> None:
    predicted = MODEL.logits(IMAGES).argmax(1).tolist()
    ex = cv.explain(MODEL, IMAGES, "ixg", target=predicted)
    score = cv.evaluate(MODEL, IMAGES, ex, "deletion(preset=skipplus)")
    prob = cv.evaluate(MODEL, IMAGES, ex, "deletion")
    assert set(score.curve.y.flatten().tolist()) <= {0.0, 1.0}
    assert score.curve.y[:, 0].tolist() == [1, 1]
    assert (prob.curve.y[score.curve.y == 1] > 1 / 7).all(), "the answer has more than its share"
    contrast = cv.explain(MODEL, IMAGES, "ixg", target=cv.Contrast(1, 2))
    with pytest.raises(BadInput, match="score=accuracy was given, and the target is no class"):
        cv.evaluate(MODEL, IMAGES, contrast, "deletion", target=cv.Contrast(1, 2), score="accuracy")


def test_both_ends() -> None:
    """Everything gone is the same for every map, and nothing shown is that too."""
    deleted = cv.evaluate(MODEL, IMAGES, EX, "deletion(ends=true,removal=mean)")
    inserted = cv.evaluate(MODEL, IMAGES, EX, "insertion(ends=true,removal=mean)")
    assert deleted.curve.x.tolist() == pytest.approx(inserted.curve.x.tolist())
    assert_same(deleted.curve.y[:, -1], inserted.curve.y[:, 0])
    assert_same(deleted.curve.y[:, 0], inserted.curve.y[:, -1])


def test_so_many_patches_at_a_time() -> None:
    """16 patches, five at a time: 5, 10, 15, and the last one; as many values of pixels end in the same image."""
    assert RemovalSchedule(at_once=5).fractions_and_counts(16) == ([0, 0.25, 0.5, 0.75, 1], [0, 5, 10, 15, 16])
    patches, values = (
        cv.evaluate(MODEL, IMAGES, EX, f"deletion(removal=minimum,{more},upsampling=nearest)")
        for more in ("at_once=4", f"preset=quantus,at_once={4 * 3 * 64}")
    )
    assert_same(patches.curve.y[:, 1:], values.curve.y, label="a patch is all of its values")
    assert patches.cost.forwards == passes(16, "patch", 4).forwards == 4


def test_areas() -> None:
    x, y = torch.tensor([[0.1, 0.3, 0.9], [1.0, 3.0, 2.0]], dtype=torch.float64)
    assert_same(area_under_curve(x, y, "none"), 0.4 + 1.5)
    assert_same(area_under_curve(x, y, "width"), 1.9 / 0.8)
    assert_same(area_under_curve(x, y, "steps"), 2 + 2.5)


def test_pixels_cannot_be_dropped() -> None:
    for text in ("deletion(granularity=pixel)", "deletion(preset=quantus,removal=token)"):
        with pytest.raises(BadInput, match="removal=token, which takes whole patches; expected one that paints"):
            cv.evaluate(MODEL, IMAGES, EX, text)
    for text in ("steps=0", "at_once=0"):
        with pytest.raises(BadInput, match=f"{text} was given; expected 1 or more"):
            cv.evaluate(MODEL, IMAGES, EX, f"deletion({text})")


@pytest.mark.parametrize("name", ["deletion", "insertion"])
def test_presets_are_settled(name: str) -> None:
    texts = [resolve_metric(f"{name}(preset={preset})").text for preset in find_metric(name).presets]
    assert len({name, *texts}) == len(texts) + 1, "no two are the same"
    assert all(resolve_metric(text).text == text for text in texts)
