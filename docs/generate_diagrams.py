"""Draw the two pictures of docs/architecture.md: python docs/generate_diagrams.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

IMAGES = Path(__file__).parent / "images"
INK, PALE, ACCENT = "#1f2933", "#e8eef5", "#fff3d6"

# Each row imports from the rows above it only.
PACKAGES = (
    (("models", "Model, Layout, Preprocess, sources"), ("targets", "which output is explained")),
    (("data", "images, masks, data sets"), ("tracing", "one forward, one backward, recorders, rules")),
    (("perturbation", "token dropping, removal, probes"),),
    (("methods", "layer maps, aggregations, explain, compare"),),
    (("metrics", "evaluate: scores of explanations"),),
    (("selection", "choose"), ("bench", "studies"), ("papers", "reproduce"), ("training", "fine-tune")),
    (("diagnostics", "doctor"), ("plotting", "figures"), ("reports", "HTML, Markdown, CSV")),
    (("cli", "command line"), ("web", "server and page")),
)
STEPS = (
    ("prepare images", "models/images.py", "pixels [B, 3, H, W]"),
    ("resolve method and target", "methods/spec.py, targets/", "MethodSpec, Target"),
    ("find blocks, grid, pooling", "tracing/structure.py", "ModelStructure, once per image size"),
    ("record one forward", "tracing/recording.py", "Recording: x, q, k, v and the recorders"),
    ("run one backward per rule table", "tracing/trace.py", "Trace: dx, dO; G = dO vᵀ on demand"),
    ("compute layer maps, last to first", "methods/executor.py", "[B, rows, N] or [B, N] per layer"),
    ("aggregate over layers", "methods/aggregation.py", "[B, N]: last, product, sum, sum from a layer on"),
    ("put tokens on the grid", "methods/executor.py", "Explanation.maps [B, rows, columns]"),
)


def draw_box(axes: Axes, left: float, bottom: float, width: float, height: float, colour: str) -> None:
    """Draw one rounded box in axes coordinates."""
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor=colour, edgecolor=INK
        )
    )


def packages_figure() -> Figure:
    """Draw the packages, one row per level; imports go up."""
    figure = Figure(figsize=(9, 6.4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 9), ylim=(0, 6.4))
    axes.set_axis_off()
    for level, row in enumerate(PACKAGES):
        bottom, width = 5.6 - 0.77 * level, 8.2 / len(row)
        for place, (name, subject) in enumerate(row):
            left = 0.6 + place * width
            draw_box(axes, left, bottom, width - 0.12, 0.6, PALE if level < 5 else ACCENT)
            middle = left + (width - 0.12) / 2
            axes.text(middle, bottom + 0.38, name, ha="center", va="center", weight="bold", color=INK, size=11)
            axes.text(middle, bottom + 0.16, subject, ha="center", va="center", color=INK, size=8)
    axes.add_patch(FancyArrowPatch((0.3, 0.3), (0.3, 6.1), arrowstyle="-|>", mutation_scale=14, color=INK))
    axes.text(0.14, 3.2, "imports", rotation=90, ha="center", va="center", color=INK, size=9)
    return figure


def explain_figure() -> Figure:
    """Draw the path of one `cv.explain` call."""
    figure = Figure(figsize=(9, 6.6))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 9), ylim=(0, 6.6))
    axes.set_axis_off()
    for number, (step, place, result) in enumerate(STEPS):
        bottom = 5.85 - 0.8 * number
        draw_box(axes, 0.3, bottom, 4.1, 0.56, PALE)
        axes.text(0.5, bottom + 0.37, step, va="center", weight="bold", color=INK, size=10)
        axes.text(0.5, bottom + 0.15, place, va="center", color=INK, size=8, family="monospace")
        axes.text(4.65, bottom + 0.28, result, va="center", color=INK, size=9)
        if number + 1 < len(STEPS):
            arrow = FancyArrowPatch((2.35, bottom), (2.35, bottom - 0.24), arrowstyle="-|>", mutation_scale=11)
            axes.add_patch(arrow)
    return figure


def main() -> None:
    """Write both pictures as SVG, the same bytes every time."""
    with mpl.rc_context({"svg.hashsalt": "clairvit", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for name, figure in (("packages", packages_figure()), ("explain", explain_figure())):
            figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
