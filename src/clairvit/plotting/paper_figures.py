"""Draw the figures of a paper: grids of photos and maps, curves over start layers, radars and mean curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.methods.explanation import Explanation
from clairvit.papers.figures import FigureContent, FigureLine
from clairvit.papers.reproduce import Sweep
from clairvit.plotting.canvas import GAP, INK, LINE, MARGIN, PALE, SMALL, TITLE, Canvas, text_width, wrap
from clairvit.plotting.comparison import draw_keys
from clairvit.plotting.curves import curves_figure
from clairvit.plotting.labels import ARROWS, map_marks
from clairvit.plotting.overlay import Array, overlay, scale_of, to_numpy
from clairvit.plotting.patch_outline import Patches, draw_outline
from clairvit.plotting.radar import radar_figure
from clairvit.plotting.series import LineStyle, line_styles, set_round_ticks
from clairvit.plotting.style import PlotStyle
from clairvit.plotting.tiles import FOOT, aspect_ratio, explanation_photo

TILE = 1.25  # inches, width of a picture
MOST_ACROSS = 10  # pictures in a line; more go on in the next one, in lines as equal as they can be
LAYERS_ACROSS = 8
HEAD = 0.26  # inches, the title of the figure
NOTE = 0.15  # inches, the line under it
COLUMN_LINE = 0.135  # inches, a line of a heading of a column
WORDS = 0.2  # inches, the words under a map that is the same everywhere
LINE_HEAD = 0.21  # inches, the heading of a line of pictures
RIGHT, WRONG = ("✓", "#14663a"), ("✗", "#a3162a")
PLOT_WIDTH, PLOT_HEIGHT, PLOT_LEFT = 2.4, 1.7, 0.5  # inches, a panel of curves


def paper_figure(content: FigureContent) -> Figure:
    """Return the figure; raise `BadInput` where it has nothing to show."""
    if content.missing:
        raise BadInput(f"{content.spec.heading} cannot be drawn: {content.missing}")
    if content.spec.kind == "starts":
        return starts_figure(content.sweeps, content.spec.heading)
    if content.spec.kind == "radar":
        return radar_figure(content.panels, content.axes, content.spec.heading)
    if content.spec.kind == "curves":
        return curves_figure(content.curves)
    return grid_figure(content)


# Grids


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture of a grid: a photo, a mask, or the map of an explanation over its photo."""

    image: Array  # [H, W, 3]
    explanation: Explanation | None = None
    heading: str = ""  # of its column, where columns go on in the next line
    outline: Patches | None = None  # bool [H, W]


@dataclass(frozen=True, eq=False)
class GridLine:
    """A line of pictures with its heading; `mark` says whether the prediction is right."""

    title: str
    detail: str
    mark: tuple[str, str] | None
    pictures: tuple[Picture | None, ...]


def grid_figure(content: FigureContent) -> Figure:
    """Return photos by methods (or methods by photos), with the predictions, marks for right and wrong, and masks."""
    headings, lines = _cells(content)
    if content.spec.transposed:
        return _transposed_figure(content, headings, lines)
    wrapped = content.spec.wrap
    if not wrapped and len(headings) > MOST_ACROSS:
        wrapped = math.ceil(len(content.headings) / math.ceil(len(content.headings) / LAYERS_ACROSS))
    if wrapped:
        headings, lines = _wrap_lines(headings, lines, wrapped)
    tile_height = TILE * _aspect(content)
    columns = max(len(line.pictures) for line in lines)
    texts = [] if wrapped else [wrap(heading, TILE * 0.92, SMALL + 0.5)[:3] for heading in headings]
    heading_height = COLUMN_LINE * max((len(text) for text in texts), default=0)
    over = COLUMN_LINE + 0.03 if wrapped else 0.0  # the headings of the pictures themselves
    pitch = [LINE_HEAD * bool(line.title) + over + tile_height + GAP / 2 for line in lines]
    explanations = _explanations(content)
    foot = FOOT * 3
    width = max(2 * MARGIN + columns * (TILE + GAP) - GAP, 4.2)
    head = MARGIN + HEAD + NOTE * bool(content.note)
    canvas = Canvas(width, head + heading_height + sum(pitch) + foot)
    _draw_title(canvas, content)
    top = head
    for column, text in enumerate(texts):
        _write_heading(canvas, text, _left(column), top, heading_height)
    top += heading_height
    for line, height in zip(lines, pitch, strict=True):
        _draw_line_heading(canvas, line, top)
        for column, picture in enumerate(line.pictures):
            if picture is not None:
                down = top + height - tile_height - GAP / 2
                if wrapped:
                    canvas.write(picture.heading, _left(column), down - COLUMN_LINE, TILE, SMALL, INK)
                _draw_picture(canvas, picture, _left(column), down, tile_height)
        top += height
    _draw_foot(canvas, explanations)
    return canvas.figure


def _left(column: int) -> float:
    return MARGIN + column * (TILE + GAP)


def _aspect(content: FigureContent) -> float:
    return max(aspect_ratio(explanation) for explanation in _explanations(content))


