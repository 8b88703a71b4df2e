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
from clairvit.cli.reproduce_runs import detected_data
from clairvit.data.detector import Detector
from clairvit.errors import BadInput
from clairvit.papers.paper import NAMES, find_paper
from clairvit.papers.setup import ReproductionConfig
from helpers.tiny_models import fresh, wrapped

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
    assert "LeGrad (code) is the best by all measures" in printed
    assert "pairs in the same order" in printed
    assert "What is not as in the paper" in printed
    assert "legrad(preset=joita)" in printed
    assert "0 of them there already" in errors
    kept = folder / "kept"
    names = {"joita-store", "joita.html", "joita.md", "joita.json", "joita-radar.png"}
    assert {file.name for file in kept.iterdir()} == names
    text = (kept / "joita.md").read_text(encoding="utf-8")
    assert "| mIoU ↑ | LeGrad (code) | 42.96 | 1 |" in text
    assert "ViT-B/16, pretrained on ImageNet-1k" in text
    kept_json = json.loads((kept / "joita.json").read_text(encoding="utf-8"))
    row = next(row for row in kept_json["rows"] if row["method"] == "LeGrad (code)")
    assert row["cells"]["mIoU"]["paper"] == 42.96
    assert row["cells"]["mIoU"]["images"] == 3
    assert (kept / "joita-radar.png").stat().st_size > 10_000


def test_it_goes_on_where_it_was(capsys: Captured) -> None:
    first = document(capsys, "joita", *DATA, "--out", "kept")
    assert main(["reproduce", "joita", *DATA, "--out", "kept"]) == 0
    errors = capsys.readouterr().err
    assert "108 numbers, 108 of them there already; 0 units" in errors
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
    arguments = ["reproduce", "joita", *DATA, "--method", "LeGrad (code)=ixg", "--out", "kept", "--json"]
    assert main(arguments) == 2
    printed, errors = capsys.readouterr()
    content = json.loads(printed)
    assert content["images"] == 2
    assert next(row for row in content["rows"] if row["method"] == "LeGrad (code)")["ours"] == "ixg"
    assert "1.png" in content["failed"][0]
    assert "some numbers could not be computed" in errors
    assert (folder / "kept" / "joita.md").exists()


# Chosen, fine-tuned, measured, joined

QUICK = ("--effort", "quick", "--quiet")


def classes_in(root: Path, count: int) -> str:
    """Write pictures of noise in two classes, and return the data set."""
    for number in range(count):
        place = root / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return f"folder:{root.name}"


