"""Specification curves: an effect under every choice of a protocol, sorted, and below each what was chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from clairvit.plotting.canvas import INK, LINE, PALE, SMALL, TITLE, Canvas

WIDTH, LABELS = 5.2, 2.9  # inches of the curve, and of the names of the choices left of it
TOP, CURVE, ROW, BETWEEN = 0.36, 1.35, 0.145, 0.07  # inches
GAP = 0.3  # between two panels
LEGEND = 0.3
# verdict -> colour and marker; they can be told apart without colours
STYLES: Mapping[str, tuple[str, str]] = {
    "surely holds": ("#08519c", "o"),
    "holds": ("#6baed6", "o"),
    "in part": ("#969696", "s"),
    "turns around": ("#fdae6b", "v"),
    "surely turns around": ("#d94801", "v"),
}


@dataclass(frozen=True)
class Specification:
    """One point of a curve: an effect, how a claim comes out there, and choice -> alternative."""

    effect: float
    verdict: str
    choices: Mapping[str, str]


def specification_curves(panels: Mapping[str, Sequence[Specification]], title: str) -> Figure:
    """Return a panel per claim, one below the other: points by falling effect, and a grid of dots of their choices."""
    rows = {name: _rows(points) for name, points in panels.items()}
    heights = {name: TOP + CURVE + _grid_height(rows[name]) for name in panels}
    canvas = Canvas(LABELS + WIDTH + 0.25, 0.32 + sum(heights.values()) + GAP * len(panels) + LEGEND)
    canvas.write(title, 0.1, 0.08, LABELS + WIDTH, TITLE, bold=True, align="left")
    top = 0.36
    for name, points in panels.items():
        _draw_panel(canvas, name, sorted(points, key=lambda point: -point.effect), rows[name], top)
        top += heights[name] + GAP
    _draw_legend(canvas, top)
    return canvas.figure


def _rows(points: Sequence[Specification]) -> dict[str, tuple[str, ...]]:
    """Return choice -> its alternatives, without choices that all points make alike."""
    names = dict.fromkeys(name for point in points for name in point.choices)
    chosen = {
        name: tuple(dict.fromkeys(point.choices[name] for point in points if name in point.choices)) for name in names
    }
    return {name: alternatives for name, alternatives in chosen.items() if len(alternatives) > 1}


def _grid_height(rows: Mapping[str, Sequence[str]]) -> float:
    return sum(ROW * len(alternatives) + BETWEEN for alternatives in rows.values())


def _draw_panel(
    canvas: Canvas, name: str, points: Sequence[Specification], rows: Mapping[str, Sequence[str]], top: float
) -> None:
    held = sum(point.verdict.endswith("holds") for point in points)
    canvas.write(f"{name}: holds in {held} of {len(points)}", 0.1, top, LABELS + WIDTH, TITLE, align="left")
    axes = canvas.axes(LABELS, top + TOP - 0.08, WIDTH, CURVE, ticks=True)
    effects = _within([point.effect for point in points])
    places = range(len(points))
    size = max(1.2, min(4.0, 72 * WIDTH / len(points) * 0.8))
    for verdict, (colour, marker) in STYLES.items():
        chosen = [place for place in places if points[place].verdict == verdict]
        axes.plot(chosen, [effects[p] for p in chosen], marker, color=colour, markersize=size, markeredgewidth=0)
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_xticks([])
    axes.tick_params(labelsize=SMALL, length=2, color=LINE, labelcolor=PALE)
    axes.set_ylabel("smallest paired effect\n(mean lead / its deviation)", fontsize=SMALL, color=PALE)
    _draw_grid(canvas, points, rows, top + TOP + CURVE, size)


def _within(effects: Sequence[float]) -> list[float]:
    """Return effects with infinite ones just outside the others."""
    finite = [effect for effect in effects if math.isfinite(effect)]
    reach = 1.1 * max((abs(effect) for effect in finite), default=1.0) or 1.0
    return [effect if math.isfinite(effect) else math.copysign(reach, effect) for effect in effects]


def _draw_grid(
    canvas: Canvas, points: Sequence[Specification], rows: Mapping[str, Sequence[str]], top: float, size: float
) -> None:
    """Draw a dot where a point made a choice, in the colour of its verdict."""
    for name, alternatives in rows.items():
        canvas.write(name, 0.1, top + 0.02, 0.95, SMALL, INK, bold=True, align="left")
        for alternative in alternatives:
            canvas.write(alternative, 1.05, top + 0.02, LABELS - 1.12, SMALL, PALE, align="right")
            axes = canvas.axes(LABELS, top, WIDTH, ROW)
            axes.set_xlim(-0.5, len(points) - 0.5)
            axes.set_ylim(-1, 1)
            axes.axhline(0, color=LINE, linewidth=0.3, zorder=0)
            for verdict, (colour, _) in STYLES.items():
                chosen = [
                    place
                    for place, point in enumerate(points)
                    if point.verdict == verdict and point.choices.get(name) == alternative
                ]
                axes.plot(chosen, [0] * len(chosen), "|", color=colour, markersize=6, markeredgewidth=size / 2)
            top += ROW
        top += BETWEEN


def _draw_legend(canvas: Canvas, top: float) -> None:
    handles = [
        Line2D([], [], marker=marker, color=colour, linestyle="none", markersize=4, label=verdict)
        for verdict, (colour, marker) in STYLES.items()
    ]
    canvas.figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - (top - 0.12) / canvas.height),
        ncols=len(handles),
        fontsize=SMALL,
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.2,
    )
