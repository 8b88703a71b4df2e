"""Scenes of two objects: a segmenter and a detector made in closed form; the object that is asked for lights up."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import clairvit as cv
from clairvit.data.scenes import SIZE, Scene, scene
from clairvit.models.images import prepare
from helpers.scripts import load_script

COUNT = 8
# The mean share of positive relevance on the asked object. A map that ignores the question has 0.5 exactly; ridge
# regression is a rough segmenter, so that the bar is what any map of the right object passes, not what a good one has.
BAR = 0.6


def benchmark() -> Any:
    return load_script("benchmarks/dense_truth.py")


@functools.cache
def models() -> tuple[cv.Model, cv.Model]:
    segmenter, detector = benchmark().fit_models()
    return segmenter, detector


@functools.cache
def scenes() -> tuple[Scene, ...]:
    return tuple(scene(benchmark().TEST_SEED, number, objects=2) for number in range(COUNT))


def test_the_models_know_the_objects() -> None:
    segmenter, detector = models()
    marked, _ = benchmark().accuracy(segmenter, scenes())
    assert marked > 0.5  # of nine classes
    pixels = prepare([item.picture for item in scenes()], detector).pixels
    with torch.no_grad():
        boxes = detector.module(pixels)["pred_boxes"] * SIZE
    inside = []
    for row, item in enumerate(scenes()):
        for name, mask in ((item.class_name, item.mask), (item.other_class_name, item.other_mask)):
            left, top, right, bottom = benchmark().bounding_box(mask)
            x, y = boxes[row, benchmark().CLASSES.index(name), :2].tolist()
            inside.append(left <= x <= right and top <= y <= bottom)
    assert sum(inside) / len(inside) > 0.5  # a box covers a tenth of the image


@pytest.mark.parametrize("kind", ["region", "object", "query", "box"])
def test_the_target_object_lights_up(kind: str) -> None:
    segmenter, detector = models()
    model = detector if kind in ("query", "box") else segmenter
    targets = benchmark().questions(kind, scenes())
    shares = benchmark().shares(model, scenes(), targets, ["rollout", "attnlrp+plus"])
    assert float(shares["attnlrp+plus"].mean()) > BAR
    if kind in ("region", "query"):  # one image, another question: an attention map stays the same
        assert float(shares["rollout"].mean()) == pytest.approx(0.5, abs=1e-6)


def test_contrast_is_positive_on_one_object_and_negative_on_the_other() -> None:
    segmenter, _ = models()
    everywhere = (0, 0, SIZE, SIZE)
    differences = []
    for item in scenes():
        target = cv.Contrast(
            cv.Region(item.class_name, box=everywhere), cv.Region(item.other_class_name, box=everywhere)
        )
        maps = cv.explain(segmenter, item.picture, "attnlrp+plus", target=target).maps[0].double()
        first, second = (benchmark().patch_shares(mask, len(maps)) for mask in (item.mask, item.other_mask))
        differences.append(float((maps * first).sum() / first.sum() - (maps * second).sum() / second.sum()))
    assert sum(difference > 0 for difference in differences) >= 0.75 * COUNT
