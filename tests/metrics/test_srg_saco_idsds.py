"""SRG, SaCo and IDSDS against loops over a ViT whose tokens are removed by hand, and against the papers' own pixels.

The tiny model is run in float64, one image and one variant at a time, without the package's engine: embed, select
tokens, run the blocks, apply the head.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics.registry import find_metric, resolve_metric
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same
from helpers.tiny_models import double

MODEL, IMAGES = double("timm-vit", 2)
CLASSES, PATCHES = (1, 4), 16
MAPS = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@torch.no_grad()
def score_of_tokens(image: int, kept: list[int], kind: str) -> float:
    """Return the target's score with these patch tokens left, by hand."""
    module = MODEL.module.eval()
    tokens = module.norm_pre(module._pos_embed(module.patch_embed(IMAGES[image : image + 1])))  # type: ignore[operator]
    prefix = tokens.shape[1] - PATCHES
    tokens = tokens[:, [*range(prefix), *(prefix + patch for patch in sorted(kept))]]
    for block in module.blocks:  # type: ignore[union-attr]
        tokens = block(tokens)
    logits = module.forward_head(module.norm(tokens))[0]  # type: ignore[operator]
    return float((logits.softmax(-1) if kind == "prob" else logits)[CLASSES[image]])


@torch.no_grad()
def score_of_pixels(image: Tensor, label: int, kind: str) -> float:
    logits = MODEL.module.eval()(image[None])[0]
    return float((logits.softmax(-1) if kind == "prob" else logits)[label])


def evaluated(metric: str, maps: Tensor = MAPS, images: Tensor = IMAGES, **more: object) -> cv.Score:
    ex = cv.explain(MODEL, images, "random", target=list(CLASSES[: len(images)]))
    score = cv.evaluate(MODEL, images, replace(ex, maps=maps), metric, **more)
    assert isinstance(score, cv.Score)
    return score


def order_of(image: int) -> list[int]:
    return MAPS[image].flatten().argsort(descending=True).tolist()


def without(removed: list[int]) -> list[int]:
    return [patch for patch in range(PATCHES) if patch not in removed]


# SRG


def srg_by_hand(image: int, kind: str) -> float:
    """Trapezoids over 0, 10 %, …, 90 %, 100 % of 16 patches; both curves meet at the ends."""
    falling = order_of(image)
    counts = [max(1, min(15, round(k * 1.6))) for k in range(1, 10)]
    gains = [0.0]
    for count in counts:
        least_first = score_of_tokens(image, without(falling[PATCHES - count :]), kind)
        gains.append(least_first - score_of_tokens(image, without(falling[:count]), kind))
    gains.append(0.0)
    return sum((a + b) / 2 for a, b in itertools.pairwise(gains)) / 10


@pytest.mark.parametrize("kind", ["prob", "logit"])
def test_srg_with_tokens_dropped_by_hand(kind: str) -> None:
    score = evaluated("srg", score=kind)
    assert_same(score.values, [srg_by_hand(image, kind) for image in range(2)], magnitude=10.0)
    assert score.curve is not None
    assert score.curve.x.tolist() == pytest.approx([k / 10 for k in range(11)])
    assert score.curve.y[:, [0, -1]].abs().max() == 0
    assert score.cost.forwards == 18


def test_srg_is_two_deletions_to_the_end() -> None:
    """Painted patches can all be removed, so that the end is computed and the areas have the same width."""
    area = {
        reverse: evaluated(f"deletion(removal=mean,ends=true,score=logit,reverse={reverse})").values
        for reverse in (True, False)
    }
    assert_same(evaluated("srg(preset=blucher)").values, area[True] - area[False], magnitude=10.0)


def test_srg_of_the_opposite_map_is_the_opposite() -> None:
    assert_same(evaluated("srg", -MAPS).values, -evaluated("srg").values, magnitude=1.0)


def test_srg_in_steps_of_so_many() -> None:
    stepped = evaluated("srg(at_once=4,removal=mean)")
    assert_same(stepped.values, evaluated("srg(steps=3,removal=mean)").values, magnitude=1.0)
    assert_same(
        evaluated("srg(steps=3,removal=mean,granularity=pixel,upsampling=nearest)").values,
        stepped.values,
        magnitude=1.0,
    )


