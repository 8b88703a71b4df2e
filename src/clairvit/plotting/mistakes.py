"""Wrong and unsure answers: the photo, the contrast map with the patches that made the difference, and without them."""

from __future__ import annotations

import html
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from clairvit._io import printable
from clairvit.audit.mistake_table import Mistakes
from clairvit.errors import BadInput
from clairvit.numerics import percent
from clairvit.plotting.canvas import SMALL, fit
from clairvit.plotting.labels import format_number
from clairvit.plotting.overlay import Array, overlay, scale_of, to_numpy
from clairvit.plotting.patch_outline import draw_outline, photo_without
from clairvit.plotting.save import write_result

COLUMNS = 3  # photo, map, photo without the parts
TILE = 2.1  # inches
SIDE = 0.25  # inches between tiles
HEADINGS = 0.55  # inches above a tile
FOOT = 0.35  # inches below all tiles
NOTEBOOK_ROWS = 12  # of the table that a notebook shows


def shown_rows(result: Mistakes, photos: int) -> list[int]:
    """Return the rows that are drawn: the first `photos` that have a photo; raise BadInput where there is none."""
    if isinstance(photos, bool) or not isinstance(photos, int) or photos < 1:
        raise BadInput(f"photos={photos!r} was given; expected 1 or more.")
    rows = [row for row, photo in enumerate(result.photos) if photo is not None][:photos]
    if not rows:
        reason = "no photo was kept (photos=0)" if len(result) else "no answer is wrong or unsure"
        raise BadInput(f"There is nothing to draw: {reason}; expected a .json or .csv file.")
    return rows


def how_many(result: Mistakes, shown: int) -> str:
    """Return how many of the answers are shown, and in which order they are."""
    order = "cost" if result.by == "cost" else "confidence"
    return f"{shown} of {len(result)} wrong or unsure answers, sorted by {order}"


def headings(result: Mistakes, row: int) -> tuple[str, str, str]:
    """Return what stands over the photo, its map and the photo without the parts."""
    first, second = result.probabilities[row].tolist()
    true = result.true[row]
    truth = "" if true is None else f", is {true} ({percent(float(result.true_probabilities[row]))})"
    if true == result.predicted[row]:
        truth = f", right; then {result.second[row]} {percent(second)}"
    photo = f"{result.predicted[row]} {percent(first)}{truth}\n{PurePath(result.names[row]).name}: {result.kinds[row]}"
    return photo, f"{result.contrasts[row]}\n{result.method}", _without(result, row)


def _without(result: Mistakes, row: int) -> str:
    """Return what is said of the photo without the parts."""
    count, other = result.needed[row], result.contrasts[row].rpartition(" − ")[2]
    if count is None:
        return f"no part found: {other} does not win\nwithout up to {result.sizes[-1]} top patches"
    total = int(np.prod(result.maps.shape[1:]))
    random = "" if not result.draws else f"; random sets: {result.random_wins[row]} of {result.draws}"
    return f"without {count} of {total} patches\n{other}{random}"


def pictures(result: Mistakes, row: int) -> tuple[Array, Array, Array]:
    """Return the photo of one answer, its contrast map over it, and the photo without the parts, [H, W, 3]."""
    stored = result.photos[row]
    assert stored is not None
    photo = to_numpy(stored) / 255
    values = to_numpy(result.maps[row])
    return photo, overlay(photo, values, scale_of(values, True)), photo_without(photo, _parts(result, row))


def _parts(result: Mistakes, row: int) -> NDArray[np.bool_]:
    return np.asarray(result.parts[row].numpy(), dtype=np.bool_)


def plot_mistakes(result: Mistakes, photos: int) -> NDArray[np.object_]:
    """Draw the first answers, one row each, on axes [rows, 3] of a new figure."""
    from matplotlib import pyplot

    rows = shown_rows(result, photos)
    first = result.photos[rows[0]]
    assert first is not None
    height = TILE * first.shape[0] / first.shape[1]
    figure_size = (COLUMNS * (TILE + SIDE), len(rows) * (height + HEADINGS) + FOOT)
    figure, grid = pyplot.subplots(len(rows), COLUMNS, figsize=figure_size, squeeze=False, layout="constrained")
    for line, row in zip(grid, rows, strict=True):
        for axes, picture, title in zip(line, pictures(result, row), headings(result, row), strict=True):
            axes.imshow(picture)
            axes.set_axis_off()
            lines = [fit(part, TILE + SIDE, SMALL) for part in printable(title).split("\n")]
            smallest = min(size for _, size in lines)
            axes.set_title("\n".join(text for text, _ in lines), fontsize=smallest, parse_math=False)
        draw_outline(line[1], _parts(result, row), pictures(result, row)[0].shape[:2], TILE)
    figure.supxlabel(printable(f"{result.model}: {how_many(result, len(rows))}"), fontsize="x-small", parse_math=False)
    return np.asarray(grid)


def save_mistakes(result: Mistakes, path: Path, photos: int) -> Path:
    """Write the figure, the document or the table, as the suffix says."""

    def draw() -> Figure:
        from matplotlib import pyplot

        figure: Figure = plot_mistakes(result, photos)[0, 0].figure
        pyplot.close(figure)
        return figure

    return write_result(result, path, draw)


def mistakes_html(result: Mistakes) -> str:
    """Return the sentence and a table of the first answers as HTML."""
    columns: tuple[str, ...] = ("image", "true", "predicted", "probability", "kind", "needed")
    heading = "".join(f"<th>{name}</th>" for name in columns)
    lines = []
    for row in result[:NOTEBOOK_ROWS]._table():
        cells = "".join(f"<td>{html.escape(_cell(row[name]))}</td>" for name in columns)
        lines.append(f"<tr>{cells}</tr>")
    table = f"<table><thead><tr>{heading}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<p>{html.escape(result.sentence)}</p>{table}"


def _cell(value: Any) -> str:
    return "–" if value is None else format_number(value) if isinstance(value, float) else str(value)
