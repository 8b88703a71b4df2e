"""Whatever a user types or has on disk: one clear sentence and status 2, or it simply works. Never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data

from clairvit.cli import main

Captured = pytest.CaptureFixture[str]
CAT = Image.fromarray(data.chelsea())


def refusal(capsys: Captured, *arguments: str) -> str:
    """Run, expect status 2 and exactly one sentence of ours on stderr."""
    assert main(["explain", *arguments]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith("clairvit: ")
    assert errors.count("\n") == 1, errors
    assert "Traceback" not in errors
    return errors


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_missing_file(capsys: Captured) -> None:
    assert "There is no image 'cta.jpg'" in refusal(capsys, "cta.jpg")


def test_a_folder_without_images(here: Path, capsys: Captured) -> None:
    (here / "empty").mkdir()
    assert "no images in the folder 'empty'" in refusal(capsys, "empty")


def test_a_pattern_that_matches_nothing(capsys: Captured) -> None:
    assert "No image matches '*.jpg'" in refusal(capsys, "*.jpg")


def test_a_text_file_named_jpg(here: Path, capsys: Captured) -> None:
    (here / "cat.jpg").write_text("meow")
    assert "'cat.jpg' is not an image" in refusal(capsys, "cat.jpg")


def test_a_truncated_jpeg(here: Path, capsys: Captured) -> None:
    CAT.save(here / "cat.jpg")
    whole = (here / "cat.jpg").read_bytes()
    (here / "cat.jpg").write_bytes(whole[: len(whole) // 2])
    assert "'cat.jpg' is damaged" in refusal(capsys, "cat.jpg")


def test_a_huge_image(here: Path, capsys: Captured) -> None:
    Image.new("1", (20000, 10000)).save(here / "huge.png")
    assert "too large" in refusal(capsys, "huge.png")


def _rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    CAT.rotate(90, expand=True).save(path, exif=exif)


SAVERS: dict[str, Callable[[Path], None]] = {
    "one_pixel.png": lambda path: CAT.resize((1, 1)).save(path),
    "cmyk.jpg": lambda path: CAT.convert("CMYK").save(path),
    "palette.png": lambda path: CAT.convert("P").save(path),
    "sixteen_bit.png": lambda path: Image.fromarray(np.asarray(CAT.convert("L")).astype(np.uint16) * 257).save(path),
    "alpha.png": lambda path: CAT.convert("RGBA").save(path),
    "grey.png": lambda path: CAT.convert("L").save(path),
    "rotated.jpg": _rotated,
}


def test_odd_images_simply_work(here: Path, capsys: Captured) -> None:
    for name, save in SAVERS.items():
        save(here / name)
    assert main(["explain", *SAVERS, "--json"]) == 0
    results = {result["image"]: result for result in json.loads(capsys.readouterr().out)["results"]}
    assert set(results) == set(SAVERS)
    for name in ("cmyk.jpg", "palette.png", "alpha.png", "rotated.jpg"):
        assert results[name]["top"][0][0]["name"] == "Bengal", name


def test_the_rest_of_a_batch_is_processed_and_the_failures_come_last(here: Path, capsys: Captured) -> None:
    CAT.save(here / "a.png")
    (here / "b.jpg").write_text("meow")
    CAT.save(here / "d.png")
    assert main(["explain", "a.png", "b.jpg", "missing.jpg", "d.png", "nothing/*.png"]) == 2
    printed, errors = capsys.readouterr()
    assert "a.png" in printed
    assert "d.png" in printed
    lines = errors.splitlines()
    assert lines[0] == "clairvit: 3 of 5 could not be explained:"
    assert all(line.startswith("clairvit: ") for line in lines)
    assert all(any(name in line for line in lines[1:]) for name in ("b.jpg", "missing.jpg", "nothing/*.png"))
    assert (here / "out" / "d-attnlrp+plus.png").exists()


def test_failures_are_in_the_json(here: Path, capsys: Captured) -> None:
    CAT.save(here / "a.png")
    assert main(["explain", "a.png", "missing.jpg", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [result["image"] for result in document["results"]] == ["a.png"]
    (failed,) = document["failed"]
    assert failed["image"] == "missing.jpg"
    assert "There is no image" in failed["error"]


def test_a_single_failure_is_in_the_json_too(capsys: Captured) -> None:
    assert main(["explain", "missing.jpg", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["results"] == []
    assert document["failed"][0]["image"] == "missing.jpg"


def test_unknown_names_get_suggestions(capsys: Captured) -> None:
    assert "Did you mean 'rollout'" in refusal(capsys, "demo", "--method", "rolout")
    assert "Did you mean 'Bengal'" in refusal(capsys, "demo", "--target", "Bengla")
    assert "Did you mean 'pets'" in refusal(capsys, "demo", "--model", "pest")
    assert "Did you mean 'logit'" in refusal(capsys, "demo", "--score", "logits")


def test_wrong_classes_options_and_places(here: Path, capsys: Captured) -> None:
    assert "There is no class 99" in refusal(capsys, "demo", "--target", "99")
    assert "could be any of" in refusal(capsys, "demo", "--target", "B")
    assert "fusion=sum" in refusal(capsys, "demo", "--method", "rollout(fusion=sum)")
    assert "needs" in refusal(capsys, "demo", "--method", "rollout+from:x")
    assert "never closes it" in _compare(capsys, "demo", "--method", "rollout(fusion=max")
    assert "ends in '.bmp'" in refusal(capsys, "demo", "--out", "cat.bmp")
    assert "cannot be used here" in refusal(capsys, "demo", "--device", "tpu")
    (here / "file").write_text("")
    assert "Cannot write" in refusal(capsys, "demo", "--out", "file/cat.png")


def _compare(capsys: Captured, *arguments: str) -> str:
    assert main(["compare", *arguments]) == 2
    return capsys.readouterr().err


def test_the_wrong_number_of_labels(here: Path, capsys: Captured) -> None:
    (here / "labels.json").write_text('["cat", "dog"]')
    assert "2 labels were given for a model with 37 classes" in refusal(capsys, "demo", "--labels", "labels.json")
    assert "2 labels were given" in refusal(capsys, "demo", "--labels", "a cat,a dog")


def test_a_request_error_with_json_is_a_document(capsys: Captured) -> None:
    assert main(["explain", "demo", "--method", "rolout", "--json"]) == 2
    printed, errors = capsys.readouterr()
    assert "rolout" in json.loads(printed)["error"]
    assert errors.startswith("clairvit: There is no method 'rolout'.")


def test_in_a_real_shell(here: Path) -> None:
    code = "import sys; from clairvit.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", "demo", "missing.jpg", "--method", "rollout"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Wrote out/demo-rollout.png" in done.stdout
    assert done.stderr.splitlines()[0] == "clairvit: 1 of 2 could not be explained:"
