"""Radar charts: several metrics of several methods as polygons, the outer ring is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.plotting.canvas import INK, LINE, PALE, SMALL, TITLE, Canvas, fit
from clairvit.plotting.series import LineStyle, line_styles

SIDE = 2.3  # inches, the diameter of the circle
AROUND, TOP = 0.95, 0.85  # inches, its margins left and right, and above
ROW = SIDE + TOP + 0.1  # inches from one row of radars to the next
KEY = 0.15  # inches, a line of the legend
Polygons = Mapping[str, Sequence[float]]  # method -> its position on each axis, 0 … 1


def radar_figure(panels: Mapping[str, Polygons], axes: Sequence[str], title: str, columns: int | None = None) -> Figure:
    """Return a radar per panel, in rows of `columns` (None: one row); a method has one colour in all of them."""
    names = list(dict.fromkeys(name for polygons in panels.values() for name in polygons))
    columns = len(panels) if columns is None else columns
    width = columns * (SIDE + 2 * AROUND)
    below = (math.ceil(len(panels) / columns) - 1) * ROW
    canvas = Canvas(width, TOP + SIDE + below + 0.45 + KEY * math.ceil(len(names) / 2) + 0.1)
    canvas.write(title, 0.1, 0.08, width - 0.2, TITLE, bold=True, align="left")
    styles = line_styles(names)
    labels = [axis.replace(" ", "\n", 1) for axis in axes]
    for index, (heading, polygons) in enumerate(panels.items()):
        left, down = index % columns * (SIDE + 2 * AROUND) + AROUND, index // columns * ROW
        draw_radar(canvas.axes(left, TOP + down, SIDE, SIDE, ticks=True, projection="polar"), labels, polygons, styles)
        canvas.write(heading, left - AROUND / 2, 0.34 + down, SIDE + AROUND, SMALL, PALE)
    _draw_legend(canvas, styles)
    return canvas.figure


def draw_radar(axes: Any, labels: Sequence[str], polygons: Polygons, styles: Mapping[str, LineStyle]) -> None:
    """Draw a polygon per method, the first on top; `labels` of the axes stand outside, broken at '\\n'."""
    if len(labels) < 3:
        raise BadInput(f"{len(labels)} axes were given; expected 3 or more: fewer span no area.")
    angles = [2 * math.pi * k / len(labels) for k in range(len(labels))]
    axes.set_theta_offset(math.pi / 2)
    axes.set_theta_direction(-1)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.25, 0.5, 0.75, 1.0], [])
    axes.set_xticks(angles, [])
    axes.grid(color=LINE, linewidth=0.5)
    axes.spines["polar"].set(visible=True, color=LINE)
    for angle, label in zip(angles, labels, strict=True):
        _draw_label(axes, angle, label.split("\n"))
    for index, (name, values) in enumerate(polygons.items()):
        style, order = styles[name], 2 + (len(polygons) - index) / len(polygons)
        closed = [*angles, angles[0]], [*values, values[0]]
        line = {"color": style.colour, "linestyle": style.dash, "linewidth": style.width}
        axes.plot(*closed, **line, clip_on=False, zorder=order)
        axes.fill(*closed, color=style.colour, alpha=0.08, linewidth=0, zorder=order)


def _draw_label(axes: Any, angle: float, lines: Sequence[str]) -> None:
    """Write each line by itself, so that it is aligned in whichever font an SVG is shown."""
    right, up = math.sin(angle), math.cos(angle)  # angle 0 is at the top, and angles go clockwise
    across = "center" if abs(right) < 0.1 else "left" if right > 0 else "right"
    along = "center" if abs(up) < 0.1 else "bottom" if up > 0 else "top"
    before = {"bottom": len(lines) - 1, "center": (len(lines) - 1) / 2, "top": 0}[along]  # lines above the anchor
    for index, line in enumerate(lines):
        axes.annotate(
            line,
            (angle, 1.06),
            (0, 1.2 * SMALL * (before - index)),
            textcoords="offset points",
            fontsize=SMALL,
            color=INK,
            ha=across,
            va=along,
            annotation_clip=False,
            parse_math=False,
        )


def _draw_legend(canvas: Canvas, styles: Mapping[str, LineStyle]) -> None:
    """Write the names in two columns at the bottom, each after a sample of its line."""
    from matplotlib.lines import Line2D

    lines = math.ceil(len(styles) / 2)
    for index, (name, style) in enumerate(styles.items()):
        left = 0.3 + (index // lines) * canvas.width / 2
        y = 0.1 + KEY * (lines - index % lines - 0.5)
        x = [left / canvas.width, (left + 0.25) / canvas.width]
        line = Line2D(x, [y / canvas.height] * 2, color=style.colour, linestyle=style.dash, linewidth=style.width)
        canvas.figure.add_artist(line)
        text, size = fit(name, canvas.width / 2 - 0.7, SMALL)
        position = (left + 0.32) / canvas.width, y / canvas.height
        canvas.figure.text(*position, text, fontsize=size, color=INK, va="center", parse_math=False)
