"""Display options of figures; they never change maps or scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from clairvit.errors import BadInput, UnknownName, did_you_mean

# The ends of a colour scale in words, by whether it is diverging; the web page has the same (static/colour.js).
LEGEND_WORDS = {False: ("little", "much"), True: ("against", "for")}


@dataclass(frozen=True)
class PlotStyle:
    """Display options of `save` and the figures."""

    cmap: str | None = None  # a matplotlib name; None: sequential or diverging, as the method is signed or not
    robust: float = 1.0  # per cent clipped at each end of the colour scale, against single extreme patches; 0: none
    opacity: float = 0.8  # of the strongest patch; weaker ones are more transparent
    smooth: bool = True  # bicubic; False shows the patches themselves
    shared: bool | None = None  # one colour scale for all maps of the figure; None: for the classes of an image
    sure: bool = False  # draw only patches that are two standard errors or more from 0, where there are errors
    layers: bool = False  # draw the per-layer strip instead of the map
    heads: bool = False  # draw the grid of heads instead of the map
    dpi: int = 200

    def __post_init__(self) -> None:
        if not 0 <= self.robust < 50:
            raise BadInput(f"robust={self.robust} is not a percentage from 0 to below 50; try robust=1.")
        if not 0 <= self.opacity <= 1:
            raise BadInput(f"opacity={self.opacity} is not between 0 and 1; try opacity=0.8.")
        if not 10 <= self.dpi <= 1200:
            raise BadInput(f"dpi={self.dpi} is not between 10 and 1200; try dpi=200.")


def plot_style(options: Mapping[str, Any]) -> PlotStyle:
    """Return the style of keyword options; raise UnknownName for a misspelt one."""
    option_names = [field.name for field in fields(PlotStyle)]
    for name in options:
        if name not in option_names:
            suggestion = did_you_mean(name, option_names)
            raise UnknownName(f"'{name}' is not a display option; there are {', '.join(option_names)}.{suggestion}")
    return PlotStyle(**options)
