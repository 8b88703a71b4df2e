"""cv.expect: shares of maps made by hand, falls by tokens dropped by hand, additive models, passes, bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import clairvit as cv
from clairvit.audit.expect import DRAWS, EMPTY, FULL, NO_MASK, random_patches
from clairvit.audit.expectation import SPANS
from clairvit.data.open import open_data
from clairvit.errors import BadInput, ClairWarning, UnknownName
from clairvit.metrics.confidence_intervals import mean_interval
from helpers.eval_contexts import case_of
from helpers.fixed_maps import fixed_map
from helpers.linear_patch_model import effects, linear
from helpers.reference_token_dropping import logits_left, logits_without
from helpers.rounding import assert_same
from helpers.tiny_models import build, double, fresh, wrapped

NAME, PATCHES, SIZE = "timm-vit", 16, 8
LEFT = [row * 4 + column for row in range(4) for column in range(2)]  # the left half of 4 × 4 patches


def region(patches: list[int], size: int = SIZE) -> Tensor:
    """Return the mask of some of 4 × 4 patches, bool [32, 32]."""
    cells = torch.zeros(PATCHES, dtype=torch.bool)
    cells[patches] = True
    return cells.reshape(4, 4).repeat_interleave(size, 0).repeat_interleave(size, 1)


def log_odds_of(logits: Tensor, index: int) -> float:
    p = logits.double().softmax(-1)[index]
    return float((p / (1 - p)).log())


def signed_map() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 4, generator=generator, dtype=torch.float64)


def test_shares_of_a_map_made_by_hand() -> None:
    model, images = double(NAME, batch=1)
    values = signed_map()
    flat = values.flatten()
    inside = [0, 1, 4, 5, 10]
    outside = [patch for patch in range(PATCHES) if patch not in inside]
    result = cv.expect(model, images, [region(inside)], fixed_map(values))
    positive = flat.clamp(min=0)
    assert_same(result.values("inside"), positive[inside].sum()[None] / positive.sum())
    assert_same(result.values("net_inside"), flat[inside].sum()[None] / flat.abs().sum())
    assert_same(result.values("net_outside"), flat[outside].sum()[None] / flat.abs().sum())
    assert_same(result.values("area"), torch.tensor([5 / 16], dtype=torch.float64))
    assert_same(result.values("lift"), positive[inside].sum()[None] / positive.sum() / (5 / 16))
    assert result.patches.tolist() == [5]


def test_an_inverted_mask_gives_the_complement() -> None:
    model, images = double(NAME)
    masks = torch.stack([region(LEFT), region([3, 7, 8])])
    result, inverse = (cv.expect(model, images, of, fixed_map(signed_map())) for of in (masks, ~masks))
    assert_same(result.values("inside") + inverse.values("inside"), torch.ones(2, dtype=torch.float64))
    assert_same(result.values("area") + inverse.values("area"), torch.ones(2, dtype=torch.float64))
    assert_same(result.values("net_inside"), inverse.values("net_outside"))
    assert_same(result.values("fall_inside"), inverse.values("fall_outside"))
    assert_same(result.values("fall_outside"), inverse.values("fall_inside"))
    assert not torch.equal(result.values("fall_inside"), result.values("fall_outside"))
    assert torch.equal(result.values("answer_kept"), 1 - inverse.values("answer_lost"))


def test_a_patch_belongs_to_the_region_by_half_of_its_pixels() -> None:
    model, images = double(NAME, batch=1)
    mask = region([0, 1])
    mask[:4, 16:24] = True  # half of patch 2
    mask[8:11, :8] = True  # 3 of 8 rows of patch 4
    assert cv.expect(model, images, mask, "ixg").patches.tolist() == [3]


def test_void_patches_are_neither_inside_nor_outside() -> None:
    model = wrapped(NAME, torch.float64)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    trimap = np.full((32, 32), 2, np.uint8)
    trimap[:, :8] = 1  # 4 patches
    trimap[:, 8:16] = 3  # 4 void patches
    values = signed_map()
    result = cv.expect(model, [picture], [trimap], fixed_map(values), mask_kind="trimap", draws=3)
    assert result.patches.tolist() == [4]
    assert result.area.tolist() == [1 / 3]
    positive = values.clamp(min=0)
    assert_same(result.inside, (positive[:, 0].sum() / positive[:, [0, 2, 3]].sum())[None])


def test_falls_are_those_of_tokens_dropped_by_hand() -> None:
    model, images = double(NAME)
    module = build(NAME).double()
    regions = (LEFT, [3, 7, 8])
    result = cv.expect(model, images, torch.stack([region(patches) for patches in regions]), "ixg", target=[2, 4])
    for row, (inside, index) in enumerate(zip(regions, (2, 4), strict=True)):
        image = images[row : row + 1]
        outside = [patch for patch in range(PATCHES) if patch not in inside]
        full, without_inside, without_outside = (
            logits_without(module, image, gone, PATCHES) for gone in ([], inside, outside)
        )
        full_odds = log_odds_of(full, index)
        size = abs(full_odds) + 1
        assert_same(result.values("fall_inside")[row], full_odds - log_odds_of(without_inside, index), magnitude=size)
        assert_same(result.values("fall_outside")[row], full_odds - log_odds_of(without_outside, index), magnitude=size)
        assert_same(result.without_inside[row, 0], without_inside.softmax(-1)[index])
        assert result.answers[row] == f"class {int(full.argmax())}"
        assert result.answers_without_inside[row] == f"class {int(without_inside.argmax())}"
        assert result.answers_without_outside[row] == f"class {int(without_outside.argmax())}"
        lost, kept = (float(int(full.argmax()) == int(other.argmax())) for other in (without_inside, without_outside))
        assert result.values("answer_lost")[row] == 1 - lost
        assert result.values("answer_kept")[row] == kept


def test_random_patches_are_hidden_by_hand_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw is a dropped set of the size of the inside, then of the outside; the excess is over their mean."""
    drawn: list[Tensor] = []

    def recorded(*arguments: Any) -> Tensor:
        drawn.append(random_patches(*arguments))
        return drawn[-1]

    monkeypatch.setattr("clairvit.audit.expect.random_patches", recorded)
    model, images = double(NAME, batch=1)
    module = build(NAME).double()
    result = cv.expect(model, images, region([5, 6, 9]), "ixg", target=1, draws=3)
    assert [int(sets.sum()) for sets in drawn] == [3, 3, 3, 13, 13, 13]
    assert len({tuple(sets.flatten().tolist()) for sets in drawn}) > 2
    odds = [log_odds_of(logits_left(module, images, (~sets[0]).nonzero().T)[0], 1) for sets in drawn]
    inside, outside = sum(odds[:3]) / 3, sum(odds[3:]) / 3
    size = max(map(abs, odds)) + 1
    assert_same(result.random_inside[0, :, 1], odds[:3], magnitude=size)
    assert_same(result.random_outside[0, :, 1], odds[3:], magnitude=size)
    assert_same(result.values("excess_inside")[0], inside - float(result.without_inside[0, 1]), magnitude=size)
    assert_same(result.values("excess_outside")[0], outside - float(result.without_outside[0, 1]), magnitude=size)
    assert result.draws == 3


