"""Header of a weights file: what is written is read again, and every entry is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import clairvit as cv
from clairvit.errors import BadInput, ModelUnavailable
from clairvit.models.preprocess import Preprocess
from clairvit.models.sources import weights_header

OPTIONS = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SEEN = Preprocess((32, 48), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (40, 60), "bilinear", keep_ratio=False)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(1)
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=(32, 48), **OPTIONS).eval()


def stored(module: nn.Module, path: Path, **other: str) -> str:
    header = weights_header.write("vit_tiny_patch16_224", OPTIONS, ("a", "b", "ü"), SEEN)
    save_file(module.state_dict(), path, {**header, **other})
    return f"file:{path}"


def test_a_file_with_a_header_needs_no_options(small: nn.Module, tmp_path: Path) -> None:
    model = cv.load(stored(small, tmp_path / "a.safetensors"))
    assert model.labels == ("a", "b", "ü")
    assert model.preprocess == SEEN
    pixels = torch.linspace(-1, 1, 3 * 32 * 48).view(1, 3, 32, 48)
    with torch.no_grad():
        assert torch.equal(model.logits(pixels), small(pixels))


def test_the_header_states_the_activation(small: nn.Module, tmp_path: Path) -> None:
    spec = stored(small, tmp_path / "a.safetensors", activation="sigmoid")
    assert cv.load(spec).activation == "sigmoid"
    assert cv.load(spec).activation_reason == "the weights file states it"
    assert cv.load(spec, activation="raw").activation == "raw"
    assert cv.load(stored(small, tmp_path / "b.safetensors")).activation == "softmax"


def test_options_of_the_user_override_the_header(small: nn.Module, tmp_path: Path) -> None:
    spec = stored(small, tmp_path / "a.safetensors")
    assert cv.load(spec, labels=["x", "y", "z"]).labels == ("x", "y", "z")
    (tmp_path / "a-labels.json").write_text(json.dumps(["k", "l", "m"]))
    assert cv.load(spec).labels == ("k", "l", "m")
    other = cv.load(spec, pretrained=False, size=64)
    assert other.preprocess.size == (64, 64)
    assert other.name.endswith("(random weights)")


@pytest.mark.parametrize(
    ("entry", "content", "words"),
    [
        ("options", '{"checkpoint_path": "evil.pth"}', "no option that shapes"),
        ("options", '{"depth": "2"}', "expected int"),
        ("options", '{"depth": true}', "expected int"),
        ("options", "[1]", "list"),
        ("options", "{", "entry 'options'"),
        ("labels", '{"0": "a"}', "1 names for 3 classes"),
        ("labels", '{"0": "a", "2": "b", "3": "c"}', "ids are not 0 to 2"),
        ("labels", "[1, 2, 3]", "list of names"),
        ("preprocess", "{}", "KeyError"),
        ("preprocess", '{"size": [1], "mean": 1}', "ValueError"),
        ("preprocess", "[]", "TypeError"),
        ("activation", "sigmod", "Did you mean 'sigmoid'"),
    ],
)
def test_invalid_headers_raise(small: nn.Module, tmp_path: Path, entry: str, content: str, words: str) -> None:
    with pytest.raises(ModelUnavailable, match=words) as caught:
        cv.load(stored(small, tmp_path / "a.safetensors", **{entry: content}))
    assert f"entry '{entry}'" in str(caught.value)


def test_options_are_checked_one_by_one() -> None:
    assert weights_header.check_options({"mlp_ratio": 2, "qk_norm": True, "global_pool": "avg"})
    with pytest.raises(BadInput, match="Did you mean 'num_heads'"):
        weights_header.check_options({"num_head": 3})
