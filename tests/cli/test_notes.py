"""What is odd about a folder (an empty class, images without masks, masks of no image) is noted by every command."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from clairvit.cli import main
from helpers.small_study import ARCHITECTURE, weights

EMPTY = "clairvit: note: No images are in the class folder 'fox'."
TINY = ["--model", "file:tiny.safetensors", "--arch", f"timm:{ARCHITECTURE}"]
BENCH = ["bench", "--data", "folder:photos", *TINY, "--method", "rollout", "--metric", "sparseness", "--out", "study"]
CHOOSE = ["choose", "folder:photos", *TINY, "--method", "rollout,center", "--metric", "sparseness"]
FINETUNE = ["finetune", "folder:photos", *TINY, "--epochs", "1"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of photos and an empty one, one mask that fits and one that does not, and a tiny model."""
    monkeypatch.chdir(tmp_path)
    weights(tmp_path / "tiny.safetensors")
    for name, colour in (("cat", "red"), ("dog", "blue")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32), colour).save(tmp_path / "photos" / name / f"{name}{number}.png")
    (tmp_path / "photos" / "fox").mkdir()
    (tmp_path / "masks").mkdir()
    for name in ("cat0", "fox7"):
        Image.new("L", (32, 32), 1).save(tmp_path / "masks" / f"{name}.png")
    return tmp_path


@pytest.mark.parametrize("command", [BENCH, CHOOSE, FINETUNE], ids=lambda command: command[0])
def test_an_empty_class_folder(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    assert EMPTY in capsys.readouterr().err
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_warning_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Once on stderr, and not again among the notes of the result."""
    assert main(["explain", "photos/cat/cat0.png", *TINY, "--method", "gradcam"]) == 0
    printed = capsys.readouterr()
    assert (printed.err + printed.out).count("gradcam: the map of") == 1


def test_a_note_of_the_library_is_printed_in_terms_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The file has the note as Python has it."""
    assert main(["explain", "photos/cat/cat0.png", *TINY, "--method", "focusvit", "--out", "cat.json"]) == 0
    printed = capsys.readouterr().out
    assert "`clairvit choose IMAGES --tune-start focusvit` looks for m*" in printed
    assert "cv.choose" not in printed
    assert "cv.choose(model, images, tune_start=['focusvit'])" in Path("cat.json").read_text(encoding="utf-8")


def test_masks_and_images_that_do_not_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--masks", "masks"]) == 0
    error_output = capsys.readouterr().err
    assert (
        "note: 5 of 6 images have no mask in 'masks': 'cat/cat1.png', 'cat/cat2.png', 'dog/dog0.png' and 2 more"
        in error_output
    )
    assert "note: 1 of 2 masks in 'masks' belong to no image: 'fox7.png'." in error_output
