"""What fuzzing found, one small case each: all of these ended in an error of Python, torch or Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import clairvit as cv
from clairvit.data.dataset import as_dataset
from clairvit.errors import BadInput, UnknownName
from clairvit.models.image_files import find_images
from clairvit.models.model import Model
from clairvit.training.finetune import finetune
from helpers.tiny_models import build, pixels

IMAGE = pixels("timm-vit", batch=1)


@pytest.fixture(scope="module")
def model() -> cv.Model:
    return cv.wrap(build("timm-vit"), name="tiny", size=32, labels=list("abcdefg"))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("x" * 5000, r"'x{80}' is no path \(File name too long\); give the path"),
        ("~no-such-user/cat.png", "'~no-such-user/cat.png' is no path"),
        (["x" * 5000], "is no path"),
        (torch.zeros(1, 3, 32, 32, device="meta"), r"has no values \(device meta\); expected an ordinary tensor"),
        (torch.zeros(1, 3, 32, 32).to_sparse(), "is sparse; expected an ordinary tensor"),
        ([torch.zeros(3, 32, 32, dtype=torch.uint8).to_sparse()], r"\(image 1\) is sparse"),
        (np.full((8, 8, 3), "12"), "no real numbers"),
        (np.zeros((8, 8, 3), dtype="M8[s]"), "no real numbers"),
    ],
    ids=["long", "home", "list", "meta", "sparse", "sparse bytes", "strings", "dates"],
)
def test_images(model: cv.Model, image: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cv.explain(model, image, "ixg", target=1)


def test_a_header_that_ends_too_early(model: cv.Model, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"P6")
    with pytest.raises(BadInput, match=r"a.png' is damaged .*save or download it again"):
        cv.explain(model, tmp_path / "a.png", "ixg", target=1)


def test_names_with_digits_that_are_no_numbers(tmp_path: Path) -> None:
    for name in ("cat²", "cat10", "cat2", "٣"):
        Image.new("L", (2, 2)).save(tmp_path / f"{name}.png")
    names = [path.stem for path in find_images(tmp_path)]
    assert names.index("cat2") < names.index("cat10")
    assert len(names) == 4


@pytest.mark.parametrize(
    "target", [[np.array([1, 2])], "--5", "9" * 5000, [object()]], ids=["array", "sign", "long", "object"]
)
def test_targets(model: cv.Model, target: Any) -> None:
    with pytest.raises((BadInput, UnknownName)):
        cv.explain(model, IMAGE, "ixg", target)


@pytest.mark.parametrize("score", [1, [], {}, b"prob"], ids=repr)
def test_scores(model: cv.Model, score: Any) -> None:
    with pytest.raises(UnknownName, match="There is no score"):
        cv.explain(model, IMAGE, "ixg", 1, score=score)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batch_size": "max"}, "batch_size='max' was given; expected 1 or more"),
        ({"batch_size": 1.5}, "batch_size=1.5 was given"),
        ({"autocast": {}}, "autocast={} was given; expected bfloat16"),
        ({"recipe": object}, "A recipe was given as type; expected its file"),
    ],
)
def test_arguments(model: cv.Model, how: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cv.explain(model, IMAGE, "ixg", target=1, **how)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (np.array(False), "masks were given as a ndarray; expected a list of 1"),
        (3, "masks were given as a int"),
        ({"": 1}, "masks were given as a dict"),
        (["x"], "A mask was given as str of <U1; expected numbers"),
        ([np.zeros((32, 32), dtype=complex)], "A mask was given as ndarray of complex128"),
    ],
    ids=["scalar", "int", "dict", "text", "complex"],
)
def test_masks(model: cv.Model, masks: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cv.evaluate(model, IMAGE, "raw-attention", "iou", masks=masks, baselines=False)


def test_a_mask_of_sixteen_bits(model: cv.Model) -> None:
    mask = np.zeros((32, 32), dtype=np.uint16)
    mask[:16] = 60_000
    same = mask > 0
    scores = [
        cv.evaluate(model, IMAGE, "raw-attention", "iou", masks=[candidate], baselines=False)
        for candidate in (mask, same)
    ]
    assert scores[0].mean == scores[1].mean


def test_training_on_tensors_of_another_size(tmp_path: Path) -> None:
    dataset = as_dataset(list(torch.zeros(4, 3, 32, 32)), Model(nn.Identity(), "none"), labels=["a", "b"] * 2)
    options = {"patch_size": 16, "embed_dim": 8, "depth": 1, "num_heads": 1}
    how = {"options": options, "size": 32, "out": tmp_path / "m.safetensors", "pretrained": False}
    with pytest.raises(BadInput, match=r"is a tensor of shape \[3, 32, 32\].*Pass paths or PIL images"):
        finetune(dataset, "timm:vit_tiny_patch16_224", **how)
