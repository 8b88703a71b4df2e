"""The commands end to end, on the built-in model."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

import clairvit as cv
from clairvit._cost import Cost
from clairvit.cli import main
from clairvit.methods.registry import by_family, list_methods
from clairvit.methods.spec import resolve_method
from helpers.rounding import assert_same, growth

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands, and `cv.load` here, load models in float64, so that batches of any size give the same numbers."""
    monkeypatch.setattr(cv, "load", functools.partial(cv.load, dtype=torch.float64))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two photos of the cat in a folder, and the folder above as the working directory."""
    monkeypatch.chdir(tmp_path)
    cat = Image.fromarray(data.chelsea())
    (tmp_path / "photos" / "more").mkdir(parents=True)
    cat.save(tmp_path / "photos" / "cat.jpg")
    cat.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "photos" / "more" / "cat.png")
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_explain_writes_picture_record_and_maps_and_says_so(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "demo"]) == 0
    assert files(photos / "out") == ["demo-attnlrp+plus.json", "demo-attnlrp+plus.npz", "demo-attnlrp+plus.png"]
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert "Bengal" in printed
    assert "%" in printed
    assert "Wrote out/demo-attnlrp+plus.png" in printed


def test_one_named_file_is_the_only_one(photos: Path) -> None:
    assert main(["explain", "photos/cat.jpg", "--method", "rollout", "-o", "deep/cat.pdf", "--quiet"]) == 0
    assert files(photos) == ["deep", "photos"]
    assert (photos / "deep" / "cat.pdf").read_bytes().startswith(b"%PDF")


def test_a_folder_gives_files_for_each_image(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "photos", "--method", "rollout(fusion=max)", "--out", "maps/"]) == 0
    stems = {name.split(".")[0] for name in files(photos / "maps")}
    assert stems == {"cat-rollout_fusion=max", "cat-2-rollout_fusion=max"}
    assert len(files(photos / "maps")) == 6
    assert "2 images" in capsys.readouterr().out


def test_several_images_in_one_named_file(photos: Path) -> None:
    assert main(["explain", "photos/*.jpg", "photos/more", "--out", "all.npz", "--batch-size", "1", "-q"]) == 0
    with np.load(photos / "all.npz") as stored:
        assert stored["maps"].shape == (2, 14, 14)
        assert json.loads(str(stored["about"]))["names"] == ["photos/cat.jpg", "photos/more/cat.png"]


@pytest.mark.usefixtures("float64")
def test_a_batch_gives_the_same_maps_as_single_images(photos: Path) -> None:
    assert main(["explain", "photos", "--out", "batch.npz", "-q"]) == 0
    assert main(["explain", "photos", "--out", "single.npz", "-q", "--batch-size", "1"]) == 0
    with np.load(photos / "batch.npz") as batch, np.load(photos / "single.npz") as single:
        assert_same(batch["maps"], single["maps"])


def test_targets_side_by_side_and_a_contrast(photos: Path, capsys: Captured) -> None:
    command = ["explain", "demo", "--target", "Egyp,5", "--contrast", "Bengal", "Egyptian Mau", "--json"]
    assert main(command) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["targets"] == ["Egyptian Mau", "Bengal", "Bengal − Egyptian Mau"]
    assert result["classes"] == [11, 5, None]
    assert len(result["maps"]) == 3
    assert result["names"] == ["demo"] * 3


def test_check_is_printed_written_and_in_the_json(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "demo", "--method", "genatt", "--check"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Check: Map supported by a test. Hiding the 18 %" in printed
    assert "Answer: Nothing speaks against it" in printed
    with_check = Image.open(photos / "out" / "demo-genatt.png").height
    assert main(["explain", "demo", "photos/no.jpg", "--method", "genatt", "--check", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    (result,) = document["results"]
    (check,) = result["check"]["checks"]
    assert check["verdict"] == "supported"
    assert check["sentence"] in printed
    assert check["badge"] in printed
    assert check["answer"]["sentence"] in printed
    assert result["check"]["thresholds"]["supported"] > result["check"]["thresholds"]["chance"]
    assert len(document["failed"]) == 1
    assert main(["explain", "demo", "--method", "genatt", "--quiet"]) == 0
    assert Image.open(photos / "out" / "demo-genatt.png").height < with_check  # no lines under the map


def test_layers_are_drawn_beside_the_map(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "demo", "--method", "genatt", "--layers"]) == 0
    assert "demo-genatt-layers.png" in files(photos / "out")
    with np.load(photos / "out" / "demo-genatt.npz") as stored:
        assert stored["layers"].shape == (12, 1, 14, 14)
    assert main(["explain", "demo", "--method", "center", "--layers"]) == 0
    assert "center has no maps of single layers" in capsys.readouterr().out


def test_json_is_one_document_and_nothing_else(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "photos", "--json"]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    document = json.loads(printed)
    assert document["command"] == "explain"
    assert document["failed"] == []
    first, second = document["results"]
    assert first["image"] == "photos/cat.jpg"
    assert np.array(first["maps"]).shape == (1, 14, 14)
    assert all(Path(file).exists() for file in first["files"] + second["files"])
    assert first["top"][0][0]["name"] == "Bengal"


def test_quiet_is_quiet(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "demo", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_compare_draws_a_grid_and_prints_classes_and_costs(photos: Path, capsys: Captured) -> None:
    methods = "rollout(fusion=max,start_layer=1),ixg+plus,decompx"
    assert main(["compare", "demo", "--method", methods, "--out", "grid.png"]) == 0
    assert Image.open(photos / "grid.png").width > 500
    printed = capsys.readouterr().out
    for word in (
        "Bengal",
        "68%",
        "rollout(fusion=max,start_layer=1)",
        "ixg+plus",
        "gradient",
        "linear",
        "forwards",
        "ms",
    ):
        assert word in printed, word
    assert "1 forward + 2 backward" in printed, "plain and linear rules, one forward"


def test_compare_in_a_folder_and_as_json(photos: Path, capsys: Captured) -> None:
    assert main(["compare", "photos", "--method", "rollout,genatt", "--target", "Bengal", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [list(result["methods"]) for result in document["results"]] == [["rollout", "genatt"]] * 2
    assert document["results"][0]["methods"]["genatt"]["targets"] == ["Bengal"]
    assert document["results"][0]["cost"]["forwards"] == 1
    assert files(photos / "out") == [
        f"cat-{n}compare-rollout-genatt.{s}" for n in ("2-", "") for s in ("json", "npz", "png")
    ]


def test_compare_all_leaves_out_what_does_not_fit(photos: Path, capsys: Captured) -> None:
    model = ["--model", "timm:swin_tiny_patch4_window7_224", "--no-pretrained"]
    assert main(["compare", "demo", "--method", "all", "--out", "swin.png", *model]) == 0
    printed = capsys.readouterr().out
    (refused,) = (text for text in printed.splitlines() if text.startswith("Left out") and "rollout" in text)
    assert "attends inside windows" in refused
    slow = [text for text in printed.splitlines() if "it is slow" in text]
    assert len(slow) == 1, "all slow methods are one line"
    assert "lime, kernelshap" in slow[0]
    assert "saliency" in printed


def test_methods_and_models_are_listed(capsys: Captured) -> None:
    assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    assert "rollout" in printed
    assert "Abnar" in printed
    assert main(["methods", "--json"]) == 0
    listed = {method["name"]: method for method in json.loads(capsys.readouterr().out)}
    assert listed["genatt"]["cost"] == {"forwards": 1, "backwards": 1, "at_most": False}
    assert main(["methods", "rollout"]) == 0
    printed = capsys.readouterr().out
    for word in ("Options", "fusion", "mean", "+skipplus", "Abnar & Zuidema"):
        assert word in printed, word
    assert main(["models"]) == 0
    assert "timm:NAME" in capsys.readouterr().out
    assert main(["models", "timm:vit_tiny*", "--json"]) == 0
    assert "timm:vit_tiny_patch16_224" in {model["name"] for model in json.loads(capsys.readouterr().out)}


@pytest.mark.usefixtures("float64")
def test_layers_are_in_the_record_too(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "demo", "--layers", "--method", "ixg+plus", "--out", "cat.json"]) == 0
    (content,) = [json.loads((photos / "cat.json").read_text(encoding="utf-8"))]
    layers = np.array(content["layer_maps"])  # [L, B, rows, cols]
    assert layers.shape == (12, 1, 14, 14)
    # twelve layers and their sum, each kept as float32
    largest = float(np.abs(layers).max())
    assert_same(layers.sum(0), content["maps"], magnitude=largest, growth=growth(1, 13), dtype=torch.float32)


def test_too_many_images_for_one_picture_are_refused_before_the_work(
    photos: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairvit.cli.image_job.explain_images", lambda *_: pytest.fail("the work was begun"))
    for i in range(45):
        (photos / "photos" / f"{i}.jpg").write_bytes((photos / "photos" / "cat.jpg").read_bytes())
    assert main(["explain", "photos", "--out", "all.png"]) == 2
    assert "at most 40" in capsys.readouterr().err


def test_all_one_trace_methods_share_their_passes_family_by_family(photos: Path, capsys: Captured) -> None:
    """Through the cost meter, as a script would read it: one forward, one backward for each rule table in use."""
    assert main(["compare", "demo", "--method", "all", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    run = [resolve_method(name).method for name in result["methods"]]
    skipped = {"cam"}  # the built-in model reads a class token
    assert {method.name for method in run} == {method.name for method in list_methods() if not method.slow} - skipped
    total = sum((method.own_cost(**method.options) for method in run), Cost())
    tables = {table for method in run for table in method.tables}
    assert (total.forwards, total.backwards) == (0, 0), "the others are slow and left out"
    assert (result["cost"]["forwards"], result["cost"]["backwards"]) == (1, len(tables))
    families = [record["family"] for record in result["methods"].values()]
    assert [families[place] for place in by_family(families)] == families
    for method, record in zip(run, result["methods"].values(), strict=True):
        assert record["class_specific"] == method.class_specific, method.name
        assert record["signed"] == (method.signed and not method.relu), method.name


def test_compare_says_what_is_signed_and_what_knows_no_class(photos: Path, capsys: Captured) -> None:
    assert main(["compare", "demo", "--method", "rollout,ixg", "--out", "two.json"]) == 0
    printed = capsys.readouterr().out
    lines = {name: next(line for line in printed.splitlines() if f" {name} " in line) for name in ("rollout", "ixg")}
    assert "any class ∀" in lines["rollout"]
    assert "for/against ±" in lines["ixg"]
    assert "attention" in lines["rollout"]


def test_compare_shows_classes_side_by_side(photos: Path, capsys: Captured) -> None:
    command = ["compare", "demo", "--method", "rollout,genatt", "--target", "Egyptian Mau,Abyssinian", "--json"]
    assert main(command) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    rollout, genatt = (np.array(result["methods"][name]["maps"]) for name in ("rollout", "genatt"))
    assert result["methods"]["genatt"]["targets"] == ["Egyptian Mau", "Abyssinian"]
    assert np.array_equal(rollout[0], rollout[1])
    assert not np.allclose(genatt[0], genatt[1])
    assert (result["cost"]["forwards"], result["cost"]["backwards"]) == (1, 2)


@pytest.mark.usefixtures("float64")
def test_heads_are_drawn_and_kept(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "demo", "--method", "rollout", "--layers", "--heads"]) == 0
    printed = capsys.readouterr().out
    assert "any class, layer 11" in printed, "the statistics of each layer"
    assert {"demo-rollout-heads.png", "demo-rollout-layers.png"} <= set(files(photos / "out"))
    with np.load(photos / "out" / "demo-rollout.npz") as stored:
        assert stored["heads"].shape == (12, 3, 1, 14, 14)
        assert stored["fused"].shape == (12, 3, 1, 14, 14)
        assert_same(stored["fused"][:, 1], stored["layers"], label="the mean is what rollout takes")
        assert_same(stored["fused_whole"][1], stored["maps"])
        assert_same(stored["fused"][:, 2].max(), stored["heads"].max())
        assert (stored["fused"][:, 0] <= stored["fused"][:, 1]).all(), "rounding to float32 keeps the order"
    record = json.loads((photos / "out" / "demo-rollout.json").read_text(encoding="utf-8"))
    assert record["heads"] == {
        "method": "rollout",
        "layers": 12,
        "heads": 3,
        "fusions": ["min", "mean", "max"],
        "whole": True,
    }
    assert list(record["statistics"][0]) == ["min", "mean", "max"]
    assert len(record["layer_statistics"]) == 12
    layer = np.array(record["layer_maps"])[7, 0]
    expected = {"min": layer.min(), "mean": layer.mean(), "max": layer.max()}
    assert record["layer_statistics"][7][0] == pytest.approx(expected)


def test_heads_of_a_method_that_has_none_are_the_attentions(photos: Path, capsys: Captured) -> None:
    assert main(["explain", "demo", "--heads", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["heads"]["method"] == "raw-attention"
    assert result["layer_statistics"] is None
    assert "out/demo-attnlrp+plus-heads.png" in result["files"]
    assert any("the heads shown are the attention's" in note for note in result["notes"])
    windows = ["--model", "timm:swin_tiny_patch4_window7_224", "--no-pretrained", "--method", "saliency"]
    assert main(["explain", "demo", "--heads", "--json", *windows]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["heads"] is None
    assert any("none are shown" in note for note in result["notes"])


@pytest.mark.usefixtures("float64")
def test_several_images_keep_their_own_heads(photos: Path) -> None:
    assert main(["explain", "photos", "--method", "genatt", "--heads", "--out", "all.npz", "-q"]) == 0
    assert main(["explain", "photos/more", "--method", "genatt", "--heads", "--out", "one.npz", "-q"]) == 0
    with np.load(photos / "all.npz") as both, np.load(photos / "one.npz") as arrays:
        assert_same(both["heads"][:, :, 1:], arrays["heads"])
        assert_same(both["fused_whole"][:, 1:], arrays["fused_whole"])


def test_class_names_are_listed(capsys: Captured) -> None:
    assert main(["classes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["index"] for entry in listed] == list(range(37))
    assert main(["classes", "bEn"]) == 0
    assert "Bengal" in capsys.readouterr().out
    assert main(["classes", "Bengla"]) == 2
    assert "Did you mean 'Bengal'?" in capsys.readouterr().err
    assert main(["classes", "--model", "timm:vit_tiny_patch16_224", "--no-pretrained", "tabby"]) == 0
    assert "tabby" in capsys.readouterr().out


def test_a_method_says_what_its_options_take(capsys: Captured) -> None:
    assert main(["methods", "rollout", "--json"]) == 0
    (rollout,) = json.loads(capsys.readouterr().out)
    assert rollout["choices"]["normalise"] == "rows | first | none"
    assert rollout["choices"]["start_layer"] == "whole number"
    assert main(["methods", "--json"]) == 0
    for method in json.loads(capsys.readouterr().out):
        assert set(method["options"]) <= set(method["choices"]), method["name"]
