"""Figures of one method: the map over the photo, and the maps of its layers. `save` writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from clairvit.errors import BadInput, Verb
from clairvit.methods.explanation import Explanation, TextRelevance
from clairvit.plotting.canvas import (
    BAR,
    GAP,
    HEADING,
    INK,
    MARGIN,
    PALE,
    SIDE_BEARINGS,
    SMALL,
    TITLE,
    Canvas,
    text_width,
    wrap,
)
from clairvit.plotting.labels import CLASS_AGNOSTIC, class_label
from clairvit.plotting.overlay import LUMA, Array, Scale, blend, overlay, to_numpy
from clairvit.plotting.patch_outline import (
    chosen_patches,
    draw_outline,
    draw_outlines,
    marked_patches,
    photo_without,
    removal_labels,
)
from clairvit.plotting.strip import frame_strip
from clairvit.plotting.style import PlotStyle
from clairvit.plotting.tiles import (
    FOOT,
    aspect_ratio,
    check_rows,
    explanation_photo,
    fold_columns,
    item_scales,
    map_picture,
    map_scale,
    map_scales,
    method_label,
    same_image,
    short_name,
    source_line,
    target_label,
)

TILE = 2.1  # inches, width of a picture
LOWEST, WIDEST = 1.05, 4.8  # inches: lower pictures are made wider, up to here
MOST_COLUMNS = 6  # targets side by side; more, as of a generated answer, go on in the next row
CHECK_LINE = 0.13  # inches, a line of text under a map
DARK = 0.5  # brightness below which text is white
TEXT_LINE = 0.17  # inches, a line of tokens under a map


@dataclass(frozen=True)
class TileGrid:
    """The places of tiles that are `tile` wide, `tall` high and followed by `side` inches."""

    rows: int
    columns: int
    tile: float
    tile_height: float
    side: float = GAP
    below: float = 0.0  # inches under a tile, for text

    @property
    def pitch(self) -> float:
        """Return the inches from a row to the next."""
        return self.tile_height + HEADING + GAP + self.below

    def corner(self, row: int, column: int) -> tuple[float, float]:
        """Return left and top of a tile's heading."""
        return MARGIN + column * (self.tile + self.side), MARGIN + row * self.pitch

    def canvas(self, foot: float = FOOT) -> Canvas:
        """Return a canvas for all tiles and `foot` inches below them."""
        width = 2 * MARGIN + self.columns * (self.tile + self.side) - (GAP if self.side == GAP else 0)
        return Canvas(width, 2 * MARGIN + self.rows * self.pitch - GAP + foot)


def explanation_figure(explanation: Explanation, style: PlotStyle | None = None) -> Figure:
    """Return a figure with the photo and overlays with their colour bars: one row per image, targets side by side.

    Where the figure would be a high column, images stand side by side.
    Chosen patches are outlined, and a further tile shows the photo without them. The text of a vision-language model
    is written under its map, each token on the colour of its relevance; a check is written below.
    """
    style = style or PlotStyle()
    explanation = frame_strip(explanation, style)
    groups = same_image(explanation)
    first_maps = {group[0] for group in groups}
    lines = [group[i : i + MOST_COLUMNS] for group in groups for i in range(0, len(group), MOST_COLUMNS)]
    check_rows(len(lines))
    scales = item_scales(explanation, style)
    columns = max(len(line) for line in lines)
    tile = tile_width(explanation)
    side = BAR if explanation.chosen is None else BAR + tile + GAP
    width = tile + side - GAP
    checks = [check_lines(explanation, item, width) for item in range(len(explanation))]
    certified = [certificate_lines(explanation, item, width) for item in range(len(explanation))]
    texts = [text_lines(text, width) for text in explanation.text_relevance] or [[]] * len(explanation)
    below = CHECK_LINE * max(len(check) + len(more) for check, more in zip(checks, certified, strict=True))
    below += TEXT_LINE * max(len(lines) for lines in texts)
    grid = TileGrid(len(lines), columns, tile, tile * aspect_ratio(explanation), side, below)
    shift = tile + GAP  # the photo's column, which needs no colour bar
    block = shift + columns * (tile + side)  # inches from an image to the next one
    across = fold_columns(len(lines), block, grid.pitch)
    grid = replace(grid, rows=math.ceil(len(lines) / across))
    body = grid.canvas()
    canvas = Canvas(body.width + shift + (across - 1) * block, body.height)
    for number, line in enumerate(lines):
        row, place = divmod(number, across)
        left, top = grid.corner(row, 0)
        if line[0] in first_maps:  # of its image
            _photo_tile(canvas, explanation, line[0], left + place * block, top, grid)
        for column, item in enumerate(line):
            left, top = grid.corner(row, column)
            left += place * block
            _map_tile(canvas, explanation, item, scales[item], style, left + shift, top, grid)
            canvas.colour_bar(
                scales[item], style.opacity, left + shift + grid.tile + 0.06, top + HEADING, grid.tile_height
            )
            under = top + HEADING + grid.tile_height
            _write_text(canvas, texts[item], scales[item], style.opacity, left + shift, under)
            under += TEXT_LINE * len(texts[item])
            _write_check(canvas, checks[item], left + shift, under, width)
            _write_check(canvas, certified[item], left + shift, under + CHECK_LINE * len(checks[item]), width)
            if explanation.chosen is not None:
                _removal_tile(canvas, explanation, item, left + shift + grid.tile + BAR, top, grid)
    canvas.caption(*source_line(explanation, style), MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN)
    return canvas.figure


