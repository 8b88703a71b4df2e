"""`clairvit certify` and `explain --certificate` end to end: the certificate is that of cv.certify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import clairvit as cv
from clairvit.cli import main
from clairvit.results import Certificate
from helpers.small_study import ARCHITECTURE, photos, weights

Captured = pytest.CaptureFixture[str]
PHOTOS = "photos/*/*.png"


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model and nine photos in the working directory."""
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 9)
    return ["--model", weights(tmp_path / "tiny.safetensors"), "--arch", f"timm:{ARCHITECTURE}"]


def test_from_photos_to_marked_patches(typed: list[str], capsys: Captured) -> None:
    assert main(["certify", PHOTOS, *typed, "--method", "ixg", "--out", "mine.json"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    certificate = Certificate.load("mine.json")
    files = sorted(str(file) for file in Path("photos").glob("*/*.png"))
    model = cv.load(typed[1], arch=typed[3])
    assert certificate == cv.certify(model, files, "ixg")
    assert certificate.sentence in printed
    assert "Wrote mine.json; use it by: clairvit explain IMAGE" in printed
    assert "--certificate mine.json" in printed
    assert main(["certify", PHOTOS, *typed, "--method", "ixg", "--out", "again.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["q"], document["files"]) == (certificate.q, ["again.json"])
    assert Certificate.load("again.json") == certificate
    with_file = ["--certificate", "mine.json"]
    assert main(["explain", files[0], *typed, *with_file, "--out", "one.json"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    record = json.loads(Path("one.json").read_text())
    (marked,) = record["certified"]["maps"]
    assert record["method"] == "ixg", "the certificate's method is the default"
    assert len(marked["patches"]) == certificate.q
    assert marked["held"] in (True, False)
    assert f"Certificate: {marked['sentence']}" in printed
    assert "Whether a photo is like the calibration photos is not checked." in printed
    assert main(["explain", *files[:2], *typed, *with_file, "--out", "two/", "--quiet"]) == 0
    assert len(list(Path("two").glob("*-ixg.png"))) == 2


def test_a_share_of_photos_with_regions(typed: list[str], capsys: Captured) -> None:
    from PIL import Image

    for file in Path("photos").glob("*/*.png"):
        target = Path("masks") / file.name
        target.parent.mkdir(exist_ok=True)
        Image.new("L", (32, 32), 255).save(target)
    assert main(["certify", PHOTOS, *typed, "--statement", "region", "--masks", "masks", "--out", "mine.json"]) == 0
    assert "on 9 of 9 photos" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", PHOTOS, *typed, "--certificate", "mine.json"]) == 2
    assert "is about regions that were drawn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["certify", "photos/0/*.png"], "3 photos cannot certify anything for 90 % of photos; expected 9 calibration"),
        (["certify", PHOTOS, "--keep", "0.95"], "9 photos cannot certify anything for 95 %"),
        (["certify", PHOTOS, "--keep", "90"], "keep=90.0 was given; expected a share of photos between 0 and 1"),
        (["certify", PHOTOS, "--out", "mine.txt"], "expected one that ends in .json"),
        (["certify", PHOTOS, "--statement", "kept"], "There is no statement 'kept'"),
        (["certify", PHOTOS, "--statement", "region"], "without regions"),
        (["certify", PHOTOS, "--method", "no-such-method"], "There is no method 'no-such-method'"),
        (["explain", PHOTOS, "--certificate", "none.json"], "The certificate 'none.json' cannot be read"),
        (
            ["explain", PHOTOS, "--certificate", "mine.json", "--method", "genatt"],
            "for maps of 'ixg', and these are of",
        ),
        (["explain", PHOTOS, "--certificate", "mine.json", "--seed", "3"], "expected maps of seed 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, typed: list[str], capsys: Captured) -> None:
    if "mine.json" in arguments:
        assert main(["certify", PHOTOS, *typed, "--method", "ixg", "--out", "mine.json", "--quiet"]) == 0
    capsys.readouterr()
    assert main([*arguments, *typed]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert message in errors
    assert "Traceback" not in errors
