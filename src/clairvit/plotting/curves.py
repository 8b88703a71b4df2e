"""Curves of a metric, such as deletion: the mean over images with its standard error, one line per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from clairvit.errors import BadInput
from clairvit.metrics.score import Score
from clairvit.plotting.canvas import INK, LINE, PALE, SMALL, TITLE, Canvas, fit, text_width
from clairvit.plotting.labels import ARROWS
from clairvit.plotting.series import BASELINE, RANDOM, LineStyle, line_styles, set_round_ticks

Array = NDArray[np.float64]
LEFT, TOP, WIDTH, HEIGHT, BELOW = 0.57, 0.48, 2.85, 2.1, 0.45  # inches: the axes and what is around them
KEY = 0.5  # from the axes to the names
NAME = 3.2  # the widest name; longer ones are cut short
PITCH = 0.138  # of the names


def draw_curves(axes: Any, scores: Sequence[Score], styles: Mapping[str, LineStyle]) -> None:
    """Draw mean lines with bands of ± 1 standard error, the first on top; methods without a style are baselines."""
    for index, score in enumerate(scores):
        assert score.curve is not None
        style, order = styles.get(score.method, BASELINE), 2 + (len(scores) - index) / len(scores)
        x, (mean, error) = score.curve.x.double().cpu().numpy(), score.mean_curve
        line = {"color": style.colour, "linestyle": style.dash, "linewidth": style.width}
        axes.plot(x, mean, **line, label=_label(score), zorder=order)
        if style.band and np.isfinite(error).any():
            axes.fill_between(x, mean - error, mean + error, color=style.colour, alpha=0.18, linewidth=0, zorder=order)
    curve = scores[0].curve
    assert curve is not None
    axes.set_xlabel(curve.across, fontsize=SMALL + 0.5, color=INK, parse_math=False)
    meaning = {"prob": "probability"}.get(curve.meaning, curve.meaning)
    axes.set_ylabel(meaning, fontsize=SMALL + 0.5, color=INK, parse_math=False)
    set_round_ticks(axes.xaxis)
    set_round_ticks(axes.yaxis)
    axes.grid(axis="y", color=LINE, linewidth=0.4)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, labelcolor=PALE, length=0)
    axes.spines["bottom"].set(visible=True, color=LINE)
    axes.margins(x=0.01)


def curves_figure(scores: Sequence[Score]) -> Figure:
    """Return the curves of one metric by several methods on the same images, with a title and a legend.

    'random' is grey and dashed, other baselines are left out.
    """
    curves = [score for score in scores if score.curve is not None]
    if not curves:
        raise BadInput("None of the scores has a curve; expected those of a metric with one, such as deletion.")
    first = curves[0]
    baselines = {*first.baselines, *(name for score in curves for name in score.baselines)}
    methods = [score for score in curves if score.baselines or score.method not in baselines]
    styles = line_styles([score.method for score in methods])
    random = first.baselines.get(RANDOM)
    lines = methods if random is None or RANDOM in styles else [*methods, random]
    widest = 1.05 * max(text_width(_label(score)) for score in lines) * SMALL / 72  # small letters are set wider
    height = max(HEIGHT, PITCH * len(lines))
    canvas = Canvas(LEFT + WIDTH + KEY + widest + 0.1, TOP + height + BELOW)
    axes = canvas.axes(LEFT, TOP, WIDTH, height, ticks=True)
    draw_curves(axes, lines, styles)
    corner = (1.02, 1 + 0.06 / HEIGHT)
    axes.legend(
        loc="upper left", bbox_to_anchor=corner, fontsize=SMALL, frameon=False, labelcolor=INK, handlelength=2.2
    )
    line_width = canvas.width - LEFT - 0.1
    canvas.write(f"{first.metric} {ARROWS[first.better]}", LEFT, 0.08, line_width, TITLE, INK, bold=True, align="left")
    subtitle = f"{describe_mean(lines)} · {first.better} is better · {first.model}"
    canvas.write(subtitle, LEFT, 0.28, line_width, SMALL, PALE, align="left")
    return canvas.figure


def _label(score: Score) -> str:
    """Return 'legrad  0.235'."""
    name, _ = fit(score.method, NAME, SMALL / 0.75)  # what fits a quarter smaller fits at SMALL
    return f"{name}  {score.mean:.3g}"


def describe_mean(scores: Sequence[Score]) -> str:
    """Return 'mean of 5 images, band ± 1 standard error'; '3 to 5' where methods have scores for different ones."""
    fewest, most = min(score.n_valid for score in scores), max(score.n_valid for score in scores)
    count = str(most) if fewest == most else f"{fewest} to {most}"
    return f"mean of {count} image" + "s" * (most != 1) + (", band ± 1 standard error" if most > 1 else "")
