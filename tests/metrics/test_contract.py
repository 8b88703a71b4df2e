"""What every metric promises. The sweep reads the registry, so a new metric is in it at once."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.metrics.registry import FAMILIES, list_metrics, resolve_metric
from helpers.module_fingerprint import differences, fingerprint, surroundings
from helpers.rounding import assert_same, rounding_bound
from helpers.tiny_models import ZOO, double, pixels, wrapped

PARTS = {metric.name for metric in list_metrics() if "parts" in metric.needs}  # swept in test_parts.py
METRICS = {metric.name: metric for metric in list_metrics() if metric.scope == "image" and metric.name not in PARTS}
KINDS = ["timm-vit", "timm-reg4-gap", "hf-dinov2-registers-sdpa", "open_clip-nonsquare", "home-mean-pool"]
# What a metric promises does not depend on how many.
QUICK = {"samples": 2, "runs": 5, "layers": 2, "steps": 4, "regions": 8, "grids": 2, "beam": 1}


def test_every_metric_is_in_a_sweep() -> None:
    every = {metric.name for metric in list_metrics()}
    assert every - PARTS - set(METRICS) == {"grid-pointing-game"}  # which is about several images


def text(name: str) -> str:
    options = ",".join(f"{key}={value}" for key, value in QUICK.items() if key in METRICS[name].options)
    return f"{name}({options})" if options else name


def objects(images: Tensor) -> Tensor:
    """A mask for each image, none of them empty or full."""
    masks = torch.zeros(len(images), *images.shape[-2:], dtype=torch.bool)
    for row, mask in enumerate(masks):
        mask[4 + row : 20, 3 : 15 + 2 * row] = True
    return masks


def scored(kind: str, images: Tensor, names: list[str], seed: int = 0, method: str = "ixg") -> dict[str, cv.Score]:
    scores = cv.evaluate(
        wrapped(kind, images.dtype),
        images,
        [method],
        [text(n) for n in names],
        target=3,
        masks=objects(images),
        distractors=[2] * len(images),
        seed=seed,
    )
    return {score.metric.partition("(")[0]: score for score in scores.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_metric_scores_every_image(kind: str) -> None:
    images, slack = pixels(kind, 3, dtype=torch.float64), rounding_bound(1.0)
    for name, score in scored(kind, images, list(METRICS)).items():
        low, high = score.span
        assert score.values.shape == (3,), name
        assert score.values.dtype == torch.float64, name
        assert score.values.isfinite().all() or METRICS[name].undefined, name
        if METRICS[name].undefined:
            continue
        if ZOO[kind].classifier or score.settings.get("score") != "prob":  # an embedding has no probabilities
            assert (score.values >= low - slack).all(), name
            assert (score.values <= high + slack).all(), name
        assert set(score.baselines) == {"random", "center"}, name


@pytest.mark.parametrize("kind", KINDS[:3])
def test_batch_of_three_equals_three_of_one(kind: str) -> None:
    model, images = double(kind, 3)
    masks, names = objects(images), [text(name) for name in METRICS]
    together = cv.evaluate(model, images, ["ixg"], names, target=3, masks=masks, distractors=[2] * 3)
    for row in range(3):
        alone = cv.evaluate(
            model, images[row : row + 1], ["ixg"], names, target=3, masks=masks[row : row + 1], distractors=[2]
        )
        for key, score in alone.items():
            assert_same(together[key].values[row], score.values[0], label=str(key))


def test_how_many_go_through_the_model_at_once_does_not_matter() -> None:
    model, images = double("timm-vit", 3)
    masks, names = objects(images), [text(name) for name in METRICS]
    usual, two = (
        cv.evaluate(model, images, ["ixg"], names, target=3, masks=masks, distractors=[2] * 3, batch_size=size)
        for size in (None, 2)
    )
    for key, score in usual.items():
        assert_same(score.values, two[key].values, label=str(key))


def test_same_seed_same_score() -> None:
    images = pixels("timm-vit", 2)
    first, again = (scored("timm-vit", images, list(METRICS), seed=5) for _ in range(2))
    for name, score in first.items():
        assert torch.equal(score.values.nan_to_num(nan=7), again[name].values.nan_to_num(nan=7)), name
        assert score.seed == 5


def test_a_map_with_nan_has_no_score_whatever_the_metric() -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 2)
    ex = cv.explain(model, images, "ixg", target=3)
    maps = ex.maps.clone()
    maps[0, 1, 1] = math.nan
    for name, metric in METRICS.items():
        if metric.undefined:
            continue
        score = cv.evaluate(
            model, images, replace(ex, maps=maps), text(name), masks=objects(images), distractors=[2] * len(images)
        )
        assert math.isnan(score.values[0]), name
        assert score.values[1].isfinite(), name
        assert (score.n_valid, score.n_invalid) == (1, 1), name


def test_a_constant_map_is_marked_whatever_the_metric() -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 2)
    ex = cv.explain(model, images, "ixg", target=3)
    flat = replace(ex, maps=torch.ones_like(ex.maps))
    for name in METRICS:
        score = cv.evaluate(model, images, flat, text(name), masks=objects(images), distractors=[2] * len(images))
        assert score.n_degenerate == 2, name


def test_the_model_is_bit_identical_afterwards() -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 2)
    before, around = fingerprint(model.module), surroundings()
    cv.evaluate(
        model,
        images,
        ["ixg"],
        [text(name) for name in METRICS],
        target=3,
        masks=objects(images),
        distractors=[2] * len(images),
    )
    assert differences(before, fingerprint(model.module)) == []
    assert differences(around, surroundings()) == []


@pytest.mark.parametrize("name", [metric.name for metric in list_metrics() if metric.scope == "image"])
def test_every_metric_is_documented(name: str) -> None:
    metric = resolve_metric(name).metric
    assert len(metric.summary) > 20
    assert metric.paper
    assert metric.family in FAMILIES
    assert metric.better in ("higher", "lower")
    assert metric.span[0] < metric.span[1]
    for preset in metric.presets:
        assert resolve_metric(f"{name}(preset={preset})")
    typed = text(name) if name in METRICS else name
    assert resolve_metric(resolve_metric(typed).text) == resolve_metric(typed)


@pytest.mark.parametrize(
    "name", [name for name, metric in METRICS.items() if metric.cost and "methods" not in metric.needs]
)
def test_declared_forwards_are_what_is_spent(name: str) -> None:
    """At most, where the image decides; shared passes count in part for each method."""
    images = pixels("timm-vit", 2)
    metric, spec = METRICS[name], resolve_metric(text(name))
    score = scored("timm-vit", images, [name])[name]
    options = dict(spec.options)
    wants = inspect.signature(metric.cost).parameters
    declared = metric.cost(**options, **({"patches": 16} if "patches" in wants else {})).forwards
    assert 0 < score.cost.forwards <= declared


def test_the_range_follows_the_unit_of_the_score() -> None:
    spans = {
        "deletion": (0, 1),
        "deletion(score=accuracy)": (0, 1),
        "deletion(score=drop)": (-1, 1),
        "deletion(score=logit)": (-math.inf, math.inf),
        "deletion(preset=skipplus-log-odds)": (-math.inf, math.inf),
        "aopc(score=logprob)": (-math.inf, math.inf),
        "faithfulness-correlation(score=logit)": (-1, 1),
        "sparseness": (0, 1),
    }
    assert {text: resolve_metric(text).span for text in spans} == spans


def test_a_spec_is_accepted_and_prints_as_its_text() -> None:
    spec = resolve_metric("mprt(layers=None)")
    assert resolve_metric(spec) is spec
    assert str(spec) == spec.text == "mprt(layers=None)"
    assert resolve_metric(spec, by="shuffle") == resolve_metric("mprt(layers=None,by=shuffle)")


@pytest.mark.parametrize("normalize", ["raw", "abs", "min-max", "over-largest"])
def test_a_map_and_its_copy_in_float64_have_the_same_scores(normalize: str) -> None:
    """To the last bit: what is computed of a float32 map is computed in float64, its normalisation too."""
    model, images = wrapped("timm-vit"), pixels("timm-vit", 2)
    ex = cv.explain(model, images, "ixg", target=3)
    maps = ex.maps.clone()
    maps[1] = 0.1
    maps[1, 0, 0] += 1e-8  # nearly constant: float32 would round some of it away
    single, double_ = (replace(ex, maps=kind) for kind in (maps, maps.double()))
    first, second = (
        cv.evaluate(
            model,
            images,
            explanation,
            [text(name) for name in METRICS],
            normalize=normalize,
            masks=objects(images),
            distractors=[2, 2],
        )
        for explanation in (single, double_)
    )
    for key, score in first.items():
        assert torch.equal(score.values.nan_to_num(nan=7), second[key].values.nan_to_num(nan=7)), key
        assert score.degenerate.tolist() == second[key].degenerate.tolist(), key
