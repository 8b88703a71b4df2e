"""A figure measured in inches from its top left corner: images, two-line headings, colour bars.

Positions are explicit instead of computed by a layout engine: tiles line up exactly, and no pyplot state is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from clairvit._io import printable
from clairvit.plotting.overlay import Array, Scale, blend
from clairvit.plotting.style import LEGEND_WORDS

INK = "#1a1a1a"
PALE = "#6b6b6b"
LINE = "#b4b4b4"
TITLE = 8.5  # points
SMALL = 6.5
HEADING = 0.36  # inches above a tile, for a title and a subtitle
GAP = 0.12  # between tiles
MARGIN = 0.08
BADGE = 0.15  # side of a mark on a tile
BAR = 0.66  # next to a tile, for a colour bar with its numbers

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Canvas:
    """A matplotlib figure of `width` × `height` inches."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self.figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(self.figure)

    def axes(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        ticks: bool = False,
        projection: str | None = None,
    ) -> Any:
        """Return axes without spines; `top` counts down from the upper edge."""
        bottom = self.height - top - height
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, projection=projection)
        if not ticks:
            axes.set_xticks([])
            axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def image(self, image: Array, left: float, top: float, width: float, height: float) -> Any:
        """Draw an image and return its axes, in pixels of the image, for what is drawn on top."""
        axes = self.axes(left, top, width, height)
        axes.imshow(image, interpolation="bicubic", aspect="auto", interpolation_stage="rgba")
        return axes

    def write(
        self,
        text: str,
        left: float,
        top: float,
        width: float,
        size: float = SMALL,
        colour: str = INK,
        bold: bool = False,
        align: str = "center",
    ) -> None:
        """Write one line in a box `width` wide; where it does not fit it is set smaller, then cut short."""
        weight = "bold" if bold else "normal"
        text, size = fit(printable(text), width, size, weight)
        x = left + {"left": 0.0, "center": width / 2, "right": width}[align]
        self.figure.text(
            x / self.width,
            1 - top / self.height,
            text,
            fontsize=size,
            color=colour,
            fontweight=weight,
            ha=align,
            va="top",
            parse_math=False,
        )

    def caption(self, first: str, name: str, last: str, left: float, top: float, width: float) -> None:
        """Write one small line; its middle part, a name that may be a path, is shortened so that the rest fits."""
        self.write(shorten_name(first, name, last, width, SMALL), left, top, width, SMALL, PALE)

    def heading(self, title: str, subtitle: str, left: float, top: float, width: float) -> None:
        """Write title and subtitle over a tile; the tile begins at `top + HEADING`."""
        self.write(title, left, top + 0.03, width, TITLE, INK, bold=True)
        self.write(subtitle, left, top + 0.2, width, SMALL, PALE)

    def group_heading(self, text: str, left: float, top: float, width: float) -> None:
        """Write a name over several tiles, with a thin line under it that is as long as they are."""
        self.write(text, left, top, width, SMALL + 0.5, PALE, bold=True, align="left")
        self.axes(left, top + 0.155, width, 0.008).set_facecolor(LINE)

    def badges(self, marks: Sequence[str], right: float, top: float) -> None:
        """Draw marks on white, next to each other, in the upper right corner of an image."""
        for number, mark in enumerate(reversed(marks)):
            self._badge(mark, right - BADGE * (number + 0.5) - 0.03 * number, top + BADGE / 2)

    def legend_mark(self, mark: str, meaning: str, left: float, top: float, width: float) -> None:
        """Write one line of a legend: the mark as it is on the tiles, and what it means."""
        meaning, size = fit(meaning, width - BADGE - 0.1, SMALL)
        total = BADGE + 0.06 + text_width(meaning) * size / 72
        left += (width - total) / 2
        self._badge(mark, left + BADGE / 2, top + 0.05)
        self.write(meaning, left + BADGE + 0.06, top, width, size, PALE, align="left")

    def _badge(self, mark: str, x: float, y: float) -> None:
        axes = self.axes(x - BADGE / 2, y - BADGE / 2, BADGE, BADGE)
        axes.set_facecolor("white")
        axes.patch.set_alpha(0.85)
        axes.text(0.5, 0.46, mark, fontsize=TITLE, color=INK, ha="center", va="center", transform=axes.transAxes)

    def colour_bar(self, scale: Scale, opacity: float, left: float, top: float, height: float) -> None:
        """Draw a vertical colour bar with its values, coloured as they appear on a mid-grey photo."""
        axes = self.axes(left, top, 0.1, height)
        axes.imshow(_ramp(scale, opacity)[::-1, None], aspect="auto", interpolation="bilinear", extent=(0, 1, 0, 1))
        middle = scale.low / 2 + scale.high / 2
        labels, unit = tick_labels([middle] if scale.flat else [scale.low, middle, scale.high])
        below, above = scale.clipped
        labels[0], labels[-1] = ("≤" * below) + labels[0], ("≥" * above) + labels[-1]
        axes.yaxis.tick_right()
        axes.set_yticks([0.5] if scale.flat else [0.0, 0.5, 1.0])
        if not scale.flat:
            low, high = LEGEND_WORDS[scale.diverging]
            labels[0], labels[-1] = f"{low}\n{labels[0]}", f"{labels[-1]}\n{high}"
        axes.set_yticklabels(labels)
        for label, side in zip(axes.get_yticklabels(), ("bottom", "center", "top"), strict=False):
            label.set_verticalalignment("center" if scale.flat else side)
        axes.tick_params(labelsize=SMALL, length=2, pad=1.5, colors=PALE, width=0.5)
        self.write(unit, left, top - 0.16, BAR - 0.1, SMALL, PALE, align="left")

    def colour_key(
        self, scale: Scale, opacity: float, low: str, high: str, left: float, top: float, width: float
    ) -> None:
        """Draw a horizontal colour bar with words at its ends, for figures in which every map has its own scale."""
        third = width / 3
        axes = self.axes(left + third, top, third, 0.09)
        axes.imshow(_ramp(scale, opacity)[None], aspect="auto", interpolation="bilinear")
        self.write(low, left, top - 0.01, third - 0.06, SMALL, PALE, align="right")
        self.write(high, left + 2 * third + 0.06, top - 0.01, third - 0.06, SMALL, PALE, align="left")