def _explanations(content: FigureContent) -> list[Explanation]:
    return [explanation for line in content.lines for explanation in line.maps if explanation is not None]


def _cells(content: FigureContent) -> tuple[list[str], list[GridLine]]:
    """Return the headings of the columns, photo and mask before the methods, and the lines of pictures."""
    column = content.spec.masks == "column" and any(line.mask is not None for line in content.lines)
    headings = ["photo", *(["mask"] if column else []), *content.headings]
    return headings, [_line(content, line, column) for line in content.lines]


def _line(content: FigureContent, line: FigureLine, mask_column: bool) -> GridLine:
    first = next((explanation for explanation in line.maps if explanation is not None), None)
    mask = None if line.mask is None else np.asarray(line.mask.cpu().numpy(), dtype=np.bool_)
    outline = mask if content.spec.masks == "outline" else None
    pictures: list[Picture | None] = []
    if first is not None:
        pictures.append(Picture(explanation_photo(first, 0), outline=outline))
    if mask_column and first is not None:
        pictures.append(None if mask is None else Picture(np.repeat(mask[..., None], 3, axis=-1).astype(np.float64)))
    style = PlotStyle()
    for heading, explanation in zip(content.headings, line.maps, strict=True):
        if explanation is None:
            pictures.append(None)
            continue
        values = to_numpy(explanation.maps[0])
        picture = overlay(
            explanation_photo(explanation, 0),
            values,
            scale_of(values, explanation.signed, style),
            style.opacity,
            style.smooth,
        )
        pictures.append(Picture(picture, explanation, heading, outline))
    mark = None if line.correct is None else RIGHT if line.correct else WRONG
    return GridLine(line.title, line.detail, mark, tuple(pictures))


def _wrap_lines(headings: Sequence[str], lines: Sequence[GridLine], across: int) -> tuple[list[str], list[GridLine]]:
    """Return each line in several, with the photo (and its mask) left of the first."""
    wrapped = []
    for line in lines:
        before = [picture for picture in line.pictures if picture is not None and not picture.heading]
        maps = line.pictures[len(before) :]
        for start in range(0, len(maps), across):
            first = start == 0
            lead: list[Picture | None] = list(before) if first else [None] * len(before)
            part = (*lead, *maps[start : start + across])
            wrapped.append(
                GridLine(line.title, line.detail, line.mark, part) if first else GridLine("", "", None, part)
            )
    return list(headings), wrapped


def _write_heading(canvas: Canvas, text: Sequence[str], left: float, top: float, height: float) -> None:
    """Write the lines of a heading so that they end above the pictures."""
    start = top + height - COLUMN_LINE * len(text)
    for number, line in enumerate(text):
        canvas.write(line, left, start + number * COLUMN_LINE, TILE, SMALL + 0.5, INK, bold=True)


def _draw_line_heading(canvas: Canvas, line: GridLine, top: float) -> None:
    """Write the name of the photo and the prediction, with its mark, over a line of pictures."""
    if not line.title:
        return
    left, down = MARGIN, top + 0.05
    width = canvas.width - 2 * MARGIN
    if line.mark is not None:
        symbol, colour = line.mark
        canvas.write(symbol, left, down - 0.01, 0.14, TITLE, colour, bold=True, align="left")
        left += 0.15
    canvas.write(line.title, left, down, width * 0.6, SMALL + 0.5, INK, bold=True, align="left")
    left += min(1.05 * text_width(line.title, "bold") * (SMALL + 0.5) / 72, width * 0.6) + 0.08
    canvas.write(line.detail, left, down, canvas.width - MARGIN - left, SMALL + 0.5, PALE, align="left")


def _draw_picture(canvas: Canvas, picture: Picture, left: float, top: float, height: float) -> None:
    explanation = picture.explanation
    words = "" if explanation is None else _constant_words(explanation)
    width = TILE
    if words:  # a plain picture would look like a map that was forgotten; a smaller one leaves room below it
        width, full = TILE * (height - WORDS) / height, height
        left, height = left + (TILE - width) / 2, height - WORDS
        canvas.write(words, left, top + full - WORDS + 0.045, width, SMALL, INK)
    axes = canvas.image(picture.image, left, top, width, height)
    draw_outline(axes, picture.outline, picture.image.shape[:2], width)
    if explanation is not None:
        canvas.badges(map_marks(explanation), left + width - 0.04, top + 0.04)


def _constant_words(explanation: Explanation) -> str:
    """Return what to write under a map that is the same everywhere, and nothing for others."""
    values = explanation.maps[0]
    if not bool((values == values.flatten()[0]).all()):
        return ""
    return "constant map" if bool(values.any()) else "zero everywhere"


