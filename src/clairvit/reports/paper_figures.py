"""The figures of a paper in the result page and as files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from clairvit._io import atomic_write
from clairvit.papers.figures import FigureContent
from clairvit.plotting.paper_figures import paper_figure
from clairvit.plotting.save import figure_bytes
from clairvit.plotting.style import PlotStyle
from clairvit.reports.blocks import Block, Chart, Charts, Picture, Section, Text
from clairvit.reports.svg import inline_svg

PAGE_DPI = 110  # of a grid inside the page; the file has the usual resolution


def figures_section(contents: Sequence[FigureContent], title: str = "Figures") -> Section:
    """Return each figure under its number; in place of one that cannot be shown, the sentence that says why."""
    sections = [
        Section(content.spec.heading + (f" ({content.part})" if content.part else ""), _blocks(content))
        for content in contents
    ]
    return Section(title, [], sections)


def _blocks(content: FigureContent) -> list[Block]:
    source = f"{content.spec.source}."
    if content.missing:
        return [Text(f"Not shown: {content.missing} ({source.rstrip('.')})")]
    figure = paper_figure(content)
    if not content.spec.is_picture:
        svg = inline_svg(figure, content.spec.heading, "The numbers are in the tables.")
        return [Charts((Chart(f"{content.caption} {source}", svg),))]
    caption = f"{content.caption} {source}"
    return [Picture(png_uri(figure), f"{content.spec.heading}. {content.caption}", caption)]


def png_uri(figure: Figure, dpi: int = PAGE_DPI) -> str:
    """Return a figure as a PNG inside a URI."""
    return "data:image/png;base64," + base64.b64encode(figure_bytes(figure, ".png", PlotStyle(dpi=dpi))).decode()


def write_figures(contents: Sequence[FigureContent], folder: Path, name: str) -> list[Path]:
    """Write NAME-figure-3.png, … for each figure that can be shown."""
    return [
        atomic_write(folder / f"{name}-figure-{content.slug}.png", figure_bytes(paper_figure(content), ".png"))
        for content in contents
        if not content.missing
    ]