def test_finetuning_first_and_a_second_run_that_does_nothing(folder: Path, capsys: Captured) -> None:
    data = classes_in(folder / "pets", 24)
    typed = ["reproduce", "focusvit", "--data", data, "--model", "scenes", "--finetune", "--training", "0.8"]
    typed += ["--epochs", "1", "--limit", "3", "--validation", "1", "--out", "kept", "--effort", "quick"]
    assert main([*typed, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["training"]["recipe"] == "focusvit"
    assert content["training"]["images"] + content["training"]["validation_images"] == 19
    assert (content["images"], content["tuned"]["images"]) == (2, 1)
    sentences = {entry["about"]: entry["what"] for entry in content["differences"]}
    assert "19 of the 24 images of the split all, the scored ones not among them" in sentences["training"]
    assert "chosen on 1 images that are not scored; 2 others are" in sentences["validation"]
    assert "3 of the 5 images not trained on" in sentences["data"]
    splits = {(split["right"]["images"] + split["wrong"]["images"]) for split in content["by_correctness"]}
    assert splits <= {0, 1, 2}
    weights = (folder / "kept" / "focusvit-model.safetensors").read_bytes()
    assert main(typed) == 0
    errors = capsys.readouterr().err
    assert errors.count("0 units of work") == 2, "the start layers and the scores are there"
    assert "epoch 1" not in errors
    assert (folder / "kept" / "focusvit-model.safetensors").read_bytes() == weights


def test_several_data_sets_are_joined_also_afterwards(folder: Path, capsys: Captured) -> None:
    first, second = classes_in(folder / "one", 2), classes_in(folder / "two", 2)
    typed = ["reproduce", "focusvit", "--data", first, "--data", second, "--validation", "0", "--out", "kept", *QUICK]
    assert main(typed) == 0
    assert capsys.readouterr().out == ""
    kept = folder / "kept"
    files = {str(file.relative_to(kept)) for file in kept.rglob("focusvit*.*") if "store" not in str(file)}
    joined = {"focusvit-joined.html", "focusvit-joined.md", "focusvit-joined.json", "focusvit-radars.png"}
    single = {f"{name}/focusvit{end}" for name in ("one", "two") for end in (".html", ".md", ".json", "-radar.png")}
    assert files == joined | single
    text = (kept / "focusvit-joined.md").read_text(encoding="utf-8")
    assert [line.split(" | ")[0] for line in text.splitlines() if "↑ |" in line or "↓ |" in line].count("| two") == 5
    again = ["reproduce", "focusvit", "--join", "kept/one", "--join", "kept/two", "--out", "again"]
    assert main(again) == 0
    assert "Wrote" in capsys.readouterr().out
    for name in joined:
        assert (folder / "again" / name).read_bytes() == (kept / name).read_bytes(), name


def test_a_data_set_that_cannot_be_used_does_not_end_the_others(folder: Path, capsys: Captured) -> None:
    typed = [
        "reproduce",
        "cmi",
        "--data",
        "folder:photos",
        "--data",
        "folder:nowhere",
        "--masks",
        "masks",
        "--out",
        "kept",
    ]
    assert main(typed) == 2
    printed, errors = capsys.readouterr()
    assert "left out: folder:nowhere: " in errors
    assert "What is not as in the paper" in printed
    assert (folder / "kept" / "photos" / "cmi.json").exists()
    assert not (folder / "kept" / "cmi-joined.json").exists()


def test_cost_is_measured_where_that_is_asked_for(capsys: Captured) -> None:
    content = document(capsys, "joita", *DATA, "--cost")
    (cost,) = content["costs"]
    assert (cost["method"]["forwards"], cost["method"]["backwards"]) == (1, 1)
    assert (cost["baseline"]["forwards"], cost["baseline"]["backwards"]) == (1, 0)
    assert "costs" not in document(capsys, "joita", *DATA)


# Mistakes


# Figures, and every paper


def test_figures_are_files_and_parts_of_the_page(folder: Path, capsys: Captured) -> None:
    options = ("--figures", "--figure-images", "2", "--out", "kept")
    assert main(["reproduce", "joita", *DATA, *options]) == 0
    assert "joita-figure-5.png" in capsys.readouterr().out
    with Image.open(folder / "kept" / "joita-figure-5.png") as picture:
        assert picture.width > picture.height / 2 > 100
    page = (folder / "kept" / "joita.html").read_text(encoding="utf-8")
    assert page.count('<img src="data:image/png;base64,') == 1
    assert "Figure 5: four methods" in page
    assert "are not in this data" in page
    assert 'src="http' not in page
    assert "photos" in (folder / "kept" / "joita.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--figures",), "expected --out DIR"),
        (("--figure-images", "2", "--out", "kept"), "expected it with --figures"),
        (("--second-model", "timm:resnet50", "--out", "kept"), "expected it with --figures"),
    ],
)
def test_options_of_figures_need_others(options: tuple[str, ...], words: str, capsys: Captured) -> None:
    assert words in refusal(capsys, "joita", *DATA, *options)


