"""Preprocessing on the command line and in study files: stated, printed, kept in results; which images are read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.bench.store import Store
from clairvit.cli import main
from clairvit.cli.arguments import read_preprocess
from clairvit.errors import BadInput
from clairvit.models.sources import registry as sources
from clairvit.models.state_hash import state_hash
from helpers.small_study import ARCHITECTURE, photos, weights

Captured = pytest.CaptureFixture[str]
STATED = ["--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225", "--resize", "40", "--interpolation", "bilinear"]
SEEN = {
    "size": [32, 32],
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "resize": 40,
    "interpolation": "bilinear",
    "keep_ratio": True,
    "display": None,
    "frames": None,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six photos in three class folders, and a model of three classes in a file that says nothing about itself."""
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 6)
    weights(tmp_path / "tiny.safetensors")
    return tmp_path


MODEL = ["--model", "file:tiny.safetensors", "--arch", f"timm:{ARCHITECTURE}"]


def printed(capsys: Captured, *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    return json.loads(out)


def refusal(capsys: Captured, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.count("\n") == 1, errors
    return errors


# stated, and kept in results ------------------------------------------------------------------------------------------


def test_explain_keeps_preprocessing_and_weights(capsys: Captured, here: Path) -> None:
    (record,) = printed(capsys, "explain", "photos/0/000.png", *MODEL, *STATED, "--method", "ixg")["results"]
    model = cv.load("file:tiny.safetensors", arch=f"timm:{ARCHITECTURE}")
    assert record["preprocess"] == SEEN
    assert record["weights_hash"] == state_hash(model.module)
    assert record["notes"] == []
    with np.load(here / "out" / "000-ixg.npz") as kept:
        about = json.loads(str(kept["about"]))
    assert (about["preprocess"], about["weights_hash"]) == (SEEN, record["weights_hash"])
    written = json.loads((here / "out" / "000-ixg.json").read_text())
    assert (written["preprocess"], written["weights_hash"]) == (SEEN, record["weights_hash"])


def test_compare_evaluate_and_choose_keep_them_too(capsys: Captured, here: Path) -> None:
    options = [*MODEL, *STATED]
    (compared,) = printed(capsys, "compare", "photos/0/000.png", *options, "--method", "ixg,saliency")["results"]
    assert {json.dumps(method["preprocess"]) for method in compared["methods"].values()} == {json.dumps(SEEN)}
    scored = printed(capsys, "evaluate", "photos", *options, "--method", "ixg", "--metric", "sparseness")
    assert scored["preprocess"] == SEEN
    assert scored["assumptions"] == []
    assert json.loads((here / "out" / "scores.json").read_text())["weights_hash"] == scored["weights_hash"]
    chosen = printed(
        capsys, "choose", "photos", *options, "--method", "ixg,saliency", "--metric", "sparseness", "--batch-size", "8"
    )
    assert chosen["preprocess"] == SEEN
    assert chosen["weights_hash"] == scored["weights_hash"]
    recipe = json.loads((here / "recipe.json").read_text())
    assert recipe["model_record"]["preprocess"] == SEEN
    assert main(["explain", "photos/0/000.png", *options, "--recipe", "recipe.json"]) == 0  # no note: the same model


def test_the_command_that_choose_prints_has_the_options(capsys: Captured) -> None:
    arguments = ["choose", "photos", *MODEL, *STATED, "--method", "ixg,saliency", "--metric", "sparseness"]
    assert main(arguments) == 0
    (line,) = (text for text in capsys.readouterr().out.splitlines() if "use it by: " in text)
    command = line.partition("use it by: clairvit ")[2].replace("IMAGE", "photos/0/000.png").split()
    assert command[command.index("--mean") + 1] == "0.485,0.456,0.406"
    assert main(command) == 0
    assert "other weights" not in capsys.readouterr().err


def test_bench_keeps_them_in_the_store(capsys: Captured, here: Path) -> None:
    work = ["--data", "folder:photos", "--method", "ixg", "--metric", "sparseness", "--out", "store"]
    document = printed(capsys, "bench", *MODEL, *STATED, *work)
    assert document["results"][0]["preprocess"] == SEEN
    store = Store.open(here / "store", create=False)
    ((key,),) = store.query("select distinct model_hash from results")[1]
    record = store.models()[str(key)]
    assert record["preprocess"] == SEEN
    assert record["weights_hash"] == document["results"][0]["weights_hash"]
    assert record["model"] == "file:tiny.safetensors"
    assert store.studies()[0]["models"][0]["resize"] == 40
    main(["bench", *MODEL, *work])  # the same file with other numbers is another model
    assert len(store.models()) == 2
    assert "assumed: timm's" in capsys.readouterr().err


def test_a_study_file_states_them(capsys: Captured, here: Path) -> None:
    (here / "study.toml").write_text(
        f"""
data = "folder:photos"
methods = "ixg"
metrics = "sparseness"

[[models]]
spec = "file:tiny.safetensors"
arch = "timm:{ARCHITECTURE}"
mean = [0.485, 0.456, 0.406]
std = [0.229, 0.224, 0.225]
resize = 40
crop = 32
interpolation = "bilinear"
"""
    )
    assert printed(capsys, "bench", "study.toml", "--out", "store")["results"][0]["preprocess"] == SEEN
    text = (here / "study.toml").read_text()
    (here / "wrong.toml").write_text(text.replace("[0.485, 0.456, 0.406]", "[123.675, 116.28, 103.53]"))
    message = refusal(capsys, "bench", "wrong.toml", "--out", "other")
    assert "wrong.toml, line 9: mean=(123.675, 116.28, 103.53) is for pixels in 0..255" in message
    (here / "wrong.toml").write_text(text.replace("crop = 32", "crop = [1, 2, 3]"))
    assert "line 12: size=(1, 2, 3) is not an image size" in refusal(capsys, "bench", "wrong.toml", "--out", "other")


def test_several_models_have_no_common_preprocessing(capsys: Captured) -> None:
    several = ["bench", "--model", "pets,scenes", "--mean", "0.5", "--data", "folder:photos", "--out", "store"]
    assert "Preprocessing is of one model, and 2 were given" in refusal(capsys, *several)
    assert "Serve them one by one" in refusal(capsys, "serve", "-m", "pets", "-m", "scenes", "--resize", "256")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mean", "a,b,c"], "--mean a,b,c was given; expected R,G,B such as 0.485,0.456,0.406"),
        (["--mean", "123.675,116.28,103.53"], "divide by 255"),
        (["--std", "0,0,0"], "one positive number for each channel"),
        (["--resize", "large"], "--resize large was given; expected a number of pixels such as 256, or ROWS,COLUMNS"),
        (["--resize", "0"], "resize=0 is not a size"),
        (["--crop", "1,2,3"], "is not an image size"),
        (["--interpolation", "cubic"], "interpolation='cubic' is unknown"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "compare", "evaluate", "choose"])
def test_wrong_numbers_are_refused_before_a_model_is_loaded(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, command: str, options: list[str], words: str
) -> None:
    monkeypatch.setattr(cv, "load", lambda *_, **__: pytest.fail("a model was loaded"), raising=False)
    assert words in refusal(capsys, command, "photos", *options)


def test_options_become_arguments_of_load() -> None:
    assert read_preprocess(None, None, None, None, None) == {}
    given = read_preprocess("0.5", "0.1,0.2,0.3", "248", "224,320", "bilinear")
    assert given == {
        "mean": 0.5,
        "std": (0.1, 0.2, 0.3),
        "resize": 248,
        "size": (224, 320),
        "interpolation": "bilinear",
    }
    with pytest.raises(BadInput, match="resize="):
        read_preprocess(None, None, "1,2,3", None, None)


def test_crop_is_the_models_image_size(capsys: Captured) -> None:
    random = ["--model", "timm:vit_tiny_patch16_224", "--no-pretrained", "--crop", "64", "--method", "ixg"]
    (record,) = printed(capsys, "explain", "photos/0/000.png", *random)["results"]
    assert record["preprocess"]["size"] == [64, 64]
    assert record["grid"] == [4, 4]


def test_finetune_trains_with_the_mean_it_is_given_and_writes_it(capsys: Captured, here: Path) -> None:
    shape = ["--no-pretrained", "--with", "patch_size=8,embed_dim=16,depth=1,num_heads=2", "--size", "32"]
    how = ["--epochs", "1", "--batch-size", "4", "--mean", "0.1,0.2,0.3", "--std", "0.4,0.5,0.6", "--held-out", "0.5"]
    assert main(["finetune", "photos", "--model", "timm:vit_tiny_patch16_224", *shape, *how, "-q"]) == 0
    model = cv.load("file:model.safetensors")
    assert model.preprocess.mean == (0.1, 0.2, 0.3)
    assert model.preprocess.std == (0.4, 0.5, 0.6)
    assert model.labels == ("0", "1", "2")
    assert model.assumptions == ()
    assert (model.activation, model.activation_reason) == ("softmax", "the weights file states it")


# printed --------------------------------------------------------------------------------------------------------------


def test_what_was_assumed_is_reported_once(capsys: Captured) -> None:
    assert main(["explain", "photos", *MODEL, "--method", "ixg"]) == 0
    out, errors = capsys.readouterr()
    assert out.count("were assumed: timm's for test_vit") == 1
    assert errors == ""
    for arguments in (
        ["evaluate", "photos", "--method", "ixg", "--metric", "sparseness"],
        ["choose", "photos", "--method", "ixg,saliency", "--metric", "sparseness"],
        ["bench", "--data", "folder:photos", "--method", "ixg", "--metric", "sparseness", "--out", "store"],
    ):
        assert main([*arguments, *MODEL]) == 0
        assert capsys.readouterr().err.count("note: mean, std, resize and interpolation were assumed") == 1
        assert main([*arguments, *MODEL, "-q"]) == 0
        assert capsys.readouterr() == ("", "")


def test_pets_is_found_by_its_name(capsys: Captured) -> None:
    assert main(["models", "pets"]) == 0
    out = capsys.readouterr().out
    assert "pets" in out
    assert "37 breeds" in out
    document = printed(capsys, "models", "scene*")
    assert [entry["name"] for entry in document] == ["scenes"]
    assert sources.sources("timm:pets") == []


# images ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["explain", "compare", "evaluate", "choose"])
def test_a_wrong_image_name_is_found_before_a_model_is_loaded(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(cv, "load", lambda *_, **__: pytest.fail("a model was loaded"), raising=False)
    assert "There is no image 'photos/0/00.png'. Did you mean '00" in refusal(capsys, command, "photos/0/00.png")
    assert main([command, "nowhere.png", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["failed"][0]["image"] == "nowhere.png"
    assert "'https://example.org/a.png' is an address" in refusal(capsys, command, "https://example.org/a.png")


def test_the_other_images_are_explained(capsys: Captured) -> None:
    assert main(["explain", "nowhere.png", "photos/0/000.png", "https://x.org/a.png", "--method", "ixg", "-q"]) == 2
    errors = capsys.readouterr().err
    assert "2 of 3 could not be explained" in errors
    assert "'https://x.org/a.png' is an address" in errors
    assert Path("out/000-ixg.png").exists()


def test_hidden_folders_and_files_are_skipped_by_every_command(capsys: Captured, here: Path) -> None:
    for place in (".ipynb_checkpoints", "0/.ipynb_checkpoints"):
        (here / "photos" / place).mkdir()
        Image.new("RGB", (32, 32)).save(here / "photos" / place / "x-checkpoint.png")
    (here / "photos" / "0" / "._000.png").write_bytes(b"a shadow of macOS")
    (here / "labels.json").write_text('["0", "1", "2"]')
    model = [*MODEL, "--labels", "labels.json"]
    explained = printed(capsys, "explain", "photos", *model, "--method", "ixg", "--out", "maps")
    names = sorted(result["image"] for result in explained["results"])
    assert names == [f"photos/{number % 3}/{number:03}.png" for number in (0, 3, 1, 4, 2, 5)]
    by_label = ["--truth", "folders", "--target", "label", "--method", "ixg", "--metric", "sparseness"]
    assert sorted(printed(capsys, "evaluate", "photos", *model, *by_label)["images"]) == names
    chosen = printed(capsys, "choose", "photos", *model, "--method", "ixg,saliency", "--metric", "sparseness")
    assert sorted(chosen["images"]) == names
    work = [
        "--data",
        "folder:photos",
        "--target",
        "label",
        "--method",
        "ixg",
        "--metric",
        "sparseness",
        "--out",
        "store",
    ]
    benched = printed(capsys, "bench", *model, *work)["results"][0]
    assert sorted(f"photos/{name}" for name in benched["images"]) == names
    shape = ["--no-pretrained", "--with", "patch_size=8,embed_dim=16,depth=1,num_heads=2", "--size", "32"]
    how = ["--epochs", "1", "--batch-size", "4", "--held-out", "0.5"]
    trained = printed(capsys, "finetune", "photos", "--model", "timm:vit_tiny_patch16_224", *shape, *how)
    assert (trained["classes"], trained["images"] + trained["validation_images"]) == (["0", "1", "2"], 6)
    hidden = printed(capsys, "explain", "photos/.ipynb_checkpoints", *model, "--method", "ixg")  # named, so meant
    assert len(hidden["results"]) == 1


def test_a_large_picture_is_explained_quietly(capsys: Captured, here: Path) -> None:
    Image.new("1", (12_000, 9_000), 1).save(here / "large.png")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["explain", "large.png", *MODEL, *STATED, "--method", "ixg", "-q", "--out", "large.json"]) == 0
    assert capsys.readouterr() == ("", "")


def test_finetune_says_what_it_assumed_of_a_file(capsys: Captured) -> None:
    how = ["--epochs", "1", "--batch-size", "4", "--held-out", "0.5"]
    done = printed(capsys, "finetune", "photos", *MODEL, *how)
    assert done["assumptions"][0].startswith("mean, std, resize and interpolation were assumed: timm's for test_vit")
    assert done["preprocess"]["mean"] == list(cv.load("file:model.safetensors").preprocess.mean)
    again = printed(capsys, "finetune", "photos", "--model", "file:model.safetensors", *how, "--out", "two.safetensors")
    assert again["assumptions"] == []
