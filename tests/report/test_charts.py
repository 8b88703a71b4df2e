"""Charts of a report: inline SVG that shows the numbers, follows the colours of the page, and carries nothing else."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from clairvit.metrics.score import Curve, Score
from clairvit.plotting.radar import radar_figure
from clairvit.plotting.series import highlighted_styles
from clairvit.reports.blocks import Chart
from clairvit.reports.charts import curves_chart, intervals_chart, radar_chart
from clairvit.reports.ranking import RadarData
from clairvit.reports.svg import inline_svg
from helpers.fixed_scores import fixed_score


def curved(method: str, lines: list[list[float]]) -> Score:
    curve = Curve(torch.tensor([0.0, 0.5, 1.0]), torch.tensor(lines, dtype=torch.float64), "prob")
    return fixed_score(method, [0.5] * len(lines), curve=curve)


def paths(chart: Chart, *declarations: str) -> list[str]:
    """Return the outlines of the paths whose CSS has these declarations."""
    elements = list(ElementTree.fromstring(chart.svg).iter("path"))
    return [
        element.attrib["d"] for element in elements if set(declarations) <= set(element.attrib["style"].split("; "))
    ]


def texts(chart: Chart) -> dict[str, float]:
    """Return text -> y, in points from the upper edge."""
    return {str(element.text): float(element.attrib["y"]) for element in ElementTree.fromstring(chart.svg).iter("text")}


def test_curves_go_through_the_means_and_random_is_dashed() -> None:
    scores = {"a": curved("a", [[1.0, 0.5, 0.0], [1.0, 0.7, 0.0]]), "random": curved("random", [[1.0, 1.0, 1.0]] * 2)}
    chart = curves_chart(scores, highlighted_styles(["a"]))
    assert chart is not None
    (line,) = paths(chart, "stroke: var(--s0)", "fill: none")
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split())) for point in re.split("[ML]", line)[1:])
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)
    assert (y1 - y0) / (y2 - y0) == pytest.approx(0.4, abs=1e-3), "from 1 to 0, the mean in the middle is 0.6"
    assert y2 > y0, "y counts down"
    assert len(paths(chart, "fill: var(--s0)", "fill-opacity: 0.18")) == 1
    (random,) = [
        element for element in ElementTree.fromstring(chart.svg).iter("path") if "dasharray" in element.attrib["style"]
    ]
    assert "stroke: var(--pale)" in random.attrib["style"]
    assert [entry.text for entry in chart.legend] == ["a", "random (baseline)"]
    assert "dasharray" in chart.legend[1].style
    assert curves_chart({"a": fixed_score("a", [0.5])}, highlighted_styles(["a"])) is None


def test_many_methods_leave_most_of_them_grey() -> None:
    scores = {f"m{i}": curved(f"m{i}", [[1.0, 0.5, 0.1 * i]]) for i in range(9)}
    chart = curves_chart(scores, highlighted_styles(list(scores)))
    assert chart is not None
    assert len(paths(chart, "stroke: var(--pale)", "stroke-width: 0.6")) == 3
    assert chart.legend[-1].text == "3 other methods"
    assert "nan" not in chart.svg.lower()


def test_intervals_are_drawn_where_there_are_images_enough_and_names_are_escaped() -> None:
    scores = {
        "<b>": fixed_score("<b>", [0.1, 0.2, 0.3] * 2),
        "one": fixed_score("one", [0.4] * 5),
        "random": fixed_score("random", [0.5, 0.6] * 3),
    }
    chart = intervals_chart(scores, highlighted_styles(["<b>", "one"]))
    assert chart is not None
    assert len(paths(chart, "stroke-width: 1.1")) == 2
    assert chart.svg.count("translate(") == 3, "a point per method"
    assert "&lt;b&gt;" in chart.svg
    assert "<b>" not in chart.svg
    same = intervals_chart({"a": fixed_score("a", [0.5, 0.5])}, highlighted_styles(["a"]))
    assert same is not None
    assert "nan" not in same.svg
    assert intervals_chart({"a": fixed_score("a", [math.nan])}, highlighted_styles(["a"])) is None


def test_intervals_are_sorted_from_the_best_with_baselines_last() -> None:
    scores = {name: fixed_score(name, [value] * 6) for name, value in (("b", 0.3), ("a", 0.2), ("random", 0.1))}
    chart = intervals_chart(scores, highlighted_styles(["b", "a"]))
    assert chart is not None
    places = texts(chart)
    assert places["a"] < places["b"] < places["random"], "lower is better"


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1])
def test_ticks_are_numbers_within_the_intervals(scale: float) -> None:
    scores = {
        name: fixed_score(name, [scale * value for value in (1, 2, 3, 4, 5, step)]) for step, name in enumerate("ab")
    }
    chart = intervals_chart(scores, highlighted_styles(["a", "b"]))
    assert chart is not None
    numbers = [float(text.replace("−", "-")) for text in texts(chart) if text not in scores]
    assert len(numbers) >= 3
    assert all(0.0 <= number / scale <= 5.0 * (1 + 1e-9) for number in numbers)
    assert max(numbers) / scale > 2.0, "no common factor is left out"


def test_names_of_axes_stand_clear_of_the_rim() -> None:
    axes = ("deletion(steps=3)", "iou", "sparseness", "insertion(steps=3)")
    data = RadarData(axes, ("a", "b"), np.eye(4)[:2], np.zeros(2), (), False)
    chart = radar_chart(data, dict.fromkeys(axes, "↑"), highlighted_styles(["a", "b"]))
    top, bottom = 0.33 * 72, (0.33 + 1.8) * 72
    options = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>\(steps=3\)<', chart.svg)]
    places = texts(chart)
    assert places["deletion ↑"] < min(options) < top - 3
    assert places["sparseness ↑"] > bottom + 3
    assert [entry.text for entry in chart.legend] == ["a", "b"]


def test_a_drawing_is_reproducible_and_has_a_title_a_description_and_no_identifiers_or_links() -> None:
    polygons = {"here": {"LIME & co": (0.0, 0.5, 1.0)}}
    first, again = (inline_svg(radar_figure(polygons, ["x", "y", "z"], "<t>"), "Radar of 1", "a 1") for _ in range(2))
    assert first == again
    svg = ElementTree.fromstring(first)
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"] == svg.findtext("title") == "Radar of 1"
    assert svg.findtext("desc") == "a 1"
    assert {element.tag for element in svg.iter()} == {"svg", "title", "desc", "path", "text"}
    assert not any(word in first for word in ("http", "url(", "href", " id=", "xmlns", "font-family"))
    assert "LIME &amp; co" in first
