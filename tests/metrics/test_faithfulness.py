"""Faithfulness on linear models, where the best map is known and every number can be added up by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit._presets import preset_settings
from clairvit.errors import BadInput
from clairvit.metrics.registry import find_metric, list_metrics, resolve_metric
from clairvit.metrics.similarity import pearson
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same, rounding_bound
from helpers.tiny_models import double

LINEAR: dict[str, Any] = {"score": "logit", "removal": "mean"}
FAMILY = [metric for metric in list_metrics() if metric.family == "faithfulness"]
# What is swept does not depend on how far a search goes
NAMES = ["naopc(cells=3,beam=1)" if metric.name == "naopc" else metric.name for metric in FAMILY]


def of_map(maps: Tensor, metric: str, grid: tuple[int, int] = (6, 6), **more: Any) -> cv.Score:
    model, image = linear(grid, 4)
    ex = replace(cv.explain(model, image, "random", target=1), maps=maps[None])
    score = cv.evaluate(model, image, ex, metric, **(LINEAR | more))
    assert isinstance(score, cv.Score)
    return score


ORACLE = effects(*linear((6, 6), 4), 1)
RANDOM = cv.explain(*linear((6, 6), 4), "random", target=1).maps[0]
CORRELATIONS = ["faithfulness-correlation", "sensitivity-n", "faithfulness-estimate"]


@pytest.mark.parametrize("name", CORRELATIONS)
def test_effects_correlate_fully_and_their_opposite_the_other_way(name: str) -> None:
    assert_same(of_map(ORACLE, name).mean, 1)
    assert_same(of_map(3 * ORACLE, name).mean, 1, label="whatever the scale")
    assert_same(of_map(-ORACLE, name).mean, -1)
    assert abs(of_map(RANDOM, name).mean) < 0.6
    assert math.isnan(of_map(torch.ones(6, 6), name).mean), "a constant map says nothing"


def models() -> list[tuple[cv.Model, Tensor]]:
    """Three linear models of six images each. Other classes stay at 0, so that the probability follows the score.

    Weights average out: where nearly all patches add to the score, nearly any order of them is monotone.
    """
    cases = []
    for seed in range(3):
        model, _ = linear((8, 8), 8, seed=seed)
        with torch.no_grad():
            model.module.weights[[0, 2]] = 0
            model.module.weights[1] -= model.module.weights[1].mean()
            model.module.weights.mul_(0.3)
        images = [linear((8, 8), 8, seed=10 * seed + k)[1] for k in range(6)]
        cases.append((model, torch.cat(images)))
    return cases


def held_to(text: str, model: cv.Model, images: Tensor, maps: Tensor) -> Tensor:
    ex = replace(cv.explain(model, images, "random", target=1), maps=maps)
    options = {"removal": "mean"} if "removal" in find_metric(text.partition("(")[0]).options else {}
    score = cv.evaluate(model, images, ex, text, **options)
    assert isinstance(score, cv.Score)
    return score.values


# Presets too, but for those in which the map is to be in another unit (the gradient) or equal to the last bit.
SWEPT = NAMES + [
    f"{metric.name}(preset={preset}{',at_once=768' if preset == 'quantus' and 'at_once' in settings else ''})"
    for metric in FAMILY
    for preset in metric.presets
    for settings in [preset_settings(metric, preset)]
    if (metric.name, preset) not in (("infidelity", "quantus"), ("completeness", "quantus"))
]


@pytest.mark.parametrize("text", SWEPT)
def test_the_best_map_beats_a_random_map_beats_the_worst(text: str) -> None:
    """What each patch adds, the same numbers shuffled, and their opposite; over models and images, by every metric."""
    best, random_score, worst = [], [], []
    for model, images in models():
        truth = torch.cat([effects(model, image[None], 1)[None] for image in images])
        chance = torch.Generator().manual_seed(1)
        shuffled = torch.stack(
            [heatmap.flatten()[torch.randperm(64, generator=chance)].reshape(8, 8) for heatmap in truth]
        )
        for maps, scores in ((truth, best), (shuffled, random_score), (-truth, worst)):
            scores.append(held_to(text, model, images, maps))
    sign = 1 if resolve_metric(text).better == "higher" else -1
    good, middling, bad = (sign * float(torch.cat(means).nanmean()) for means in (best, random_score, worst))
    slack = rounding_bound(max(abs(good), abs(middling), abs(bad)))  # where a metric cannot tell two of them apart
    assert good >= middling - slack
    assert middling >= bad - slack
    assert good > bad + 1e-6


def test_a_map_that_adds_up_is_complete() -> None:
    terms = float(ORACLE.abs().sum() / ORACLE.sum().abs())  # completeness is relative to the sum of them
    assert_same(of_map(ORACLE, "completeness").mean, 0, magnitude=terms)
    assert_same(of_map(2 * ORACLE, "completeness").mean, 1, magnitude=terms)
    assert_same(of_map(torch.zeros(6, 6), "completeness").mean, 1, magnitude=terms)


def test_monotonicity_counts_the_steps_that_rise() -> None:
    """Groups that add something raise the score, groups that take away do not: added up by hand."""
    ascending = ORACLE.flatten().sort().values
    sums = torch.stack([ascending[: round(k * 36 / 10)].sum() for k in range(1, 11)])
    expected = (sums[1:] >= sums[:-1]).double().mean()
    assert of_map(ORACLE, "monotonicity").mean == pytest.approx(float(expected))
    assert 0 < float(expected) < 1


def test_insertion_minus_deletion_is_just_that() -> None:
    parts = [of_map(RANDOM, name).mean for name in ("insertion", "deletion")]
    assert_same(of_map(RANDOM, "insertion-deletion").mean, parts[0] - parts[1], magnitude=max(map(abs, parts)))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_its_images_one_by_one_whatever_the_batch_size(name: str) -> None:
    model, images = double("timm-vit", 3)
    together = cv.evaluate(model, images, "genatt", name, target=3)
    small = cv.evaluate(model, images, "genatt", name, target=3, batch_size=5)
    assert_same(together.values, small.values)
    for row in range(3):
        alone = cv.evaluate(model, images[row : row + 1], "genatt", name, target=3)
        assert_same(together.values[row], alone.values[0])


@pytest.mark.parametrize("name", ["faithfulness-correlation", "sensitivity-n"])
def test_methods_share_the_passes_that_do_not_depend_on_the_map(name: str) -> None:
    model, image = linear((6, 6), 4)
    alone = cv.evaluate(model, image, "saliency", name, target=1, **LINEAR)
    beside = cv.evaluate(
        model, image, ["saliency", "random", "center", "occlusion(window=2)"], [name], target=1, **LINEAR
    )
    assert len(beside) == 4
    assert sum(score.cost.forwards for score in beside.values()) <= alone.cost.forwards * 3 + 4, "100 for all of them"
    assert_same(beside["saliency", alone.metric].values, alone.values)


def test_pearson_is_numpys() -> None:
    a, b = torch.randn(2, 5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row in range(5):
        assert_same(pearson(a[row], b[row]), torch.corrcoef(torch.stack([a[row], b[row]]))[0, 1])


def test_options_that_make_no_sense_are_refused() -> None:
    for text, message in [
        ("faithfulness-correlation(subset=1.5)", "subset=1.5 was given; expected a part"),
        ("faithfulness-correlation(subset=36)", "subset=36.0 was given; expected a part .* or a count of 1 to 35"),
        ("faithfulness-estimate(preset=quantus,at_once=577)", "at_once=577 was given; expected 1 to 576"),
        ("faithfulness-correlation(runs=1)", "runs=1 was given; expected 3 or more"),
        ("monotonicity(steps=1)", "steps=1 was given; expected 2 or more"),
    ]:
        with pytest.raises(BadInput, match=message):
            of_map(ORACLE, text)


# F-Fidelity


def powers(order: list[int]) -> tuple[cv.Model, Tensor, cv.Explanation]:
    """A model whose patch i adds 2^i to class 1, so that a drop says which patches are gone; a map in this order."""
    model, image = linear((4, 4))
    with torch.no_grad():
        model.module.weights[1] = 2.0 ** torch.arange(16, dtype=torch.float64).reshape(4, 4)  # type: ignore[index, union-attr]
        model.module.weights[1] /= model.module.embed(image)[0, 0]  # type: ignore[index, union-attr, operator]
    maps = torch.zeros(16, dtype=torch.float64)
    maps[order] = torch.arange(16, 0, -1, dtype=torch.float64)
    return model, image, replace(cv.explain(model, image, "random", target=1), maps=maps.reshape(1, 4, 4))


@pytest.mark.parametrize("order", ["morf", "lerf"])
@pytest.mark.parametrize(("share", "trained", "count"), [(0.5, 1.0, 4), (0.5, 0.2, 3), (1.0, 1.0, 8), (0.01, 1.0, 1)])
def test_f_fidelity_removes_random_parts_of_the_top_set(order: str, share: float, trained: float, count: int) -> None:
    """Of half of the patches the share, and at most the trained one; which they are is read off the drop."""
    ranking = torch.randperm(16, generator=torch.Generator().manual_seed(3)).tolist()
    model, image, ex = powers(ranking)
    allowed = set(ranking[:8] if order == "morf" else ranking[8:])
    seen = set()
    for seed in range(6):
        given = {"share": share, "trained": trained, "order": order, "seed": seed, "steps": 1, "runs": 1}
        score = cv.evaluate(model, image, replace(ex, seed=seed), "f-fidelity", baselines=False, **LINEAR, **given)
        drop = round(float(score.values[0]))
        assert_same(score.values[0], drop, magnitude=2.0**16)
        removed = {k for k in range(16) if drop >> k & 1}
        assert len(removed) == count
        assert removed <= allowed
        seen.add(frozenset(removed))
    assert (len(seen) > 1) == (count < 8), "another seed draws other patches"


def test_f_fidelity_of_whole_top_sets_is_the_sum_of_their_effects() -> None:
    ranking = torch.randperm(16, generator=torch.Generator().manual_seed(4)).tolist()
    model, image, ex = powers(ranking)
    score = cv.evaluate(model, image, ex, "f-fidelity", share=1.0, trained=1.0, runs=2, baselines=False, **LINEAR)
    tops = [min(max(1, round(k * 1.6)), 15) for k in range(1, 10)]
    expected = [float(sum(2**patch for patch in ranking[:top])) for top in tops]
    assert score.curve is not None
    assert_same(score.curve.y[0], expected, magnitude=2.0**16)
    assert_same(score.values[0], math.fsum(expected) / 9, magnitude=2.0**16)
    assert score.cost.forwards == 9 * 2
    assert resolve_metric("f-fidelity(order=lerf)").better == "lower"
