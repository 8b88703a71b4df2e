"""`clairvit features`: pictures of patch tokens on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data

import clairvit as cv
from clairvit.cli import main


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    Image.fromarray(data.chelsea()).save(tmp_path / "photos" / "cat.png")
    Image.fromarray(data.astronaut()).save(tmp_path / "photos" / "human.png")
    return tmp_path


def test_a_folder_has_one_basis_and_three_files_per_image(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", "photos", "--patch", "5,7", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "features"
    cat, human = document["results"]
    assert cat["explained_variance"] == human["explained_variance"]
    assert [Path(file).name for file in cat["files"]] == [f"cat-features{end}" for end in (".png", ".json", ".npz")]
    expected = cv.features("pets", [photos / "photos" / "cat.png", photos / "photos" / "human.png"])
    assert human["outliers"] == [expected.outliers[1].nonzero().tolist()]
    assert cat["grid"] == [14, 14]
    assert np.shape(human["pca"]) == (1, 14, 14, 3)
    assert human["similarity"][0][5][7] == pytest.approx(1, abs=192 * np.finfo(np.float64).eps)
    stored = json.loads((photos / "out" / "human-features.json").read_text(encoding="utf-8"))
    assert stored["pca"] == human["pca"]
    with np.load(photos / "out" / "cat-features.npz") as arrays:
        assert arrays["tokens"].shape == (1, 14, 14, 192)


def test_one_file_and_all_layers(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", "demo", "--layer", "all", "--out", "cat.png"]) == 0
    assert sorted(path.name for path in photos.glob("*.png")) == ["cat-layers.png", "cat.png"]
    printed = capsys.readouterr().out
    assert "block 11 of pets" in printed
    assert "14 × 14 patches of 192 channels; three components hold" in printed
    assert "Wrote cat-layers.png" in printed


def test_channels_of_a_cnn_are_drawn_for_each_layer(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "torchvision:resnet18", "--no-pretrained"]
    command = ["features", "photos", *model, "--layer", "all", "--channels", "3", "--out", "all.png", "--json"]
    assert main(command) == 0
    names = {path.name for path in photos.glob("*.png")}
    assert names == {"all.png", "all-layers.png", "all-channels-1.png", "all-channels-2.png"}
    cat, human = json.loads(capsys.readouterr().out)["results"]
    assert list(cat["strongest_channels"]) == ["layer1", "layer2", "layer3", "layer4"]
    assert [len(channels) for channels in human["strongest_channels"]["layer1"]] == [3]


def test_an_unreadable_image_is_reported_and_the_rest_shown(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "photos" / "broken.png").write_bytes(b"no picture")
    assert main(["features", "photos", "--layer", "-9", "--foreground", "positive", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert len(document["results"]) == 2
    assert {entry["layer_name"] for entry in document["results"]} == {"block 3"}
    assert all(0 <= entry["foreground"][0] <= 1 for entry in document["results"])
    assert [Path(failure["image"]).name for failure in document["failed"]] == ["broken.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--layer", "12"], "pets has 12 layers; expected 0 to 11"),
        (["demo", "--layer", "last"], "--layer last was given; expected a whole number"),
        (["demo", "--patch", "5"], "--patch 5 was given; expected ROW,COL"),
        (["demo", "--patch", "14,0"], "14 was given; expected a whole number from 0 to 13"),
        (["demo", "--foreground", "left"], "expected 'positive' or 'negative'"),
        (["demo", "--threshold", "1"], "without a foreground"),
        (["missing.jpg"], "missing.jpg"),
        (["demo", "--out", "cat.txt"], "write to a name that ends in"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: list[str], message: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["features", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not (photos / "out").exists()
