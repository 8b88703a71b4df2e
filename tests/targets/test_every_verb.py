"""Every verb with every kind of target, each on a tiny model: what `docs/targets.md` says of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from helpers import dense_models, tiny_pairs, vision_language
from helpers.rounding import assert_same
from helpers.tiny_models import WIDTH, double

Case = tuple[cv.Model, Tensor, Any]  # a model, eight images, a target

COUNT = 8  # that calibration asks for
METHODS = ["ixg", "attnlrp+plus", "leave-one-out", "rise(samples=4)", "random"]
METRICS = ["deletion(steps=2)", "faithfulness-correlation(runs=4)", "max-sensitivity(samples=1)", "sparseness"]


def classifier(target: Callable[[Tensor], Any]) -> Case:
    model, images = double("timm-vit", batch=COUNT)
    return model, images, target(images)


def pair(name: str, target: Any) -> Case:
    return tiny_pairs.wrapped(name), tiny_pairs.pixels(COUNT), target


def dense(make: Callable[[], Any], target: Any) -> Case:
    return dense_models.model_of(make), dense_models.images(COUNT), target


def language(name: str) -> Case:
    module = vision_language.tiny_language_model(name)
    model = cv.wrap(module, size=vision_language.SIDE, mean=0.5, std=0.5)
    text = vision_language.model_text(name, [1, 3], [4, 11, 12, 14])
    return model.with_inputs(**text), vision_language.images(COUNT), cv.NextToken(token=9)


BOX = (8, 8, 40, 48)
CASES: dict[str, Callable[[], Case]] = {
    "class": lambda: classifier(lambda _: 3),
    "Contrast": lambda: classifier(lambda _: cv.Contrast(1, 3)),
    "function": lambda: classifier(lambda _: lambda scores: scores[:, 1] - scores[:, 2]),
    "Output": lambda: classifier(lambda _: cv.Output(lambda output: output[:, 1] ** 2)),
    "Similar": lambda: classifier(lambda images: cv.Similar(images[0].flip(-1))),
    "Neuron": lambda: classifier(lambda _: cv.Neuron(1, 5)),
    "Direction": lambda: classifier(lambda _: cv.targets.Direction(0, [1.0, -2.0] * (WIDTH // 2), patch=(1, 2))),
    "Text": lambda: pair("CLIPModel", cv.Text("a red car")),
    "Text, attention pool": lambda: pair("SiglipModel", cv.Text("a red car", against=["a photo"])),
    "Contrast of texts": lambda: pair("open_clip", cv.Contrast(cv.Text("a cat"), cv.Text("a dog"))),
    "Region": lambda: dense(dense_models.dpt_segmenter, cv.Region(1, box=BOX)),
    "Region, reduced keys": lambda: dense(dense_models.segformer, cv.Region(point=(5, 7))),
    "Region, prompted": lambda: dense(dense_models.sam, cv.Region(box=BOX)),
    "Query": lambda: dense(dense_models.yolos, cv.Query(2, 1)),
    "Query, decoder": lambda: dense(dense_models.detr, cv.Query(2, box="left")),
    "NextToken": lambda: language("llava"),
    "NextToken, 2-D positions": lambda: language("qwen2-vl"),
}
# What a model cannot be asked for, whatever the target: its layers have no maps of one size, or attend in windows.
REFUSED = {
    ("Region, reduced keys", "calibrate"): "its layers have maps of different sizes",
    ("Region, reduced keys", "intervene"): "does not attend between all its tokens in every layer",
    ("Region, prompted", "intervene"): "does not attend between all its tokens in every layer",
}


def explain(model: cv.Model, images: Tensor, target: Any) -> None:
    for method in METHODS:
        explanation = cv.explain(model, images[:2], method, target=target)
        assert explanation.maps.isfinite().all()
        assert (explanation.score == "none") == (method == "random")


def compare(model: cv.Model, images: Tensor, target: Any) -> None:
    many = cv.compare(model, images[:2], METHODS, target=target)
    assert list(many) == METHODS
    assert not torch.equal(many["ixg"].maps, many["leave-one-out"].maps)


def evaluate(model: cv.Model, images: Tensor, target: Any) -> None:
    scores = cv.evaluate(model, images[:2], ["ixg", "leave-one-out"], METRICS, target=target)
    for method in ("ixg", "leave-one-out"):
        assert all(scores[method, metric].values.isfinite().all() for metric in METRICS)


def choose(model: cv.Model, images: Tensor, target: Any) -> None:
    assert cv.choose(model, images[:2], ["ixg", "attnlrp+plus"], METRICS[:1], target=target).ranking


def check(model: cv.Model, images: Tensor, target: Any) -> None:
    explanation = cv.explain(model, images[:2], "ixg", target=target)
    assert all(item.removals for item in explanation.check())
    assert len(cv.check_maps(model, images[:2], explanation.maps, target)) == 2


def calibrate(model: cv.Model, images: Tensor, target: Any) -> None:
    recipe = cv.calibrate(model, images, target=target, sets=2, metrics=METRICS[:1])
    assert cv.explain(model, images[:2], recipe, target=target).maps.isfinite().all()


def expect(model: cv.Model, images: Tensor, target: Any) -> None:
    """The falls of hiding inside and outside are of the target's own score."""
    masks = torch.zeros(2, *images.shape[-2:], dtype=torch.bool)
    masks[:, : images.shape[-2] // 2] = True
    result = cv.expect(model, images[:2], masks, "ixg", target)
    assert len(result) == 2
    assert result.values("fall_inside").abs().min() > 0


def trace(model: cv.Model, images: Tensor, target: Any) -> None:
    traced = cv.trace(model, images[:2], target=target)
    assert traced.dpixels.any()
    again = traced.retarget(target)
    assert traced.target is not None
    assert again.target is not None
    assert_same(again.target(again.logits).detach(), traced.target(traced.logits).detach())


def intervene(model: cv.Model, images: Tensor, target: Any) -> None:
    """A sweep over heads is one intervention per head, by the same score."""
    scores = cv.intervene(model, images[:2], {cv.Site(0, head=1): "zero"}, target=target)
    sweep = cv.intervene_sweep(model, images[:2], target=target)
    assert scores.difference().abs().min() > 0
    assert_same(sweep.effects[:, 0, 1], scores.difference(), magnitude=float(sweep.scores.abs().max()))


VERBS = (explain, compare, evaluate, choose, check, calibrate, expect, trace, intervene)


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")  # notes about so few images and so small maps
@pytest.mark.parametrize("name", CASES)
def test_every_verb_takes_the_target(name: str) -> None:
    case = CASES[name]()
    for verb in VERBS:
        if (name, verb.__name__) in REFUSED:
            with pytest.raises(cv.errors.NotApplicable, match=REFUSED[name, verb.__name__]):
                verb(*case)
        else:
            verb(*case)


def test_scores_of_another_output_are_not_taken_for_the_targets() -> None:
    """Channel 4 of a block and class 4 are column 4 of different scores."""
    model, images, _ = CASES["class"]()
    traced = cv.trace(model, images[:1], target=1)
    scores = cv.intervene(model, images[:1], {cv.Site(0, head=1): "zero"})
    for target in (cv.Neuron(1, 4), cv.Similar(images[1]), cv.Output(lambda output: output[:, 1])):
        for run in (traced.retarget, scores.difference):
            with pytest.raises(cv.errors.BadInput, match="reads another output of the model than the scores that were"):
                run(target)
    neuron = cv.trace(model, images[:1], target=cv.Neuron(1, 4))
    with pytest.raises(cv.errors.BadInput, match="reads another output"):
        neuron.retarget(4)
    assert neuron.retarget(cv.Neuron(1, 5)).target.names == ("layer 1, channel 5",)
    with pytest.raises(cv.errors.BadInput, match="There is no class 99"):
        cv.intervene(model, images[:1], {cv.Site(0, head=1): "zero"}, target=99)
