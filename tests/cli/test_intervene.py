"""`clairvit intervene`: a sweep over heads or layers on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import clairvit as cv
from clairvit.cli import main
from clairvit.models.image_files import read_image
from helpers.tiny_pairs import save_clip

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two photos in the current folder."""
    monkeypatch.chdir(tmp_path)
    names = [f"cat-{number}.png" for number in range(2)]
    for number, name in enumerate(names):
        read_image("demo").transpose(list(Image.Transpose)[number]).save(name)
    return names


def test_the_record_is_that_of_the_sweep(photos: list[str], capsys: Captured) -> None:
    model = f"hf:{save_clip(Path('clip'))}"
    typed = ["intervene", *photos, "--model", model, "--text", "a dog", "--batch-size", "1", "--json"]
    assert main(typed) == 0
    document = json.loads(capsys.readouterr().out)
    sweep = cv.intervene_sweep(model, photos, target=cv.Text("a dog"))
    assert document["command"] == "intervene"
    assert (document["score"], document["target"]) == ("difference of cosines", ["a dog"] * 2)
    assert document["names"] == photos
    effects = [value for image in document["effects"] for layer in image for value in layer]
    assert effects == pytest.approx(sweep.effects.flatten().tolist(), abs=64 * 1.2e-7)  # cosines in float32
    endings = (".png", ".json", ".npz")
    assert [Path(file).name for file in document["files"]] == [f"intervene-head-zero{ending}" for ending in endings]
    assert all(Path(file).stat().st_size for file in document["files"])
    assert main([*typed, "--score", "logit"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == "difference of logits"


def test_the_strongest_sites_are_printed(photos: list[str], capsys: Captured) -> None:
    typed = ["--source", photos[1], "--kind", "mlp", "--target", "Bengal", "-o", "mlp.png"]
    assert main(["intervene", photos[0], *typed]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "mlp → source of pets, cat-0.png: change of the logit of Bengal" in printed
    assert "layer 11" in printed
    assert "Wrote mlp.png" in printed
    assert Path("mlp.png").stat().st_size > 0


def test_an_unreadable_image_is_reported_and_the_rest_used(photos: list[str], capsys: Captured) -> None:
    Path("broken.png").write_bytes(b"no picture")
    assert main(["intervene", *photos, "broken.png", "--kind", "block", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["names"] == photos
    assert [failure["image"] for failure in document["failed"]] == ["broken.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "hed"], "There is no kind 'hed'. Did you mean 'head'?"),
        (["--value", "one"], "There is no value 'one'"),
        (
            ["--value", "source"],
            "pass --source IMAGE.",
        ),
        (["--value", "mean", "--source", "demo"], "no site has the value 'source'"),
        (["--source", "nowhere.jpg"], "nowhere.jpg"),
        (["--target", "Bengal", "--neuron", "3,17"], "2 targets were given"),
        (["--neuron", "3"], "--neuron 3 was given; expected LAYER,CHANNEL"),
        (["--out", "sweep.txt"], "sweep.txt"),
        (["--model", "torchvision:resnet18", "--no-pretrained"], "does not attend between all its tokens"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(options: list[str], message: str, capsys: Captured) -> None:
    assert main(["intervene", "demo", *options]) == 2
    printed, errors = capsys.readouterr()
    assert message in errors
    assert "Traceback" not in printed + errors


def test_the_old_name_answers_with_the_new_one(capsys: Captured) -> None:
    assert main(["patch", "demo"]) == 2
    assert capsys.readouterr().err.strip() == "clairvit: clairvit patch is called clairvit intervene since 0.3."
