"""`clairvit explain --keep-maps`: all maps in few files, the same as those of Python within half precision."""

from __future__ import annotations

from pathlib import Path

import pytest

import clairvit as cv
from clairvit.cli import main
from clairvit.methods.map_shards import read_maps
from helpers.small_study import ARCHITECTURE, photos, weights


def test_maps_of_all_images_are_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = weights(tmp_path / "tiny.safetensors")
    photos(tmp_path / "photos", 3)
    (tmp_path / "photos" / "broken.jpg").write_text("no image")
    arguments = ["explain", "photos", "--model", file, "--arch", f"timm:{ARCHITECTURE}", "--method", "legrad"]
    assert main([*arguments, "--keep-maps", "--out", "maps"]) == 2, "an image could not be read"
    assert [path.name for path in Path("maps").iterdir()] == ["maps-00000.npz"]
    stored = read_maps("maps", "legrad")
    assert len(stored.names) == 3
    model = cv.load(file, arch=f"timm:{ARCHITECTURE}")
    expected = cv.explain(model, list(stored.names), "legrad")
    assert stored.targets == expected.targets
    largest = expected.maps.abs().flatten(1).amax(1)[:, None, None]
    assert bool(((stored.maps - expected.maps).abs() <= largest * (2**-11 + 2**-22)).all()), "the same batch"
    capsys.readouterr()
    assert main([*arguments, "--keep-maps", "--out", "one.png"]) == 2
    assert "--keep-maps writes many maps into files of a folder" in capsys.readouterr().err
    assert main([*arguments, "--keep-maps", "--layers"]) == 2
    assert "expected it without --layers" in capsys.readouterr().err
