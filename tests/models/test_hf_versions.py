"""A transformers that is too old for a family of models is refused in one sentence."""

from __future__ import annotations

import importlib
import sys

import pytest

import clairvit as cv
from clairvit.errors import ModelUnavailable
from clairvit.models.sources.hf_versions import FAMILIES, OLDEST, check_version
from helpers import vision_language


def pretend(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    """Let this version be installed; transformers puts another module in its place once a model is used."""
    importlib.import_module("transformers")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", installed)


@pytest.mark.parametrize(
    ("installed", "model_type", "needed"),
    [
        ("4.40.2", "vit", OLDEST),
        ("4.40.2", "", OLDEST),
        ("5.2.0rc1", "qwen2_5_vl", FAMILIES["qwen2_5_vl"]),
        *(("5.0.0", model_type, needed) for model_type, needed in FAMILIES.items()),
    ],
)
def test_an_old_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str, model_type: str, needed: str
) -> None:
    pretend(monkeypatch, installed)
    with pytest.raises(
        ModelUnavailable, match=rf"need\w* transformers {needed} or newer, and {installed} is installed"
    ):
        check_version(model_type)


@pytest.mark.parametrize("installed", ["5.13.0", "5.13.0.dev0", "5.20.1", "6.0"])
def test_a_new_version_is_taken(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    pretend(monkeypatch, installed)
    for model_type in ("", "vit", *FAMILIES):
        check_version(model_type)


def test_modules_and_model_types_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = vision_language.tiny_language_model("qwen2-vl")
    cv.wrap(module, size=32, mean=0.5, std=0.5)
    pretend(monkeypatch, "5.2.0")
    with pytest.raises(ModelUnavailable, match=r"'qwen2_vl' models need transformers 5\.3"):
        cv.wrap(module, size=32, mean=0.5, std=0.5)
    with pytest.raises(ModelUnavailable, match=r"'qwen2_vl' models need transformers 5\.3"):
        cv.load("hf:qwen2_vl", pretrained=False)
    pretend(monkeypatch, "4.40.2")
    with pytest.raises(ModelUnavailable, match=r"'vit' models need transformers"):
        cv.load("hf:vit", pretrained=False)
