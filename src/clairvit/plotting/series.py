"""Colours and line styles of methods, the same in every chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from matplotlib.ticker import MaxNLocator, ScalarFormatter

from clairvit.plotting.canvas import PALE

Dash: TypeAlias = "str | tuple[int, tuple[float, ...]]"  # as matplotlib has it: '-' or (offset, (on, off, …))

RANDOM = "random"  # the baseline that is drawn with the methods
# The colours of Okabe and Ito, which colour-blind readers tell apart; without black and yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES: tuple[Dash, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class LineStyle:
    """How the line of one method is drawn; `width` in points."""

    colour: str
    dash: Dash = "-"
    width: float = 1.5
    band: bool = True  # draw its standard error


BASELINE = LineStyle(PALE, "--", 1.0)
OTHER = LineStyle(PALE, "-", 0.6, band=False)  # a method without a colour of its own


def line_styles(methods: Sequence[str]) -> dict[str, LineStyle]:
    """Return a style per method: colours first, then the same colours with other dashes."""
    return {
        method: LineStyle(COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)])
        for index, method in enumerate(methods)
    }


def highlighted_styles(methods: Sequence[str]) -> dict[str, LineStyle]:
    """Return a colour and a dash for each of the first methods, and `OTHER` for the rest."""
    styles = {
        method: LineStyle(colour, DASHES[index % len(DASHES)], width=1.1)
        for index, (method, colour) in enumerate(zip(methods, COLOURS, strict=False))
    }
    return {method: styles.get(method, OTHER) for method in methods}


def set_round_ticks(axis: Any, count: int = 6) -> None:
    """Put at most `count` + 1 ticks at round numbers, each written in full, without a common factor or offset."""
    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]))
    formatter = ScalarFormatter(useOffset=False)
    formatter.set_scientific(False)
    axis.set_major_formatter(formatter)
