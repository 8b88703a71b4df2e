"""Two photos side by side, each with the map of what makes it like the other; also as JSON and arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from clairvit.methods.explanation_files import npz_bytes
from clairvit.methods.match import ImageMatch
from clairvit.plotting.canvas import BAR, GAP, HEADING, MARGIN, Canvas
from clairvit.plotting.labels import format_number
from clairvit.plotting.overlay import to_numpy
from clairvit.plotting.save import figure_bytes, write_result
from clairvit.plotting.strip import frame_strip
from clairvit.plotting.style import PlotStyle, plot_style
from clairvit.plotting.tiles import (
    FOOT,
    aspect_ratio,
    explanation_photo,
    map_picture,
    map_scales,
    short_name,
    source_line,
)

TILE = 2.3  # inches


def match_figure(match: ImageMatch, style: PlotStyle | None = None) -> Figure:
    """Return a figure with a column per image: its photo, and below it its map over the photo."""
    style = style or PlotStyle()
    explanation = frame_strip(match.explanation, style)
    maps = to_numpy(explanation.maps)
    scales = map_scales(explanation, maps, style)
    height = TILE * aspect_ratio(explanation)
    line = HEADING + height + GAP
    canvas = Canvas(2 * MARGIN + 2 * (TILE + BAR), 2 * MARGIN + 2 * line + FOOT)
    for item in range(2):
        left = MARGIN + item * (TILE + BAR)
        photo = explanation_photo(explanation, item)
        canvas.heading(short_name(explanation, item), f"cosine {format_number(match.cosine)}", left, MARGIN, TILE)
        canvas.image(photo, left, MARGIN + HEADING, TILE, height)
        top = MARGIN + line
        canvas.heading(explanation.targets[item], explanation.method, left, top, TILE)
        canvas.image(map_picture(explanation, item, scales[item], style), left, top + HEADING, TILE, height)
        canvas.colour_bar(scales[item], style.opacity, left + TILE + 0.06, top + HEADING, height)
    canvas.caption(*source_line(explanation, style), MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN)
    return canvas.figure


def save_match(match: ImageMatch, path: Path, **display: Any) -> Path:
    """Write the figure, the record with the cosine, or the raw maps, as the suffix says."""
    style = plot_style(display)
    return write_result(
        match,
        path,
        lambda: match_figure(match, style),
        lambda: npz_bytes({"": match.explanation}),
        style,
    )


def match_png(match: ImageMatch) -> bytes:
    """Return the figure as PNG bytes."""
    return figure_bytes(match_figure(match), ".png")
