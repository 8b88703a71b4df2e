"""The built-in model of part scenes: it classifies unseen ones, also without some of their parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import clairvit as cv
from clairvit.cli import main
from clairvit.data.part_scenes import CLASSES, part_scenes
from clairvit.errors import BadInput

SEED = 20  # training saw seed 1, validation seed 2
COUNT = 12


@pytest.fixture(scope="module")
def model() -> cv.Model:
    return cv.load("parts")


def test_it_is_small_and_loads_as_the_other_built_in_models_do(model: cv.Model) -> None:
    assert model.name == "parts"
    assert model.labels == CLASSES
    assert model.preprocess.size == (112, 112)
    assert sum(tensor.numel() for tensor in model.module.state_dict().values()) * 2 < 3_000_000  # bytes of float16
    with pytest.raises(BadInput, match="112 x 112"):
        cv.load("parts", size=224)


def test_it_is_right_with_and_without_parts(model: cv.Model) -> None:
    names = ["part-accuracy", "part-accuracy(removed=1)", "part-accuracy(removed=2)", "background-independence"]
    scores = cv.evaluate(model, part_scenes(COUNT, SEED), ["center"], names, baselines=False)
    assert all(scores["center", name].mean >= 0.95 for name in names[:3])
    assert scores["center", names[3]].mean >= 0.9


def test_a_faithful_map_answers_the_questions(model: cv.Model) -> None:
    """A random map is less complete, and does not follow the class."""
    names = ["part-completeness", "target-sensitivity"]
    scores = cv.evaluate(model, part_scenes(8, SEED), ["attnlrp+plus", "random"], names, baselines=False)
    assert scores["attnlrp+plus", names[0]].mean > scores["random", names[0]].mean
    assert scores["attnlrp+plus", names[1]].mean > 0.5
    assert scores["random", names[1]].mean == 0


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "evaluate",
        "parts:6",
        "--model",
        "parts",
        "--method",
        "rollout",
        "--metric",
        "part-accuracy",
        "--json",
    ]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["images"]) == 6
    assert {value for row in document["scores"] for value in row["values"]} == {1.0}
    assert main(["evaluate", "demo", "--metric", "single-deletion"]) == 2
    assert "--data parts:200 --model parts" in capsys.readouterr().err