def test_random_patches_are_of_those_that_count_and_as_many_as_asked_for() -> None:
    context = case_of(torch.rand(3, 4, 4, dtype=torch.float64))
    among = torch.zeros(3, 16, dtype=torch.bool)
    among[:, :12] = True
    counts = torch.tensor([1, 5, 12])
    drawn = [random_patches(context, among, counts, index) for index in range(8)]
    assert all(torch.equal(sets.sum(1), counts) and not (sets & ~among).any() for sets in drawn)
    assert len({tuple(sets[1].tolist()) for sets in drawn}) == 8
    assert torch.equal(random_patches(context, among, counts, 3), drawn[3])


def test_an_additive_model_falls_by_the_sum_of_what_was_hidden() -> None:
    """Painted with the mean a patch counts 0, so that a contrast falls by Σ effects; a note says that it is painted."""
    model, image = linear()
    difference = (effects(model, image, 0) - effects(model, image, 2)).flatten()
    result = cv.expect(model, image, [region(LEFT)], "leave-one-out", cv.Contrast(0, 2), removal="mean")
    right = [patch for patch in range(PATCHES) if patch not in LEFT]
    assert_same(result.values("fall_inside"), difference[LEFT].sum()[None], magnitude=float(difference.abs().sum()))
    assert_same(result.values("fall_outside"), difference[right].sum()[None], magnitude=float(difference.abs().sum()))
    assert (result.quantity, result.unit) == ("score", "score")
    painted = cv.expect(model, image, [region(LEFT)], "leave-one-out", cv.Contrast(0, 2))
    assert_same(painted.full, result.full)
    assert any("painted" in note and note.startswith("expect:") for note in painted.notes)
    assert not any(note.startswith("expect:") for note in result.notes)


