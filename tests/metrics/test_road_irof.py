"""ROAD, IROF and infidelity on linear models, where every number can be added up by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit._rng import image_seeds
from clairvit.errors import BadInput
from clairvit.metrics.curves import _kept_by_segment
from clairvit.metrics.faithfulness import _least_squares_factor, _random_blocks
from clairvit.metrics.registry import resolve_metric
from clairvit.perturbation.removal import impute
from clairvit.perturbation.segments import segments_on_patches, superpixels
from helpers.eval_contexts import case_of
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same, rounding_bound
from helpers.tiny_models import pixels, wrapped

GRID, PATCH, TARGET = (8, 8), 8, 0
MODEL, IMAGE = linear(GRID, PATCH, seed=6)  # the whole image speaks for the target, as IROF wants it
BEST = effects(MODEL, IMAGE, TARGET)
RANDOM = cv.explain(MODEL, IMAGE, "random", target=TARGET).maps[0]
WHOLE = float(BEST.sum())
TOTAL = float(BEST.abs().sum())  # the size of what the sums below add up
MEAN: dict[str, Any] = {"score": "logit", "removal": "mean"}


def of_map(maps: Tensor, metric: str, **more: Any) -> cv.Score:
    ex = replace(cv.explain(MODEL, IMAGE, "random", target=TARGET), maps=maps[None])
    score = cv.evaluate(MODEL, IMAGE, ex, metric, **more)
    assert isinstance(score, cv.Score)
    return score


@pytest.mark.parametrize("name", ["road", "irof"])
def test_the_best_map_beats_a_random_map_beats_the_worst(name: str) -> None:
    best, random_score, worst = (of_map(maps, name, **MEAN).mean for maps in (BEST, RANDOM, -BEST))
    assert best > random_score > worst


# ROAD


def test_road_by_hand() -> None:
    """With the mean colour in the place of imputation, what is left adds up patch by patch."""
    falling = BEST.flatten().sort(descending=True).values
    counts = [round(k / 10 * 64) for k in range(1, 10)]
    morf = sum(float(falling[count:].sum()) for count in counts) / 9
    lerf = sum(float(falling[: 64 - count].sum()) for count in counts) / 9
    assert_same(of_map(BEST, "road(order=morf)", **MEAN).mean, morf, magnitude=TOTAL)
    assert_same(of_map(BEST, "road(order=lerf)", **MEAN).mean, lerf, magnitude=TOTAL)
    both = of_map(BEST, "road", **MEAN)
    assert_same(both.mean, (lerf - morf) / 2, magnitude=TOTAL)
    assert both.curve is not None
    assert both.curve.x.tolist() == pytest.approx([k / 10 for k in range(1, 10)])
    assert both.cost.forwards == 18
    assert of_map(BEST, "road(order=morf)", **MEAN).cost.forwards == 9


def test_roads_presets_say_which_way_is_good() -> None:
    both, morf, lerf = (of_map(BEST, name, **MEAN) for name in ("road", "road(preset=morf)", "road(preset=lerf)"))
    assert [score.better for score in (both, morf, lerf)] == ["higher", "lower", "higher"]
    assert_same(both.mean, (lerf.mean - morf.mean) / 2, magnitude=TOTAL)
    worst = of_map(-BEST, "road(preset=morf)", **MEAN)
    assert morf.mean < worst.mean


def test_roads_patches_are_imputed_and_its_score_is_the_confidence() -> None:
    """The engine's imputation (proved in tests/perturb) of exactly the top patches, then softmax."""
    score = of_map(BEST, "road(order=morf,steps=1)")
    edge = BEST.flatten().sort(descending=True).values[31]  # half of 64
    top = edge <= BEST
    gone = top.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)[None]
    filled = impute(IMAGE, gone, image_seeds(IMAGE, 0))
    with torch.no_grad():
        expected = MODEL.module(filled).softmax(-1)[0, TARGET]
    assert_same(score.mean, expected)
    assert of_map(BEST, "road(order=morf,steps=1)", removal="mean").mean != pytest.approx(score.mean, abs=1e-4)


def test_imputation_takes_away_what_stands_out() -> None:
    """Bright patches on a dark ground are imputed dark. (On an even image imputation changes nothing, for any map.)"""
    model, image = linear(GRID, PATCH)
    with torch.no_grad():
        model.module.weights.abs_()
    bright = torch.zeros(GRID, dtype=torch.float64)
    bright[1:8:3, 1:8:3] = 2
    image = bright.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1).expand(1, 3, -1, -1).contiguous()
    truth = effects(model, image, TARGET)
    means = []
    for maps in (truth, RANDOM, -truth):
        ex = replace(cv.explain(model, image, "random", target=TARGET), maps=maps[None])
        means.append(cv.evaluate(model, image, ex, "road", score="logit").mean)
    best, random_score, worst = means
    assert best > random_score > worst
    assert best > float(truth.sum()) / 4, "a half is the most there is"