def _transposed_figure(content: FigureContent, headings: Sequence[str], lines: Sequence[GridLine]) -> Figure:
    """Return a column for each photo (or class of one), and a line of pictures for each heading."""
    tile_height = TILE * _aspect(content)
    side = max(1.06 * text_width(heading, "bold") * (SMALL + 0.5) / 72 for heading in headings) + 0.12
    side = min(side, 2.0)
    above, head = 0.5, MARGIN + HEAD + NOTE * bool(content.note)
    width = max(2 * MARGIN + side + len(lines) * (TILE + GAP) - GAP, 4.2)
    canvas = Canvas(width, head + above + len(headings) * (tile_height + GAP / 2) + FOOT * 3)
    _draw_title(canvas, content)
    for column, line in enumerate(lines):
        left, down = MARGIN + side + column * (TILE + GAP), head
        symbol, colour = line.mark or ("", INK)
        canvas.write(line.title, left, down + 0.02, TILE, SMALL + 0.5, INK, bold=True)
        for number, text in enumerate(wrap(f"{symbol} {line.detail}".strip(), TILE, SMALL)[:2]):
            canvas.write(text, left, down + 0.19 + 0.12 * number, TILE, SMALL, colour if symbol else PALE)
        for row, picture in enumerate(line.pictures):
            if picture is not None:
                _draw_picture(canvas, picture, left, down + above + row * (tile_height + GAP / 2), tile_height)
    for row, heading in enumerate(headings):
        middle = head + above + row * (tile_height + GAP / 2) + tile_height / 2 - 0.06
        canvas.write(heading, MARGIN, middle, side - 0.08, SMALL + 0.5, INK, bold=True, align="left")
    _draw_foot(canvas, _explanations(content))
    return canvas.figure


def _draw_title(canvas: Canvas, content: FigureContent) -> None:
    """Write the title, and under it what is not as in the paper's figure."""
    width = canvas.width - 2 * MARGIN
    canvas.write(content.spec.heading, MARGIN, MARGIN, width, TITLE, bold=True, align="left")
    canvas.write(content.note, MARGIN, MARGIN + 0.2, width, SMALL, PALE, align="left")


def _draw_foot(canvas: Canvas, explanations: Sequence[Explanation]) -> None:
    """Draw what the colours and marks mean, and the models."""
    draw_keys(canvas, explanations, PlotStyle())
    models = " and ".join(dict.fromkeys(explanation.model for explanation in explanations))
    canvas.write(f"model: {models}", MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN, SMALL, PALE)


# Curves over start layers


def starts_figure(sweeps: Sequence[Sweep], title: str) -> Figure:
    """Return a panel per measure with a curve per method: the value when it is summed from each layer on."""
    measures = list(dict.fromkeys(sweep.measure.name for sweep in sweeps))
    styles = line_styles(list(dict.fromkeys(sweep.method for sweep in sweeps)))
    pitch = PLOT_LEFT + PLOT_WIDTH + 0.15
    canvas = Canvas(max(len(measures) * pitch + 0.1, 4.2), HEAD + 0.3 + PLOT_HEIGHT + 0.42 + 0.2)
    canvas.write(title, 0.1, 0.08, canvas.width - 0.2, TITLE, bold=True, align="left")
    for number, measure in enumerate(measures):
        left = number * pitch + PLOT_LEFT
        axes = canvas.axes(left, HEAD + 0.3, PLOT_WIDTH, PLOT_HEIGHT, ticks=True)
        of_measure = [sweep for sweep in sweeps if sweep.measure.name == measure]
        canvas.write(
            f"{measure} {ARROWS[of_measure[0].measure.better]}", left, HEAD + 0.1, PLOT_WIDTH, SMALL + 1, INK, bold=True
        )
        axes.axvline(of_measure[0].middle, color=PALE, linestyle=(0, (4, 3)), linewidth=0.8)
        for sweep in of_measure:
            style = styles[sweep.method]
            line = {"color": style.colour, "linestyle": style.dash, "linewidth": style.width}
            axes.plot(range(len(sweep.values)), sweep.values, **line, label=sweep.method)
            if math.isfinite(sweep.values[sweep.best]):
                axes.plot([sweep.best], [sweep.values[sweep.best]], marker="o", color=style.colour, markersize=4.5)
        axes.set_xlabel("start layer", fontsize=SMALL + 0.5, color=INK)
        set_round_ticks(axes.xaxis)
        axes.xaxis.get_major_locator().set_params(integer=True)
        set_round_ticks(axes.yaxis)
        axes.grid(axis="y", color=LINE, linewidth=0.4)
        axes.tick_params(labelsize=SMALL, labelcolor=PALE, length=0)
        axes.spines["bottom"].set(visible=True, color=LINE)
        axes.margins(x=0.03, y=0.08)
    _draw_starts_legend(canvas, styles, sweeps[0].middle)
    return canvas.figure


def _draw_starts_legend(canvas: Canvas, styles: Mapping[str, LineStyle], middle: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=style.colour, linestyle=style.dash, linewidth=style.width, label=name)
        for name, style in styles.items()
    ]
    handles.append(Line2D([], [], color=PALE, marker="o", linestyle="", markersize=4.5, label="best start"))
    handles.append(
        Line2D([], [], color=PALE, linestyle=(0, (4, 3)), linewidth=0.8, label=f"ceil(L/2) = {middle}: SkipPLUS")
    )
    canvas.figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.01, 0.0),
        ncols=len(handles),
        fontsize=SMALL,
        frameon=False,
        labelcolor=INK,
        handlelength=2.2,
        columnspacing=1.4,
    )