@pytest.mark.parametrize("draws", [1, DRAWS, 4])
def test_passes_are_counted(draws: int) -> None:
    """One forward and backward for the map, two passes without inside and outside, two for each draw."""
    model, images = double(NAME, batch=1)
    calls = []
    handle = model.module.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    try:
        cv.expect(model, images, region(LEFT), "ixg", draws=draws)  # the structure is found once
        calls.clear()
        result = cv.expect(model, images, region(LEFT), "ixg", draws=draws, batch_size=1)
    finally:
        handle.remove()
    assert (result.cost.forwards, result.cost.backwards) == (3 + 2 * draws, 1)
    assert len(calls) == 3 + 2 * draws


def test_images_without_a_usable_region_are_named_and_left_out() -> None:
    model, images = double(NAME, batch=5)
    sliver = torch.zeros(32, 32, dtype=torch.bool)
    sliver[:, :3] = True
    masks = [region(LEFT), None, torch.zeros(32, 32), torch.ones(32, 32), sliver]
    result = cv.expect(model, images, masks, "ixg")
    assert result.rows == (0,)
    assert [reason for _, reason in result.left_out] == [NO_MASK, EMPTY, FULL, EMPTY]
    assert len({name for name, _ in result.left_out}) == 4
    alone = cv.expect(model, images[:1], masks[:1], "ixg")
    assert_same(result.full, alone.full)
    with pytest.raises(BadInput, match=r"No image with a region is left .*has no mask"):
        cv.expect(model, images[1:], masks[1:], "ixg")


def test_a_mask_of_another_size_is_one_sentence_or_left_out() -> None:
    model, images = double(NAME)
    masks = [region(LEFT), torch.ones(16, 16)]
    with pytest.raises(BadInput, match=r"mask has shape \[16, 16\] for an image of 32 × 32"):
        cv.expect(model, images, masks, "ixg")
    with pytest.warns(ClairWarning, match="is left out"):
        result = cv.expect(model, images, masks, "ixg", on_error="skip")
    assert result.rows == (0,)
    assert "[16, 16]" in dict(result.left_out)[cv.explain(model, images, "ixg").names[1]]


def test_results_do_not_depend_on_the_batch() -> None:
    model, images = double(NAME, batch=3)
    masks = torch.stack([region([patch, patch + 5]) for patch in range(3)])
    together = cv.expect(model, images, masks, "ixg", target=3)
    for row in range(3):
        alone = cv.expect(model, images[row : row + 1], masks[row : row + 1], "ixg", target=3)
        for name in SPANS:
            assert_same(alone.values(name), together[row].values(name), magnitude=10.0)
    other = cv.expect(model, images, masks, "ixg", target=3, seed=1)
    assert not torch.equal(other.random_inside, together.random_inside)


def test_conditions_and_what_fails() -> None:
    model, images = double(NAME, batch=6)
    masks = torch.stack([region(list(range(count))) for count in (2, 4, 6, 8, 10, 12)])
    result = cv.expect(model, images, masks, "ixg", threshold=["area >= 0.5 on 50%", "mean area < 0.9"])
    assert [test.passed for test in result.tests] == [True, True]
    assert result.passed
    assert result.failed.rows == (0, 1, 2)
    assert result.fails == (True, True, True, False, False, False)
    assert result[3:].passed is False, "fewer than 6 images have no interval of a mean"
    (strict,) = result.test("area >= 0.5")
    assert not strict.passed
    assert cv.expect(model, images, masks, "ixg").passed is None
    values = result.values("area").numpy()
    mean = result.mean("area")
    assert (mean.images, mean.mean) == (6, values.mean())
    assert (mean.low, mean.high) == mean_interval(values, 0, (0, 1))


def test_classes_are_the_true_ones_where_they_are_known() -> None:
    model, images = double(NAME, batch=4)
    masks = torch.stack([region(LEFT)] * 4)
    result = cv.expect(model, images, masks, "ixg", "label", labels=[1, 2, 1, 2])
    assert result.targets == result.classes == ("class 1", "class 2", "class 1", "class 2")
    by_class = result.by_class()
    assert list(by_class) == ["class 1", "class 2"]
    assert by_class["class 2"].rows == (1, 3)
    predicted = cv.expect(model, images, masks, "ixg", labels=[1, 2, 1, None])
    assert predicted.targets == predicted.answers
    assert predicted.classes == (*result.classes[:3], predicted.targets[3])


