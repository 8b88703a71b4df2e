"""`clairvit reproduce` end to end: tables, files, JSON, going on in a store, --check without data, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

import clairvit as cv
from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.cli import main
from clairvit.cli.annotations import Annotations
from clairvit.cli.reproduce import detected_data
from clairvit.data.detector import Detector
from clairvit.errors import BadInput
from clairvit.papers.paper import NAMES, find_paper
from clairvit.papers.setup import ReproductionConfig
from helpers.tiny_models import wrapped

Captured = pytest.CaptureFixture[str]
SIZE = 32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos and masks in the working directory, and a tiny model instead of the built-in one."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "masks"):
        (tmp_path / name).mkdir()
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{seed}.png")
        mask = np.zeros((SIZE, SIZE), dtype=np.uint8)
        mask[4 + seed : 20, 6:24] = 1
        Image.fromarray(mask).save(tmp_path / "masks" / f"{seed}.png")
    monkeypatch.setattr(cv, "load", lambda *_, **__: wrapped("timm-vit"))
    return tmp_path


DATA = ("--data", "folder:photos", "--masks", "masks")


def refusal(capsys: Captured, *arguments: str) -> str:
    assert main(["reproduce", *arguments]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith("clairvit: ")
    sentences = [line for line in errors.splitlines() if not line.startswith("clairvit: note: ")]
    assert len(sentences) == 1, errors
    return errors


def document(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert main(["reproduce", *arguments, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


# --check


@pytest.mark.parametrize("name", NAMES)
def test_check_needs_no_data(name: str, capsys: Captured) -> None:
    assert main(["reproduce", name, "--check"]) == 0
    printed, errors = capsys.readouterr()
    findings = find_paper(name).check()
    held = sum(finding.holds for finding in findings)
    assert f"{held} of {len(findings)} hold when computed again" in printed
    assert printed.count("NO ") >= len(findings) - held
    assert errors == ""


def test_check_as_json(capsys: Captured) -> None:
    content = document(capsys, "cmi", "--check")
    assert content["paper"] == "cmi"
    assert [check["holds"] for check in content["check"]] == [True] * 5
    assert "0.38245" in content["check"][2]["seen"]


# Runs


def test_tables_and_files(folder: Path, capsys: Captured) -> None:
    assert main(["reproduce", "joita", *DATA, "--out", "kept"]) == 0
    printed, errors = capsys.readouterr()
    assert "3 images" in printed
    assert "42.96" in printed, "the paper's"
    assert "LeGrad is the best by all measures" in printed
    assert "pairs in the same order" in printed
    assert "What is not as in the paper" in printed
    assert "legrad(preset=joita)" in printed
    assert "0 of them there already" in errors
    kept = folder / "kept"
    assert {file.name for file in kept.iterdir()} == {"joita-store", "joita.md", "joita.json", "joita-radar.png"}
    text = (kept / "joita.md").read_text(encoding="utf-8")
    assert "| mIoU ↑ | LeGrad | 42.96 | 1 |" in text
    assert "ViT-B/16, pretrained on ImageNet-1k" in text
    kept_json = json.loads((kept / "joita.json").read_text(encoding="utf-8"))
    row = next(row for row in kept_json["rows"] if row["method"] == "LeGrad")
    assert row["cells"]["mIoU"]["paper"] == 42.96
    assert row["cells"]["mIoU"]["images"] == 3
    assert (kept / "joita-radar.png").stat().st_size > 10_000


def test_it_goes_on_where_it_was(capsys: Captured) -> None:
    first = document(capsys, "joita", *DATA, "--out", "kept")
    assert main(["reproduce", "joita", *DATA, "--out", "kept"]) == 0
    errors = capsys.readouterr().err
    assert "90 numbers, 90 of them there already; 0 units" in errors
    again = document(capsys, "joita", *DATA, "--out", "kept")
    assert {**first, "seconds": 0} == {**again, "seconds": 0}


def test_without_out_nothing_is_kept(folder: Path, capsys: Captured) -> None:
    before = set(folder.rglob("*"))
    assert main(["reproduce", "cmi", *DATA, "--limit", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 3 images" in printed
    assert "--out DIR keeps" in printed
    assert set(folder.rglob("*")) == before


def test_quiet_and_json(capsys: Captured) -> None:
    assert main(["reproduce", "cmi", *DATA, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    content = document(capsys, "cmi", *DATA)
    assert content["numbers_on"] == "11 images"
    assert [row["method"] for row in content["rows"]][:2] == ["Attention Rollout", "Gradient Attention Rollout"]
    assert content["rows"][0]["cells"]["FAF"]["paper"] == pytest.approx(0.38245, abs=1e-5)
    assert content["claims"][0]["comparisons"] == 2
    assert content["differences"]


def test_a_paper_without_numbers_has_one_row_a_method(capsys: Captured) -> None:
    assert main(["reproduce", "skipplus", "--data", "folder:photos", "--limit", "1", "--target", "predicted"]) == 0
    printed = capsys.readouterr().out
    assert "DecompX∘SkipPLUS" in printed
    assert "AP is left out: the data has no masks." in printed
    assert "Summed from which layer on?" in printed
    assert "mean rank" in printed
    assert "deletion goes with AP, and against insertion" in " ".join(printed.split())


def test_another_method_and_a_torn_image(folder: Path, capsys: Captured) -> None:
    """The rest is done, the files are written, and the status says that something is missing."""
    (folder / "photos" / "1.png").write_bytes(b"torn")
    arguments = ["reproduce", "joita", *DATA, "--method", "LeGrad=ixg", "--out", "kept", "--json"]
    assert main(arguments) == 2
    printed, errors = capsys.readouterr()
    content = json.loads(printed)
    assert content["images"] == 2
    assert next(row for row in content["rows"] if row["method"] == "LeGrad")["ours"] == "ixg"
    assert "1.png" in content["failed"][0]
    assert "some numbers could not be computed" in errors
    assert (folder / "kept" / "joita.md").exists()


# Mistakes


def test_mistakes_are_one_sentence(folder: Path, capsys: Captured) -> None:
    assert "Did you mean 'skipplus'?" in refusal(capsys, "skipluss", "--check")
    assert "expected --data NAME:PATH" in refusal(capsys, "joita")
    assert "quick, usual, paper" in refusal(capsys, "joita", *DATA, "--effort", "slow")
    assert "expected one of predicted, label" in refusal(capsys, "joita", *DATA, "--target", "cat")
    assert "folder:photos has none; expected data with masks" in refusal(capsys, "joita", "--data", "folder:photos")
    assert "explains the true class" in refusal(capsys, "skipplus", *DATA)
    assert "expected --masks mask-rcnn" in refusal(capsys, "cmi", *DATA, "--weights", "w.pth")
    assert "expected --data folder:PATH" in refusal(capsys, "cmi", "--data", "pets:photos", "--masks", "mask-rcnn")
    assert "expected score= and mask=" in refusal(
        capsys, "cmi", "--data", "folder:photos", "--masks", "mask-rcnn(scor=0.7)"
    )
    assert "--masks nowhere is not a folder" in refusal(
        capsys, "cmi", "--data", "folder:photos", "--masks", "nowhere", "--out", "kept"
    )
    assert "expected data with masks" in refusal(capsys, "joita", "--data", "folder:photos", "--out", "kept")
    assert not (folder / "kept").exists(), "no store is begun for what cannot be done"
    assert "There is no data set 'folders'" in refusal(capsys, "joita", "--data", "folders:photos")


def test_mask_rcnn_finds_the_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of whole pictures from a detector that always finds the same square; its options are part of the mark."""
    import clairvit.data.foreground as places

    square = np.zeros((SIZE, SIZE), dtype=np.uint8)
    square[8:16, 8:16] = 255
    foreground = places.Foreground(Image.fromarray(square), (("cat", 0.9),))
    monkeypatch.setattr(places, "load_detector", lambda *_, **__: Detector(nn.Identity(), "tiny", ("cat",)))
    monkeypatch.setattr(places, "foreground", lambda *_, **__: foreground)
    config = ReproductionConfig(find_paper("cmi"), ModelConfig("tiny"), DataConfig("folder:photos", limit=2))
    shown = detected_data(config, Annotations(masks="mask-rcnn"), wrapped("timm-vit"))
    other = detected_data(config, Annotations(masks="mask-rcnn(score=0.7)"), wrapped("timm-vit"))
    assert len(shown.dataset) == 2
    page = shown.dataset.read(0, wrapped("timm-vit"))
    assert page.mask is not None
    assert int(page.mask.sum()) == 64
    assert shown.dataset.content_hash(0) != other.dataset.content_hash(0)
    assert shown.description == "a folder of images, 2 of 3 images"
    nowhere = ReproductionConfig(config.paper, config.model, DataConfig("folder:nowhere"))
    with pytest.raises(BadInput, match="There is no folder 'nowhere'"):
        detected_data(nowhere, Annotations(masks="mask-rcnn"), wrapped("timm-vit"))
