"""`clairvit compare -m A -m B`: several models side by side on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from skimage import data

from clairvit.cli import main
from clairvit.cli.arguments import read_model

MODELS = ["-m", "pets", "-m", "torchvision:resnet18", "--no-pretrained"]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    Image.fromarray(data.chelsea()).save(tmp_path / "photos" / "cat.png")
    Image.fromarray(data.astronaut()).save(tmp_path / "photos" / "human.png")
    return tmp_path


def test_models_have_entries_of_their_own(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "photos" / "broken.png").write_bytes(b"no picture")
    assert main(["compare", "photos", *MODELS, "--method", "gradcam,rollout", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [Path(failure["image"]).name for failure in document["failed"]] == ["broken.png"]
    cat, _ = document["results"]
    first, second = cat["models"].values()
    assert list(first["methods"]) == ["gradcam", "rollout"]
    assert list(second["methods"]) == ["gradcam"]
    assert "no attention" in second["skipped"]["rollout"]
    assert [Path(file).name for file in cat["files"]] == [
        f"cat-compare-gradcam-rollout{end}" for end in (".png", ".json", ".npz")
    ]
    assert all(Path(file).stat().st_size > 0 for file in cat["files"])


def test_one_picture_of_all_images_and_a_table_of_predictions(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "photos", *MODELS, "--method", "gradcam", "--out", "all.png"]) == 0
    assert sorted(path.name for path in photos.iterdir()) == ["all.png", "photos"]
    printed = capsys.readouterr().out
    assert "What each model sees" in printed
    assert "torchvision:resnet18" in printed
    assert "Wrote all.png" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mean", "0.5"], "--mean 0.5 was given with 2 models; expected it in parentheses behind the model"),
        (["--target", "Bengal"], "torchvision:resnet18 (random weights): There is no class 'Bengal'"),
        (["--target", "3"], "Class 3 is Basset Hound in pets"),
        (["--generate", "--prompt", "What is this?"], "--generate explains the words that one model writes"),
        (["--method", "rollout,gradcam", "--out", "all.txt"], "all.txt"),
    ],
)
def test_refusals(photos: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "photos/cat.png", *MODELS, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_options_in_parentheses_are_of_one_model(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["-m", "pets", "-m", "pets(mean=0.4,0.5,0.6,std=0.25)"]
    assert main(["compare", "photos/cat.png", *models, "--method", "rollout", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["results"][0]["models"]
    assert list(entries) == ["pets", "pets (2)"]
    means = [entry["methods"]["rollout"]["preprocess"]["mean"] for entry in entries.values()]
    assert means[1] == [0.4, 0.5, 0.6] != means[0]
    assert main(["compare", "photos/cat.png", "-m", models[3], "--method", "rollout", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["results"][0]["methods"]["rollout"]
    assert alone["maps"] == entries["pets (2)"]["methods"]["rollout"]["maps"]


def test_what_is_typed_for_a_model() -> None:
    assert read_model("timm:vit_tiny_patch16_224") == ("timm:vit_tiny_patch16_224", {})
    assert read_model("file:a (1).pth(arch=timm:x,labels=cat,dog (wild),mean=0.5)") == (
        "file:a (1).pth",
        {"arch": "timm:x", "labels": "cat,dog (wild)", "mean": "0.5"},
    )
    assert read_model("file:photo(1)") == ("file:photo(1)", {})
