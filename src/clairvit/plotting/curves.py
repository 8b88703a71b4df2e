"""Curves: what a metric was read off, the mean over images with its uncertainty, one line a method."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from clairvit.errors import BadInput
from clairvit.metrics.score import Score
from clairvit.plotting.canvas import INK, LINE, PALE, SMALL, TITLE, fit, text_width
from clairvit.plotting.measures import ARROWS

Array = NDArray[np.float64]
LUCK = "random"  # the baseline that is drawn beside the methods
# Okabe and Ito's, which colour-blind readers tell apart; without black and yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
STROKES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))  # when the colours have been used up
LEFT, TOP, WIDTH, HEIGHT, BELOW = 0.57, 0.48, 2.85, 2.1, 0.45  # inches: the axes and what is around them
KEY = 0.5  # from the axes to the names
NAME = 3.2  # the widest name; longer ones are cut short
PITCH = 0.138  # of the names


def mean_line(score: Score) -> tuple[Array, Array]:
    """[S] and [S]: the mean over the images that have a score, and its standard error (NaN for a single image)."""
    assert score.curve is not None
    lines = score.curve.y.detach().double().cpu().numpy()
    lines = lines[np.isfinite(score.values.double().cpu().numpy())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy complains of a mean of nothing, which is NaN here
        mean = lines.mean(0)
        error = lines.std(0, ddof=1) / math.sqrt(len(lines)) if len(lines) > 1 else np.full(lines.shape[1], np.nan)
    return mean, error


def curves_figure(scores: Sequence[Score]) -> Figure:
    """One metric of several methods on the same images. 'random' is grey and dashed, other baselines are left out."""
    drawn = [one for one in scores if one.curve is not None]
    if not drawn:
        raise BadInput("None of the scores has a curve; expected those of a metric with one, such as deletion.")
    first = drawn[0]
    assert first.curve is not None
    baselines = {*first.baselines, *(name for one in drawn for name in one.baselines)}
    methods = [one for one in drawn if one.baselines or one.method not in baselines]
    luck = [one for one in (first.baselines.get(LUCK),) if one is not None and LUCK not in {m.method for m in methods}]
    names = [_label(one) for one in (*methods, *luck)]
    widest = 1.05 * max(text_width(name) for name in names) * SMALL / 72  # small letters are set a little wider
    width = LEFT + WIDTH + KEY + widest + 0.1
    height = TOP + BELOW + max(HEIGHT, PITCH * len(names))
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    box = (LEFT / width, BELOW / height, WIDTH / width, 1 - (TOP + BELOW) / height)
    axes = figure.add_axes(box)
    for place, score in enumerate(methods):
        stroke = STROKES[place // len(COLOURS) % len(STROKES)]
        _draw(axes, score, COLOURS[place % len(COLOURS)], stroke, 1.5)
    for score in luck:
        _draw(axes, score, PALE, "--", 1.0)
    _dress(axes, first.curve.meaning, first.curve.across)
    room = width - LEFT - 0.1
    title, size = fit(f"{first.metric} {ARROWS[first.better]}", room, TITLE, "bold")
    figure.text(LEFT / width, 1 - 0.2 / height, title, fontsize=size, color=INK, weight="bold")
    about = f"{_of_images([*methods, *luck])} · {first.better} is better · {first.model}"
    text, size = fit(about, room, SMALL)
    figure.text(LEFT / width, 1 - 0.37 / height, text, fontsize=size, color=PALE)
    return figure


def _label(score: Score) -> str:
    """'legrad  0.235'"""
    name, _ = fit(score.method, NAME, SMALL / 0.75)  # what fits a quarter smaller fits at SMALL
    return f"{name}  {score.mean:.3g}"


def _of_images(scores: Sequence[Score]) -> str:
    """'mean of 5 images, band ± 1 standard error'; '3 to 5' where methods have scores for different ones."""
    fewest, most = (pick(one.n_valid for one in scores) for pick in (min, max))
    count = str(most) if fewest == most else f"{fewest} to {most}"
    return f"mean of {count} image" + "s" * (most != 1) + (", band ± 1 standard error" if most > 1 else "")


def _draw(axes: Axes, score: Score, colour: str, stroke: object, width: float) -> None:
    """The mean, and a band of a standard error to each side where there are images enough to say."""
    assert score.curve is not None
    x = score.curve.x.cpu().numpy()
    mean, error = mean_line(score)
    axes.plot(x, mean, color=colour, linestyle=stroke, linewidth=width, label=_label(score))
    if np.isfinite(error).any():
        axes.fill_between(x, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)


def _dress(axes: Axes, meaning: str, across: str) -> None:
    axes.set_xlabel(across, fontsize=SMALL + 0.5, color=INK)
    axes.set_ylabel({"prob": "probability"}.get(meaning, meaning), fontsize=SMALL + 0.5, color=INK)
    axes.tick_params(labelsize=SMALL, color=LINE, labelcolor=INK, length=2.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)
    axes.margins(x=0.01)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.02, 1 + 0.06 / HEIGHT),
        fontsize=SMALL,
        frameon=False,
        labelcolor=INK,
        handlelength=2.2,
    )
