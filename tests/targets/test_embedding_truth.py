"""Scenes of two objects: the object that a prompt names, or that another scene shares, lights up."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from clairvit.data.scenes import scene

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "embedding_truth.py"
COUNT = 6
BAR = 0.6  # the mean share of positive relevance on the asked object; a map that ignores the question has 0.5


@functools.cache
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("embedding_truth", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["embedding_truth"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["prompt", "similar"])
def test_the_asked_object_lights_up(kind: str) -> None:
    scenes = [scene(benchmark().TEST_SEED, number, objects=2) for number in range(COUNT)]
    targets = benchmark().questions(kind, scenes)
    shares = benchmark().shares(benchmark().scene_pair(), scenes, targets, ["rollout", "attnlrp+plus"])
    assert float(shares["attnlrp+plus"].mean()) > BAR
    assert float(shares["rollout"].mean()) == pytest.approx(0.5, abs=1e-6)  # one image, another question: the same map
