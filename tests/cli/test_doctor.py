"""`clairvit doctor`: lines, JSON, exit status."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clairvit.cli import main

CODE = """
import torch
import clairvit as cv
import timm

def vit():
    torch.manual_seed(0)
    small = dict(img_size=32, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=4)
    return timm.create_model("vit_tiny_patch16_224", **small).eval()

def build():
    return cv.wrap(vit(), mean=(0.5,) * 3, std=(0.5,) * 3, labels=["a", "b", "c", "d"])

def own():
    return torch.nn.Sequential(vit())

def assumed():
    return vit().half()

def broken():
    model = vit()
    model.head.weight.data.fill_(float("nan"))
    return model

def stopped():
    raise RuntimeError("no weights")
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "checked_vit.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("checked_vit", None)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    chance = np.random.default_rng(0)
    for place in range(3):
        Image.fromarray(chance.integers(0, 255, (40, 40, 3), np.uint8)).save(folder / f"{place}.png")
    return folder


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "checked_vit:build"]) == 0
    printed = capsys.readouterr().out
    for name in ("determinism", "batch independence", "completeness", "residual cancellation", "methods", "integrity"):
        assert name in printed
    assert "checked_vit:build can be explained" in printed


def test_advice_names_options(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "checked_vit:own"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "If the model was trained otherwise, give --mean, --std, --resize or --interpolation." in printed
    assert "cv.wrap(…, size=). On the command line: --crop." in printed
    assert re.search(r"skip\s+\d+ others", printed)
    assert main(["doctor", "checked_vit:own", "--crop", "32", "--mean", "0.5", "--std", "0.5", "-q"]) == 0


def test_a_failing_check_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "checked_vit:broken"]) == 1
    printed = capsys.readouterr().out
    assert "head.weight" in printed
    assert "cannot be explained as it is: see finite scores." in printed


def test_strict_counts_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "checked_vit:assumed", "-q"]) == 0
    assert main(["doctor", "checked_vit:assumed", "-q", "--strict"]) == 1
    assert capsys.readouterr().out == ""


def test_json(capsys: pytest.CaptureFixture[str], photos: Path) -> None:
    assert main(["doctor", "checked_vit:build", str(photos), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["model"], document["ok"]) == ("doctor", "checked_vit:build", True)
    assert len(document["images"]) == 3
    assert {check["status"] for check in document["checks"]} <= {"pass", "warn", "fail", "skip"}
    deletion = next(check for check in document["checks"] if check["name"] == "deletion")
    assert deletion["details"]["images"] == 3
    assert document["failed"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checked_vit:stopped"], "RuntimeError: no weights"),
        (["checked_vit:biuld"], "Did you mean 'build'?"),
        (["no_such_code:build"], "no Python module 'no_such_code'"),
        (["pet"], "Did you mean 'pets'?"),
        (["checked_vit:build", "no.jpg"], "no.jpg"),
        (["checked_vit:build", "--method", "legard"], "no method 'legard'"),
        (["checked_vit:build", "--no-pretrained"], "weights come from your own code"),
    ],
)
def test_bad_input_is_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_an_unreadable_image_costs_only_itself(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "not.png").write_text("no picture", encoding="utf-8")
    assert main(["doctor", "checked_vit:build", str(photos)]) == 2
    captured = capsys.readouterr()
    assert "can be explained" in captured.out
    assert "1 of 4 could not be read" in captured.err


def test_other_commands_take_it_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["explain", "demo", "--model", "checked_vit:build", "--method", "rollout", "--out", "map.json"]
    assert main(arguments) == 0
    assert json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))["model"] == "checked_vit:build"
