"""Randomisation: what is drawn anew and what is never touched, maps that cannot change, and by hand where they do."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import clairvit as cv
from clairvit._rng import image_seeds, make_generator
from clairvit.errors import BadInput
from clairvit.metrics.randomisation import parameter_layers
from helpers.covering import covering_array
from helpers.module_fingerprint import differences, fingerprint, surroundings
from helpers.rounding import assert_same
from helpers.tiny_models import CLASSES, ZOO, double, pixels, wrapped

KIND = "timm-vit"
ORDERS = ["top-down", "bottom-up", "independent"]
LAWS = ["by=normal", "by=shuffle", "by=reset", "preset=quantus"]
TARGET = 3


@pytest.mark.parametrize(("order", "metric"), covering_array(ORDERS, ["mprt", "smooth-mprt(samples=2)"]))
def test_a_map_that_ignores_the_model_does_not_change(metric: str, order: str) -> None:
    model, images = double(KIND, 2)
    for method in ("center", "random"):
        score = cv.evaluate(model, images, method, metric, target=TARGET, order=order)
        assert score.curve.y.shape == (2, 12)
        assert torch.allclose(score.curve.y, torch.ones(2, 12, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(score.values, torch.ones(2, dtype=torch.float64), atol=1e-12)


SIMILARITIES = ["spearman", "pearson", "ssim", "hog"]
ORDERED_SUMMARIES = [(order, summary) for order in ORDERS for summary in ("mean", "last", "auc")]


@pytest.mark.parametrize(("ordered_summary", "similarity"), covering_array(ORDERED_SUMMARIES, SIMILARITIES))
def test_the_centre_is_the_same_for_every_model_and_similarity(
    ordered_summary: tuple[str, str], similarity: str
) -> None:
    """METRICS 10.12: at every layer, and in every summary."""
    model, images = double(KIND, 1)
    order, summary = ordered_summary
    score = cv.evaluate(
        model, images, "center", "mprt", layers=None, order=order, similarity=similarity, summary=summary
    )
    assert score.curve.y.shape == (1, len(parameter_layers(model.module)))
    assert (score.curve.y - 1).abs().max() < 1e-12
    assert (score.values - 1).abs().max() < 1e-12


def test_the_centre_has_as_much_disorder_as_before() -> None:
    model, images = double(KIND, 2)
    entropy = cv.evaluate(model, images, "center", "efficient-mprt")
    assert entropy.values.tolist() == [0, 0], "as much disorder as before"


@pytest.mark.parametrize(
    ("metric", "law"),
    covering_array(["mprt", "smooth-mprt(samples=1)", "efficient-mprt", "random-logit"], LAWS, least=2),
)
def test_the_users_model_and_chance_stay_as_they_were(metric: str, law: str) -> None:
    model = wrapped(KIND)
    before, around = fingerprint(model.module), surroundings()
    cv.evaluate(
        model, pixels(KIND, 1), "genatt", metric, **({} if metric == "random-logit" else dict([law.split("=")]))
    )
    assert not differences(before, fingerprint(model.module))
    assert not differences(around, surroundings())


def by_hand(module: nn.Module, steps: int) -> nn.Module:
    """The first steps from the head on, drawn here."""
    module = copy.deepcopy(module)
    chance = make_generator(0, "mprt/parameters")
    owners = [
        part for part in module.modules() if part._parameters and any(p is not None for p in part._parameters.values())
    ]
    with torch.no_grad():
        for part in owners[::-1][:steps]:
            for p in part._parameters.values():
                if p is not None:
                    noise = torch.randn(p.numel(), generator=chance).to(p).reshape(p.shape)
                    p.copy_(p.mean() + p.std(correction=0) * noise)
    return module


@pytest.mark.parametrize("method", ["genatt", "ixg"])
def test_cascade_steps_by_hand(method: str) -> None:
    model, images = double(KIND, 2)
    usual = cv.explain(model, images, method, target=TARGET).maps.flatten(1).abs()
    score = cv.evaluate(model, images, method, "mprt", target=TARGET, layers=None)
    count = len(parameter_layers(model.module))
    assert score.curve.x.tolist() == pytest.approx([(k + 1) / count for k in range(count)])
    for steps in (1, 2, 7, count):
        other = cv.wrap(by_hand(model.module, steps), name="random", size=ZOO[KIND].size)
        maps = cv.explain(other, images, method, target=TARGET).maps.flatten(1).abs()
        for image in range(2):
            expected = scipy.stats.spearmanr(usual[image].numpy(), maps[image].numpy()).statistic
            assert_same(score.curve.y[image, steps - 1], expected, magnitude=1.0)
    assert_same(score.values, score.curve.y.mean(1), label="the original does not count")


def test_summaries_are_read_off_the_curve() -> None:
    model, images = double(KIND, 2)
    mean, last, auc = (
        cv.evaluate(model, images, "genatt", "mprt", target=TARGET, layers=4, summary=name)
        for name in ("mean", "last", "auc")
    )
    x, y = mean.curve.x.numpy(), mean.curve.y.numpy()
    assert_same(mean.values, y.mean(1), magnitude=1.0)
    assert_same(last.values, y[:, -1], magnitude=1.0)
    assert_same(auc.values, ((y[:, 1:] + y[:, :-1]) / 2 * np.diff(x)).sum(1) / (x[-1] - x[0]), magnitude=1.0)
    score = cv.evaluate(model, images, "genatt", "mprt", target=TARGET, layers=1, summary="auc")
    assert_same(score.values, last.values, magnitude=1.0)


def test_the_sign_counts_only_if_asked() -> None:
    model, images = double(KIND, 2)
    unsigned_score, signed_score = (
        cv.evaluate(model, images, "ixg", "mprt", target=TARGET, layers=1, signed=s) for s in (False, True)
    )
    before = cv.explain(model, images, "ixg", target=TARGET).maps.flatten(1)
    random = cv.wrap(by_hand(model.module, 10**6), name="random", size=ZOO[KIND].size)
    after = cv.explain(random, images, "ixg", target=TARGET).maps.flatten(1)
    signed = [scipy.stats.spearmanr(a.numpy(), b.numpy()).statistic for a, b in zip(before, after, strict=True)]
    assert_same(signed_score.values, signed, magnitude=1.0)
    assert not torch.allclose(unsigned_score.values, signed_score.values)


@pytest.mark.parametrize("metric", ["mprt", "smooth-mprt(layers=2,samples=3)", "efficient-mprt", "random-logit"])
def test_a_batch_is_its_images_one_by_one_and_seeds_differ(metric: str) -> None:
    model, images = double(KIND, 3)
    together = cv.evaluate(model, images, "genatt", metric, target=TARGET)
    alone = [float(cv.evaluate(model, images[i : i + 1], "genatt", metric, target=TARGET).values) for i in range(3)]
    assert_same(together.values, alone, magnitude=1.0)
    other = cv.evaluate(model, images, "genatt", metric, target=TARGET, seed=5)
    assert not torch.allclose(together.values, other.values)


def test_methods_share_the_passes() -> None:
    model, images = double(KIND, 2)
    methods = ["genatt", "ixg", "center", "random"]
    for metric, steps in (("mprt(layers=4)", 4), ("smooth-mprt(layers=3,samples=2)", 8), ("efficient-mprt", 1)):
        for score in cv.evaluate(model, images, methods, [metric], target=TARGET).values():
            assert score.cost.forwards == -(-steps // 4), "one forward a random model and copy, for four methods"
            assert score.cost.backwards == -(-steps // 4)


def test_efficient_mprt_by_hand() -> None:
    model, images = double(KIND, 2)
    random = cv.wrap(by_hand(model.module, 10**6), name="random", size=ZOO[KIND].size)
    before, after = (
        [
            scipy.stats.entropy(np.histogram(heatmap.numpy(), bins=10, density=True)[0])
            for heatmap in cv.explain(each, images, "ixg", target=TARGET).maps
        ]
        for each in (model, random)
    )
    score = cv.evaluate(model, images, "ixg", "efficient-mprt(bins=10)", target=TARGET)
    assert_same(score.values, [(b - a) / a for a, b in zip(before, after, strict=True)], magnitude=1.0)


def test_smooth_mprt_by_hand_and_without_noise() -> None:
    model, images = double(KIND, 2)
    plain = cv.evaluate(model, images, "ixg", "mprt(preset=quantus,layers=3)", target=TARGET)
    single = "smooth-mprt(preset=quantus,layers=3,samples=1,order=top-down)"  # the last copy has no noise
    same = cv.evaluate(model, images, "ixg", single, target=TARGET)
    assert_same(plain.curve.y, same.curve.y, magnitude=1.0)
    random = cv.wrap(by_hand(model.module, 10**6), name="random", size=ZOO[KIND].size)
    means = []
    for each in (model, random):
        maps = []
        for k in range(2):
            noise = torch.stack(
                [
                    torch.randn(images.shape[1:], generator=make_generator(m, "robustness/noise", k))
                    for m in image_seeds(images, 0)
                ]
            )
            deviation = 0.1 * (images.amax((1, 2, 3), keepdim=True) - images.amin((1, 2, 3), keepdim=True))
            maps.append(cv.explain(each, images + deviation * noise.to(images), "ixg", target=TARGET).maps)
        means.append(torch.stack(maps).mean(0).flatten(1).abs())
    expected = [scipy.stats.spearmanr(a.numpy(), b.numpy()).statistic for a, b in zip(*means, strict=True)]
    score = cv.evaluate(model, images, "ixg", "smooth-mprt(layers=1,samples=2)", target=TARGET)
    assert_same(score.values, expected, magnitude=1.0)


@pytest.mark.parametrize("other", ["other=random", "other=second", "other=least", "preset=quantus"])
def test_maps_that_ask_for_no_class_are_the_same_for_another(other: str) -> None:
    for kind in ("ssim", "spearman", "pearson", "hog", *(["ssim-flat"] if "quantus" in other else [])):
        for method in ("raw-attention", "rollout", "center"):
            score = cv.evaluate(*double(KIND, 2), method, f"random-logit({other},similarity={kind})", target=TARGET)
            assert score.values.tolist() == pytest.approx([1, 1], abs=1e-12)


def test_random_logit_by_hand() -> None:
    model, images = double(KIND, 2)
    with torch.no_grad():
        order = model.logits(images).argsort(-1, descending=True).tolist()
    usual = cv.explain(model, images, "ixg").maps.flatten(1)
    classes_by_option = {"second": [row[1] for row in order], "least": [row[-1] for row in order]}
    for other, classes in classes_by_option.items():
        maps = cv.explain(model, images, "ixg", target=classes).maps.flatten(1)
        expected = [scipy.stats.spearmanr(a.numpy(), b.numpy()).statistic for a, b in zip(usual, maps, strict=True)]
        score = cv.evaluate(model, images, "ixg", "random-logit(similarity=spearman)", other=other)
        assert_same(score.values, expected, magnitude=1.0)
    least = cv.evaluate(model, images[:1], "ixg", "random-logit", target=order[0][-1], other="least")
    assert float(least.values) < 1 - 1e-6, "the least probable class is asked for: another one is taken"


def test_a_random_class_is_any_but_the_one_explained() -> None:
    model, images = double(KIND, 1)
    maps = [cv.explain(model, images, "ixg", target=c).maps.flatten() for c in range(CLASSES)]
    others = [c for c in range(CLASSES) if c != TARGET]
    expected = np.array([np.corrcoef(maps[TARGET], maps[c])[0, 1] for c in others])
    drawn = set()
    for s in range(10 * CLASSES):
        score = cv.evaluate(model, images, "ixg", "random-logit(similarity=pearson)", target=TARGET, seed=s)
        nearest = int(np.abs(expected - float(score.values)).argmin())
        assert_same(score.values[0], expected[nearest], magnitude=1.0)
        drawn.add(others[nearest])
    assert drawn == set(others)


def test_what_makes_no_sense_is_refused() -> None:
    model, images = double(KIND, 1)
    with pytest.raises(BadInput, match=r"which is no class, was given"):
        cv.evaluate(model, images, "ixg", "random-logit", target=cv.Contrast(1, 2))
    with pytest.raises(BadInput, match=r"layers=0 was given"):
        cv.evaluate(model, images, "ixg", "mprt", layers=0)
    with pytest.raises(BadInput, match=r"samples=0 was given"):
        cv.evaluate(model, images, "ixg", "smooth-mprt", samples=0)
    with pytest.raises(BadInput, match=r"bins=1 was given"):
        cv.evaluate(model, images, "ixg", "efficient-mprt", bins=1)
