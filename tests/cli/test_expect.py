"""`clairvit expect` end to end: exit status, files, thresholds, two versions, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.cli import main
from helpers.small_study import ARCHITECTURE, photos, weights

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model, six photos with masks of their left half, in the working directory."""
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 6)
    mask = np.zeros((32, 32), np.uint8)
    mask[:, :16] = 255
    for file in Path("photos").glob("*/*.png"):
        (Path("masks") / file.parent.name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(Path("masks") / file.parent.name / file.name)
    model = ["--model", weights(tmp_path / "tiny.safetensors"), "--arch", f"timm:{ARCHITECTURE}"]
    return ["expect", "photos", "--masks", "masks", "--method", "saliency", *model]


@pytest.mark.parametrize(
    ("thresholds", "status"),
    [
        ([], 0),
        (["area <= 0.5"], 0),
        (["area <= 0.5", "area >= 0.9 on 50%"], 1),
        (["mean area > 0.1"], 0),
        (["mean area > 0.6"], 1),
    ],
)
def test_the_exit_status_says_whether_the_thresholds_hold(
    thresholds: list[str], status: int, typed: list[str], capsys: Captured
) -> None:
    options = [part for text in thresholds for part in ("--threshold", text)]
    assert main([*typed, *options, "--out", "result.csv"]) == status
    printed = " ".join(capsys.readouterr().out.split())
    assert "Wrote result.csv" in printed
    assert printed.count(": passed,") + printed.count(": failed,") == len(thresholds)
    with Path("result.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["area"]) for row in rows] == [0.5] * 6
    assert all(("passed" in row) == bool(thresholds) for row in rows)
    assert main([*typed, *options, "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] == (None if not thresholds else status == 0)
    model = cv.load(typed[7], arch=typed[9])
    files = sorted(str(file) for file in Path("photos").glob("*/*.png"))
    masks = [str(file).replace("photos", "masks") for file in files]
    result = cv.expect(model, files, masks, "saliency")
    expected = result.to_dict()["images"]
    assert all(row["inside"] for row in expected), "what the test takes for granted"
    for row, values in zip(document["images"], expected, strict=True):
        assert {name: row[name] for name in values} == values


def test_two_versions_are_compared(typed: list[str], tmp_path: Path, capsys: Captured) -> None:
    old = weights(tmp_path / "old.safetensors", seed=1)
    assert main([*typed, "--against-model", old, "--threshold", "mean area_change >= 0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["against"] is not None
    assert any(row["inside_change"] for row in document["images"])
    assert main([*typed, "--against-model", typed[7]]) == 0
    assert "0 of 6 answers are not those of" in " ".join(capsys.readouterr().out.split())


def test_a_photo_that_cannot_be_read_is_status_2(typed: list[str], capsys: Captured) -> None:
    Path("photos/0/000.png").write_bytes(b"no picture")
    assert main([*typed, "--threshold", "area >= 0.9"]) == 2
    printed, errors = capsys.readouterr()
    assert "000.png" in errors
    assert "Traceback" not in errors
    assert "holds on 0 of 5 images" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threshold", "inside"], "is no condition; expected one such as"),
        (["--threshold", "insid > 1"], "There is no quantity 'insid'"),
        (["--threshold", "inside_change > 1"], "There is no quantity 'inside_change'"),
        (["--out", "result.png"], "write to a name that ends in .json, .csv"),
        (["--removal", "nothing"], "nothing"),
        (["--against-model", "no-such-model"], "no-such-model"),
        (["--masks", "no-such-folder"], "--masks no-such-folder is not a folder"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, typed: list[str], capsys: Captured) -> None:
    assert main([*typed, *arguments]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    (error,) = [line for line in errors.splitlines() if not line.startswith("clairvit: note: ")]
    assert message in error


def test_images_without_masks_are_refused_with_the_option(typed: list[str], capsys: Captured) -> None:
    without = [*typed[:2], *typed[4:]]
    assert main(without) == 2
    assert "No regions were given; expected one mask per image: --masks" in capsys.readouterr().err
