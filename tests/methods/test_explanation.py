"""Explanation and Comparison as values: indexing, iteration, pictures in a notebook, short reprs."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.errors import BadInput, UnknownName
from clairvit.methods.explain import DEFAULT_PANEL, expand_all
from helpers.method_conditions import allow_declared_zeros
from helpers.tiny_models import pixels, wrapped


@pytest.fixture(scope="module")
def three() -> cv.Explanation:
    return cv.explain(wrapped("timm-vit"), pixels("timm-vit", batch=3), "rollout", target=[1, 4, 6], layers=True)


def test_an_item_is_an_explanation_of_one_map(three: cv.Explanation) -> None:
    for row in (0, 2, -1):
        item = three[row]
        assert isinstance(item, cv.Explanation)
        assert torch.equal(item.maps[0], three.maps[row])
        assert item.classes == (three.classes[row],)
        assert item.layers is not None
        assert torch.equal(item.layers[:, 0], three.layers[:, row])  # type: ignore[index]


def test_slices_lists_and_iteration(three: cv.Explanation) -> None:
    assert three[1:].classes == (4, 6)
    assert three[[2, 0]].classes == (6, 1)
    assert [explanation.classes for explanation in three] == [(1,), (4,), (6,)]
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
    assert set(everything) | set(everything.skipped) == set(map(str, expand_all(["all"])))
    assert set(more) - set(everything) == {"lime(samples=8)"}


@pytest.mark.parametrize("methods", ["rollout", [], ""])
def test_other_strings_are_no_lists(methods: object) -> None:
    with pytest.raises(BadInput, match="expected a list of names"):
        cv.compare(wrapped("timm-vit"), pixels("timm-vit"), methods)  # type: ignore[arg-type]


def test_reprs_are_short(three: cv.Explanation) -> None:
    model = wrapped("timm-vit")
    trace = cv.trace(model, pixels("timm-vit"))
    scores = cv.evaluate(model, pixels("timm-vit"), ["rollout"], ["sparseness"])
    many = cv.compare(model, pixels("timm-vit"), [name for name in DEFAULT_PANEL for _ in range(2)])
    for value in (model, trace, trace.layers[0], trace.recording, three, scores, *scores.values(), many):
        assert len(repr(value)) < 250
        assert "\n" not in repr(value)
    assert f"{len(trace.layers)} layers" in repr(trace)


def test_maps_as_an_array(three: cv.Explanation) -> None:
    assert three.numpy().shape == tuple(three.maps.shape)
    assert (three.numpy() == three.maps.numpy()).all()


def test_a_single_map_is_drawn_on_given_axes(three: cv.Explanation) -> None:
    figure, axes = plt.subplots()
    assert three[0].plot(ax=axes) is axes
    assert len(axes.images) == 1
    assert axes.get_title().startswith("any class")
    plt.close(figure)


def test_several_maps_have_axes_each(three: cv.Explanation) -> None:
    all_axes = three.plot(cmap="viridis", smooth=False)
    assert all_axes.shape == (3,)
    assert all(len(axes.images) == 1 for axes in all_axes)
    _, axes = plt.subplots(1, 3)
    assert list(three.plot(axes)) == list(axes)
    with pytest.raises(BadInput, match="1 axes were given for 3 maps"):
        three.plot(axes[0])
    with pytest.raises(UnknownName, match="'colour' is not a display option"):
        three.plot(colour="red")
    plt.close("all")


def test_html_is_small_and_self_contained(three: cv.Explanation) -> None:
    page = three._repr_html_()
    assert page.count("<img") == 1
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert len(page) < 500_000, "of noise, which does not compress"
    assert "&lt;b&gt;" in replace(three, notes=("<b>",))._repr_html_()


def test_concat_is_the_inverse_of_iteration(three: cv.Explanation) -> None:
    back = cv.Explanation.concat(list(three))
    assert torch.equal(back.maps, three.maps)
    assert (back.targets, back.names, back.cost) == (three.targets, three.names, three.cost)
    with pytest.raises(BadInput, match="No explanations were given"):
        cv.Explanation.concat([])
    with pytest.raises(BadInput, match="same method, model and score"):
        cv.Explanation.concat([three, replace(three, method="genatt")])


def test_a_comparison_is_drawn_on_axes_and_as_html() -> None:
    many = cv.compare(wrapped("timm-vit"), pixels("timm-vit", batch=2), ["rollout", "saliency", "cam"], skip=True)
    axes = many.plot()
    assert axes.shape == (2, len(many))
    assert [panel.get_title() for panel in axes[0]] == list(many)
    assert many.plot(axes).shape == axes.shape
    with pytest.raises(BadInput, match="1 axes were given for 2 maps"):
        many.plot(axes[0, 0])
    page = many._repr_html_()
    assert page.count("<img") == 1
    assert all(name in page for name in many.skipped)
    plt.close("all")


def test_a_comparison_is_found_by_its_spec() -> None:
    many = cv.compare(wrapped("timm-vit"), pixels("timm-vit"), [cv.parse_method("rollout"), "genatt+plus"], target=1)
    assert many[cv.parse_method("genatt+plus")] is many["genatt+plus"]
    with pytest.raises(KeyError):
        many["ixg"]


def test_specs_and_strings_give_the_same_map() -> None:
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    spec = cv.parse_method("rollout", fusion="max")
    assert torch.equal(cv.explain(model, image, spec).maps, cv.explain(model, image, str(spec)).maps)
    assert cv.explain(model, image, spec, fusion="min").method == "rollout(fusion=min)"


@pytest.mark.parametrize("shape", ["image", "batch of one", "batch"])
def test_target_is_one_per_image_and_targets_are_several(shape: str) -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", batch=2)
    given = {"image": images[0], "batch of one": images[:1], "batch": images}[shape]
    count = len(images) if shape == "batch" else 1
    assert cv.explain(model, given, "ixg", target=[4] * count).classes == (4,) * count
    assert cv.explain(model, given, "ixg", targets=[4, 1]).classes == (4,) * count + (1,) * count
    assert cv.explain(model, given, "ixg", targets=[[5] * count, None]).classes[:count] == (5,) * count
    with pytest.raises(BadInput, match="targets were given for"):
        cv.explain(model, given, "ixg", target=[1, 2, 3])
    with pytest.raises(BadInput, match="expected one of them"):
        cv.explain(model, given, "ixg", target=1, targets=[1, 2])
    with pytest.raises(BadInput, match="expected a list of targets"):
        cv.explain(model, given, "ixg", targets="cat")
    with pytest.raises(BadInput, match="An empty list of targets"):
        cv.explain(model, given, "ixg", targets=[])
