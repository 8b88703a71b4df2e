"""Spans and intervals over the whole registry: every metric with every preset and every value of its options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics import registry
from clairvit.metrics.confidence_intervals import EVERYWHERE, FEWEST, mean_interval, outside
from clairvit.metrics.registry import Metric, MetricSpec, list_metrics, resolve_metric
from clairvit.metrics.score import Score
from helpers.covering import all_cases
from helpers.tiny_models import double

IMAGES = 8  # enough for an interval
# What makes a metric slow and does not change which values it can have
QUICK: dict[str, Any] = {"samples": 2, "runs": 5, "layers": 2, "steps": 4, "regions": 8, "grids": 2, "at_once": 96}
METRICS = {metric.name: metric for metric in list_metrics() if metric.scope == "image" and "parts" not in metric.needs}


def variants(metric: Metric) -> Iterator[MetricSpec]:
    """Yield a metric with its presets, each choice of an option, and each choice on top of each preset's others."""
    quick = {key: value for key, value in QUICK.items() if key in metric.options}
    hints = get_type_hints(metric.function)
    yield resolve_metric(metric.name, **quick)
    for preset in metric.presets:
        options = dict(resolve_metric(metric.name, preset=preset).options)
        fewer = {key: value for key, value in QUICK.items() if options.get(key) is not None}
        yield resolve_metric(metric.name, preset=preset, **fewer)
    for option, default in metric.options.items():
        choices = get_args(hints[option]) if get_origin(hints[option]) is Literal else ()
        for value in (not default,) if isinstance(default, bool) else choices:
            if value != default:
                yield resolve_metric(metric.name, **quick, **{option: value})


def masks_of(images: Tensor) -> Tensor:
    masks = torch.zeros(len(images), *images.shape[-2:], dtype=torch.bool)
    for row, mask in enumerate(masks):
        mask[2 + row : 14 + row, 3 : 15 + row] = True
    return masks


def scores_of(specs: list[MetricSpec], target: Any = 3) -> dict[str, dict[str, Score]]:
    """Return the scores of a signed map, by metric; of specs that the model can take; of the first one two maps'."""
    model, images = double("timm-vit", IMAGES)
    scores = {}
    for number, spec in enumerate(specs):
        try:
            evaluated = cv.evaluate(
                model,
                images,
                ["ixg"] if number and not all_cases() else ["ixg", "rollout"],
                [spec],
                target=target,
                masks=masks_of(images),
                distractors=[2] * len(images),
                baselines=False,
            )
        except BadInput:  # options that exclude each other, or a tiny image too small for a preset
            continue
        scores[spec.text] = {score.method: score for score in evaluated.values()}
    return scores


def assert_intervals_are_true(scores: dict[str, dict[str, Score]]) -> int:
    """Assert that values lie in the span, and that the interval does and contains the mean; return how many."""
    intervals = 0
    for text, by_method in scores.items():
        for score in by_method.values():
            span, values = resolve_metric(text).span_with(score.settings), score.valid
            assert score.span == span, (text, score.notes)
            assert len(outside(values, span)) == 0, (text, span, values)
            if len(values) < FEWEST:
                continue
            low, high = score.interval
            assert low <= score.mean <= high, (text, score.mean, score.interval)
            assert span[0] <= low, (text, score.interval)
            assert high <= span[1], (text, score.interval)
            intervals += 1
    return intervals


@pytest.mark.parametrize("name", METRICS)
def test_the_interval_contains_the_mean_and_lies_in_the_span(name: str) -> None:
    scores = scores_of(list(dict.fromkeys(variants(METRICS[name]))))
    assert scores, "the default at least"
    assert assert_intervals_are_true(scores) or METRICS[name].undefined


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.in_score or name == "irof"])
def test_the_span_of_a_difference_or_a_function_is_not_that_of_a_probability(name: str) -> None:
    quick = {key: value for key, value in QUICK.items() if key in METRICS[name].options}
    spec = resolve_metric(name, **quick)
    for target in (cv.Contrast(3, 1), lambda scores: 40 * scores[:, 3] + 7):
        scores = scores_of([spec], target)
        assert assert_intervals_are_true(scores) or METRICS[name].undefined
        assert all(score.span == EVERYWHERE for score in scores[spec.text].values())


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("faf", (0, 1)),
        ("faf(lift=true)", (0, math.inf)),
        ("aopc(preset=quantus)", EVERYWHERE),
        ("relevance-mass(preset=quantus)", EVERYWHERE),
        ("relevance-mass(preset=quantus-attribution-localisation)", (0, 1)),
        ("irof", (-math.inf, 1)),
        ("irof(score=logit)", EVERYWHERE),
        ("completeness(preset=quantus)", (0, 1)),
        ("complexity(preset=quantus)", (-math.log1p(1e-12), math.inf)),
        ("deletion(preset=quantus,score=drop)", EVERYWHERE),
    ],
)
def test_the_span_follows_the_options(text: str, span: tuple[float, float]) -> None:
    assert resolve_metric(text).span == span


def test_the_largest_lift_is_the_inverse_of_the_area() -> None:
    """All attention on the object: FAF = 1, over its area 16 / 64 = 4, beyond the span of FAF itself."""
    model, images = double("timm-vit", 1)
    masks = torch.zeros(1, *images.shape[-2:], dtype=torch.bool)
    masks[:, :16, :16] = True
    ex = cv.explain(model, images, "rollout")
    peak = torch.zeros_like(ex.maps)
    peak[:, 0, 0] = 1
    score = cv.evaluate(model, images, replace(ex, maps=peak), "faf(lift=true)", masks=masks)
    area = float(masks.double().mean())
    assert score.values.tolist() == [1 / area]
    assert score.span[1] >= 1 / area > 1


def test_values_outside_a_declared_span_are_noted_and_not_cut() -> None:
    with registry.METRICS.restored():
        cv.metric("wide-share", better="higher", span=(0, 1))(_twice_the_share)
        model, images = double("timm-vit", IMAGES)
        score = cv.evaluate(model, images, "rollout", "wide-share")
    low, high = score.interval
    assert low <= score.mean <= high
    assert score.mean > 1
    assert score.span == EVERYWHERE
    assert any("wide-share" in note and "8 of 8 values lie outside 0 … 1" in note for note in score.notes)


def _twice_the_share(context: cv.extend.EvalContext) -> Tensor:
    return 2 + context.maps.flatten(2).abs().amax(-1) / context.maps.abs().sum((2, 3))


@pytest.mark.parametrize("span", [EVERYWHERE, (0, 1), (-1, 1), (0, math.inf), (5, 6), (2.5, 2.75)])
@pytest.mark.parametrize("n", [6, 9, 14, 60])
def test_no_span_turns_an_interval_round_or_drops_the_mean(span: tuple[float, float], n: int) -> None:
    for seed in range(20):
        values = np.random.default_rng([seed, n]).lognormal(0.8, 0.6, n)
        low, high = mean_interval(values, span=span)
        assert low <= values.mean() <= high
        if span[0] <= values.mean() <= span[1]:
            assert span[0] <= low <= high <= span[1]