# SaCo


def saco_by_hand(drops: list[float], means: list[float]) -> float:
    total = signed = 0.0
    for i, j in itertools.combinations(range(len(drops)), 2):
        weight = means[i] - means[j]
        signed += weight if drops[i] >= drops[j] else -weight
        total += abs(weight)
    return signed / total


@pytest.mark.parametrize("groups", [4, 8, 10, 16])
def test_saco_with_tokens_dropped_by_hand(groups: int) -> None:
    """4, 8 and 16 divide 16 patches; of 10 groups six have two patches and four have one."""
    expected = []
    for image in range(2):
        falling, whole = order_of(image), score_of_tokens(image, list(range(PATCHES)), "prob")
        cut = [[p for k, p in enumerate(falling) if k * groups // PATCHES == g] for g in range(groups)]
        assert sorted(map(len, cut)) == [PATCHES // groups] * (groups - PATCHES % groups) + [PATCHES // groups + 1] * (
            PATCHES % groups
        )
        drops = [whole - score_of_tokens(image, without(group), "prob") for group in cut]
        means = [float(MAPS[image].flatten()[group].sum()) / len(group) for group in cut]
        expected.append(saco_by_hand(drops, means))
    score = evaluated("saco", groups=groups)
    assert_same(score.values, expected)
    assert score.cost.forwards == groups


def test_saco_of_equal_groups_may_take_sums_or_means() -> None:
    """The paper sums; where K divides the patches, the factor 16 / K cancels."""
    falling, whole = order_of(0), score_of_tokens(0, list(range(PATCHES)), "prob")
    cut = [falling[4 * g : 4 * g + 4] for g in range(4)]
    drops = [whole - score_of_tokens(0, without(group), "prob") for group in cut]
    sums = [float(MAPS[0].flatten()[group].sum()) for group in cut]
    assert_same(evaluated("saco", groups=4).values[0], saco_by_hand(drops, sums))


def test_saco_by_pixels_as_the_paper_does() -> None:
    """Ten groups of 1024 pixels, each replaced by the mean colour of the image."""
    score = evaluated("saco(preset=wu,upsampling=nearest,groups=8)", groups=8)
    for image in range(2):
        pixels, label = IMAGES[image], CLASSES[image]
        mean = pixels.mean((1, 2))[:, None, None]
        falling, values = order_of(image), MAPS[image].flatten()
        drops, means = [], []
        for g in range(8):
            group = torch.zeros(PATCHES, dtype=torch.bool)
            group[falling[2 * g : 2 * g + 2]] = True
            mask = group.reshape(4, 4).repeat_interleave(8, 0).repeat_interleave(8, 1)
            changed = torch.where(mask, mean, pixels)
            drops.append(score_of_pixels(pixels, label, "prob") - score_of_pixels(changed, label, "prob"))
            means.append(float(values[group].mean()))
        assert_same(score.values[image], saco_by_hand(drops, means))


def test_saco_of_the_effects_is_one_and_of_their_opposite_minus_one() -> None:
    model, image = linear((6, 6), 4)
    truth = effects(model, image, 1)
    for sign in (1, -1):
        ex = replace(cv.explain(model, image, "random", target=1), maps=sign * truth[None])
        score = cv.evaluate(model, image, ex, "saco(removal=mean,score=logit,groups=9)")
        assert_same(score.mean, sign)


def test_saco_counts_equal_drops_as_agreement_and_equal_groups_not_at_all() -> None:
    """A model that looks at nothing: every drop is 0, so that each pair counts as +."""
    model, image = linear((6, 6), 4)
    with torch.no_grad():
        model.module.weights.zero_()
    step = torch.zeros(1, 6, 6, dtype=torch.float64)
    step[0, :3] = 1.0
    ex = replace(cv.explain(model, image, "random", target=1), maps=step)
    assert cv.evaluate(model, image, ex, "saco(removal=mean,score=logit)").mean == 1
    flat = replace(ex, maps=torch.ones_like(step))
    assert math.isnan(cv.evaluate(model, image, flat, "saco(removal=mean,score=logit)").mean)


def test_saco_takes_no_more_groups_than_patches() -> None:
    score = evaluated("saco", groups=50)
    assert score.settings["groups"] == "16"
    assert_same(score.values, evaluated("saco", groups=16).values)


# IDSDS


@pytest.mark.parametrize("cells", [2, 3, 4])
def test_idsds_with_tokens_dropped_by_hand(cells: int) -> None:
    expected = []
    for image in range(2):
        whole, sums, drops = score_of_tokens(image, list(range(PATCHES)), "logit"), [], []
        for row, col in itertools.product(range(cells), repeat=2):
            cell = [4 * r + c for r in range(4) for c in range(4) if (r * cells // 4, c * cells // 4) == (row, col)]
            sums.append(sum(float(MAPS[image].flatten()[patch]) for patch in cell))
            drops.append(whole - score_of_tokens(image, without(cell), "logit"))
        expected.append(float(spearmanr(sums, drops).statistic))
    score = evaluated("idsds", cells=cells, baselines=False)
    assert_same(score.values, expected)
    assert score.cost.forwards == cells**2


def test_idsds_by_pixels_as_the_authors_do() -> None:
    """Squares of 8 × 8 pixels set to zero; the attribution of a square is the sum of its pixels."""
    score = evaluated("idsds(preset=hesse)")
    for image in range(2):
        pixels, label = IMAGES[image], CLASSES[image]
        upsampled = torch.nn.functional.interpolate(MAPS[image][None, None], (32, 32), mode="bilinear")[0, 0]
        sums, drops = [], []
        for top, left in itertools.product(range(0, 32, 8), repeat=2):
            changed = pixels.clone()
            changed[:, top : top + 8, left : left + 8] = 0
            sums.append(float(upsampled[top : top + 8, left : left + 8].sum()))
            drops.append(score_of_pixels(pixels, label, "logit") - score_of_pixels(changed, label, "logit"))
        assert_same(score.values[image], spearmanr(sums, drops).statistic)


def test_idsds_cells_cover_every_pixel() -> None:
    """32 pixels in three: 11, 11 and 10; no pixel is left over."""
    score = evaluated("idsds(preset=hesse,cells=3)", baselines=False)
    assert score.n_valid == 2
    assert score.cost.forwards == 9


def test_idsds_of_the_effects_is_one() -> None:
    model, image = linear((8, 8), 4)
    truth = effects(model, image, 1)
    for sign in (1, -1):
        ex = replace(cv.explain(model, image, "random", target=1), maps=sign * truth[None])
        assert_same(cv.evaluate(model, image, ex, "idsds(removal=mean)").mean, sign)


def test_methods_share_the_passes_of_idsds() -> None:
    alone = cv.evaluate(MODEL, IMAGES, "legrad", "idsds", target=3)
    beside = cv.evaluate(MODEL, IMAGES, ["legrad", "rollout", "ixg"], ["idsds"], target=3)
    assert sum(score.cost.forwards for score in beside.values()) <= alone.cost.forwards * 3
    assert_same(beside["legrad", "idsds"].values, alone.values)


# All three


@pytest.mark.parametrize("name", ["srg", "saco", "idsds"])
def test_higher_is_better_with_baselines_and_intervals(name: str) -> None:
    model, images = double("timm-vit", 8)
    score = cv.evaluate(model, images, "ixg", name, target=3)
    assert isinstance(score, cv.Score)
    assert score.better == "higher"
    assert set(score.baselines) == {"random", "center"}
    low, high = score.interval
    assert low <= score.mean <= high
    assert find_metric(name).span == (-1, 1)
    assert all(resolve_metric(f"{name}(preset={preset})").better == "higher" for preset in find_metric(name).presets)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("saco(groups=1)", "groups=1 was given; expected 2 or more"),
        ("idsds(cells=1)", "cells=1 was given; expected 2 or more"),
        ("srg(steps=0)", "steps=0 was given; expected 1 or more"),
        ("idsds(granularity=pixel)", "Single pixels or channel values were asked for with removal=token"),
        ("saco(granularity=pixel)", "Single pixels or channel values were asked for with removal=token"),
    ],
)
def test_options_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        evaluated(text)
