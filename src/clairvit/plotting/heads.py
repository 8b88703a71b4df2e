"""Maps of single heads, layers × heads, next to the heads of a layer fused by min, mean and max."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure

from clairvit.errors import Argument, BadInput, Verb
from clairvit.methods.explanation import FUSIONS, Explanation, Heads
from clairvit.plotting.canvas import MARGIN, PALE, SMALL, TITLE, Canvas
from clairvit.plotting.labels import CLASS_AGNOSTIC
from clairvit.plotting.overlay import Array, Scale, overlay, scale_of, to_numpy
from clairvit.plotting.strip import frame_strip
from clairvit.plotting.style import PlotStyle
from clairvit.plotting.tiles import FOOT, aspect_ratio, explanation_photo, same_image, short_name, target_label

WIDE, HIGH = 13.0, 13.0  # inches for the tiles of a row or a column, if they can be that small
LARGE, SMALLEST = 1.15, 0.5  # inches, width of a tile
SEAM = 0.04  # between tiles
GUTTER = 0.2  # between the heads and their fusions
NAMES = 0.55  # on the left, for the layers
TITLED = 0.44  # over a block: whose heads, and their numbers
TALLEST = 80.0  # inches; a taller figure cannot be read


@dataclass(frozen=True)
class Grid:
    """The places of the tiles of one block; every block is one image, or one class of it."""

    layers: int
    heads: int
    tile: float
    tile_height: float
    whole: bool  # a last row for the method over all its layers

    @property
    def fused_left(self) -> float:
        """Return the left edge of the fused maps."""
        return MARGIN + NAMES + self.heads * (self.tile + SEAM) - SEAM + GUTTER

    @property
    def width(self) -> float:
        """Return the width of the figure in inches."""
        return self.fused_left + len(FUSIONS) * (self.tile + SEAM) - SEAM + MARGIN

    @property
    def rows_height(self) -> float:
        """Return the height of the rows of layers."""
        return self.layers * (self.tile_height + SEAM) - SEAM

    @property
    def height(self) -> float:
        """Return the height of one block."""
        return TITLED + self.rows_height + (GUTTER + self.tile_height if self.whole else 0.0)


def heads_figure(explanation: Explanation, style: PlotStyle | None = None) -> Figure:
    """Return a figure with a row per layer, a column per head, then min, mean and max; last the whole method."""
    style = style or PlotStyle()
    explanation = frame_strip(explanation, style)
    heads = explanation.heads
    if heads is None:
        raise BadInput(
            f"'{explanation.method}' was computed without its heads; ask for them with ",
            Verb("explain", by_head=True),
            " (a model that attends inside windows has none to show).",
        )
    items = _distinct_items(explanation, heads)
    grid = arrange_grid(heads, aspect_ratio(explanation))
    height = 2 * MARGIN + len(items) * (grid.height + GUTTER) - GUTTER + FOOT
    if height > TALLEST:
        raise BadInput(
            f"The heads of {len(items)} maps make a figure {height:.0f} inches tall, too tall to read (at most "
            f"{TALLEST:.0f}); write one file per image, or ask for fewer classes.",
            advice=[Argument("out", "DIR")],
        )
    canvas = Canvas(grid.width, height)
    for number, item in enumerate(items):
        _block(canvas, explanation, heads, item, grid, style, MARGIN + number * (grid.height + GUTTER))
    note = "one colour scale for all" if style.shared else "each map on its own colour scale"
    agnostic = "" if _class_specific(explanation, heads) else f" · {CLASS_AGNOSTIC} the same for all classes"
    last = f" · rows as the model's head reads them · {note}{agnostic}"
    first, width = f"{heads.method}, head by head · ", canvas.width - 2 * MARGIN
    canvas.caption(first, explanation.model, last, MARGIN, canvas.height - FOOT + 0.04, width)
    return canvas.figure


def arrange_grid(heads: Heads, aspect: float) -> Grid:
    """Return the grid of the largest tiles that fit into WIDE × HIGH inches."""
    layers, count = heads.maps.shape[:2]
    tile = min(LARGE, WIDE / (count + len(FUSIONS)) - SEAM, (HIGH / (layers + 1) - SEAM) / aspect)
    tile = max(SMALLEST, tile)
    return Grid(layers, count, tile, tile * aspect, heads.whole is not None)


def _distinct_items(explanation: Explanation, heads: Heads) -> list[int]:
    """Return the items to draw; heads that are the same for all classes of an image are drawn once."""
    specific = _class_specific(explanation, heads)
    return [item for group in same_image(explanation) for item in (group if specific else group[:1])]


def _class_specific(explanation: Explanation, heads: Heads) -> bool:
    """Return whether the maps differ between classes: attention weights do not, whatever the method."""
    return explanation.class_specific and heads.method == explanation.method


def _block(
    canvas: Canvas, explanation: Explanation, heads: Heads, item: int, grid: Grid, style: PlotStyle, top: float
) -> None:
    maps, fused = to_numpy(heads.maps[:, :, item]), to_numpy(heads.fused[:, :, item])  # [L, H, rows, cols], [L, 3, …]
    method_maps = None if heads.whole is None else to_numpy(heads.whole[:, item])[None]  # [1, 3, rows, cols]
    all_maps = [maps, fused] if method_maps is None else [maps, fused, method_maps]
    shared_scale = scale_of(np.concatenate([part.ravel() for part in all_maps]), _signed(all_maps), style)
    photo = _downscaled(explanation_photo(explanation, item), math.ceil(grid.tile * style.dpi))

    def picture(parts: Array, left: float, down: float) -> None:
        rows, columns = parts.shape[:2]
        image = mosaic(photo, parts, shared_scale if style.shared else None, style, SEAM / grid.tile)
        canvas.image(image, left, down, columns * (grid.tile + SEAM) - SEAM, rows * (grid.tile_height + SEAM) - SEAM)

    name = short_name(explanation, item)
    if _class_specific(explanation, heads):
        name += f" · {target_label(explanation, item)}"
    canvas.write(
        f"{name} · {heads.method}", MARGIN, top + 0.02, canvas.width - 2 * MARGIN, TITLE, bold=True, align="left"
    )
    start, down = MARGIN + NAMES, top + TITLED
    _write_names(canvas, [f"head {head}" for head in range(grid.heads)], start, down - 0.15, grid.tile)
    _write_names(canvas, FUSIONS, grid.fused_left, down - 0.15, grid.tile)
    for layer in range(grid.layers):
        middle = down + layer * (grid.tile_height + SEAM) + grid.tile_height / 2 - 0.05
        canvas.write(f"layer {layer}", MARGIN, middle, NAMES - 0.08, SMALL, PALE, align="right")
    picture(maps, start, down)
    picture(fused, grid.fused_left, down)
    if method_maps is not None:
        last = down + grid.rows_height + GUTTER
        across = grid.fused_left - MARGIN - 0.08
        text, middle = f"{heads.method} over all its layers, heads fused in each", last + grid.tile_height / 2 - 0.05
        canvas.write(text, MARGIN, middle, across, SMALL, PALE, align="right")
        picture(method_maps, grid.fused_left, last)


def mosaic(photo: Array, maps: Array, scale: Scale | None, style: PlotStyle, seam: float) -> Array:
    """Return R × C overlays as one image, [R, C, rows, cols] -> [H, W, 3]: hundreds of axes would take minutes."""
    height, width = photo.shape[:2]
    gap = max(1, round(seam * width))
    rows, columns = maps.shape[:2]
    image = np.ones((rows * (height + gap) - gap, columns * (width + gap) - gap, 3))
    for row, column in np.ndindex(rows, columns):
        values = maps[row, column]
        map_scale = scale or scale_of(values, _signed([values]), style)
        down, left = row * (height + gap), column * (width + gap)
        image[down : down + height, left : left + width] = overlay(
            photo, values, map_scale, style.opacity, style.smooth
        )
    return image


def _write_names(canvas: Canvas, names: Sequence[str], left: float, top: float, tile: float) -> None:
    for index, name in enumerate(names):
        canvas.write(name, left + index * (tile + SEAM), top, tile, SMALL, PALE)


def _signed(parts: Sequence[Array]) -> bool:
    return any(bool((part < 0).any()) for part in parts)


def _downscaled(photo: Array, width: int) -> Array:
    """Return a photo [H, W, 3] no wider than it will be drawn."""
    if photo.shape[1] <= width:
        return photo
    size = (max(1, round(photo.shape[0] * width / photo.shape[1])), width)
    pixels = torch.from_numpy(np.ascontiguousarray(photo.transpose(2, 0, 1)))[None]
    small = torch.nn.functional.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
    return to_numpy(small[0]).transpose(1, 2, 0).clip(0.0, 1.0)
