from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clairvit.errors import BadInput, UnknownName
from clairvit.plotting.save import SUFFIXES, save, save_comparison
from plotting.fakes import fake

STARTS = {".png": b"\x89PNG", ".jpg": b"\xff\xd8", ".jpeg": b"\xff\xd8", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_suffix_is_written_whole_into_a_new_folder(tmp_path: Path, suffix: str) -> None:
    path = save(fake(), tmp_path / "new" / "folder" / f"cat{suffix}")
    assert path.read_bytes().startswith(STARTS.get(suffix, b""))
    assert [file.name for file in path.parent.iterdir()] == [f"cat{suffix}"], "no temporary file is left"


def test_the_explanation_saves_itself(tmp_path: Path) -> None:
    assert Image.open(fake().save(tmp_path / "cat.PNG", dpi=50)).width > 100


def test_the_record_says_everything(tmp_path: Path) -> None:
    explanation = fake(2, targets=["Bengal", "Bengal − Egyptian Mau"])
    content = json.loads(save(explanation, tmp_path / "cat.json").read_text())
    assert content["method"] == "legrad"
    assert content["grid"] == [4, 4]
    assert content["cost"] == {"forwards": 1, "backwards": 1, "seconds": 0.03, "own_seconds": 0.0}
    assert content["targets"] == ["Bengal", "Bengal − Egyptian Mau"]
    assert content["classes"] == [1, None]
    assert content["probabilities"][1] is None
    assert content["top"][0][0]["name"] == "Egyptian Mau"
    assert content["statistics"][0] == {"min": 0.0, "max": 6.0, "mean": 3.0}
    assert {"model", "score", "seed", "versions", "notes", "names", "signed"} <= set(content)
    np.testing.assert_array_equal(np.array(content["maps"], dtype=np.float32), explanation.maps.numpy())


def test_values_that_are_not_finite_become_null_not_broken_json(tmp_path: Path) -> None:
    explanation = fake()
    explanation.maps[0, 0, 0] = float("nan")
    content = json.loads(save(explanation, tmp_path / "cat.json").read_text(), parse_constant=pytest.fail)
    assert content["maps"][0][0][0] is None
    assert content["statistics"][0]["max"] is not None


def test_raw_maps_are_kept_bit_for_bit(tmp_path: Path) -> None:
    explanation = fake(2, layers=3)
    with np.load(save(explanation, tmp_path / "cat.npz"), allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored["maps"], explanation.maps.numpy())
        np.testing.assert_array_equal(stored["logits"], explanation.logits.numpy())
        assert explanation.layers is not None
        np.testing.assert_array_equal(stored["layers"], explanation.layers.numpy())
        about = json.loads(str(stored["about"]))
    assert about["method"] == "legrad"
    assert "maps" not in about


def test_a_comparison_keeps_every_method(tmp_path: Path) -> None:
    both = {"rollout": fake(method="rollout"), "decompx+skipplus": fake(method="decompx+skipplus", signed=True)}
    with np.load(save_comparison(both, tmp_path / "both.npz")) as stored:
        assert {"rollout/maps", "decompx+skipplus/maps", "rollout/about"} <= set(stored)
    assert set(json.loads(save_comparison(both, tmp_path / "both.json").read_text())) == set(both)
    assert Image.open(save_comparison(both, tmp_path / "both.png")).width > 100


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg", ".npz", ".json"])
def test_the_same_map_gives_the_same_file(tmp_path: Path, suffix: str) -> None:
    first, second = (save(fake(), tmp_path / f"{name}{suffix}").read_bytes() for name in "ab")
    assert first == second


@pytest.mark.parametrize("name", ["cat", "cat.bmp", "cat.exe"])
def test_an_unknown_suffix_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"write to a name that ends in \.png"):
        save(fake(), tmp_path / "folder" / name)
    assert not (tmp_path / "folder").exists()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(BadInput, match=r"Cannot write .*cat\.png.*choose a place you may write to"):
        save(fake(), tmp_path / "file" / "cat.png")


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(fake(), tmp_path / "cat.json")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(BadInput, match="No space left"):
        save(fake(method="other"), path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_display_options_reach_the_picture(tmp_path: Path) -> None:
    plain = save(fake(), tmp_path / "plain.png").read_bytes()
    assert save(fake(), tmp_path / "viridis.png", cmap="viridis").read_bytes() != plain
    assert save(fake(layers=2), tmp_path / "layers.png", layers=True).exists()
    with pytest.raises(UnknownName, match="not a display option"):
        save(fake(), tmp_path / "cat.png", colour="red")
