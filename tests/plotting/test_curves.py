"""Curves: the mean over images that have a score, its band, and the random baseline apart from the methods."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.metrics.score import Curve, Score
from clairvit.plotting.canvas import PALE
from clairvit.plotting.curves import curves_figure
from clairvit.plotting.series import COLOURS

LINES = torch.tensor([[1.0, 0.5, 0.0], [0.6, 0.3, 0.4], [9.0, 9.0, 9.0]], dtype=torch.float64)


def score(
    method: str, values: tuple[float, ...] = (0.5, 0.4, math.nan), curve: bool = True, with_baselines: bool = True
) -> Score:
    """Three images; the third has no score, so its line must not count."""
    baselines: Mapping[str, Score] = {}
    if with_baselines:
        baselines = {name: score(name, with_baselines=False) for name in ("random", "center")}
    return Score(
        metric="deletion",
        method=method,
        values=torch.tensor(values, dtype=torch.float64),
        better="lower",
        span=(0, 1),
        degenerate=torch.zeros(len(values), dtype=torch.bool),
        names=tuple(f"{i}.jpg" for i in range(len(values))),
        model="tiny",
        curve=Curve(torch.tensor([0.0, 0.5, 1.0]), LINES[: len(values)], "prob") if curve else None,
        baselines=baselines,
    )


def labels(figure: Figure) -> list[str]:
    return [str(line.get_label()).split("  ")[0] for line in figure.axes[0].get_lines()]


def words(figure: Figure) -> str:
    return " ".join(text.get_text() for text in figure.texts)


def test_the_mean_and_its_error_are_of_images_with_a_score() -> None:
    mean, error = score("legrad").mean_curve
    np.testing.assert_allclose(mean, [0.8, 0.4, 0.2])
    np.testing.assert_allclose(error, [0.2, 0.1, 0.2])  # |a - b| / 2 for two values
    _, error = score("legrad", values=(0.5, math.nan, math.nan)).mean_curve
    assert np.isnan(error).all()


def test_a_figure_has_a_line_and_a_band_for_each_method_and_grey_dashes_for_random() -> None:
    scores = [score("legrad"), score("rollout")]
    figure = curves_figure([*scores, *scores[0].baselines.values()])
    (axes,) = figure.axes
    assert labels(figure) == ["legrad", "rollout", "random"]
    legrad, rollout, random = axes.get_lines()
    np.testing.assert_allclose(np.asarray(legrad.get_ydata()), [0.8, 0.4, 0.2])
    assert [to_hex(line.get_color()) for line in (legrad, rollout, random)] == [*COLOURS[:2], PALE]
    assert (legrad.get_linestyle(), random.get_linestyle()) == ("-", "--")
    assert len(axes.collections) == 3
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(1.0)  # 0.8 + 0.2
    assert "mean of 2 images, band ± 1 standard error · lower is better · tiny" in words(figure)
    assert axes.get_ylabel() == "probability"


def test_a_random_map_that_was_asked_for_is_drawn_once_as_a_method() -> None:
    assert labels(curves_figure([score("random"), score("legrad")])) == ["random", "legrad"]


def test_one_image_has_no_band() -> None:
    single = score("legrad", values=(0.5,), with_baselines=False)
    figure = curves_figure([single])
    assert not figure.axes[0].collections
    assert "mean of 1 image · " in words(figure)


def test_images_that_some_methods_have_no_score_for_are_counted() -> None:
    other = score("rollout", values=(0.5, 0.4, 0.1))
    assert "mean of 2 to 3 images" in words(curves_figure([score("legrad"), other]))


@pytest.mark.parametrize("count", [1, 30])
def test_every_name_is_on_the_paper(count: int) -> None:
    long = "ensemble(rollout(discard_ratio=0.9,fusion=max)+skipplus,decompx+skipplus,by=max)"
    figure = curves_figure([score(f"method {i} {'x' * i}") for i in range(count - 1)] + [score(long)])
    figure.canvas.draw()
    legend = figure.axes[0].get_legend()
    assert legend is not None
    width, height = figure.bbox.width, figure.bbox.height
    assert len(legend.get_texts()) == count + 1
    for text in (*legend.get_texts(), *figure.texts):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width, text.get_text()
        assert 0 <= box.y0 < box.y1 <= height, text.get_text()


def test_no_curve_no_picture() -> None:
    with pytest.raises(BadInput, match="None of the scores has a curve; expected those of a metric with one"):
        curves_figure([score("legrad", curve=False)])
