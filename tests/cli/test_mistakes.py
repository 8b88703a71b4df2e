"""`clairvit mistakes` end to end: the table, files of every kind, without true classes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import clairvit as cv
from clairvit.cli import main
from helpers.small_study import ARCHITECTURE, photos, weights

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model of the classes 0, 1 and 2, and six photos in folders of these names, in the working directory."""
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 6)
    model = ["--model", weights(tmp_path / "tiny.safetensors"), "--arch", f"timm:{ARCHITECTURE}", "--labels", "0,1,2"]
    return ["mistakes", "photos", "--method", "ixg", *model]


def test_the_table_is_that_of_the_verb(typed: list[str], capsys: Captured) -> None:
    assert main([*typed, "--truth", "folders", "--unsure", "1", "--out", "m.json"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Wrote m.json" in printed
    model = replace(cv.load(typed[5], arch=typed[7]), labels=("0", "1", "2"))
    result = cv.mistakes(model, "photos", "ixg", labels="folders", unsure=1.0)
    assert result.sentence in printed
    assert 0 < result.wrong < 6, "what the test takes for granted"
    assert main([*typed, "--truth", "folders", "--unsure", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["image"] for row in document["mistakes"]] == list(result.names)
    assert [row["kind"] for row in document["mistakes"]] == list(result.kinds)
    assert [row["needed"] for row in document["mistakes"]] == list(result.needed)
    assert document["pairs"] == result.to_dict()["pairs"]
    stored = json.loads(Path("m.json").read_text())
    assert stored["mistakes"][0]["map"] == result.maps[0].tolist()


@pytest.mark.parametrize("name", ["m.html", "m.png", "m.csv"])
def test_every_kind_of_file(name: str, typed: list[str], capsys: Captured) -> None:
    assert (
        main([*typed, "--truth", "folders", "--unsure", "1", "--photos", "2", "--by", "confidence", "--out", name]) == 0
    )
    assert f"Wrote {name}" in capsys.readouterr().out
    if name.endswith(".png"):
        Image.open(name).verify()
    elif name.endswith(".html"):
        assert "2 of 6 wrong or unsure answers, sorted by confidence" in Path(name).read_text()
    else:
        assert len(Path(name).read_text().splitlines()) == 1 + 6


def test_without_true_classes_the_unsure_answers_are_listed(typed: list[str], capsys: Captured) -> None:
    assert main([*typed, "--unsure", "0", "--out", "none.png"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "No true classes are known, so only unsure answers are listed: 0 of 6" in printed
    assert "none.png was not written: no answer is wrong or unsure." in printed
    assert not Path("none.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "loss"], "There is no order 'loss'; expected one of cost, confidence"),
        (["--out", "m.txt"], "write to a name that ends in .png"),
        (["--truth", "no-such-file.csv"], "--truth no-such-file.csv is not a file"),
        (["--method", "rollout", "--unsure", "1"], "gives the same map for every class"),
        (["--removal", "nothing"], "nothing"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, typed: list[str], capsys: Captured) -> None:
    without_method = [part for part in typed if part not in ("--method", "ixg")]
    assert main([*without_method, *arguments]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    (error,) = [line for line in errors.splitlines() if not line.startswith("clairvit: note: ")]
    assert message in error
