"""Several models side by side: a row per model with the photo as it sees it and the maps of its methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.methods.compare_models import ModelComparison
from clairvit.methods.explanation import Comparison, Explanation
from clairvit.methods.explanation_files import npz_bytes
from clairvit.plotting.canvas import GAP, HEADING, MARGIN, PALE, SMALL, TITLE, Canvas, shorten_name, wrap
from clairvit.plotting.comparison import draw_keys, legend_of
from clairvit.plotting.labels import class_label, map_marks
from clairvit.plotting.patch_outline import draw_outlines
from clairvit.plotting.save import NOTEBOOK_IMAGES, figure_bytes, write_result
from clairvit.plotting.strip import frame_strip
from clairvit.plotting.style import PlotStyle, plot_style
from clairvit.plotting.tiles import (
    FOOT,
    WIDEST_FIGURE,
    aspect_ratio,
    check_rows,
    explanation_photo,
    item_scales,
    map_picture,
    short_name,
    target_label,
)

LARGE, SMALLEST = 1.7, 1.15  # inches, width of a tile
TITLE_LINE = 0.24  # inches, the name of an image over its rows
REASON_LINE = 0.13
MOST_LINES = 7  # of a reason


def model_comparison_figure(comparison: ModelComparison, style: PlotStyle | None = None) -> Figure:
    """Return a figure with a block per image and target, and in it a row per model.

    A row begins with the photo as the model sees it, under it stand its highest classes. Where a method does not fit a
    model, its place says why.
    """
    style = style or PlotStyle()
    rows = {model: _drawable(methods, style) for model, methods in comparison.items()}
    methods = comparison.methods
    explanations = [explanation for row in rows.values() for explanation in row.values()]
    if not explanations:
        raise BadInput("There is no explanation to compare; give at least one method that fits a model.")
    if len({len(explanation) for explanation in explanations}) > 1:
        raise BadInput("The models have different numbers of maps; expected the same images and targets for all.")
    count = len(explanations[0])
    most = int((WIDEST_FIGURE - 2 * MARGIN) // (SMALLEST + GAP)) - 1
    lines = math.ceil(len(methods) / most)
    columns = 1 + math.ceil(len(methods) / lines)
    tile = min(LARGE, (WIDEST_FIGURE - 2 * MARGIN + GAP) / columns - GAP)
    height = tile * max(map(aspect_ratio, explanations))
    pitch = HEADING + height + GAP
    check_rows(count * len(rows) * lines)
    block = TITLE_LINE + len(rows) * lines * pitch
    foot = FOOT * (1 + bool(legend_of(explanations)))
    canvas = Canvas(2 * MARGIN + columns * (tile + GAP) - GAP, 2 * MARGIN + count * block + foot + FOOT)
    for item in range(count):
        top = MARGIN + item * block
        width = canvas.width - 2 * MARGIN
        canvas.write(_title(explanations, item), MARGIN, top + 0.03, width, bold=True, align="left")
        for number, (model, row) in enumerate(rows.items()):
            down = top + TITLE_LINE + number * lines * pitch
            _photo(canvas, model, row, item, down, tile)
            for place, method in enumerate(methods):
                line, column = divmod(place, columns - 1)
                left, upper = MARGIN + (1 + column) * (tile + GAP), down + line * pitch
                if method in row:
                    _map(canvas, method, row[method], item, left, upper, tile, style)
                else:
                    reason = comparison[model].skipped.get(method, "")
                    _left_out(canvas, method, reason, left, upper, tile)
    draw_keys(canvas, explanations, style)
    return canvas.figure


def _title(explanations: Sequence[Explanation], item: int) -> str:
    """Return the name of an image, with the target where all models have the same one."""
    targets = {explanation.targets[item] for explanation in explanations if explanation.class_specific}
    name = short_name(explanations[0], item)
    return f"{name} · {next(iter(targets))}" if len(targets) == 1 else name


def _drawable(comparison: Comparison, style: PlotStyle) -> dict[str, Explanation]:
    return {method: frame_strip(explanation, style) for method, explanation in comparison.items()}


def _photo(canvas: Canvas, model: str, row: Mapping[str, Explanation], item: int, top: float, tile: float) -> None:
    """Draw the photo as the model sees it; its heading is the model with its highest classes."""
    explanation = next(iter(row.values()), None)
    model = shorten_name("", model, "", tile, TITLE)
    if explanation is None:
        canvas.heading(model, "no method fits", MARGIN, top, tile)
        return
    best = [class_label(guess.name, guess.probability, guess.score) for guess in explanation.top_classes(item, 2)]
    canvas.heading(model, " · ".join(best), MARGIN, top, tile)
    photo = explanation_photo(explanation, item)
    canvas.image(photo, MARGIN, top + HEADING, tile, tile * aspect_ratio(explanation))


def _map(
    canvas: Canvas,
    method: str,
    explanation: Explanation,
    item: int,
    left: float,
    top: float,
    tile: float,
    style: PlotStyle,
) -> None:
    label = target_label(explanation, item) if explanation.class_specific else explanation.targets[item]
    canvas.heading(method, label, left, top, tile)
    picture = map_picture(explanation, item, item_scales(explanation, style)[item], style)
    axes = canvas.image(picture, left, top + HEADING, tile, tile * aspect_ratio(explanation))
    draw_outlines(axes, explanation, item, picture.shape[:2], tile)
    canvas.badges(map_marks(explanation), left + tile - 0.05, top + HEADING + 0.05)


def _left_out(canvas: Canvas, method: str, reason: str, left: float, top: float, tile: float) -> None:
    """Write why a method has no map of a model in the place of the map."""
    canvas.heading(method, "left out", left, top, tile)
    lines = wrap(reason, tile, SMALL)
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], "…"]
    for number, line in enumerate(lines):
        down = top + HEADING + 0.04 + number * REASON_LINE
        canvas.write(line, left, down, tile, SMALL, PALE, align="left")


def save_model_comparison(comparison: ModelComparison, path: Path, **display: Any) -> Path:
    """Write the picture, the records by model and method, the table, or all raw maps as 'MODEL/METHOD/maps'."""
    style = plot_style(display)

    def arrays() -> bytes:
        return npz_bytes(
            {f"{model}/{method}": part for model, methods in comparison.items() for method, part in methods.items()}
        )

    return write_result(comparison, path, lambda: model_comparison_figure(comparison, style), arrays, style)


def model_comparison_png(comparison: ModelComparison) -> bytes:
    """Return the picture as PNG bytes, of the first images where they are too many for one page."""
    part = comparison.take(_first_rows(list(comparison.values())))
    return figure_bytes(model_comparison_figure(part, PlotStyle()), ".png")


def _first_rows(comparisons: Sequence[Comparison]) -> range:
    counts = [len(explanation) for comparison in comparisons for explanation in comparison.values()]
    return range(min([NOTEBOOK_IMAGES, *counts]))
