"""The verb `evaluate`: values for each image, what random maps score, and the message when a map cannot be scored."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import clairvit as cv
from clairvit.data.dataset import SampleBatch, iter_batches
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.metrics.score import paired
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same
from helpers.tiny_models import double, fresh, pixels, wrapped

KIND = "timm-vit"


def scored(images: Tensor, metric: str, method: str = "genatt", **how: object) -> cv.Score:
    score = cv.evaluate(wrapped(KIND, images.dtype), images, method, metric, target=3, **how)
    assert isinstance(score, cv.Score)
    return score


@pytest.mark.parametrize("metric", ["deletion", "insertion", "sparseness", "complexity"])
def test_a_batch_is_its_images_one_by_one(metric: str) -> None:
    images = pixels(KIND, 11, dtype=torch.float64)
    together = scored(images, metric)
    assert together.values.shape == (11,)
    for row in (0, 7, 10):
        alone = scored(images[row : row + 1], metric)
        assert_same(together.values[row], alone.values[0])
        for name in ("random", "center"):
            assert_same(together.baselines[name].values[row], alone.baselines[name].values[0])


def test_many_methods_and_metrics_are_each_alone() -> None:
    model, images = double(KIND, 3)
    both = cv.evaluate(model, images, ["genatt", "rollout"], ["deletion", "sparseness"], target=3)
    assert list(both) == [(m, k) for k in ("deletion", "sparseness") for m in ("genatt", "rollout")]
    for (method, metric), score in both.items():
        alone = scored(images, metric, method)
        assert_same(score.values, alone.values)
        assert (score.method, score.metric, score.better) == (alone.method, alone.metric, alone.better)


def test_an_option_goes_to_the_metrics_that_have_it() -> None:
    images = pixels(KIND, 2)
    scores = cv.evaluate(wrapped(KIND), images, ["genatt"], ["deletion", "sparseness"], target=3, removal="mean")
    assert [score.metric for score in scores.values()] == ["deletion(removal=mean)", "sparseness"]
    with pytest.raises(BadInput, match="None of the metrics deletion, sparseness has an option 'remova'"):
        cv.evaluate(wrapped(KIND), images, ["genatt"], ["deletion", "sparseness"], target=3, remova="mean")
    with pytest.raises(BadInput, match="No metrics were given"):
        cv.evaluate(wrapped(KIND), images, ["genatt"], [], target=3)


def test_maps_that_are_there_already() -> None:
    model, images = double(KIND, 3)
    ex = cv.explain(model, images, "genatt", target=[1, 4, 6])
    given = cv.evaluate(model, images, ex, "deletion")
    named = cv.evaluate(model, images, "genatt", "deletion", target=[1, 4, 6])
    assert_same(given.values, named.values)
    with pytest.raises(BadInput, match="has 3 maps and 2 images were given"):
        cv.evaluate(model, images[:2], ex, "deletion")
    contrast = cv.explain(model, images, "genatt", target=cv.Contrast(1, 2))
    with pytest.raises(BadInput, match="no class"):
        cv.evaluate(model, images, contrast, "deletion")


def test_a_broken_map_has_no_score_and_a_flat_one_is_marked() -> None:
    model, images = wrapped(KIND), pixels(KIND, 3)
    ex = cv.explain(model, images, "genatt", target=3)
    maps = ex.maps.clone()
    maps[0, 0, 0], maps[1] = math.nan, 0.5
    score = cv.evaluate(model, images, replace(ex, maps=maps), "deletion")
    assert math.isnan(score.values[0])
    assert score.values[1:].isfinite().all()
    assert (score.n_valid, score.n_invalid, score.n_degenerate) == (2, 1, 1)
    assert score.mean == pytest.approx(float(score.values[1:].mean()))
    again = cv.evaluate(model, images, replace(ex, maps=maps), "deletion")
    assert torch.equal(score.values[1:], again.values[1:]), "the random order of equal patches is the seed's"


def test_the_right_order_beats_a_random_map_beats_the_reverse() -> None:
    """On a linear model the effects themselves are the best map there can be."""
    model, image = linear((6, 6), 4)
    oracle = effects(model, image, 1)[None]
    ex = cv.explain(model, image, "random", target=1)
    means = {}
    for name, maps in (("oracle", oracle), ("random", ex.maps), ("reverse", -oracle)):
        for metric in ("deletion", "insertion"):
            score = cv.evaluate(model, image, replace(ex, maps=maps), metric, score="logit", removal="mean")
            means[name, metric] = float(score.values)
    assert means["oracle", "deletion"] < means["random", "deletion"] < means["reverse", "deletion"]
    assert means["oracle", "insertion"] > means["random", "insertion"] > means["reverse", "insertion"]


def test_the_curve_is_what_the_area_is_of() -> None:
    """By hand on the linear model: what is left after each step, added up."""
    model, image = linear((6, 6), 4)
    expected_effects = effects(model, image, 1)
    ex = replace(cv.explain(model, image, "random", target=1), maps=expected_effects[None])
    score = cv.evaluate(model, image, ex, "deletion", score="logit", removal="mean")
    order = expected_effects.flatten().argsort(descending=True)
    total = expected_effects.sum()
    left = [total - expected_effects.flatten()[order[: max(1, round(k / 10 * 36))]].sum() for k in range(1, 10)]
    expected = torch.stack([total, *left])
    assert_same(score.curve.y[0], expected)
    assert score.curve.x.tolist() == pytest.approx([k / 10 for k in range(10)])
    area = torch.trapezoid(expected, dx=0.1)
    assert_same(score.values[0], area / 0.9, magnitude=float(expected.abs().max()))
    plain = cv.evaluate(model, image, ex, "deletion", preset="skipplus", score="logit", removal="mean")
    assert_same(plain.values[0], area, magnitude=float(expected.abs().max()))


def test_cost_is_what_is_spent() -> None:
    score = scored(pixels(KIND, 2), "deletion", steps=5)
    assert score.cost.forwards == 5
    assert score.settings["steps"] == 5
    assert scored(pixels(KIND, 2), "sparseness").cost.forwards == 0


def test_methods_that_explain_again_share_the_passes() -> None:
    """One noisy copy is one forward and one backward for all gradient methods together; LeGrad adds a backward."""
    images = pixels(KIND, 2)
    for methods, backwards in (
        (["ixg"], 1),
        (["ixg", "genatt", "gmar-l1"], 1),
        (["legrad"], 1),
        (["legrad", "ixg"], 2),
    ):
        scores = cv.evaluate(wrapped(KIND), images, methods, ["max-sensitivity"], target=3, samples=12, baselines=False)
        costs = [score.cost for score in scores.values()]
        assert [cost.forwards for cost in costs] == [12 // len(methods)] * len(methods), methods
        assert [cost.backwards for cost in costs] == [12 * backwards // len(methods)] * len(methods), methods
        assert not any(score.baselines for score in scores.values())


def test_maps_may_be_shaped_first() -> None:
    model, images = double(KIND, 2)
    ex = cv.explain(model, images, "ixg", target=3)
    flat = ex.maps.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    shapes = {
        "abs": flat.abs(),
        "relu": flat.clamp(min=0),
        "min-max": (flat - low) / (high - low),
        "over-largest": flat / flat.abs().amax(1, keepdim=True),
    }
    for shape, expected in shapes.items():
        by_hand = replace(ex, maps=expected.reshape(ex.maps.shape))
        score = cv.evaluate(model, images, ex, "infidelity(runs=5)", normalize=shape, scaled=False)
        other = cv.evaluate(model, images, by_hand, "infidelity(runs=5)", scaled=False)
        assert_same(score.values, other.values, label=shape)
        assert score.settings["maps"] == shape
        assert other.settings["maps"] == "raw"
        again = cv.evaluate(model, images, "ixg", "avg-sensitivity(samples=2,radius=1e-6)", target=3, normalize=shape)
        assert (again.values < 1e-2).all(), "copies are shaped as the map is"


def test_methods_that_do_not_fit_may_be_left_out() -> None:
    model, images = wrapped(KIND), pixels(KIND, 10)  # two batches
    scores = cv.evaluate(model, images, ["cam", "ixg"], ["sparseness"], target=3, skip=True)
    assert list(scores) == [("ixg", "sparseness")]
    assert len(scores["ixg", "sparseness"].values) == 10
    assert "pool" in scores.skipped["cam"]
    with pytest.raises(NotApplicable, match="pool"):
        cv.evaluate(model, images, ["cam", "ixg"], ["sparseness"], target=3)


def test_no_method_may_fit() -> None:
    """Where nothing fits there is nothing to score, and what the model says of the images is still there."""
    model, image = linear()
    for metric in ("sparseness", "grid-pointing-game"):
        scores = cv.evaluate(model, image, ["rollout"], [metric, "sparseness"], baselines=False, skip=True)
        assert not scores
        assert "no attention" in scores.skipped["rollout"]
        assert len(scores.predictions) == 1


def test_what_cannot_be_done_is_an_error_with_a_reason() -> None:
    images = pixels(KIND, 2)
    with pytest.raises(UnknownName, match=r"There is no metric 'deletoin'.*'deletion'"):
        scored(images, "deletoin")
    with pytest.raises(UnknownName, match=r"'deletion' has no option 'step'; it has steps.*'steps'"):
        scored(images, "deletion(step=3)")
    with pytest.raises(BadInput, match=r"none were given; expected one mask per image"):
        scored(images, "iou")
    with pytest.raises(BadInput, match="without labels for all images"):
        cv.evaluate(wrapped(KIND), images, "genatt", "deletion", target="label")
    with pytest.raises(BadInput, match="2 masks were given for 3 images; expected one for each"):
        cv.evaluate(wrapped(KIND), pixels(KIND, 3), "genatt", "iou", target=3, masks=torch.ones(2, 32, 32))
    with pytest.raises(
        BadInput, match=r"A mask has shape \[16, 32\] for an image of 32 × 32 pixels as the model sees it"
    ):
        cv.evaluate(wrapped(KIND), images, "genatt", "iou", target=3, masks=torch.ones(2, 16, 32))
    with pytest.raises(
        BadInput, match="normalize=square was given; expected one of raw, abs, relu, min-max, over-largest"
    ):
        cv.evaluate(wrapped(KIND), images, "genatt", "sparseness", target=3, normalize="square")
    with pytest.raises(BadInput, match="1 targets were given for 2 images"):
        cv.evaluate(wrapped(KIND), images, "genatt", "sparseness", target=[3])


def test_paired_differences_are_narrower() -> None:
    score = scored(pixels(KIND, 8, dtype=torch.float64), "sparseness")
    noise = torch.linspace(-0.01, 0.01, 8, dtype=torch.float64)
    other = replace(score, values=score.values - 0.1 + noise)
    gap, (low, high) = paired(score, other)
    assert gap == pytest.approx(0.1, abs=1e-9)
    assert 0.09 < low < 0.1 < high < 0.11


@pytest.mark.parametrize(
    ("text", "better"),
    [
        ("deletion", "lower"),
        ("deletion(reverse=true)", "higher"),
        ("aopc(regions=3)", "higher"),
        ("aopc(order=lerf,regions=3)", "lower"),
        ("road(order=morf,steps=1)", "lower"),
        ("sparseness(preset=focusvit)", "lower"),
    ],
)
def test_which_way_is_good_may_depend_on_the_options(text: str, better: str) -> None:
    assert scored(pixels(KIND, 1), text).better == better


def test_nothing_is_kept_of_images_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six batches from files: what is alive between two of them does not grow, but for the scores."""
    generator, paths = np.random.default_rng(0), []
    for number in range(48):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(generator.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(paths[-1])
    alive: list[int] = []

    def watched(*given: Any) -> Iterator[SampleBatch]:
        for part in iter_batches(*given):
            yield part
            gc.collect()
            kept = (
                candidate for candidate in gc.get_objects() if type(candidate) in (torch.Tensor, torch.nn.Parameter)
            )
            alive.append(sum(candidate.numel() * candidate.element_size() for candidate in kept))

    monkeypatch.setattr("clairvit.methods.runs.iter_batches", watched)
    cv.evaluate(fresh(KIND), paths, ["ixg", "rollout"], ["deletion(steps=2)", "sparseness", "random-logit"], target=3)
    assert len(alive) == 6
    image = 3 * 32 * 32 * 4
    assert alive[-1] - alive[0] < 40 * image / 4, "a quarter of the images that were read meanwhile"


def test_a_preset_for_several_metrics_goes_to_those_that_have_it() -> None:
    model, images = double(KIND, 2)
    names = ["sparseness", "complexity", "iou"]
    masks = torch.zeros(2, 32, 32)
    masks[:, 4:20, 4:20] = 1
    scores = cv.evaluate(model, images, ["ixg"], names, target=3, masks=masks, compat="quantus")
    alone = cv.evaluate(model, images, "ixg", "sparseness(preset=quantus)", target=3)
    assert isinstance(alone, cv.Score)
    by_name = {metric.partition("(")[0]: score for (_, metric), score in scores.items()}
    assert set(by_name) == set(names)
    assert_same(by_name["sparseness"].values, alone.values)
    with pytest.raises(BadInput, match="None of the metrics sparseness, iou has an option 'preset'"):
        cv.evaluate(model, images, ["ixg"], ["sparseness", "iou"], target=3, preset="rise")


def test_what_is_named_twice_is_scored_once() -> None:
    images = pixels(KIND, 2)
    scores = cv.evaluate(wrapped(KIND), images, ["rollout", "rollout()"], ["sparseness", "sparseness"], target=3)
    (score,) = scores.values()
    assert score.values.shape == (2,)