def test_two_models_are_compared_image_by_image() -> None:
    model, images = double(NAME, batch=6)
    old = fresh(NAME, torch.float64)
    with torch.no_grad():
        old.module.head.weight.mul_(-1)
    masks: list[Any] = [region([patch, patch + 4]) for patch in range(6)]
    result = cv.expect(model, images, masks, "ixg", against=old, threshold="mean inside_change > -1")
    new_alone, old_alone = (cv.expect(each, images, masks, "ixg") for each in (model, old))
    assert result.against is not None
    for name in SPANS:
        assert torch.equal(result.values(name), new_alone.values(name))
        assert torch.equal(result.against.values(name), old_alone.values(name))
        change = new_alone.values(name) - old_alone.values(name)
        assert torch.equal(result.values(f"{name}_change"), change)
    paired = result.mean("inside_change")
    assert (paired.low, paired.high) == mean_interval(result.values("inside_change").numpy(), 0, (-1, 1))
    assert result.answer_changed == tuple(
        new != other for new, other in zip(new_alone.answers, old_alone.answers, strict=True)
    )
    assert any(result.answer_changed)
    assert result[2:4].against is not None
    assert result[2:4].against.names == result[2:4].names
    unchanged = cv.expect(model, images, masks, "ixg", against=model)
    assert unchanged.answer_changed == (False,) * 6
    assert not unchanged.values("inside_change").any()
    assert result.passed


def test_images_that_one_model_has_no_result_for_are_left_out_of_the_comparison() -> None:
    """A model of coarser patches sees no region in a small mask."""
    model, images = double(NAME, batch=2)
    small = torch.zeros(32, 32, dtype=torch.bool)
    small[:8, :8] = True
    masks = [small, region(LEFT)]
    coarse, _ = linear(grid=(2, 2), patch=16)
    result = cv.expect(model, images, masks, "saliency", cv.Contrast(0, 1), against=coarse)
    assert result.rows == (1,)
    assert result.left_out == ((cv.explain(model, images, "ixg").names[0], "linear has no result for it"),)


def test_the_default_method_is_that_of_explain() -> None:
    model, images = double(NAME, batch=1)
    assert cv.expect(model, images, region(LEFT)).method == cv.explain(model, images).method == "attnlrp+plus"
    linear_model, image = linear()
    explanation = cv.explain(linear_model, image)
    result = cv.expect(linear_model, image, region(LEFT))
    assert result.method == explanation.method != "attnlrp+plus"
    assert explanation.notes[-1] in result.notes


@pytest.mark.slow
def test_the_scenes_model_looks_at_its_objects() -> None:
    """Planted truth: in every scene more of the evidence lies on the object than its area, and removal agrees."""
    model = cv.load("scenes")
    result = cv.expect(
        model, open_data("scenes:8").dataset, threshold=["lift > 2", "mean excess_inside > 0", "answer_kept >= 1"]
    )
    assert result.passed, str(result)
    assert result.mean("inside").low > result.mean("area").high
    assert result.mean("excess_outside").high < 0
    assert len(result.by_class()) == 8


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"masks": None}, BadInput, "No regions were given; expected one mask per image: masks="),
        ({"masks": [None, None]}, BadInput, "2 masks were given for 1 images"),
        ({"draws": 0}, BadInput, "draws=0 was given; expected 1 or more"),
        ({"threshold": "inside"}, BadInput, "is no condition"),
        ({"threshold": "inside_change > 0"}, UnknownName, "no quantity 'inside_change'"),
        ({"removal": "nothing"}, (BadInput, UnknownName), "nothing"),
        ({"method": "no-such-method"}, UnknownName, "no-such-method"),
        ({"target": "label"}, BadInput, "without labels for all images"),
        ({"on_error": 3}, BadInput, "on_error=3"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], error: Any, message: str) -> None:
    model, images = double(NAME, batch=1)
    with pytest.raises(error, match=message):
        cv.expect(model, images, **{"masks": [region(LEFT)], "method": "ixg"} | arguments)


def test_values_that_there_are_not() -> None:
    model, images = double(NAME, batch=1)
    result = cv.expect(model, images, region(LEFT), fixed_map(-torch.ones(4, 4, dtype=torch.float64)))
    assert math.isnan(result.values("inside")), "no positive evidence"
    assert result.sentence.startswith("No part of the evidence")
    assert result.values("net_inside").tolist() == [-0.5]
    assert result.test("inside >= 0")[0].passed is False
    with pytest.raises(UnknownName, match="no quantity 'insid'"):
        result.values("insid")
    with pytest.raises(BadInput, match="expected against="):
        result.values("inside_change")


def test_a_data_set_with_annotations_of_its_own_takes_no_others() -> None:
    model, scenes = wrapped(NAME), open_data("scenes:1").dataset
    for arguments in ({"masks": [region(LEFT)]}, {"labels": [0]}):
        with pytest.raises(BadInput, match="data set that has its own"):
            cv.expect(model, scenes, **arguments)
