"""Figures a person would put in a paper. Each function returns a matplotlib Figure; `save` writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.methods.explanation import Explanation
from clairvit.plotting.canvas import BAR, GAP, HEADING, MARGIN, PALE, SMALL, TITLE, Canvas
from clairvit.plotting.colour import Scale
from clairvit.plotting.labels import CLASS_AGNOSTIC, guesses, named
from clairvit.plotting.overlay import numbers, overlay
from clairvit.plotting.patch_outline import chosen_in, outline, removed_in_words, without
from clairvit.plotting.style import PlotStyle
from clairvit.plotting.tiles import (
    FOOT,
    aspect_of,
    check_rows,
    photo_in,
    same_image,
    scale_for,
    scales_for,
    short_name,
    source_line,
    titled,
)

TILE = 2.1  # inches, width of a picture


@dataclass(frozen=True)
class Sheet:
    """Where tile (row, column) lies when every tile is `tile` wide, `tall` high and followed by `side` inches."""

    rows: int
    columns: int
    tile: float
    tall: float
    side: float = GAP

    def corner(self, row: int, column: int) -> tuple[float, float]:
        """Left and top of a tile's heading."""
        return MARGIN + column * (self.tile + self.side), MARGIN + row * (self.tall + HEADING + GAP)

    def canvas(self, foot: float = FOOT) -> Canvas:
        width = 2 * MARGIN + self.columns * (self.tile + self.side) - (GAP if self.side == GAP else 0)
        return Canvas(width, 2 * MARGIN + self.rows * (self.tall + HEADING + GAP) - GAP + foot)


def explanation_figure(explanation: Explanation, style: PlotStyle | None = None) -> Figure:
    """Photo and overlays with their colour bars: targets side by side, one row for each image.

    Where patches were chosen they are outlined, and a further picture shows the photo without them.
    """
    style = style or PlotStyle()
    groups = same_image(explanation)
    check_rows(len(groups))
    scales = scales_for(explanation, numbers(explanation.maps), style)
    columns = max(len(group) for group in groups)
    side = BAR if explanation.chosen is None else BAR + TILE + GAP
    sheet = Sheet(len(groups), columns, TILE, TILE * aspect_of(explanation), side)
    shift = TILE + GAP  # the photo's column, which needs no colour bar
    body = sheet.canvas()
    canvas = Canvas(body.width + shift, body.height)
    for row, group in enumerate(groups):
        left, top = sheet.corner(row, 0)
        _photo_tile(canvas, explanation, group[0], left, top, sheet)
        for column, item in enumerate(group):
            left, top = sheet.corner(row, column)
            _map_tile(canvas, explanation, item, scales[item], style, left + shift, top, sheet)
            canvas.colour_bar(scales[item], style.opacity, left + shift + sheet.tile + 0.06, top + HEADING, sheet.tall)
            if explanation.chosen is not None:
                _rest_tile(canvas, explanation, item, left + shift + sheet.tile + BAR, top, sheet)
    canvas.caption(*source_line(explanation), MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN)
    return canvas.figure


def layers_figure(explanation: Explanation, style: PlotStyle | None = None) -> Figure:
    """What each layer says: a strip of small overlays with layer numbers, one strip for each map."""
    style = style or PlotStyle()
    if explanation.layers is None:
        raise BadInput(
            f"'{explanation.method}' was computed without its layers; ask for them with cv.explain(…, layers=True) "
            "(methods that have no layers cannot show any).",
            parameters={"layers": "True"},
        )
    layers = numbers(explanation.layers)  # [L, B, rows, cols]
    count, maps = layers.shape[:2]
    columns = _strip(count + 2)  # the photo, the layers, the map they make together
    lines = math.ceil((count + 2) / columns)
    check_rows(lines * maps)
    tile, label, title = 1.15, 0.19, 0.26
    tall = tile * aspect_of(explanation)
    block = title + lines * (tall + label + 0.06)
    canvas = Canvas(2 * MARGIN + columns * (tile + GAP) - GAP, 2 * MARGIN + maps * (block + GAP) - GAP + FOOT)
    for item in range(maps):
        top = MARGIN + item * (block + GAP)
        canvas.write(
            titled(explanation, item), MARGIN, top + 0.03, canvas.width - 2 * MARGIN, TITLE, bold=True, align="left"
        )
        photo, whole = photo_in(explanation, item), numbers(explanation.maps[item])
        scales = [*scales_for(explanation, layers[:, item], style), scale_for(explanation, whole, style)]
        names = [*(f"layer {layer}" for layer in range(count)), explanation.method]
        pictures = [
            overlay(photo, values, scale, style.opacity, style.smooth)
            for values, scale in zip([*layers[:, item], whole], scales, strict=True)
        ]
        for number, (name, picture) in enumerate(
            zip([short_name(explanation, item), *names], [photo, *pictures], strict=True)
        ):
            row, column = divmod(number, columns)
            left, down = MARGIN + column * (tile + GAP), top + title + row * (tall + label + 0.06)
            canvas.write(name, left, down + 0.04, tile, SMALL, PALE)
            canvas.image(picture, left, down + label, tile, tall)
    note = "one colour scale for all layers" if style.shared else "each layer on its own colour scale"
    first, model, last = source_line(explanation)
    canvas.caption(first, model, f"{last} · {note}", MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN)
    return canvas.figure


def _photo_tile(canvas: Canvas, explanation: Explanation, item: int, left: float, top: float, sheet: Sheet) -> None:
    """The photo; its heading names the image and the classes the model considers."""
    best = [named(guess.name, guess.probability, guess.score) for guess in guesses(explanation, item, 2)]
    canvas.heading(short_name(explanation, item), " · ".join(best), left, top, sheet.tile)
    canvas.image(photo_in(explanation, item), left, top + HEADING, sheet.tile, sheet.tall)


def _map_tile(
    canvas: Canvas,
    explanation: Explanation,
    item: int,
    scale: Scale,
    style: PlotStyle,
    left: float,
    top: float,
    sheet: Sheet,
) -> None:
    canvas.heading(titled(explanation, item), explanation.method, left, top, sheet.tile)
    values = numbers(explanation.maps[item])
    picture = overlay(photo_in(explanation, item), values, scale, style.opacity, style.smooth)
    axes = canvas.image(picture, left, top + HEADING, sheet.tile, sheet.tall)
    outline(axes, chosen_in(explanation, item), picture.shape[:2], sheet.tile)
    if not explanation.class_specific:
        canvas.badges([CLASS_AGNOSTIC], left + sheet.tile - 0.05, top + HEADING + 0.05)


def _rest_tile(canvas: Canvas, explanation: Explanation, item: int, left: float, top: float, sheet: Sheet) -> None:
    """The photo without the chosen patches."""
    chosen = chosen_in(explanation, item)
    assert chosen is not None
    canvas.heading(*removed_in_words(explanation, item, chosen), left, top, sheet.tile)
    rest = without(photo_in(explanation, item), chosen)
    axes = canvas.image(rest, left, top + HEADING, sheet.tile, sheet.tall)
    outline(axes, chosen, rest.shape[:2], sheet.tile)


def _strip(tiles: int) -> int:
    """At most eight in a line, lines as equal as they can be."""
    return math.ceil(tiles / math.ceil(tiles / 8))
