"""The built-in model of scenes: it classifies unseen scenes, and by their markers."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.data.scenes import CLASSES, draw, plan, scene, scenes, with_class
from clairvit.errors import BadInput
from clairvit.models.images import prepare

SEED = 20  # training saw seed 1 alone
COUNT = 200


@pytest.fixture(scope="module")
def model() -> cv.Model:
    return cv.load("scenes")


def guesses(model: cv.Model, pictures: list[Image.Image]) -> list[str]:
    with torch.no_grad():
        logits = model.logits(prepare(pictures, model).pixels)
    return [model.labels[number] for number in logits.argmax(1)]


def test_it_is_small_and_loads_as_the_other_built_in_model_does(model: cv.Model) -> None:
    assert model.name == "scenes"
    assert model.labels == CLASSES
    assert model.preprocess.size == (96, 96)
    assert sum(tensor.numel() for tensor in model.module.state_dict().values()) * 2 < 3_000_000  # bytes of float16
    assert cv.load("scenes", dtype="float64").dtype == torch.float64
    with pytest.raises(BadInput, match="96 x 96"):
        cv.load("scenes", size=224)
    random = cv.load("scenes", pretrained=False)
    assert "random weights" in random.name
    assert not torch.equal(random.module.state_dict()["head.weight"], model.module.state_dict()["head.weight"])


def test_it_names_the_class_of_scenes_it_never_saw(model: cv.Model) -> None:
    drawn_scenes = [scene(SEED, number) for number in range(COUNT)]
    right = [
        guess == example.class_name
        for guess, example in zip(
            guesses(model, [example.picture for example in drawn_scenes]), drawn_scenes, strict=True
        )
    ]
    assert sum(right) / COUNT > 0.95


def test_it_classifies_by_the_marker(model: cv.Model) -> None:
    """Another ink on the same badge is another answer."""
    plans = [plan(SEED, number) for number in range(40)]
    expected = [CLASSES[(CLASSES.index(draw(planned).class_name) + 3) % len(CLASSES)] for planned in plans]
    pictures = [draw(with_class(planned, kind)).picture for planned, kind in zip(plans, expected, strict=True)]
    right = [guess == kind for guess, kind in zip(guesses(model, pictures), expected, strict=True)]
    assert sum(right) / len(right) > 0.9


def test_it_recognises_both_of_two_objects(model: cv.Model) -> None:
    """Although it was trained on one: otherwise class contrast would compare nothing."""
    drawn_scenes = [scene(SEED, number, objects=2) for number in range(80)]
    with torch.no_grad():
        best = model.logits(prepare([example.picture for example in drawn_scenes], model).pixels).topk(2).indices
    both = [
        {model.labels[int(k)] for k in row} == {example.class_name, example.other_class_name}
        for row, example in zip(best, drawn_scenes, strict=True)
    ]
    assert sum(both) / len(both) > 0.7


@pytest.mark.parametrize("method", ["ixg+skipplus", "leave-one-out"])
def test_faithful_methods_point_at_the_marker(model: cv.Model, method: str) -> None:
    dataset = scenes(12, SEED, mask="part")
    metric = "pointing-game(tolerance=0)"
    scores = cv.evaluate(model, dataset, [method], [metric], target="label")
    chance = sum(float(scene(SEED, number).part.mean()) for number in range(12)) / 12  # a random point hits so often
    assert chance < 0.05
    assert scores[method, metric].mean > 10 * chance