# IROF


def test_irof_by_hand() -> None:
    """Superpixels in the order of the mean effect of their patches; the curve added up, the area by the trapezoid."""
    groups = segments_on_patches(superpixels(IMAGE[0], MODEL.preprocess), GRID)
    count = int(groups.max()) + 1
    assert count >= 3, "the image must have something to order"
    for maps in (BEST, RANDOM):
        parts = [groups == k for k in range(count)]
        order = sorted(parts, key=lambda part: -float(maps[part].mean()))
        curve = [WHOLE]
        for part in order:
            curve.append(curve[-1] - float(BEST[part].sum()))
        area = sum((a + b) / 2 for a, b in pairwise(curve)) / count / WHOLE
        score = of_map(maps, "irof", **MEAN)
        assert_same(score.mean, 1 - area, magnitude=TOTAL / WHOLE)
        assert score.cost.forwards == count


def test_images_of_a_batch_have_superpixels_of_their_own() -> None:
    """As many as each has: the batch asks for a ragged lot of variants, and each image's score is its own."""
    images = torch.cat([IMAGE, IMAGE.flip(3) + torch.linspace(-3, 1, 64), IMAGE + torch.linspace(-3, 2, 64)[:, None]])
    counts = {int(segments_on_patches(superpixels(image, MODEL.preprocess), GRID).max()) + 1 for image in images}
    assert len(counts) > 1
    assert min(counts) > 1
    together = cv.evaluate(MODEL, images, "ixg", "irof", target=TARGET)
    assert isinstance(together, cv.Score)
    alone = [cv.evaluate(MODEL, image[None], "ixg", "irof", target=TARGET).mean for image in images]
    assert_same(together.values, alone)
    assert len({round(value, 4) for value in alone}) == 3


def test_an_image_of_one_superpixel_has_no_irof() -> None:
    model, image = linear((6, 6), 4)
    assert int(superpixels(image[0], model.preprocess).max()) == 0
    score = cv.evaluate(model, image, "random", "irof", target=1)
    assert isinstance(score, cv.Score)
    assert math.isnan(score.mean)


