"""Explanation and Comparison as values: indexing, iteration, pictures in a notebook, short reprs."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.methods.explain import DEFAULT_PANEL, expand_all
from conditions import allow_declared_zeros
from tiny import pixels, wrapped


@pytest.fixture(scope="module")
def three() -> cv.Explanation:
    return cv.explain(wrapped("timm-vit"), pixels("timm-vit", batch=3), "rollout", target=[1, 4, 6], layers=True)


def test_an_item_is_an_explanation_of_one_map(three: cv.Explanation) -> None:
    for row in (0, 2, -1):
        one = three[row]
        assert isinstance(one, cv.Explanation)
        assert torch.equal(one.maps[0], three.maps[row])
        assert one.classes == (three.classes[row],)
        assert one.layers is not None
        assert torch.equal(one.layers[:, 0], three.layers[:, row])  # type: ignore[index]


def test_slices_lists_and_iteration(three: cv.Explanation) -> None:
    assert three[1:].classes == (4, 6)
    assert three[[2, 0]].classes == (6, 1)
    assert [one.classes for one in three] == [(1,), (4,), (6,)]
    with pytest.raises(IndexError):
        three[3]


def test_a_notebook_shows_a_picture(three: cv.Explanation) -> None:
    with Image.open(io.BytesIO(three._repr_png_())) as picture:
        assert picture.format == "PNG"
        assert picture.size[0] > 200


def test_a_comparison_is_drawn_and_saved(tmp_path: Path) -> None:
    many = cv.compare(wrapped("timm-vit"), pixels("timm-vit", batch=2), ["rollout", "saliency"])
    with Image.open(io.BytesIO(many._repr_png_())) as picture:
        assert picture.format == "PNG"
    assert many.save(tmp_path / "many.png").stat().st_size > 10_000
    assert many.save(tmp_path / "many.json").exists()
    assert repr(many) == "Comparison(2 methods × 2 maps: rollout, saliency)"


def test_compare_has_a_default_panel_and_all() -> None:
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    assert tuple(cv.compare(model, image)) == DEFAULT_PANEL
    with warnings.catch_warnings():
        allow_declared_zeros()
        everything = cv.compare(model, image, "all")
        more = cv.compare(model, image, ["all", "lime(samples=8)"])
    assert set(everything) | set(everything.skipped) == set(expand_all(["all"]))
    assert set(more) - set(everything) == {"lime(samples=8)"}


@pytest.mark.parametrize("methods", ["rollout", [], ""])
def test_other_strings_are_no_lists(methods: object) -> None:
    with pytest.raises(BadInput, match="expected a list of names"):
        cv.compare(wrapped("timm-vit"), pixels("timm-vit"), methods)  # type: ignore[arg-type]


def test_reprs_are_short(three: cv.Explanation) -> None:
    model = wrapped("timm-vit")
    trace = cv.trace(model, pixels("timm-vit"))
    for value in (model, trace, trace.layers[0], trace.recording, three):
        assert len(repr(value)) < 250
        assert "\n" not in repr(value)
    assert f"{len(trace.layers)} layers" in repr(trace)
