"""`clairvit explain --features` and CNNs on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from skimage import data

from clairvit.cli import main

RESNET = ["--model", "torchvision:resnet18", "--no-pretrained"]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in ("cat", "same"):
        Image.fromarray(data.chelsea()).save(tmp_path / "photos" / f"{name}.png")
    return tmp_path


def test_features_of_a_cnn_are_drawn_beside_the_map(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "photos", *RESNET, "--method", "gradcam(relu=false)", "--features", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    written = [file for entry in result["results"] for file in entry["files"]]
    assert sum(file.endswith("-features.png") for file in written) == 2
    for file in written:
        assert Path(file).stat().st_size > 0


def test_features_of_a_vit_and_one_file_for_all(photos: Path) -> None:
    assert main(["explain", "photos", "--features", "--out", "all.png"]) == 0
    assert {"all.png", "all-features-1.png", "all-features-2.png"} <= {path.name for path in photos.iterdir()}


def test_several_targets_have_the_features_once(photos: Path) -> None:
    assert main(["explain", "demo", "--target", "Bengal,Sphynx", "--features", "--out", "cat.png"]) == 0
    assert sorted(path.name for path in photos.glob("*.png")) == ["cat-features.png", "cat.png"]


def test_attention_on_a_cnn_is_refused_in_a_sentence(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "demo", *RESNET, "--method", "rollout"]) != 0
    error_output = capsys.readouterr().err
    assert "no attention" in error_output
    assert "gradcam" in error_output
