"""The radar's polygons lie where the numbers say, methods keep their colour, and too few axes are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from clairvit.errors import BadInput
from clairvit.plotting.radar import radar_figure
from clairvit.plotting.save import write_figure
from clairvit.plotting.series import COLOURS

AXES = ["Faithfulness Correlation", "Max-Sensitivity", "Sparseness", "Model Randomisation"]
HERE = {"LIME": (0.0, 0.5, 1.0, 0.25), "SHAP": (1.0, 1.0, 0.0, 0.0)}
PAPER = {"SHAP": (0.2, 0.3, 0.4, 0.5)}


def circles() -> list[Any]:
    return list(radar_figure({"here": HERE, "the paper": PAPER}, AXES, "focusvit").axes)


def test_polygons_are_closed_and_in_place() -> None:
    here, paper = circles()
    lime, shap = here.lines
    angles, places = lime.get_data()
    assert list(places) == [0.0, 0.5, 1.0, 0.25, 0.0]
    assert list(angles) == pytest.approx([0, math.pi / 2, math.pi, 3 * math.pi / 2, 0])
    assert list(paper.lines[0].get_data()[1]) == [0.2, 0.3, 0.4, 0.5, 0.2]
    assert list(shap.get_data()[1]) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_a_method_has_one_colour() -> None:
    here, paper = circles()
    assert here.lines[0].get_color() == COLOURS[0]
    assert here.lines[1].get_color() == paper.lines[0].get_color() == COLOURS[1]


def test_axes_and_headings_are_named(tmp_path: Any) -> None:
    figure = radar_figure({"here": HERE, "the paper": PAPER}, AXES, "focusvit")
    written = [text.get_text() for text in figure.texts]
    assert {"focusvit", "here", "the paper", "LIME", "SHAP"} <= set(written)
    labels = circles()[0].texts  # one per line; two lines where an axis has two words
    assert " ".join(label.get_text() for label in labels) == " ".join(AXES)
    first = [label for label in labels if label.get_text() in {axis.split(" ")[0] for axis in AXES}]
    assert [label.get_ha() for label in first] == ["center", "left", "center", "right"], "outside the circle"
    assert [label.get_va() for label in first] == ["bottom", "center", "top", "center"]
    file = write_figure(figure, tmp_path / "radar.png")
    assert file.stat().st_size > 10_000


def test_two_axes_span_nothing() -> None:
    with pytest.raises(BadInput, match="2 axes were given; expected 3 or more"):
        radar_figure({"here": {"a": (1.0, 0.0)}}, ["x", "y"], "t")