def test_groups_go_one_by_one_and_ties_in_random_order() -> None:
    groups = torch.tensor([[0, 0], [1, 2]])
    maps = torch.tensor([[[1.0, 3.0], [5.0, 0.0]]])  # means 2, 5, 0
    (left,) = _kept_by_segment(case_of(maps, size=4), 0, groups)
    assert left.int().tolist() == [[1, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    flat = torch.zeros(1, 2, 2)
    firsts = {tuple(_kept_by_segment(case_of(flat, size=4, seed=seed), 0, groups)[0, 0].tolist()) for seed in range(20)}
    assert len(firsts) == 3, "a constant map: any of the three may go first"


# Infidelity


def test_the_effects_are_fully_faithful() -> None:
    exactly = rounding_bound(TOTAL) ** 2  # squares of what rounding leaves
    for options in ({}, {"scaled": False}, {"side": 2}, {"side": 8, "runs": 1}):
        assert of_map(BEST, "infidelity", **MEAN, **options).mean < exactly
    assert of_map(RANDOM, "infidelity", **MEAN).mean > 0.1
    assert of_map(RANDOM, "infidelity", **MEAN).cost.forwards <= 100


def test_only_without_scaling_does_the_unit_of_a_map_count() -> None:
    assert of_map(7 * BEST, "infidelity", **MEAN).mean < rounding_bound(TOTAL) ** 2
    random_score, more = (of_map(maps, "infidelity", **MEAN).mean for maps in (RANDOM, 7 * RANDOM))
    assert_same(random_score, more)
    nothing = of_map(torch.zeros(GRID), "infidelity(scaled=false)", **MEAN).mean
    assert nothing > 0.1
    assert_same(of_map(2 * BEST, "infidelity(scaled=false)", **MEAN).mean, nothing)
    assert_same(of_map(-BEST, "infidelity(scaled=false)", **MEAN).mean, 4 * nothing)


def test_the_opposite_of_the_effects_is_no_better_than_an_empty_map() -> None:
    empty, opposite = (of_map(maps, "infidelity", **MEAN).mean for maps in (torch.zeros(GRID), -BEST))
    assert_same(opposite, empty)
    assert of_map(RANDOM, "infidelity", **MEAN).mean <= empty


def test_the_gradient_is_fully_faithful_as_squares_of_pixels_go_one_by_one() -> None:
    """What changed times the gradient is the drop, whatever goes; half the gradient leaves half the drops, squared."""
    gradient = MODEL.module.weights[TARGET].detach() / (3 * PATCH**2)
    low = float(IMAGE.min())
    drops = (IMAGE - low).sum(1)[0] * gradient.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)
    for text in (
        "infidelity(preset=quantus,region=16,upsampling=nearest)",
        "infidelity(preset=quantus,upsampling=nearest)",
    ):
        assert of_map(gradient, text, score="logit").mean < rounding_bound(float(drops.abs().sum())) ** 2
    by_square = drops.reshape(4, 16, 4, 16).sum((1, 3)).flatten().cumsum(0)  # row by row, they stay away
    half = of_map(gradient / 2, "infidelity(preset=quantus,region=16,upsampling=nearest)")
    assert_same(half.mean, (by_square / 2).square().mean(), magnitude=float(drops.abs().sum()) ** 2)
    assert half.cost.forwards == 8, "16 squares, shared with the centre map"


def test_infidelity_by_hand() -> None:
    """Blocks as they were drawn, sums and squares one by one."""
    context = case_of(RANDOM[None], size=64)
    context.trace.pixels = IMAGE  # type: ignore[misc]
    blocks = _random_blocks(context, 100, None)[0].reshape(-1, *GRID)
    pairs = [(float(RANDOM[block].sum()), float(BEST[block].sum())) for block in blocks]
    plain = sum((a - d) ** 2 for a, d in pairs) / 100
    assert_same(of_map(RANDOM, "infidelity(scaled=false)", **MEAN).mean, plain)
    factor = sum(a * d for a, d in pairs) / sum(a * a for a, _ in pairs)
    scaled = sum((max(0, factor) * a - d) ** 2 for a, d in pairs) / 100
    assert_same(of_map(RANDOM, "infidelity", **MEAN).mean, scaled)


def test_the_factor_is_that_of_least_squares_and_never_negative() -> None:
    sums, drops = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = float(torch.linalg.lstsq(sums[:, None], drops[:, None]).solution)
    sign = math.copysign(1, expected)
    assert float(_least_squares_factor(sign * sums[None, None], drops[None])) == pytest.approx(abs(expected), rel=1e-10)
    assert float(_least_squares_factor(-sign * sums[None, None], drops[None])) == 0
    assert float(_least_squares_factor(0 * sums[None, None], drops[None])) == 0


def test_blocks_are_squares_everywhere_and_an_images_own() -> None:
    context = case_of(torch.zeros(2, 4, 7))
    blocks = _random_blocks(context, 400, None).reshape(2, 400, 4, 7)
    tall, wide = blocks.any(3).sum(2), blocks.any(2).sum(2)
    assert torch.equal(tall, wide)
    assert torch.equal(blocks.sum((2, 3)), tall * wide), "no gaps"
    assert set(tall.flatten().tolist()) == {1, 2}, "half of the shorter side at most"
    assert blocks.any(1).all(), "every patch is in some block"
    assert not torch.equal(blocks[0], blocks[1])
    assert torch.equal(blocks, _random_blocks(context, 400, None).reshape(blocks.shape))
    assert (_random_blocks(context, 50, 4).reshape(2, 50, 4, 7).sum((2, 3)) == 16).all()


def test_methods_share_the_blocks() -> None:
    alone = cv.evaluate(MODEL, IMAGE, "saliency", "infidelity", target=TARGET, **MEAN)
    beside = cv.evaluate(MODEL, IMAGE, ["saliency", "random", "center", "ixg"], ["infidelity"], target=TARGET, **MEAN)
    assert_same(beside["saliency", "infidelity(removal=mean)"].values, alone.values)
    assert sum(score.cost.forwards for score in beside.values()) <= 104, "100 passes for all of them"


# All three


@pytest.mark.parametrize("name", ["road", "irof", "infidelity"])
def test_on_a_transformer(name: str) -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 2)
    score, other = (cv.evaluate(model, images, "genatt", name, target=3, seed=seed) for seed in (0, 0))
    assert torch.equal(score.values.nan_to_num(), other.values.nan_to_num())
    low, high = resolve_metric(name).metric.span
    assert all(math.isnan(value) or low <= value <= high for value in score.values.tolist())


def test_options_that_make_no_sense_are_refused() -> None:
    for text, message in [
        ("road(steps=0)", "steps=0 was given; expected 1 or more"),
        ("infidelity(runs=0)", "runs=0 was given; expected 1 or more"),
        ("infidelity(side=9)", "side=9 was given; expected a block of 1 to 8 patches"),
        ("infidelity(side=0)", "side=0 was given; expected 1 or more patches, such as side=2"),
        ("infidelity(preset=quantus,region=0)", "region=0 was given; expected 1 or more pixels, such as region=4"),
        (
            "infidelity(preset=quantus,region=5)",
            "region=5 was given for images of .* expected a side that divides both",
        ),
    ]:
        with pytest.raises(BadInput, match=message):
            of_map(BEST, text)