def _ramp(scale: Scale, opacity: float) -> Array:
    values = np.linspace(scale.low, scale.high, 256)
    return blend(np.full((256, 3), 0.5), values, scale, opacity)


def tick_labels(values: list[float]) -> tuple[list[str], str]:
    """Return short labels and the power of ten they share: [0.00112, 0] -> (['1.12', '0'], '×10⁻³')."""
    largest = max(abs(value) for value in values)
    if largest == 0 or not math.isfinite(largest):
        return [f"{value:g}" for value in values], ""
    exponent = math.floor(math.log10(largest))
    exponent = 0 if -1 <= exponent <= 3 else exponent
    # Two steps of division: 10 ** -exponent alone overflows for denormal maps.
    mantissas = [value / 10 ** (exponent // 2) / 10 ** (exponent - exponent // 2) for value in values]
    decimals = max(0, 2 - math.floor(math.log10(max(abs(mantissa) for mantissa in mantissas))))
    labels = [f"{mantissa:.{decimals}f}".replace("-", "−") if mantissa else "0" for mantissa in mantissas]
    return labels, f"×10{str(exponent).translate(SUPERSCRIPTS)}" if exponent else ""


SIDE_BEARINGS = 1.03  # width of a line with the space before the first and after the last letter
LEAST_KEPT = 12  # letters of a shortened name


def fit(text: str, width: float, size: float, weight: str = "normal") -> tuple[str, float]:
    """Return the text and size that fit into `width` inches: up to a quarter smaller, then shortened with '…'."""
    points = 72 * width / SIDE_BEARINGS
    unit = text_width(text, weight)
    if unit * size <= points:
        return text, size
    size = max(0.75 * size, points / unit)
    while len(text) > 1 and text_width(text, weight) * size > points:
        text = text.rstrip("…")[:-1].rstrip() + "…"
    return text, size


def wrap(text: str, width: float, size: float) -> list[str]:
    """Return the text in lines of whole words that are at most `width` inches wide; a longer word is a line."""
    points = 72 * width / SIDE_BEARINGS
    lines: list[str] = []
    for word in text.replace(" %", "\u00a0%").split(" "):
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(joined) * size <= points:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def shorten_name(first: str, name: str, last: str, width: float, size: float) -> str:
    """Return `first + name + last` with the middle of the name left out where the line is wider than `width` inches.

    The end of a name tells models apart ('…/run-7/epoch-30.safetensors'), so two thirds of what fits are kept there.
    """
    points = 72 * width / SIDE_BEARINGS
    least = 0.75 * size  # as small as `fit` sets it
    text = first + name + last
    kept_length = len(name)
    while kept_length > LEAST_KEPT and text_width(text) * least > points:
        kept_length -= 1
        end = -(-2 * kept_length // 3)
        text = f"{first}{name[: kept_length - end]}…{name[-end:]}{last}"
    return text


@lru_cache(maxsize=4096)
def text_width(text: str, weight: str = "normal") -> float:
    """Return the width in points of one line set at one point."""
    if not text.strip():
        return 0.0
    font = FontProperties(size=100, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(printable(text), font, ismath=False)
    return float(width) / 100
