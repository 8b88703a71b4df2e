"""Saved segmenters, depth models and detectors of transformers: labels, preprocessing, targets, command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image

import clairvit as cv
from clairvit.cli import main
from clairvit.models.images import prepare
from helpers.dense_models import DENSE, DETECTORS, NAMES, SIZE
from helpers.rounding import assert_same

EDGES = {"shortest_edge": SIZE, "longest_edge": 2 * SIZE}
SQUARE = {"height": SIZE, "width": SIZE}
# Name -> its image processor, with the size that it has in published checkpoints, scaled down
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "segformer": ("SegformerImageProcessor", {"size": SQUARE}),
    "dpt": ("DPTImageProcessor", {"size": SQUARE}),
    "dpt depth": ("DPTImageProcessor", {"size": SQUARE, "keep_aspect_ratio": True}),
    "maskformer": ("MaskFormerImageProcessor", {"size": EDGES}),
    "mask2former": ("Mask2FormerImageProcessor", {"size": EDGES}),
    "sam": ("SamImageProcessor", {"size": {"longest_edge": SIZE}, "pad_size": SQUARE}),
    "detr": ("DetrImageProcessor", {"size": EDGES}),
    "yolos": ("YolosImageProcessor", {"size": EDGES}),
    "rt_detr": ("RTDetrImageProcessor", {"size": SQUARE}),
}
CROPPED = ("dpt depth", "maskformer", "mask2former", "sam", "detr", "yolos")  # their processors keep the whole photo


def saved(name: str, folder: Path) -> str:
    """Save a tiny checkpoint with its image processor; return its name for cv.load."""
    (DENSE | DETECTORS)[name]().save_pretrained(folder)  # type: ignore[operator]
    processor, options = PROCESSORS[name]
    getattr(hf, processor)(**options).save_pretrained(folder)
    return f"hf:{folder}"


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_saved_model_is_loaded_with_labels_and_preprocessing(name: str, tmp_path: Path) -> None:
    model = cv.load(saved(name, tmp_path))
    assert model.labels == (() if name == "sam" else NAMES)
    assert model.preprocess.size == (SIZE, SIZE)
    cropped = [note for note in model.assumptions if f"central {SIZE} × {SIZE} pixels" in note]
    assert bool(cropped) == (name in CROPPED)
    target = cv.Region(point=(9, 30)) if name in DENSE else cv.Query(1)
    explanation = cv.explain(model, "demo", "saliency", target=target)
    wrapped = dataclasses.replace(model, module=(DENSE | DETECTORS)[name]())
    same = cv.explain(wrapped, explanation.pixels, "saliency", target=target)
    assert same.targets == explanation.targets
    assert_same(same.maps, explanation.maps)


@pytest.mark.parametrize("name", ["segformer", "detr"])
def test_a_square_photo_is_preprocessed_as_by_the_processor(name: str, tmp_path: Path) -> None:
    model = cv.load(saved(name, tmp_path))
    photo = Image.effect_noise((90, 90), 60).convert("RGB")
    pixels = prepare(photo, model).pixels
    processor = hf.AutoImageProcessor.from_pretrained(tmp_path)
    expected = torch.as_tensor(processor(photo, return_tensors="pt")["pixel_values"])
    assert pixels.shape == expected.shape
    # resizing rounds to whole grey values: one step of 1/255, over the smallest std of ImageNet, 0.224
    assert float((pixels - expected).abs().max()) <= 1.01 / 255 / 0.224


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, in one line."""
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def assert_refused(capsys: pytest.CaptureFixture[str], sentence: str, *arguments: str | Path) -> None:
    """Run a command that must end with status 2, one sentence, and no traceback."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert sentence in " ".join(captured.err.split())
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.out + captured.err


def test_command_line_of_a_segmenter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = saved("segformer", tmp_path / "model")
    places = ("--region", "sky@4,8,40,36", "--region", "0,0,64,64", "--point", "cat@5,6")
    common = ("explain", "demo", "--model", spec, "--out", tmp_path / "out")
    assert run(*common, *places, "--method", "ixg", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)["results"]
    first, second, third = entry["targets"]
    assert (first, third) == ("sky in 4,8,40,36", "cat at 5,6")
    assert second.endswith(" in 0,0,64,64")
    refused = {
        (): "Name a part of the image: --region CLASS@LEFT,TOP,RIGHT,BOTTOM.",
        ("--region", "sky@0,0,65,9"): "box=(0, 0, 65, 9) does not lie inside the image that the model sees, 64 pixels",
        ("--region", "tres@0,0,9,9"): "There is no class 'tres' among the model's 5. Did you mean 'tree'?",
        ("--query", "3"): "Query reads the queries of a detector, and SegformerForSemanticSegmentation has none",
        ("--text", "a cat"): "has no text tower",
    }
    for options, sentence in refused.items():
        assert_refused(capsys, sentence, *common, *options)


def test_command_line_of_a_detector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = saved("yolos", tmp_path / "model")
    queries = [text for query in ("2", "cat@2", "dog", "2:left", "dog:height") for text in ("--query", query)]
    common = ("compare", "demo", "--model", spec, "--out", tmp_path / "out")
    assert run(*common, *queries, "--method", "ixg,genatt", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)["results"]
    best, named, chosen, side, chosen_side = entry["methods"]["ixg"]["targets"]
    assert best.endswith(" (query 2)")
    assert (named, side) == ("cat (query 2)", "left of query 2")
    assert chosen.startswith("dog (query ")
    assert chosen_side == f"height of {chosen}"
    refused = {
        (): "Name a query: --query INDEX.",
        ("--query", "6"): "There is no query 6: the model has 6; give a number from 0 to 5.",
        ("--query", "tres"): "There is no class 'tres' among the model's 5. Did you mean 'tree'?",
        ("--query", "3:lefft"): "A box has no side 'lefft'. Did you mean 'left'?",
        ("--region", "0,0,9,9"): "boxes of queries. Name a query instead: --query INDEX",
    }
    for options, sentence in refused.items():
        assert_refused(capsys, sentence, *common, *options, "--method", "saliency")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--region", "sky@1,2,3", "--region sky@1,2,3 was given; expected LEFT,TOP,RIGHT,BOTTOM in pixels, or CLASS@"),
        ("--region", "sky", "expected LEFT,TOP,RIGHT,BOTTOM in pixels"),
        ("--point", "1,b", "--point 1,b was given; expected X,Y in pixels, or CLASS@X,Y"),
        ("--query", "cat@left", "--query cat@left was given; expected the number of a query, a class, or CLASS@NUMBER"),
        ("--query", " ", "expected the number of a query"),
    ],
)
def test_unreadable_options(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "demo", option, value) == 2
    assert message in printed(capsys)