def test_all_papers_on_one_page(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    some = tuple(find_paper(name) for name in ("cmi", "joita", "skipplus"))
    monkeypatch.setattr("clairvit.papers.paper.list_papers", lambda: some)
    assert main(["reproduce", "all", *DATA, "--out", "kept"]) == 0
    printed, errors = capsys.readouterr()
    assert "Each claim of each paper" in printed
    assert "not testable here" in printed
    assert "skipplus on folder:photos is left out: " in errors
    assert "2 of 3: joita on folder:photos, about " in errors
    kept = folder / "kept"
    assert {"papers.html", "papers.json", "cmi", "joita"} <= {file.name for file in kept.iterdir()}
    page = (kept / "papers.html").read_text(encoding="utf-8")
    assert "Which claims hold" in page
    assert "Left out" in page
    assert "hold when computed again" in page
    content = json.loads((kept / "papers.json").read_text(encoding="utf-8"))
    assert content["papers"] == ["cmi", "joita", "skipplus"]
    assert [entry["paper"] for entry in content["left_out"]] == ["skipplus"]
    verdicts = {entry["verdict"] for entry in content["claims"] if entry["paper"] == "skipplus"}
    assert verdicts == {"not testable here"}
    assert {run["paper"]["name"] for run in content["runs"]} == {"cmi", "joita"}
    again = document(capsys, "all", *DATA, "--out", "kept")
    assert [run["rows"] for run in again["runs"]] == [run["rows"] for run in content["runs"]]


def test_every_check_at_once(capsys: Captured) -> None:
    content = document(capsys, "all", "--check")
    assert [entry["paper"] for entry in content["papers"]] == list(NAMES)


@pytest.mark.parametrize("options", [("--method", "CAM=rollout"), ("--finetune", "--out", "x"), ("--join", "x")])
def test_options_of_one_paper_are_refused_for_all(options: tuple[str, ...], capsys: Captured) -> None:
    assert "is of one paper, and 'all' was given" in refusal(capsys, "all", *DATA, *options)


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


def test_mistakes_with_several_runs_are_one_sentence(folder: Path, capsys: Captured) -> None:
    assert "such as 200, or a share" in refusal(capsys, "focusvit", *DATA, "--validation", "many")
    assert "nothing of 'joita' is chosen" in refusal(capsys, "joita", *DATA, "--validation", "2")
    assert "'cmi' says nothing about what its methods cost" in refusal(capsys, "cmi", *DATA, "--cost")
    assert "--epochs 3 is of fine-tuning" in refusal(capsys, "focusvit", *DATA, "--epochs", "3")
    assert "expected --out DIR" in refusal(capsys, "focusvit", *DATA, "--finetune")
    assert "2 models were given for 1 data set;" in refusal(capsys, "joita", *DATA, "-m", "pets", "-m", "scenes")
    assert "folder:photos has no classes" in refusal(capsys, "focusvit", *DATA, "--finetune", "--out", "kept")
    assert "There is no 'kept/joita.json'" in refusal(capsys, "joita", "--join", "kept")
    assert not (folder / "kept").exists()


def test_mask_rcnn_finds_the_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of whole pictures from a detector that always finds the same square; its options are part of the mark."""
    import clairvit.data.foreground as places

    square = np.zeros((SIZE, SIZE), dtype=np.uint8)
    square[8:16, 8:16] = 255
    foreground = places.Foreground(Image.fromarray(square), (("cat", 0.9),))
    monkeypatch.setattr(places, "load_detector", lambda *_, **__: Detector(nn.Identity(), "tiny", ("cat",)))
    monkeypatch.setattr(places, "foreground", lambda *_, **__: foreground)
    config = ReproductionConfig(find_paper("cmi"), ModelConfig("tiny"), DataConfig("folder:photos", limit=2))
    shown = detected_data(config, Annotations(masks="mask-rcnn"), fresh("timm-vit"))
    other = detected_data(config, Annotations(masks="mask-rcnn(score=0.7)"), fresh("timm-vit"))
    assert len(shown.dataset) == 2
    page = shown.dataset.read(0, fresh("timm-vit"))
    assert page.mask is not None
    assert int(page.mask.sum()) == 64
    assert shown.dataset.content_hash(0) != other.dataset.content_hash(0)
    assert shown.description == "a folder of images, 2 of 3 images"
    nowhere = ReproductionConfig(config.paper, config.model, DataConfig("folder:nowhere"))
    with pytest.raises(BadInput, match="There is no folder 'nowhere'"):
        detected_data(nowhere, Annotations(masks="mask-rcnn"), fresh("timm-vit"))
