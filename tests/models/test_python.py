"""MODULE:ATTRIBUTE of the user's own code as the name of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import clairvit as cv
from clairvit.errors import BadInput, ModelUnavailable, UnknownName

CODE = """
import torch
from torch import nn
import clairvit as cv
import timm

SMALL = dict(img_size=32, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=4)

def build():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **SMALL)

class Zoo:
    double = staticmethod(lambda: build().double())

net = build()
parallel = nn.DataParallel(net)
model = cv.wrap(net, mean=(0.5,) * 3, std=(0.5,) * 3, size=32, labels=["a", "b", "c", "d"], name="mine")
number = 3
wrong = dict

def broken():
    raise OSError("the weights are at home")

def needs(path):
    return net
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_own_vit.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "my_broken_vit.py").write_text("import torch\n1 / 0\n", encoding="utf-8")
    (tmp_path / "my_lacking_vit.py").write_text("import no_such_package\n", encoding="utf-8")
    refusing = "import clairvit as cv\ncv.load('pets', size=3)\n"
    (tmp_path / "my_refusing_vit.py").write_text(refusing, encoding="utf-8")
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "vits.py").write_text("from my_own_vit import build\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before, path = {*sys.modules}, list(sys.path)
    yield
    for name in [name for name in sys.modules if name.startswith("my_") and name not in before]:
        del sys.modules[name]
    assert sys.path == path  # the current directory was on it only while the model was loaded


@pytest.mark.parametrize(
    "name", ["my_own_vit:build", "my_own_vit:net", "my_package.vits:build", "my_own_vit:Zoo.double"]
)
def test_functions_and_modules(name: str) -> None:
    model = cv.load(name)
    assert model.name == name
    assert model.module(torch.zeros(1, 3, 32, 32, dtype=model.dtype, device=model.device)).shape == (1, 4)
    assert model.preprocess.size == (32, 32)


def test_a_module_stays_as_it_is() -> None:
    assert cv.load("my_own_vit:Zoo.double").dtype == torch.float64
    assert cv.load("my_own_vit:Zoo.double", dtype="float32").dtype == torch.float32
    model = cv.load("my_own_vit:net")
    assert model.module is sys.modules["my_own_vit"].net
    assert model.module.training
    assert cv.load("my_own_vit:net", device="cpu").device.type == "cpu"


def test_a_model_keeps_what_it_states() -> None:
    model = cv.load("my_own_vit:model")
    assert model.labels == ("a", "b", "c", "d")
    assert model.preprocess.mean == (0.5, 0.5, 0.5)
    assert cv.load("my_own_vit:model", labels=["w", "x", "y", "z"]).labels == ("w", "x", "y", "z")
    assert cv.load("my_own_vit:build", labels=["w", "x", "y", "z"]).labels == ("w", "x", "y", "z")


def test_preprocessing_and_activation_can_be_stated() -> None:
    for name in ("my_own_vit:build", "my_own_vit:model"):
        model = cv.load(name, mean=(0.1, 0.2, 0.3), std=0.4, activation="sigmoid", resize=40)
        assert (model.preprocess.mean, model.preprocess.std) == ((0.1, 0.2, 0.3), (0.4, 0.4, 0.4))
        assert (model.preprocess.resize, model.activation) == (40, "sigmoid")


def test_wrappers_are_removed_and_named() -> None:
    model = cv.load("my_own_vit:parallel")
    assert model.module is sys.modules["my_own_vit"].net
    assert model.wrappers == ("DataParallel",)


def test_every_function_takes_it() -> None:
    assert cv.explain(cv.load("my_own_vit:build"), "demo", "rollout").maps.shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("no_such_module:build", UnknownName, "no Python module 'no_such_module'.*current directory"),
        ("my_package.nets:build", UnknownName, "no Python module 'my_package.nets'"),
        ("my_own_vit:biuld", UnknownName, r"no attribute 'biuld'\. Did you mean 'build'\?"),
        ("my_broken_vit:build", ModelUnavailable, "Importing 'my_broken_vit' failed .ZeroDivisionError: division"),
        ("my_refusing_vit:build", BadInput, "^The built-in model takes 224 x 224 images"),
        ("my_lacking_vit:build", ModelUnavailable, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("my_own_vit:broken", ModelUnavailable, "Calling 'my_own_vit:broken' .* failed .OSError: the weights are"),
        ("my_own_vit:needs", ModelUnavailable, "TypeError: needs.. missing 1 required"),
        ("my_own_vit:number", BadInput, "'my_own_vit:number' is a int; expected a torch.nn.Module"),
        ("my_own_vit:wrong", BadInput, "returned a dict; expected a torch.nn.Module"),
        ("tim:vit_tiny_patch16_224", UnknownName, r"Did you mean 'timm:vit_tiny_patch16_224'\?"),
        ("no-such:build", UnknownName, "There is no model 'no-such:build'"),
    ],
)
def test_errors_are_one_sentence(name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        cv.load(name)
    assert "\n" not in str(caught.value)


def test_pretrained_false_raises_for_user_code() -> None:
    with pytest.raises(BadInput, match="weights come from your own code"):
        cv.load("my_own_vit:build", pretrained=False)
