"""`clairvit evaluate` and `clairvit metrics` end to end: the numbers are cv.evaluate's, mistakes one sentence."""

from __future__ import annotations

import csv
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.cli import main
from clairvit.cli.arguments import resolve_methods, resolve_metrics
from clairvit.cli.evaluate import check_suffix
from clairvit.cli.image_job import output_path
from clairvit.cli.output import print_scores, score_notes
from clairvit.errors import BadInput
from clairvit.methods.registry import list_methods
from clairvit.metrics.registry import list_metrics
from helpers.fixed_scores import fixed_score
from helpers.rounding import assert_same
from helpers.three_photos import CAT
from helpers.three_photos import photos as photos

Captured = pytest.CaptureFixture[str]


def mask(folder: Path, name: str, box: tuple[int, int, int, int], size: tuple[int, int]) -> None:
    folder.mkdir(exist_ok=True)
    picture = Image.new("L", size)
    picture.paste(1, box)
    picture.save(folder / name)


def stored(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def refusal(capsys: Captured, *arguments: str) -> str:
    """Run, expect status 2 and exactly one sentence of ours on stderr."""
    assert main(["evaluate", *arguments]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith("clairvit: ")
    assert errors.count("\n") == 1, errors
    return errors


# evaluate -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands, and `cv.load` here, load models in float64, so that batches of any size give the same numbers."""
    monkeypatch.setattr(cv, "load", functools.partial(cv.load, dtype=torch.float64))


@pytest.mark.usefixtures("float64")
def test_a_folder_gets_all_that_is_known_and_it_is_what_python_says(photos: Path, capsys: Captured) -> None:
    arguments = ["--method", "legrad,rollout(fusion=max)", "--metric", "deletion(steps=3),sparseness", "--seed", "3"]
    assert main(["evaluate", "photos", *arguments, "--out", "scores"]) == 0
    assert sorted(p.name for p in (photos / "scores").iterdir()) == [
        "deletion_steps=3.png",
        "scores.csv",
        "scores.json",
    ]
    assert Image.open(photos / "scores" / "deletion_steps=3.png").size > (800, 500)

    images = sorted(str(path) for path in Path("photos").iterdir())
    expected = cv.evaluate(
        cv.load("pets"), images, ["legrad", "rollout(fusion=max)"], ["deletion(steps=3)", "sparseness"], seed=3
    )
    assert isinstance(expected, dict)
    content = stored(photos / "scores" / "scores.json")
    assert (content["images"], content["seed"], content["model"], content["failed"]) == (images, 3, "pets", [])
    assert content["versions"]["torch"]
    records = {(entry["method"], entry["metric"]): entry for entry in content["scores"]}
    assert [key[0] for key in records][:4] == ["legrad", "rollout(fusion=max)", "random", "center"]
    assert [entry["baseline"] for entry in records.values()] == [False, False, True, True] * 2
    for key, score in expected.items():
        for name, expected_score in {key[0]: score, **score.baselines}.items():
            record = records[name, key[1]]
            assert_same(record["values"], expected_score.values)
            assert_same(
                [record["mean"], record["standard_error"]], [expected_score.mean, expected_score.standard_error]
            )
            assert record["interval"] == [None, None], "three images"
            assert (record["n_valid"], record["n_invalid"], record["n_degenerate"]) == (3, 0, 0)
    record = records["legrad", "deletion(steps=3)"]
    assert record["settings"]["steps"] == 3
    assert record["cost"]["forwards"] == 3
    assert record["curve"]["x"] == [0, 0.25, 0.5, 0.75]
    assert records["legrad", "sparseness"]["curve"] is None

    with (photos / "scores" / "scores.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["image", "method", "metric", "value"]
    assert len(table) == 3 * 4 * 2
    for row in table:
        place = content["images"].index(row["image"])
        assert float(row["value"]) == records[row["method"], row["metric"]]["values"][place]

    printed, errors = capsys.readouterr()
    assert errors == ""
    assert "deletion(steps=3) ↓" in printed
    assert "sparseness ↑" in printed
    assert f"{record['mean']:.4g} ± {record['standard_error']:.2g}" in printed
    assert "No interval for fewer than 6 images" in printed
    assert "random (baseline)" in printed
    assert "center (baseline)" in printed
    assert "↑ higher is better, ↓ lower is better" in printed
    assert "Wrote scores/deletion_steps=3.png" in printed


def test_a_mask_is_cut_as_the_image_is(photos: Path, capsys: Captured) -> None:
    """All of a map lies on a mask of the central square, which the model sees; on its left half, what lies left."""
    mask(photos / "all", "cat0.png", (75, 0, 376, 300), (451, 300))
    mask(photos / "left", "cat0.png", (75, 0, 225, 300), (451, 300))
    maps = cv.explain(cv.load("pets"), "photos/cat0.png", "genatt").maps[:, None].double()
    fine = torch.nn.functional.interpolate(maps, (224, 224), mode="bilinear")
    left = float(fine[..., :112].sum() / fine.sum())
    assert abs(left - 0.5) > 0.03  # or it could not tell left from right
    for folder, expected in (("all", 1.0), ("left", left)):
        arguments = [
            "--method",
            "genatt",
            "--metric",
            "relevance-mass",
            "--masks",
            folder,
            "--json",
            "-o",
            f"{folder}.json",
        ]
        assert main(["evaluate", "photos/cat0.png", *arguments]) == 0
        score = json.loads(capsys.readouterr().out)["scores"][0]
        assert score["method"] == "genatt"
        assert score["values"] == [pytest.approx(expected, abs=0.01)]
        assert score["standard_error"] is None


def test_an_image_without_a_mask_has_no_score_and_a_note_says_so(photos: Path, capsys: Captured) -> None:
    mask(photos / "masks", "cat0.png", (100, 50, 300, 250), (451, 300))
    mask(photos / "masks", "cat2.png", (20, 50, 220, 250), (371, 300))
    options = ["--method", "center", "--metric", "iou,sparseness", "--masks", "masks", "--out", "scores.csv"]
    assert main(["evaluate", "photos", *options]) == 0
    printed = capsys.readouterr().out
    assert "Note: 1 without a mask in masks, so without a score by masks: photos/cat1.png." in printed
    assert "n = 2" in printed
    with (photos / "scores.csv").open(encoding="utf-8") as file:
        values = {
            (row["image"], row["metric"]): row["value"] for row in csv.DictReader(file) if row["method"] == "center"
        }
    assert values["photos/cat1.png", "iou"] == ""
    assert 0 < float(values["photos/cat0.png", "iou"]) < 1
    assert math.isfinite(float(values["photos/cat1.png", "sparseness"]))


def test_a_mask_is_of_one_image_in_whichever_folder(photos: Path, capsys: Captured) -> None:
    """Two images of one name never share a mask, and masks may lie in folders as the images do."""
    arguments = ["evaluate", "photos", "--method", "center", "--metric", "iou", "--masks", "masks", "--out", "s.json"]
    for name in ("one", "two"):
        (photos / "photos" / name).mkdir()
        CAT.save(photos / "photos" / name / "same.png")
    mask(photos / "masks", "same.png", (100, 50, 300, 250), (451, 300))
    message = refusal(capsys, *arguments[1:])
    assert "2 images are called 'same', and 'masks/same.png' could be the mask of any of them" in message
    assert "'masks/one/same.png'" in message
    (photos / "masks" / "same.png").unlink()
    mask(photos / "masks" / "two", "same.png", (100, 50, 300, 250), (451, 300))
    assert main(arguments) == 0
    content = stored(photos / "s.json")
    values = dict(zip(content["images"], content["scores"][0]["values"], strict=True))
    assert [image for image, value in values.items() if value is not None] == ["photos/two/same.png"]


def test_masks_of_other_images_are_refused(photos: Path, capsys: Captured) -> None:
    mask(photos / "masks", "dog.png", (100, 50, 300, 250), (451, 300))
    options = ("--method", "center", "--metric", "iou", "--out", "s.json")
    message = refusal(capsys, "photos", *options, "--masks", "masks")
    assert "None of the 1 masks in 'masks' is called like one of the 3 images; expected 'cat0.png'" in message
    assert "None of the 0 masks in 'photos'" in refusal(capsys, "photos", *options, "--masks", "photos")


def test_a_broken_image_is_reported_at_the_end_and_the_rest_is_done(photos: Path, capsys: Captured) -> None:
    (photos / "photos" / "bad.jpg").write_text("meow")
    mask(photos / "masks", "cat1.png", (0, 0, 9, 9), (100, 300))  # not the shape of its image
    for number, width in ((0, 451), (2, 371)):
        mask(photos / "masks", f"cat{number}.png", (100, 50, 300, 250), (width, 300))
    options = ["--method", "center", "--metric", "sparseness", "--masks", "masks", "--out", "s.json"]
    assert main(["evaluate", "photos", *options, "-q"]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert "2 of 4 could not be scored:" in errors
    assert "'photos/bad.jpg' is not an image" in errors
    assert "cat1.png' is 100 × 300 pixels and its image 411 × 300" in errors
    content = stored(photos / "s.json")
    assert content["images"] == ["photos/cat0.png", "photos/cat2.png"]
    assert [failure["image"] for failure in content["failed"]] == ["photos/bad.jpg", "photos/cat1.png"]


def test_json_is_one_document_even_if_nothing_can_be_read(photos: Path, capsys: Captured) -> None:
    (photos / "bad.jpg").write_text("meow")
    assert main(["evaluate", "bad.jpg", "--json"]) == 2
    content = json.loads(capsys.readouterr().out)
    assert content["results"] == []
    assert content["failed"][0]["image"] == "bad.jpg"
    assert not (photos / "out").exists()


def test_a_target_is_scored_instead_of_the_prediction(photos: Path, capsys: Captured) -> None:
    arguments = ["photos/cat0.png", "--method", "center", "--metric", "deletion(steps=2)", "--json", "--out", "s.json"]
    starts = []
    for target in ([], ["--target", "Bengal"], ["--target", "Sphynx"]):
        assert main(["evaluate", *arguments, *target]) == 0
        starts.append(json.loads(capsys.readouterr().out)["scores"][0]["curve"]["mean"][0])
    assert starts[0] == starts[1] > 0.5 > starts[2]
    assert "names 2 classes; expected one" in refusal(capsys, *arguments[:-3], "--target", "Bengal,Sphynx")


def test_a_baseline_that_is_asked_for_is_a_method_and_stands_once(photos: Path, capsys: Captured) -> None:
    arguments = ["photos/cat0.png", "--method", "random,center", "--metric", "sparseness", "--json", "--out", "s.json"]
    assert main(["evaluate", *arguments]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert [(score["method"], score["baseline"]) for score in scores] == [("random", False), ("center", False)]


@pytest.mark.usefixtures("float64")
def test_true_classes_from_a_file_and_from_folders(photos: Path, capsys: Captured) -> None:
    """By file name or stem, the class by name or number; who has none is named and the rest is done."""
    lines = ["image,class,other", "cat0.png,Bengal,Sphynx", "cat1,5,", "photos/cat2.png,,"]
    (photos / "truth.csv").write_text("\n".join(lines), encoding="utf-8")
    options = ["--method", "ixg", "--metric", "deletion(steps=1)", "--json", "--out", "s.json"]
    assert main(["evaluate", "photos", *options, "--truth", "truth.csv", "--target", "label"]) == 2
    printed, errors = capsys.readouterr()
    assert "There is no class for 'photos/cat2.png' in --truth truth.csv" in errors
    content = json.loads(printed)
    assert content["images"] == ["photos/cat0.png", "photos/cat1.png"]
    record = content["scores"][0]
    assert record["settings"]["target"] == "label"
    expected_score = cv.evaluate(cv.load("pets"), content["images"], "ixg", "deletion(steps=1)", target=["Bengal", 5])
    assert_same(record["values"], expected_score.values)

    (photos / "truth.csv").write_text("\n".join([*lines, "cat1,6,"]), encoding="utf-8")
    message = refusal(capsys, "photos", "--truth", "truth.csv")
    assert "--truth truth.csv has 2 lines for 'cat1'; expected one" in message
    (photos / "kinds" / "egyptian_mau").mkdir(parents=True)
    CAT.save(photos / "kinds" / "egyptian_mau" / "cat.png")
    assert main(["evaluate", "kinds", *options, "--truth", "folders", "--target", "label"]) == 0
    score = json.loads(capsys.readouterr().out)["scores"][0]
    expected_score = cv.evaluate(cv.load("pets"), [CAT], "ixg", "deletion(steps=1)", target="Egyptian Mau")
    assert_same(score["values"], expected_score.values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no lines below its first; expected image and class"),
        (b"image,class\n", "has no lines below its first; expected image and class"),
        (b"file,label\ncat0,Bengal\n", "has the columns file, label; expected image and class"),
        (b'{"a": 1,\n"b": [2, 3], "c": 4}\n', "has the columns"),
        (b"image,class\ncat0,husky, Siberian\n", "has more than 2 cells in the line of 'cat0'; expected a class with"),
        (b"image,class\ncat0,Ch\xe4t\n", "cannot be read ('utf-8' codec can't decode"),
    ],
)
def test_a_truth_file_that_is_none(content: bytes, message: str, photos: Path, capsys: Captured) -> None:
    (photos / "truth.csv").write_bytes(content)
    assert f"--truth truth.csv {message}" in refusal(capsys, "photos", "--truth", "truth.csv")


def test_two_objects_on_the_command_line(photos: Path, capsys: Captured) -> None:
    (photos / "truth.csv").write_text("image,class,other\ncat0,Bengal,Sphynx\ncat1,Bengal,\n", encoding="utf-8")
    for number, width in ((0, 451), (1, 411)):
        mask(photos / "masks", f"cat{number}.png", (100, 50, 300, 250), (width, 300))
    arguments = [
        "photos/cat0.png",
        "photos/cat1.png",
        "--method",
        "ixg",
        "--metric",
        "class-contrast",
        "--masks",
        "masks",
    ]
    assert main(["evaluate", *arguments, "--truth", "truth.csv", "--target", "label", "--json", "-o", "s.json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["scores"][0]["values"]
    assert -1 < first < 1
    assert first != 0
    assert second is None


def test_trimaps_have_a_border_that_counts_nowhere(photos: Path, capsys: Captured) -> None:
    """All of what the model sees is animal or border, so every pixel that counts is animal."""
    values = np.full((300, 451), 1, np.uint8)
    values[:, :200] = 3
    (photos / "trimaps").mkdir()
    Image.fromarray(values).save(photos / "trimaps" / "cat0.png")
    arguments = ["photos/cat0.png", "--method", "ixg", "--metric", "ap", "--masks", "trimaps", "--json", "-o", "s.json"]
    assert main(["evaluate", *arguments, "--mask-kind", "trimap"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["values"] == [1.0]


def test_masks_that_a_detector_finds(photos: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes it found are reported, and an image where it finds nothing has no score."""
    from clairvit.data import foreground as foreground_module

    def detected_foreground(detector: object, picture: Image.Image, **how: object) -> foreground_module.Foreground:
        segmentation = Image.new("L", picture.size)
        if picture.width == 451:
            segmentation.paste(255, (100, 50, 300, 250))
        return foreground_module.Foreground(segmentation, (("cat", 0.9),) if picture.width == 451 else ())

    loaded: list[object] = []
    monkeypatch.setattr(foreground_module, "load_detector", lambda weights, device: loaded.append((weights, device)))
    monkeypatch.setattr(foreground_module, "foreground", detected_foreground)
    arguments = [
        "photos",
        "--method",
        "ixg",
        "--metric",
        "faf",
        "--masks",
        "mask-rcnn",
        "--weights",
        "w.pth",
        "-o",
        "s.json",
    ]
    assert main(["evaluate", *arguments]) == 0
    assert loaded == [("w.pth", "cpu")]
    printed = capsys.readouterr().out
    assert "Foreground found in the images: cat (1); none in 2, which have no score by masks." in printed
    content = stored(photos / "s.json")
    assert content["foreground"] == {"photos/cat0.png": [["cat", 0.9]], "photos/cat1.png": [], "photos/cat2.png": []}
    assert [value is None for value in content["scores"][0]["values"]] == [False, True, True]


def test_classes_that_were_found_equally_often_are_listed_by_name() -> None:
    """Whatever the hash seed: as many names as would be in this order by chance once in 40,000."""
    names = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]
    (note,) = score_notes({}, [], None, {"photo.png": [(name, 0.5) for name in names]})
    listed = ", ".join(f"{name} (1)" for name in names)
    assert note == f"Foreground found in the images: {listed}; none in 0, which have no score by masks."


def test_all_methods_that_fit(photos: Path, capsys: Captured) -> None:
    assert main(["evaluate", "photos/cat0.png", "--method", "all", "--metric", "sparseness", "-o", "s.json"]) == 0
    content = stored(photos / "s.json")
    scored = {score["method"] for score in content["scores"]}
    quick = {method.name for method in list_methods() if not method.slow}
    assert scored | set(content["skipped"]) >= quick
    assert list(content["skipped"]) == ["cam"]
    assert "Left out cam: " in capsys.readouterr().out


def test_what_is_named_twice_is_done_once() -> None:
    assert list(map(str, resolve_methods("rollout, legrad,rollout(),"))) == ["rollout", "legrad"]
    assert [metric.text for metric in resolve_metrics("deletion,deletion(steps=9),deletion(steps=3)")] == [
        "deletion",
        "deletion(steps=3)",
    ]


def test_mistakes_are_one_sentence_before_a_model_is_loaded(
    photos: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(cv, "load", never, raising=False)
    message = refusal(capsys, "photos", "--metric", "deletoin")
    assert "There is no metric 'deletoin'. Did you mean 'deletion'" in message
    assert "`clairvit metrics`" in message
    assert "'deletion' has no option 'stps'; it has" in refusal(capsys, "photos", "--metric", "deletion(stps=3)")
    assert "There is no method 'legrda'. Did you mean 'legrad'" in refusal(capsys, "photos", "--method", "legrda")
    assert "No metric was given; write e.g. --metric deletion,insertion." in refusal(capsys, "photos", "--metric", " ,")
    assert "No method was given; write e.g. --method attnlrp+plus,rollout." in refusal(capsys, "photos", "--method", "")
    message = refusal(capsys, "photos", "--metric", "deletion,iou")
    assert (
        "'iou' compares maps with masks, and none were given; expected a folder with a mask for each image" in message
    )
    assert "--masks nowhere is not a folder; expected one with" in refusal(capsys, "photos", "--masks", "nowhere")
    assert "--target label needs the true classes" in refusal(capsys, "photos", "--target", "label")
    assert "--truth nowhere is not a file" in refusal(capsys, "photos", "--truth", "nowhere")
    assert "--weights w.pth are Mask R-CNN's" in refusal(capsys, "photos", "--weights", "w.pth")
    assert "--mask-kind map was given" in refusal(capsys, "photos", "--mask-kind", "map")
    assert "normalize=square was given" in refusal(capsys, "photos", "--maps", "square")
    message = refusal(capsys, "photos", "--metric", "class-contrast", "--masks", ".")
    assert "compares two objects in an image, and their classes were not given" in message
    message = refusal(capsys, "photos", "--masks", "mask-rcnn(scor=0.3)")
    assert "sets scor=0.3; expected score= and mask=" in message
    (photos / "empty").mkdir()
    assert "no images in the folder 'empty'" in refusal(capsys, "empty")
    assert "'x.png' ends in '.png'; write scores to a name that ends in .json or .csv" in refusal(
        capsys, "photos", "--out", "x.png"
    )


def test_a_missing_image(capsys: Captured) -> None:
    assert "There is no image 'cta.jpg'" in refusal(capsys, "cta.jpg")


def test_where_scores_go(photos: Path) -> None:
    assert not output_path("out/", check_suffix).is_file
    assert not output_path("out", check_suffix).is_file
    assert not output_path("photos", check_suffix).is_file
    assert output_path("a/b.JSON", check_suffix).is_file
    with pytest.raises(BadInput, match=r"ends in '\.npz'"):
        output_path("b.npz", check_suffix)


# metrics --------------------------------------------------------------------------------------------------------------


def test_all_metrics_are_listed(capsys: Captured) -> None:
    assert main(["metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{len(list_metrics())} metrics" in lines[0]
    for metric in list_metrics():
        (row,) = [
            line.replace(",", " ").split()
            for line in lines
            if metric.name in line.split()[:2] and metric.paper.split()[0] in line
        ]
        assert ("↑" if metric.better == "higher" else "↓") in row
        assert ("masks" in row) == ("masks" in metric.needs)
        assert ("explains" in row) == ("methods" in metric.needs)


def test_one_metric_in_full(capsys: Captured) -> None:
    assert main(["metrics", "sparseness"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "Chalasani",
        "the Gini index",
        "higher",
        "0 … 1",
        "offset",
        "focusvit",
        "offset=0.0",
        "papers differ",
    ):
        assert part in printed, part
    assert main(["metrics", "deletion"]) == 0
    assert "9 for a map of 14 × 14 patches" in capsys.readouterr().out


def test_metrics_as_json(capsys: Captured) -> None:
    assert main(["metrics", "--json"]) == 0
    listed = {metric["name"]: metric for metric in json.loads(capsys.readouterr().out)}
    assert set(listed) == {metric.name for metric in list_metrics()}
    assert listed["deletion"]["cost"] == {"forwards": 9}
    assert listed["sparseness"]["cost"] == {"forwards": 0}
    assert listed["complexity"]["span"] == [0, None]
    assert listed["iou"]["needs"] == ["masks"]
    assert listed["sparseness"]["presets"]["focusvit"] == {"offset": 0.0}


def test_an_unknown_metric(capsys: Captured) -> None:
    assert main(["metrics", "delition"]) == 2
    assert "There is no metric 'delition'. Did you mean 'deletion'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [f"{metric.name}(preset={preset})" for metric in list_metrics() for preset in metric.presets]
)
def test_a_preset_is_the_same_metric_when_its_full_name_is_read_again(text: str) -> None:
    """The command hands full names on, and prints them for people to type."""
    (metric,) = resolve_metrics(text)
    (again,) = resolve_metrics(metric.text)
    assert (again.text, again.options) == (metric.text, metric.options)


# data sets ------------------------------------------------------------------------------------------------------------


def test_a_data_set_brings_its_masks_and_has_a_limit(photos: Path, capsys: Captured) -> None:
    arguments = ["evaluate", "scenes:6", "--limit", "3", "--model", "scenes", "--method", "rollout", "--metric", "ap"]
    assert main([*arguments, "--target", "label", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["images"]) == 3
    model = cv.load("scenes")
    from clairvit.data.open import open_data

    expected = cv.evaluate(model, open_data("scenes:6", limit=3).dataset, "rollout", "ap", target="label")
    (row,) = (score for score in document["scores"] if score["method"] == "rollout" and score["metric"] == "ap")
    assert row["mean"] == pytest.approx(expected.mean, abs=1e-9)


def test_options_of_data_sets_and_of_images(photos: Path, capsys: Captured) -> None:
    assert "has its own masks" in refusal(capsys, "scenes:6", "--masks", "photos")
    assert "--split test is of a data set" in refusal(capsys, "photos", "--split", "test")
    assert main(["evaluate", "photos", "--limit", "2", "--method", "rollout", "--metric", "sparseness", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["images"]) == 2


def test_a_forgotten_mask_kind_is_named_with_its_option(photos: Path, capsys: Captured) -> None:
    """Every pixel of a trimap is above 0, so that any map would point at the object."""
    values = np.full((40, 40), 2, np.uint8)
    values[10:30, 10:30] = 1
    (photos / "trimaps").mkdir()
    Image.fromarray(values).save(photos / "trimaps" / "cat0.png")
    arguments = ["photos/cat0.png", "--method", "ixg", "--metric", "pointing-game", "--masks", "trimaps"]
    with Image.open(photos / "photos" / "cat0.png") as image:
        Image.fromarray(values).resize(image.size, Image.Resampling.NEAREST).save(photos / "trimaps" / "cat0.png")
    assert main(["evaluate", *arguments]) == 2
    assert "--mask-kind trimap" in capsys.readouterr().err


def test_intervals_are_printed_from_six_images_on(capsys: Captured) -> None:
    for values in ([0.1, 0.2, 0.4, 0.3, 0.25], [0.1, 0.2, 0.4, 0.3, 0.25, 0.5]):
        score = fixed_score("genatt", values)
        print_scores({"deletion": {"genatt": score}}, ["genatt"])
        printed = capsys.readouterr().out
        low, high = score.interval
        assert f"{score.mean:.4g} ± {score.standard_error:.2g}" in printed
        assert ("No interval" in printed) == (len(values) < 6)
        assert (f"[{low:.4g}, {high:.4g}]" in printed) == (len(values) >= 6)
