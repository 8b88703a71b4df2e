"""The default method, its fallbacks, and the recommendations."""

from __future__ import annotations

import pytest
import torch

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.methods.recommended import default_method, default_methods, recommended_methods
from clairvit.methods.spec import resolve_method
from helpers.broken_models import quantised, wrapped


def test_every_recommended_method_exists() -> None:
    for item in (*default_methods(), *recommended_methods()):
        assert resolve_method(item.method).text == item.method
        assert item.reason


def test_the_default_is_the_first_of_the_list() -> None:
    explanation = cv.explain("pets", "demo")
    assert explanation.method == default_method() == "attnlrp+plus"
    assert torch.equal(explanation.maps, cv.explain("pets", "demo", "attnlrp+plus").maps)
    assert not any("default" in note for note in explanation.notes)


def test_a_model_without_gradients_falls_back_to_a_black_box_method(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(quantised())
    images = torch.randn(1, 3, *model.preprocess.size, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        "clairvit.methods.explain.default_methods",
        lambda: (default_methods()[0], cv.Recommendation("default", "lime(samples=24)", "no gradients")),
    )
    explanation = cv.explain(model, images, target=1)
    assert explanation.method == "lime(samples=24)"
    assert any("The default attnlrp+plus does not fit this model" in note for note in explanation.notes)
    assert explanation.notes[-1] == "lime(samples=24) was used: no gradients."


def test_options_belong_to_the_default_method() -> None:
    with pytest.raises(LookupError, match="attnlrp"):
        cv.explain("pets", "demo", fusion="max")


def test_a_wrong_target_is_no_reason_to_fall_back() -> None:
    with pytest.raises(BadInput):
        cv.explain("pets", "demo", target=99)
