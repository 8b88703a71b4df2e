"""`clairvit finetune` end to end: killed and typed again it ends with the same bytes; mistakes are one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.cli import main
from clairvit.cli.finetune import open_images, read_options
from clairvit.data.scenes import CLASSES
from clairvit.errors import BadInput

Captured = pytest.CaptureFixture[str]
TINY = [
    "--model",
    "timm:vit_tiny_patch16_224",
    "--no-pretrained",
    "--size",
    "32",
    "--batch-size",
    "8",
    "--rate",
    "3e-3",
]
SHAPE = ["--with", "patch_size=8,embed_dim=16,depth=2,num_heads=2,drop_rate=0.1"]
DISCARD = ["--discard-state"]
COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220), "green": (30, 200, 30)}


@pytest.fixture(autouse=True)
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """photos/red/0.png …, and the folder above as the working directory; one thread, as in the other process."""
    monkeypatch.chdir(tmp_path)
    for name, colour in COLOURS.items():
        make(tmp_path / "photos" / name, colour, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


def make(folder: Path, colour: tuple[int, int, int], count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        red, green, blue = (min(255, part + 5 * number) for part in colour)
        Image.new("RGB", (40, 36), (red, green, blue)).save(folder / f"{number}.png")


def refusal(capsys: Captured, *arguments: str) -> str:
    assert main(["finetune", *arguments]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith("clairvit: ")
    assert errors.count("\n") == 1, errors
    return errors


def test_killed_after_an_epoch_and_typed_again_it_ends_with_the_same_bytes(photos: Path) -> None:
    arguments = ["finetune", "photos", *TINY, *SHAPE, "--patience", "50"]
    code = "import sys; from clairvit.cli import main; sys.exit(main(sys.argv[1:]))"
    # meant to be long, so that the signal meets it at work, wherever that is
    command = [sys.executable, "-c", code, *arguments, "--out", "killed.safetensors", "--epochs", "500"]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(cv.__file__).parent.parent)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=here) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "epoch 2:" in line:
                run.kill()
                break
        assert run.wait() == -9
    stored = json.loads(_notes(photos / "killed.training.safetensors")["clairvit"])
    done = len(stored["history"])
    assert 2 <= done < 500
    more = ["--epochs", str(done + 2), "--quiet"]
    assert main([*arguments, "--out", "killed.safetensors", *more]) == 0
    assert main([*arguments, "--out", "whole.safetensors", *more]) == 0
    for ending in (".safetensors", ".training.safetensors"):
        assert (photos / f"killed{ending}").read_bytes() == (photos / f"whole{ending}").read_bytes()


def _notes(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def test_the_json_document_says_what_was_done_and_the_file_loads_by_itself(capsys: Captured) -> None:
    assert main(["finetune", "photos", *TINY, *SHAPE, "--epochs", "6", "--held-out", "0.25", "--json"]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    document = json.loads(printed)
    assert document["command"] == "finetune"
    assert document["classes"] == ["blue", "green", "red"]
    assert (document["images"], document["validation_images"]) == (18, 6)
    assert len(document["epochs"]) <= 6
    assert document["accuracy"] == max(epoch["accuracy"] for epoch in document["epochs"])
    model = cv.load(f"file:{document['file']}")
    assert model.labels == ("blue", "green", "red")
    assert model.preprocess.resize == 36
    assert cv.explain(model, "photos/red/0.png", "legrad").maps.shape == (1, 4, 4)


def test_what_is_printed_names_the_best_epoch_and_the_next_step(capsys: Captured) -> None:
    assert main(["finetune", "photos", *TINY, *SHAPE, "--epochs", "1", "--out", "new/m.safetensors"]) == 0
    printed, errors = capsys.readouterr()
    assert "Best after epoch 1" in printed
    assert "--model file:new/m.safetensors" in printed
    assert "epoch 1: loss" in errors
    assert main(["finetune", "photos", *TINY, *SHAPE, "--epochs", "2", "--out", "new/m.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert "1 of these epochs was done before" in printed
    assert "m.training.safetensors" in printed
    assert "stays: the same command with more --epochs goes on" in " ".join(printed.split())
    assert main(["finetune", "photos", *TINY, *SHAPE, "--epochs", "3", "--out", "new/m.safetensors", *DISCARD]) == 0
    printed = capsys.readouterr().out
    assert "2 of these epochs were done before" in printed
    assert "stays" not in printed
    assert [file.name for file in Path("new").iterdir()] == ["m.safetensors"]


def test_a_recipe_has_a_name_and_options_change_it(capsys: Captured) -> None:
    arguments = ["finetune", "photos", *TINY, *SHAPE, "--epochs", "1", "--json", "--out"]
    rates = []
    for options in (["a.safetensors"], ["b.safetensors", "--warmup", "0"]):
        assert main([*arguments, *options]) == 0
        rates.append(json.loads(capsys.readouterr().out)["epochs"][0]["rate"])
    assert rates[0] < rates[1], "still rising in the first epoch"
    assert "Choose one of: default, focusvit." in refusal(capsys, "photos", *TINY, *SHAPE, "--recipe", "vit")


def test_train_and_val_folders_are_taken_as_they_are(photos: Path, capsys: Captured) -> None:
    (photos / "photos").rename(photos / "train")
    (photos / "all").mkdir()
    (photos / "train").rename(photos / "all" / "train")
    for name, colour in COLOURS.items():
        make(photos / "all" / "val" / name, colour, 2)
    assert main(["finetune", "all", *TINY, *SHAPE, "--epochs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["images"], document["validation_images"]) == (24, 6)


def test_an_image_that_cannot_be_read_is_left_out_and_reported_at_the_end(photos: Path, capsys: Captured) -> None:
    (photos / "photos" / "red" / "3.png").write_bytes(b"nothing")
    assert main(["finetune", "photos", *TINY, *SHAPE, "--epochs", "1"]) == 2
    printed, errors = capsys.readouterr()
    assert "Wrote model.safetensors" in printed
    assert "3.png" in errors.splitlines()[-1]


def test_a_data_set_is_trained_on_its_own_training_split(photos: Path, capsys: Captured) -> None:
    lines = []
    for number, (name, colour) in enumerate({"Abyssinian": COLOURS["red"], "beagle": COLOURS["blue"]}.items(), 1):
        make(photos / name, colour, 8)
        for place in range(8):
            (photos / "set" / "images").mkdir(parents=True, exist_ok=True)
            (photos / "set" / "annotations" / "trimaps").mkdir(parents=True, exist_ok=True)
            Image.open(photos / name / f"{place}.png").save(photos / "set" / "images" / f"{name}_{place}.jpg")
            trimap = Image.new("L", (40, 36), 1)
            trimap.save(photos / "set" / "annotations" / "trimaps" / f"{name}_{place}.png")
            lines.append(f"{name}_{place} {number} 1 1")
    (photos / "set" / "annotations" / "trainval.txt").write_text("\n".join(lines[:6] + lines[8:14]))
    (photos / "set" / "annotations" / "test.txt").write_text("\n".join(lines[6:8] + lines[14:]))
    assert main(["finetune", "pets:set", *TINY, *SHAPE, "--epochs", "8", "--rotation", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["classes"] == ["Abyssinian", "Beagle"]
    assert (document["images"], document["validation_images"]) == (10, 2)
    assert document["accuracy"] == 1.0


def test_a_data_set_with_a_validation_split_is_validated_on_it(photos: Path) -> None:
    for split, count in (("train", 3), ("val", 2)):
        for wnid in ("n01440764", "n01443537"):
            make(photos / "set" / split / wnid, COLOURS["red"], count)
    dataset, validation, classes = open_images("imagenet:set")
    assert validation is not None
    assert (len(dataset), len(validation), len(classes or ())) == (6, 4, 1000)
    assert {name.split("/")[0] for name in dataset.names} == {"train"}
    assert {name.split("/")[0] for name in validation.names} == {"val"}


def test_scenes_are_made_for_training() -> None:
    dataset, validation, classes = open_images("scenes:12")
    assert (len(dataset), validation, classes) == (12, None, CLASSES)
    assert dataset.names[0] == "scene 1-0"
    assert len(open_images("scenes")[0]) == 8000
    parts, validation, _ = open_images("parts:3")
    assert (parts.names, validation) == (("parts 1-0", "parts 1-1", "parts 1-2"), None)  # seed 0 is to evaluate on


def test_mistakes_are_one_sentence(photos: Path, capsys: Captured) -> None:
    assert "'photo' is not a folder" in refusal(capsys, "photo")
    assert "Did you mean 'scenes'" in refusal(capsys, "scene")
    assert "has 0 folders" in refusal(capsys, "photos/red")
    assert "expected NAME=VALUE" in refusal(capsys, "photos", *TINY, "--with", "depth")
    assert "Did you mean 'embed_dim'" in refusal(capsys, "photos", *TINY, "--with", "embed_dims=3")
    assert "expected a learning rate" in refusal(capsys, "photos", *TINY[:-2], "--rate", "0")
    assert "no model 'vit_tinny" in refusal(capsys, "photos", "--model", "timm:vit_tinny_patch16_224")
    assert ".safetensors" in refusal(capsys, "photos", *TINY, *SHAPE, "--out", "model.pth")
    (photos / "photos" / "empty").mkdir()
    assert "The class folder 'photos/empty' has no images; expected some" in refusal(capsys, "photos", *TINY)


def test_options_of_the_model_are_read_as_what_they_are() -> None:
    options = read_options(" patch_size=8, qk_norm=True,mlp_ratio=2.5,global_pool=avg ")
    assert options == {"patch_size": 8, "qk_norm": True, "mlp_ratio": 2.5, "global_pool": "avg"}
    assert read_options("") == {}
    with pytest.raises(BadInput, match="NAME=VALUE"):
        read_options("depth=")


def test_tokens_are_dropped_and_a_trigger_is_planted_and_scored_by_localisation(photos: Path, capsys: Captured) -> None:
    """From the data to the table: fine-tune with a backdoor, then ask which methods find the trigger."""
    planted = ["--drop-tokens", "0.4", "--trigger", "green", "--trigger-size", "8", "--trigger-share", "0.3"]
    assert main(["finetune", "photos", *TINY, *SHAPE, *planted, "--epochs", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["interventions"] == {
        "drop_tokens": 0.4,
        "trigger": "green",
        "trigger_size": 8,
        "trigger_position": "random",
        "trigger_share": 0.3,
    }
    assert 0 <= document["attack_success"] <= 1
    assert json.loads(_notes(photos / "model.safetensors")["training"]) == document["interventions"]
    arguments = ["--model", "file:model.safetensors", "--target", "label", "--method", "legrad,rollout"]
    metrics = ["--metric", "relevance-mass,pointing-game(tolerance=0),ap", "--json"]
    assert main(["evaluate", "--data", "trigger(folder:photos,class=green,size=8)", *arguments, *metrics]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert len(scores["images"]) == 16, "photos of the trigger's class are left out"
    assert len(scores["scores"]) == 3 * 4, "three metrics; two methods, random and center"
    assert main(["finetune", "photos", *TINY, *SHAPE, *planted, "--epochs", "3"]) == 0
    printed, errors = capsys.readouterr()
    assert ", trigger " in errors
    assert ", trigger " in printed


def test_interventions_that_do_not_fit_are_one_sentence(capsys: Captured) -> None:
    assert "drop_tokens=1.5 was given" in refusal(capsys, "photos", *TINY, *SHAPE, "--drop-tokens", "1.5")
    spec = "trigger(folder:photos,class=red)"
    assert "type folder:photos --trigger red." in refusal(capsys, spec, *TINY, *SHAPE)
    assert "trigger=pink was given" in refusal(capsys, "photos", *TINY, *SHAPE, "--trigger", "pink")
