"""Comparison of many methods on the same images: a tile per method, grouped by family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.methods.explanation import Explanation
from clairvit.plotting.canvas import GAP, HEADING, MARGIN, PALE, SMALL, Canvas
from clairvit.plotting.labels import CLASS_AGNOSTIC, SIGNED, class_label, cost_label, map_marks
from clairvit.plotting.overlay import Scale, scale_of
from clairvit.plotting.patch_outline import draw_outlines
from clairvit.plotting.strip import frame_strip
from clairvit.plotting.style import PlotStyle
from clairvit.plotting.tiles import (
    FOOT,
    WIDEST_FIGURE,
    aspect_ratio,
    check_rows,
    explanation_photo,
    fold_columns,
    item_scales,
    map_picture,
    same_image,
    screen_columns,
    short_name,
    target_label,
)

LARGE, USUAL, SMALLEST = 1.6, 1.2, 0.9  # inches, width of a tile; the smallest where a page of classes is crowded
CROWDED = 60  # tiles
WIDE = 13.8  # inches a figure is wide at most, if it has the choice
BAND = 0.22  # over a row of tiles, for the names of families
LABEL = 0.15  # over a tile, for its class where there are several
SEAM = 0.04  # between the classes of one method


@dataclass(frozen=True)
class Cell:
    """The layout of one method in inches: its heading, and under it one tile per class."""

    tiles: int
    tile: float  # width of a tile
    tile_height: float
    band: float  # height of the line above, for the names of families

    @property
    def width(self) -> float:
        """Return the width in inches."""
        return self.tiles * (self.tile + SEAM) - SEAM

    @property
    def label(self) -> float:
        """Return the height of the class names over the tiles."""
        return LABEL if self.tiles > 1 else 0.0

    @property
    def height(self) -> float:
        """Return the height in inches."""
        return self.band + HEADING + self.label + self.tile_height

    def corner(self, row: int, column: int) -> tuple[float, float]:
        """Return left and top of its heading."""
        return MARGIN + column * (self.width + GAP), MARGIN + row * (self.height + GAP) + self.band

    def canvas(self, rows: int, columns: int, foot: float) -> Canvas:
        """Return a canvas for so many cells and `foot` inches below them."""
        width = 2 * MARGIN + columns * (self.width + GAP) - GAP
        return Canvas(width, 2 * MARGIN + rows * (self.height + GAP) - GAP + foot)


def comparison_figure(explanations: Mapping[str, Explanation], style: PlotStyle | None = None) -> Figure:
    """Return a figure with a tile per method, wrapped; several classes stand side by side within a method.

    Several images with one map each are rows, as long as the methods fit on one line; otherwise a block each. Where the
    figure would be a high column, rows of few methods stand side by side.
    """
    style = style or PlotStyle()
    explanations = {name: frame_strip(explanation, style) for name, explanation in explanations.items()}
    if not explanations:
        raise BadInput("There is no explanation to compare; give at least one method that fits the model.")
    methods = list(explanations.items())
    first = methods[0][1]
    sizes = {name: len(explanation) for name, explanation in methods}
    if len(set(sizes.values())) > 1:
        raise BadInput(f"The methods explain different numbers of maps ({sizes}); compare them on the same images.")
    groups = same_image(first)
    classes = max(len(group) for group in groups)
    cell, rows, columns = arrange_cells(
        len(methods), len(groups), classes, aspect_ratio(first), bool(families(methods))
    )
    check_rows(rows * len(groups))
    method_explanations = list(explanations.values())
    across = fold_columns(len(groups), columns * (cell.width + GAP), rows * (cell.height + GAP))
    down = math.ceil(len(groups) / across)
    scales = {name: item_scales(explanation, style) for name, explanation in methods}
    canvas = cell.canvas(rows * down, columns * across, FOOT * (2 + bool(legend_of(method_explanations))))
    for block, group in enumerate(groups):
        top, left = rows * (block // across), columns * (block % across)
        _photo_cell(canvas, _heading_explanation(method_explanations), group, cell, top, left)
        for number, (name, explanation) in enumerate(methods, start=1):
            row, column = divmod(number, columns)
            _method_cell(canvas, name, explanation, group, scales[name], cell, style, top + row, left + column)
        for row in range(rows if cell.band else 0):
            _bands(canvas, families(methods), cell, row, columns, top, left)
    draw_keys(canvas, method_explanations, style)
    canvas.write(first.model, MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN, SMALL, PALE)
    return canvas.figure


def _heading_explanation(explanations: Sequence[Explanation]) -> Explanation:
    """Return the explanation whose targets are the headings: the first that is class-specific, if there is one."""
    return next((explanation for explanation in explanations if explanation.class_specific), explanations[0])


def rows_needed(methods: int, images: int, classes: int) -> int:
    """Return how many rows of tiles a comparison of square images has, where images stand one under another."""
    return images * arrange_cells(methods, images, classes, 1.0, grouped=True)[1]


def arrange_cells(methods: int, images: int, classes: int, aspect: float, grouped: bool) -> tuple[Cell, int, int]:
    """Return a cell, and how many rows (for one image) and columns of them."""
    cells = methods + 1
    band = BAND if grouped else 0.0
    least = SMALLEST if classes > 1 and cells * classes > CROWDED else USUAL
    small = Cell(classes, least, least * aspect, band)

    def cell_of(columns: int) -> Cell:
        """Return the largest cell that fits so many times side by side."""
        width = (WIDE + GAP) / columns - GAP + SEAM
        tile = max(least, min(LARGE, width / classes - SEAM))
        return Cell(classes, tile, tile * aspect, band)

    def size_of(columns: int) -> tuple[float, float]:
        """Return width and height of a cell with the gaps around it."""
        cell = cell_of(columns)
        return cell.width + GAP, cell.height + GAP

    most = max(1, int((WIDE + GAP) // (small.width + GAP)))
    in_line = images > 1 and cells * (small.width + GAP) <= WIDEST_FIGURE
    short = cells <= most and cells * (small.width + GAP) <= WIDE / 1.5
    columns = cells if in_line or short else screen_columns(cells, most, size_of)
    return cell_of(columns), math.ceil(cells / columns), columns


def families(methods: Sequence[tuple[str, Explanation]]) -> list[str]:
    """Return the family of each method, if there are several and each is a run of neighbours; else none."""
    named_families = [explanation.family for _, explanation in methods]
    runs = [family for family, _ in groupby(named_families)]
    contiguous = len(runs) == len(set(runs)) > 1
    return named_families if contiguous and all(runs) else []


def _photo_cell(
    canvas: Canvas, explanation: Explanation, group: Sequence[int], cell: Cell, row: int, column: int
) -> None:
    """Draw the photo; its heading names the target (or the image) and the highest classes."""
    left, top = cell.corner(row, column)
    best = [class_label(guess.name, guess.probability, guess.score) for guess in explanation.top_classes(group[0], 3)]
    title = target_label(explanation, group[0]) if len(group) == 1 else short_name(explanation, group[0])
    canvas.heading(title, " · ".join([name for name in best if name != title][:2]), left, top, cell.width)
    middle = left + (cell.width - cell.tile) / 2
    canvas.image(
        explanation_photo(explanation, group[0]), middle, top + HEADING + cell.label, cell.tile, cell.tile_height
    )


def _method_cell(
    canvas: Canvas,
    name: str,
    explanation: Explanation,
    group: Sequence[int],
    scales: Sequence[Scale],
    cell: Cell,
    style: PlotStyle,
    row: int,
    column: int,
) -> None:
    left, top = cell.corner(row, column)
    canvas.heading(name, cost_label(explanation.cost), left, top, cell.width)
    down = top + HEADING + cell.label
    once = not explanation.class_specific  # the same for all targets: drawn once, in the middle
    for index, item in enumerate(group[:1] if once else group):
        start = left + ((cell.width - cell.tile) / 2 if once else index * (cell.tile + SEAM))
        if cell.label:
            canvas.write(target_label(explanation, item), start, top + HEADING, cell.tile, SMALL, PALE)
        picture = map_picture(explanation, item, scales[item], style)
        axes = canvas.image(picture, start, down, cell.tile, cell.tile_height)
        draw_outlines(axes, explanation, item, picture.shape[:2], cell.tile)
    right = left + (cell.width + cell.tile) / 2 if once else left + cell.width
    canvas.badges(map_marks(explanation), right - 0.05, down + 0.05)


def _bands(canvas: Canvas, names: Sequence[str], cell: Cell, row: int, columns: int, top: int, first: int) -> None:
    """Write the names of the families over one row of an image's tiles, each with a line as long as its tiles.

    `top` and `first` are the row and the column where the tiles of the image begin.
    """
    start = row * columns
    on_row = [(index, names[index - 1]) for index in range(max(1, start), min(start + columns, len(names) + 1))]
    for family, members in groupby(on_row, key=lambda entry: entry[1]):
        indices = [index for index, _ in members]
        left, down = cell.corner(top + row, first + indices[0] - start)
        canvas.group_heading(family, left, down - cell.band + 0.02, len(indices) * (cell.width + GAP) - GAP)


def legend_of(explanations: Sequence[Explanation]) -> list[tuple[str, str]]:
    """Return the marks that occur in the figure, with their meaning."""
    meanings = {SIGNED: "signed: evidence for and against", CLASS_AGNOSTIC: "class-agnostic: one map for all classes"}
    used = {mark for explanation in explanations for mark in map_marks(explanation)}
    return [(mark, meaning) for mark, meaning in meanings.items() if mark in used]


def draw_keys(canvas: Canvas, explanations: Sequence[Explanation], style: PlotStyle) -> None:
    """Draw the meaning of the colours and of the marks under the tiles."""
    words = {False: ("least relevant", "most relevant"), True: ("against the class", "for the class")}
    kinds = sorted({explanation.signed for explanation in explanations})
    legend = legend_of(explanations)
    top = canvas.height - FOOT * (2 + bool(legend)) + 0.06
    width = min(3.4, (canvas.width - 2 * MARGIN) / len(kinds))
    left = (canvas.width - width * len(kinds)) / 2
    for number, signed in enumerate(kinds):
        scale = scale_of(np.array([0.0, 1.0]), signed, replace(style, robust=0.0))
        canvas.colour_key(scale, style.opacity, *words[signed], left + number * width, top, width)
    if legend:
        width = min(2.6, (canvas.width - 2 * MARGIN) / len(legend))
        left = (canvas.width - width * len(legend)) / 2
        for number, (mark, meaning) in enumerate(legend):
            canvas.legend_mark(mark, meaning, left + number * width, top + FOOT, width)
