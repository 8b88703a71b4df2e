"""The edges (METRICS 0) for every metric that looks at masks: NaN and constant maps, empty, full, one-pixel masks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.metrics.localisation import FULL
from clairvit.metrics.registry import find_metric, list_metrics
from helpers.eval_contexts import case_of, values
from helpers.rounding import assert_same
from helpers.tiny_models import pixels, wrapped

SIZE = 16
ALL = [metric.name for metric in list_metrics() if metric.family == "localisation" and "methods" not in metric.needs]
VARIANTS = [
    *ALL,
    *(
        f"{name}(preset={preset})"
        for name in ALL
        for preset in find_metric(name).presets
        if (name, preset) != ("pointing-game", "quantus")  # an empty mask is a hit there: test_points
    ),
    *(f"{name}(threshold={word})" for name in ("pixel-accuracy", "iou", "f1") for word in ("otsu", "sweep", "best")),
    "iou(over=set,classes=two)",
    "ap(on=binary)",
    "faf(overlap=soft)",
    "faf(overlap=nearest)",
]
UNDEFINED_IF_FULL = ("roc-auc", "a-tsi", "m-tsi")  # no background to compare with


def noise(batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masks() -> Tensor:
    object_masks = torch.zeros(3, SIZE, SIZE, dtype=torch.bool)
    object_masks[:, 2:9, 3:10] = True
    return object_masks


@pytest.mark.parametrize("text", VARIANTS)
def test_a_map_with_nan_has_no_score(text: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        maps = noise().abs()
        maps[1, 2, 1] = bad
        metric_values = values(text, case_of(maps, masks=masks()))
        assert metric_values[0, 1].isnan()
        assert torch.equal(metric_values[0, [0, 2]], values(text, case_of(noise().abs(), masks=masks()))[0, [0, 2]])


@pytest.mark.parametrize("text", VARIANTS)
def test_a_constant_map_is_flagged_and_scores_as_a_random_map(text: str) -> None:
    context = case_of(torch.full((3, 4, 4), 2.0), masks=masks())
    assert context.degenerate.all()
    metric_values = values(text, context)
    low, high = find_metric(text.partition("(")[0]).span
    assert ((metric_values >= low) & (metric_values <= high)).all()
    other = values(text, case_of(torch.full((3, 4, 4), 7.0), masks=masks()))
    assert_same(metric_values, other, label="whatever the constant")


@pytest.mark.parametrize("text", VARIANTS)
def test_an_empty_mask_is_undefined(text: str) -> None:
    where = masks()
    where[1] = False
    context = case_of(noise().abs(), masks=where)
    metric_values = values(text, context)
    assert metric_values[0, 1].isnan()
    assert metric_values[0, [0, 2]].isfinite().all()
    assert FULL not in context.notes_log.notes


@pytest.mark.parametrize("text", VARIANTS)
def test_a_full_mask_is_flagged(text: str) -> None:
    where = masks()
    where[1] = True
    context = case_of(noise().abs(), masks=where)
    metric_values = values(text, context)
    assert context.notes_log.notes == [FULL]
    assert metric_values[0, [0, 2]].isfinite().all()
    assert metric_values[0, 1].isnan() if text.startswith(UNDEFINED_IF_FULL) else metric_values[0, 1].isfinite()
    mass = ("relevance-mass", "energy", "relevance-rank", "top-k", "pointing-game", "faf", "ap(on=binary)")
    if text.startswith(mass) or text == "ap":
        assert float(metric_values[0, 1]) == pytest.approx(1)
    void = torch.zeros_like(where)
    void[0], void[1, 3:5] = ~where[0], True
    context = case_of(noise().abs(), masks=where, void=void)
    values(text, context)
    assert context.notes_log.notes == [FULL], "void pixels are no background"


@pytest.mark.parametrize("text", VARIANTS)
def test_a_mask_of_one_pixel_is_defined(text: str) -> None:
    """A map that peaks there scores better than one that peaks elsewhere."""
    where = torch.zeros(2, SIZE, SIZE, dtype=torch.bool)
    where[:, 1, 14] = True
    maps = torch.zeros(2, SIZE, SIZE, dtype=torch.float64)
    maps[0, 1, 14] = maps[1, 15, 1] = 1
    context = case_of(maps, masks=where)
    actual = values(text, context)[0]
    if text in ("a-tsi", "m-tsi"):  # outside over inside: of a map that is zero inside there is no ratio
        assert actual[0] == 0
        assert actual[1].isnan()
        return
    assert actual.isfinite().all()
    if text.startswith("top-k"):  # of all pixels, as there are fewer than 1000
        assert actual.tolist() == [1 / SIZE**2] * 2
    else:
        assert actual[0] < actual[1] if text == "baf" else actual[0] > actual[1]


def test_one_pixel_is_part_of_a_patch_in_part() -> None:
    where = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
    where[:, 5, 10] = True
    context = case_of(torch.ones(1, 4, 4), masks=where)
    assert float(values("faf(overlap=soft)", context)) == pytest.approx(1 / 256)
    assert float(values("faf", context)) == 0
    assert values("faf(lift=true)", context).isnan(), "0 / 0: no patch is foreground"
    assert float(values("top-k(k=10)", context)) == pytest.approx(1 / 256), "a constant map"


@pytest.mark.parametrize("text", VARIANTS)
def test_batch_of_three_equals_three_of_one(text: str) -> None:
    together = values(text, case_of(noise(), masks=masks()))
    for image in range(3):
        alone = values(text, case_of(noise()[image : image + 1], masks=masks()[image : image + 1]))
        assert float(together[0, image]) == pytest.approx(float(alone), abs=1e-12)


def test_the_flag_is_a_note_of_the_score() -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 2)
    where = torch.zeros(2, *images.shape[-2:], dtype=torch.bool)
    where[:, 3:9] = True
    assert FULL not in cv.evaluate(model, images, "ixg", "iou", target=3, masks=where).notes
    where[1] = True
    assert FULL in cv.evaluate(model, images, "ixg", "iou", target=3, masks=where).notes