def tile_width(explanation: Explanation) -> float:
    """Return the width of a picture in inches: wider where it would be too low, as for the frames of a clip."""
    return max(TILE, min(WIDEST, LOWEST / aspect_ratio(explanation)))


def check_lines(explanation: Explanation, item: int, width: float) -> list[str]:
    """Return the badge and all that the check says of map and answer in lines that fit into `width`; none without."""
    if explanation.checked is None:
        return []
    check = explanation.checked[item]
    outlined = "" if marked_patches(explanation, item) is None else " Outlined: the parts that were hidden."
    about_the_answer = wrap(f"Answer: {check.answer.sentence}", width, SMALL)
    return [f"Check: {check.badge}", *wrap(f"{check.about_the_map}{outlined}", width, SMALL), *about_the_answer]


def certificate_lines(explanation: Explanation, item: int, width: float) -> list[str]:
    """Return what a certificate says of one map in lines that fit into `width` inches; none without."""
    marked = explanation.certified
    if marked is None:
        return []
    heading = "Certified patches (outlined)"
    return [heading, *wrap(f"{marked.sentences[item]} {marked.condition}", width, SMALL)]


def _write_check(canvas: Canvas, lines: Sequence[str], left: float, top: float, width: float) -> None:
    """Write the lines of a check or certificate under its map, the first one in bold."""
    for number, line in enumerate(lines):
        canvas.write(line, left, top + 0.04 + number * CHECK_LINE, width, SMALL, INK, bold=number == 0, align="left")


def text_lines(text: TextRelevance, width: float) -> list[list[tuple[str, float, float]]]:
    """Return the tokens of a text in lines that fit into `width` inches: (token, inches, relevance) each."""
    lines: list[list[tuple[str, float, float]]] = []
    left = width
    for token, value in zip(text.tokens, text.values.tolist(), strict=True):
        shown = token.replace("\n", "↵").strip() or "␣"
        inches = min(text_width(shown) * SMALL / 72 * SIDE_BEARINGS + 0.05, width)
        if left + inches > width:
            lines.append([])
            left = 0.0
        lines[-1].append((shown, inches, value))
        left += inches
    return lines


def _write_text(
    canvas: Canvas,
    lines: Sequence[Sequence[tuple[str, float, float]]],
    scale: Scale,
    opacity: float,
    left: float,
    top: float,
) -> None:
    """Write tokens on the colours that their relevance has on the map's scale, over white."""
    for number, line in enumerate(lines):
        across, down = left, top + 0.04 + number * TEXT_LINE
        for token, inches, value in line:
            colour = blend(np.ones((1, 3)), np.array([value]), scale, opacity)[0]
            canvas.axes(across, down, inches, TEXT_LINE - 0.02).set_facecolor(tuple(colour))
            ink = "white" if float(colour @ LUMA) < DARK else INK
            canvas.write(token, across, down + 0.025, inches, SMALL, ink)
            across += inches


