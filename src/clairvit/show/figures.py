"""Figures a person would put in a paper. Each function returns a matplotlib Figure; `save` writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.methods.explanation import Explanation
from clairvit.show.colour import Array, Scale, scale_of
from clairvit.show.look import Look
from clairvit.show.overlay import numbers, overlay, photo_of
from clairvit.show.page import BAR, GAP, HEADING, MARGIN, PALE, SMALL, TITLE, Page
from clairvit.show.words import effort, guesses, named

TILE = 2.1  # inches, width of a picture
FOOT = 0.24  # the line under a figure
MOST_ROWS = 40  # a taller picture is no figure any more


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

    def page(self, foot: float = FOOT) -> Page:
        width = 2 * MARGIN + self.columns * (self.tile + self.side) - (GAP if self.side == GAP else 0)
        return Page(width, 2 * MARGIN + self.rows * (self.tall + HEADING + GAP) - GAP + foot)


def explanation_figure(explanation: Explanation, look: Look | None = None) -> Figure:
    """Photo and overlays with their colour bars: targets side by side, one row for each image."""
    look = look or Look()
    groups = same_image(explanation)
    check_rows(len(groups))
    scales = _scales(explanation, numbers(explanation.maps), look)
    columns = max(len(group) for group in groups)
    sheet = Sheet(len(groups), columns, TILE, TILE * _aspect(explanation), BAR)
    shift = TILE + GAP  # the photo's column, which needs no colour bar
    body = sheet.page()
    page = Page(body.width + shift, body.height)
    for row, group in enumerate(groups):
        left, top = sheet.corner(row, 0)
        _photo_tile(page, explanation, group[0], left, top, sheet)
        for column, item in enumerate(group):
            left, top = sheet.corner(row, column)
            _map_tile(page, explanation, item, scales[item], look, left + shift, top, sheet)
            page.bar(scales[item], look.opacity, left + shift + sheet.tile + 0.06, top + HEADING, sheet.tall)
    page.write(_source(explanation), MARGIN, page.height - FOOT + 0.04, page.width - 2 * MARGIN, SMALL, PALE)
    return page.figure


def comparison_figure(explanations: Mapping[str, Explanation], look: Look | None = None) -> Figure:
    """One image: the photo and a tile for each method, wrapped. Several images or targets: one row for each."""
    look = look or Look()
    if not explanations:
        raise BadInput("There is no explanation to compare; give at least one method that fits the model.")
    methods = list(explanations.items())
    first = methods[0][1]
    sizes = {name: len(explanation) for name, explanation in methods}
    if len(set(sizes.values())) > 1:
        raise BadInput(f"The methods explain different numbers of maps ({sizes}); compare them on the same images.")
    check_rows(len(first))
    tiles = len(methods) + 1
    columns = tiles if len(first) > 1 else _columns(tiles)
    rows = len(first) if len(first) > 1 else math.ceil(tiles / columns)
    tile = max(1.2, min(1.6, 13.0 / columns))
    sheet = Sheet(rows, columns, tile, tile * _aspect(first))
    page = sheet.page()
    for item in range(len(first)):
        _photo_tile(page, first, item, *sheet.corner(item, 0), sheet, target=True)
        for number, (name, explanation) in enumerate(methods, start=1):
            row, column = (item, number) if len(first) > 1 else divmod(number, columns)
            left, top = sheet.corner(row, column)
            page.heading(name, effort(explanation.cost), left, top, sheet.tile)
            values = numbers(explanation.maps[item])
            picture = overlay(
                _photo(explanation, item), values, _scale(explanation, values, look), look.opacity, look.smooth
            )
            page.picture(picture, left, top + HEADING, sheet.tile, sheet.tall)
    _keys(page, [explanation for _, explanation in methods], look)
    return page.figure


def layers_figure(explanation: Explanation, look: Look | None = None) -> Figure:
    """What each layer says: a strip of small overlays with layer numbers, one strip for each map."""
    look = look or Look()
    if explanation.layers is None:
        raise BadInput(
            f"'{explanation.method}' was computed without its layers; ask for them with cv.explain(…, layers=True) "
            "or --layers (methods that have no layers cannot show any)."
        )
    layers = numbers(explanation.layers)  # [L, B, rows, cols]
    count, maps = layers.shape[:2]
    columns = _strip(count + 2)  # the photo, the layers, the map they make together
    lines = math.ceil((count + 2) / columns)
    check_rows(lines * maps)
    tile, label, title = 1.15, 0.19, 0.26
    tall = tile * _aspect(explanation)
    block = title + lines * (tall + label + 0.06)
    page = Page(2 * MARGIN + columns * (tile + GAP) - GAP, 2 * MARGIN + maps * (block + GAP) - GAP + FOOT)
    for item in range(maps):
        top = MARGIN + item * (block + GAP)
        page.write(
            _title(explanation, item), MARGIN, top + 0.03, page.width - 2 * MARGIN, TITLE, bold=True, align="left"
        )
        photo, whole = _photo(explanation, item), numbers(explanation.maps[item])
        scales = [*_scales(explanation, layers[:, item], look), _scale(explanation, whole, look)]
        names = [*(f"layer {layer}" for layer in range(count)), explanation.method]
        pictures = [
            overlay(photo, values, scale, look.opacity, look.smooth)
            for values, scale in zip([*layers[:, item], whole], scales, strict=True)
        ]
        for number, (name, picture) in enumerate(
            zip([_short_name(explanation, item), *names], [photo, *pictures], strict=True)
        ):
            row, column = divmod(number, columns)
            left, down = MARGIN + column * (tile + GAP), top + title + row * (tall + label + 0.06)
            page.write(name, left, down + 0.04, tile, SMALL, PALE)
            page.picture(picture, left, down + label, tile, tall)
    note = "one colour scale for all layers" if look.shared else "each layer on its own colour scale"
    foot = f"{_source(explanation)} · {note}"
    page.write(foot, MARGIN, page.height - FOOT + 0.04, page.width - 2 * MARGIN, SMALL, PALE)
    return page.figure


def same_image(explanation: Explanation) -> list[list[int]]:
    """Maps of the same image, which stand in one row: neighbours with the same name and the same pixels."""
    groups: list[list[int]] = []
    for item, name in enumerate(explanation.names):
        previous = groups[-1][-1] if groups else None
        if (
            previous is not None
            and explanation.names[previous] == name
            and bool((explanation.pixels[previous] == explanation.pixels[item]).all())
        ):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _photo_tile(
    page: Page, explanation: Explanation, item: int, left: float, top: float, sheet: Sheet, target: bool = False
) -> None:
    """The photo; its heading names the image (or the target) and the classes the model considers."""
    best = [named(guess.name, guess.probability) for guess in guesses(explanation, item, 3)]
    if target:
        title = _title(explanation, item)
        others = [name for name in best if name != title]
    else:
        title, others = _short_name(explanation, item), best
    page.heading(title, " · ".join(others[:2]), left, top, sheet.tile)
    page.picture(_photo(explanation, item), left, top + HEADING, sheet.tile, sheet.tall)


def _map_tile(
    page: Page, explanation: Explanation, item: int, scale: Scale, look: Look, left: float, top: float, sheet: Sheet
) -> None:
    page.heading(_title(explanation, item), explanation.method, left, top, sheet.tile)
    values = numbers(explanation.maps[item])
    picture = overlay(_photo(explanation, item), values, scale, look.opacity, look.smooth)
    page.picture(picture, left, top + HEADING, sheet.tile, sheet.tall)


def _keys(page: Page, explanations: Sequence[Explanation], look: Look) -> None:
    """The legend of a comparison: which end of the colours means what."""
    words = {False: ("least relevant", "most relevant"), True: ("against the class", "for the class")}
    kinds = sorted({explanation.signed for explanation in explanations})
    width = min(3.4, (page.width - 2 * MARGIN) / len(kinds))
    left = (page.width - width * len(kinds)) / 2
    for number, signed in enumerate(kinds):
        scale = scale_of(np.array([0.0, 1.0]), signed, replace(look, robust=0.0))
        page.key(scale, look.opacity, *words[signed], left + number * width, page.height - FOOT + 0.06, width)


def _scales(explanation: Explanation, maps: Array, look: Look) -> list[Scale]:
    """One scale for each map, or the same for all of them."""
    if look.shared:
        return [_scale(explanation, maps, look)] * len(maps)
    return [_scale(explanation, values, look) for values in maps]


def _scale(explanation: Explanation, values: Array, look: Look) -> Scale:
    return scale_of(values, explanation.signed, look)


def _photo(explanation: Explanation, item: int) -> Array:
    return photo_of(explanation.pixels[item], explanation.preprocess)


def _title(explanation: Explanation, item: int) -> str:
    return named(explanation.targets[item], explanation.probabilities[item])


def _short_name(explanation: Explanation, item: int) -> str:
    """The file without its folders."""
    return PurePath(explanation.names[item]).name or explanation.names[item]


def _source(explanation: Explanation) -> str:
    return f"{explanation.method} · {explanation.model} · explains the {explanation.score}"


def _aspect(explanation: Explanation) -> float:
    height, width = explanation.pixels.shape[-2:]
    return float(height / width)


def _columns(tiles: int) -> int:
    """About two thirds as many rows as columns, and no lonely tile in the last row if that can be helped."""
    if tiles <= 5:
        return tiles
    around = range(max(4, round(math.sqrt(tiles * 1.2))), max(4, round(math.sqrt(tiles * 1.2))) + 4)
    return min(around, key=lambda columns: (-tiles % columns, columns))


def _strip(tiles: int) -> int:
    """At most eight in a line, lines as equal as they can be."""
    return math.ceil(tiles / math.ceil(tiles / 8))


def check_rows(rows: int) -> None:
    if rows > MOST_ROWS:
        raise BadInput(
            f"A figure of {rows} rows is too tall to read (at most {MOST_ROWS}); write one file an image: --out DIR."
        )
