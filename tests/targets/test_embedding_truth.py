"""Scenes of two objects: the object that a prompt names, or that another scene shares, lights up."""

from __future__ import annotations

from typing import Any

import pytest

import clairvit as cv
from clairvit.data.scenes import scene
from helpers.relevance import mean_on
from helpers.scripts import load_script

COUNT = 6
BAR = 0.6  # the mean share of positive relevance on the asked object; a map that ignores the question has 0.5


def benchmark() -> Any:
    return load_script("benchmarks/embedding_truth.py")


@pytest.mark.parametrize("kind", ["prompt", "similar"])
def test_the_target_object_lights_up(kind: str) -> None:
    scenes = [scene(benchmark().TEST_SEED, number, objects=2) for number in range(COUNT)]
    targets = benchmark().questions(kind, scenes)
    shares = benchmark().shares(benchmark().scene_pair(), scenes, targets, ["rollout", "attnlrp+plus"])
    assert float(shares["attnlrp+plus"].mean()) > BAR
    assert float(shares["rollout"].mean()) == pytest.approx(0.5, abs=1e-6)  # one image, another question: the same map


def test_prompts_find_their_object() -> None:
    """Of two objects the one that the prompt names has more relevance in at least 14 of 16 maps; chance gives 8."""
    model, named_wins = benchmark().scene_pair(), []
    for number in range(8):
        drawn = scene(5, number, objects=2)
        prompts = [cv.Text(drawn.class_name, against=None), cv.Text(str(drawn.other_class_name), against=None)]
        first, second = cv.explain(model, drawn.picture, "attnlrp", targets=prompts).maps
        named_wins.append(mean_on(first, drawn.part) > mean_on(first, drawn.other_part))
        named_wins.append(mean_on(second, drawn.other_part) > mean_on(second, drawn.part))
    assert sum(named_wins) >= 14, named_wins