def layers_figure(explanation: Explanation, style: PlotStyle | None = None) -> Figure:
    """Return a figure with a strip of small overlays per map, one overlay per layer."""
    style = style or PlotStyle()
    explanation = frame_strip(explanation, style)
    if explanation.layers is None:
        raise BadInput(
            f"'{explanation.method}' was computed without its layers; ask for them with ",
            Verb("explain", layers=True),
            " (methods that have no layers cannot show any).",
        )
    count, maps = explanation.layers.shape[:2]
    columns = _strip_columns(count + 2)  # the photo, the layers, the map they make together
    lines = math.ceil((count + 2) / columns)
    check_rows(lines * maps)
    tile, label, title = 1.15, 0.19, 0.26
    tile_height = tile * aspect_ratio(explanation)
    block = title + lines * (tile_height + label + 0.06)
    canvas = Canvas(2 * MARGIN + columns * (tile + GAP) - GAP, 2 * MARGIN + maps * (block + GAP) - GAP + FOOT)
    for item in range(maps):
        top = MARGIN + item * (block + GAP)
        heading, width = target_label(explanation, item), canvas.width - 2 * MARGIN
        canvas.write(heading, MARGIN, top + 0.03, width, TITLE, bold=True, align="left")
        for number, (name, picture) in enumerate(_layer_tiles(explanation, item, style)):
            row, column = divmod(number, columns)
            left, down = MARGIN + column * (tile + GAP), top + title + row * (tile_height + label + 0.06)
            canvas.write(name, left, down + 0.04, tile, SMALL, PALE)
            canvas.image(picture, left, down + label, tile, tile_height)
    note = "one colour scale for all layers" if style.shared else "each layer on its own colour scale"
    first, model, last = source_line(explanation, style)
    canvas.caption(first, model, f"{last} · {note}", MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN)
    return canvas.figure


def _layer_tiles(explanation: Explanation, item: int, style: PlotStyle) -> Iterator[tuple[str, Array]]:
    """Yield the names and images of a strip: the photo, the layers, the whole map."""
    assert explanation.layers is not None
    photo, method_map = explanation_photo(explanation, item), to_numpy(explanation.maps[item])
    yield short_name(explanation, item), photo
    scales = map_scales(explanation, to_numpy(explanation.layers[:, item]), style)
    for layer, (name, scale) in enumerate(zip(explanation.layer_names, scales, strict=True)):
        values = to_numpy(explanation.layer_map(layer)[item])
        if explanation.layer_grids:
            name = f"{name} · {values.shape[0]} × {values.shape[1]}"
        yield name, overlay(photo, values, scale, style.opacity, style.smooth)
    scale = map_scale(explanation, method_map, style)
    yield explanation.method, map_picture(explanation, item, scale, style)


def _photo_tile(canvas: Canvas, explanation: Explanation, item: int, left: float, top: float, grid: TileGrid) -> None:
    """Draw the photo; its heading names the image and the highest classes."""
    best = [class_label(guess.name, guess.probability, guess.score) for guess in explanation.top_classes(item, 2)]
    canvas.heading(short_name(explanation, item), " · ".join(best), left, top, grid.tile)
    canvas.image(explanation_photo(explanation, item), left, top + HEADING, grid.tile, grid.tile_height)


def _map_tile(
    canvas: Canvas,
    explanation: Explanation,
    item: int,
    scale: Scale,
    style: PlotStyle,
    left: float,
    top: float,
    grid: TileGrid,
) -> None:
    canvas.heading(target_label(explanation, item), method_label(explanation, item), left, top, grid.tile)
    picture = map_picture(explanation, item, scale, style)
    axes = canvas.image(picture, left, top + HEADING, grid.tile, grid.tile_height)
    draw_outlines(axes, explanation, item, picture.shape[:2], grid.tile)
    if not explanation.class_specific:
        canvas.badges([CLASS_AGNOSTIC], left + grid.tile - 0.05, top + HEADING + 0.05)


def _removal_tile(canvas: Canvas, explanation: Explanation, item: int, left: float, top: float, grid: TileGrid) -> None:
    """Draw the photo without the chosen patches."""
    chosen = chosen_patches(explanation, item)
    assert chosen is not None
    canvas.heading(*removal_labels(explanation, item, chosen), left, top, grid.tile)
    remaining = photo_without(explanation_photo(explanation, item), chosen)
    axes = canvas.image(remaining, left, top + HEADING, grid.tile, grid.tile_height)
    draw_outline(axes, chosen, remaining.shape[:2], grid.tile)


def _strip_columns(tiles: int) -> int:
    """Return the columns of a strip: at most eight, in lines as equal as they can be."""
    return math.ceil(tiles / math.ceil(tiles / 8))
