"""Radar: several metrics of several methods as polygons, ours and a paper's side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.plotting.canvas import INK, LINE, PALE, SMALL, TITLE, fit
from clairvit.plotting.curves import COLOURS, STROKES

SIDE, AROUND, TOP, KEY = 2.3, 0.95, 0.85, 0.15  # inches: the circle, what is beside and above it, a line of the key
Polygons = Mapping[str, Sequence[float]]  # method -> its place on each axis, 0 … 1


def radar_figure(panels: Mapping[str, Polygons], axes: Sequence[str], title: str) -> Figure:
    """A circle for each panel; the same method has the same colour in all of them. The outer ring is the best."""
    if len(axes) < 3:
        raise BadInput(f"{len(axes)} axes were given; expected 3 or more: fewer span no area.")
    names = list(dict.fromkeys(name for polygons in panels.values() for name in polygons))
    lines = math.ceil(len(names) / 2)
    width = len(panels) * (SIDE + 2 * AROUND)
    height = TOP + SIDE + 0.45 + KEY * lines + 0.1
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    text, size = fit(title, width - 0.2, TITLE, "bold")
    figure.text(0.1 / width, 1 - 0.2 / height, text, fontsize=size, color=INK, weight="bold")
    looks = {
        name: (COLOURS[place % len(COLOURS)], STROKES[place // len(COLOURS) % len(STROKES)])
        for place, name in enumerate(names)
    }
    for place, (heading, polygons) in enumerate(panels.items()):
        left = place * (SIDE + 2 * AROUND) + AROUND
        box = (left / width, 1 - (TOP + SIDE) / height, SIDE / width, SIDE / height)
        circle = cast(Any, figure.add_axes(box, projection="polar"))  # matplotlib types it as plain axes
        _dress(circle, axes)
        for name, row in polygons.items():
            _draw(circle, row, *looks[name])
        words, size = fit(heading, SIDE + AROUND, SMALL)
        figure.text((left + SIDE / 2) / width, 1 - 0.42 / height, words, fontsize=size, color=PALE, ha="center")
    _key(figure, looks, width, height)
    return figure


def _angles(count: int) -> list[float]:
    return [2 * math.pi * k / count for k in range(count)]


def _draw(circle: Any, row: Sequence[float], colour: str, stroke: object) -> None:
    angles = _angles(len(row))
    circle.plot([*angles, angles[0]], [*row, row[0]], color=colour, linestyle=stroke, linewidth=1.4, clip_on=False)
    circle.fill([*angles, angles[0]], [*row, row[0]], color=colour, alpha=0.08, linewidth=0)


def _dress(circle: Any, axes: Sequence[str]) -> None:
    circle.set_theta_offset(math.pi / 2)
    circle.set_theta_direction(-1)
    circle.set_ylim(0, 1)
    circle.set_yticks([0.25, 0.5, 0.75, 1.0])
    circle.set_yticklabels([])
    circle.set_xticks(_angles(len(axes)))
    circle.set_xticklabels([])
    for angle, axis in zip(_angles(len(axes)), axes, strict=True):
        beside, above = math.sin(angle), math.cos(angle)  # 0 is at the top, and it goes round clockwise
        across = "center" if abs(beside) < 0.1 else "left" if beside > 0 else "right"
        along = "center" if abs(above) < 0.1 else "bottom" if above > 0 else "top"
        words = axis.replace(" ", "\n", 1)
        circle.text(angle, 1.06, words, fontsize=SMALL, color=INK, ha=across, va=along, multialignment="center")
    circle.grid(color=LINE, linewidth=0.5)
    circle.spines["polar"].set_color(LINE)


def _key(figure: Figure, looks: Mapping[str, tuple[str, Any]], width: float, height: float) -> None:
    """Two columns below the circles."""
    lines = math.ceil(len(looks) / 2)
    for place, (name, (colour, stroke)) in enumerate(looks.items()):
        left = 0.3 + (place // lines) * width / 2
        y = (0.1 + KEY * (lines - place % lines - 0.5)) / height
        figure.add_artist(_line(left / width, (left + 0.25) / width, y, colour, stroke))
        text, size = fit(name, width / 2 - 0.7, SMALL)
        figure.text((left + 0.32) / width, y, text, fontsize=size, color=INK, va="center")


def _line(left: float, right: float, y: float, colour: str, stroke: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([left, right], [y, y], color=colour, linestyle=stroke, linewidth=1.4)
