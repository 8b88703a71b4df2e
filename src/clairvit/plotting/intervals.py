"""Means of a metric with their 95 % intervals, one row per method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from clairvit.metrics.score import Score
from clairvit.plotting.canvas import INK, LINE, PALE, SMALL, Canvas, fit, text_width
from clairvit.plotting.series import BASELINE, RANDOM, LineStyle, set_round_ticks

WIDTH, PITCH, TOP, BELOW = 3.4, 0.16, 0.06, 0.2  # inches: the figure, a row, what is above and below the rows
WIDEST_NAME = 1.6

IntervalRow: TypeAlias = tuple[float, tuple[float, float], str]  # mean, interval, colour


def intervals_figure(scores: Mapping[str, Score], styles: Mapping[str, LineStyle]) -> Figure:
    """Return means with intervals, the best on top; methods without a style are baselines, at the bottom."""
    names = {method: fit(method, WIDEST_NAME, SMALL / 0.75)[0] for method in scores}
    left = 0.1 + 1.03 * max(text_width(name) for name in names.values()) * SMALL / 72
    canvas = Canvas(WIDTH, TOP + PITCH * len(scores) + BELOW)
    axes = canvas.axes(left, TOP, WIDTH - left - 0.12, PITCH * len(scores), ticks=True)
    draw_intervals(axes, scores, styles)
    axes.set_yticks(axes.get_yticks(), [names[method] for method in ranked(scores, styles)], parse_math=False)
    for label, method in zip(axes.get_yticklabels(), ranked(scores, styles), strict=True):
        label.set(color=INK if method in styles else PALE, style="normal" if method in styles else "italic")
    return canvas.figure


def ranked(scores: Mapping[str, Score], styles: Mapping[str, LineStyle]) -> list[str]:
    """Return the methods from best to worst mean, baselines last."""
    sign = {"lower": 1, "higher": -1}
    return sorted(scores, key=lambda name: (name not in styles, sign[scores[name].better] * scores[name].mean))


def draw_intervals(axes: Any, scores: Mapping[str, Score], styles: Mapping[str, LineStyle]) -> None:
    """Draw a point per mean, a line per interval, and a dashed line at the mean of the random baseline."""
    methods = ranked(scores, styles)
    rows = [(scores[method].mean, scores[method].interval, styles.get(method, BASELINE).colour) for method in methods]
    draw_rows(axes, rows, random=scores[RANDOM].mean if RANDOM in scores else None)


def draw_rows(axes: Any, rows: Sequence[IntervalRow], random: float | None) -> None:
    """Draw a point per mean and a line per interval, the first row on top; a dashed line at `random`."""
    for row, (mean, interval, colour) in enumerate(rows):
        if math.isfinite(interval[0]):
            axes.plot(interval, [row, row], color=colour, linewidth=1.1, zorder=3)
        axes.plot([mean], [row], "o", color=colour, markersize=4.2, markeredgewidth=0, zorder=4)
    if random is not None:
        axes.axvline(random, color=PALE, linestyle=BASELINE.dash, linewidth=0.8, zorder=2)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)))
    set_round_ticks(axes.xaxis)
    axes.grid(axis="x", color=LINE, linewidth=0.4)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, labelcolor=PALE, length=0)
    axes.margins(x=0.03)
