"""Draw the picture of docs/architecture.md: python docs/generate_diagrams.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

IMAGES = Path(__file__).parent / "images"
INK, GREY, PALE, ACCENT = "#1f2933", "#52606d", "#e8eef5", "#fff3d6"

VERBS = (
    *("explain", "compare", "evaluate", "check", "choose", "calibrate", "expect", "mistakes", "features", "match"),
    "intervene",
)
OTHERS = ("doctor", "page", "command line")  # take the same road
# A step of the road: what it is called, what it does, where it stands, the packages below it.
STEPS = (
    ("Question", "what was asked,\ncoerced and checked", "methods/runs.py", ("models", "targets", "data")),
    ("iter_runs", "read, group and record\nthe images once", "methods/runs.py", ("cuda", "tracing", "perturbation")),
    ("run_all", "layer maps, aggregated,\nlast layer to first", "methods/planner.py", ("methods",)),
    (
        "the verb's own step",
        "maps, scores, checks,\nfeatures, choices",
        "a file per verb",
        ("metrics", "compat", "selection", "bench", "audit, diagnostics"),
    ),
    (
        "a result",
        "rows that join, draw\nand save themselves",
        "_rows.py, _tables.py",
        ("plotting", "reports", "web", "cli"),
    ),
)
WIDTH = 2.0  # of a step with the arrow behind it


def draw_box(axes: Axes, left: float, bottom: float, width: float, height: float, colour: str) -> None:
    """Draw one rounded box in axes coordinates."""
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.06", facecolor=colour, edgecolor=INK
        )
    )


def draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow from one point to another."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=INK, shrinkA=0, shrinkB=0))


def architecture_figure() -> Figure:
    """Draw the road that every verb takes, and below each step the packages that it stands on."""
    width = WIDTH * len(STEPS) + 0.2
    figure = Figure(figsize=(width, 4.7))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, 4.7))
    axes.set_axis_off()
    draw_box(axes, 0.2, 4.1, width - 0.4, 0.42, ACCENT)
    axes.text(width / 2, 4.31, " · ".join(VERBS + OTHERS), ha="center", va="center", color=INK, size=9.5)
    for number, (step, does, place, packages) in enumerate(STEPS):
        left, middle = 0.2 + WIDTH * number, 0.2 + WIDTH * number + 0.89
        draw_box(axes, left, 2.6, 1.78, 1.2, PALE)
        axes.text(middle, 3.6, step, ha="center", va="center", weight="bold", color=INK, size=10.5)
        axes.text(middle, 3.2, does, ha="center", va="center", color=INK, size=8.5)
        axes.text(middle, 2.76, place, ha="center", va="center", color=GREY, size=8, family="monospace")
        if number:
            draw_arrow(axes, (left - 0.22, 3.2), (left, 3.2))
        for row, package in enumerate(packages):
            bottom = 2.1 - 0.39 * row
            draw_box(axes, left, bottom, 1.78, 0.32, "white")
            axes.text(middle, bottom + 0.16, package, ha="center", va="center", color=INK, size=9.5)
    draw_arrow(axes, (1.09, 4.1), (1.09, 3.8))
    draw_arrow(axes, (width - 0.3, 0.36), (0.3, 0.36))
    order = "a package imports from those to its left, and from those above it"
    axes.text(width / 2, 0.17, order, ha="center", va="center", color=INK, size=9)
    return figure


def main() -> None:
    """Write the picture as SVG, the same bytes every time."""
    with mpl.rc_context({"svg.hashsalt": "clairvit", "svg.fonttype": "none", "font.family": "sans-serif"}):
        architecture_figure().savefig(IMAGES / "architecture.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
