"""Chosen patches are outlined where they are, on any photo, and the photo without them lacks them and nothing else."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from clairvit.methods.explanation import Explanation
from clairvit.plotting.comparison import comparison_figure
from clairvit.plotting.figures import explanation_figure
from clairvit.plotting.patch_outline import PAPER, STRIPE, boundary_segments, photo_without
from plotting.fakes import fake

GRID, SIZE = (3, 5), (48, 80)
CHOSEN = torch.zeros(GRID, dtype=torch.bool)
CHOSEN[1, 2] = CHOSEN[1, 3] = CHOSEN[0, 4] = True  # two side by side, one in a corner of the photo


def chosen(maps: int = 1, brightness: float = 0.0) -> Explanation:
    explanation = fake(maps, method="counterfactual", grid=GRID, size=SIZE)
    return replace(explanation, chosen=CHOSEN.repeat(maps, 1, 1), pixels=explanation.pixels + brightness)


def drawn(figure: Figure) -> np.ndarray:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(float) / 255


def pictures(figure: Figure) -> list[np.ndarray]:
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def written(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_edges_are_the_sides_without_a_chosen_neighbour() -> None:
    segments = {tuple(sorted(segment)) for segment in boundary_segments(CHOSEN.numpy(), SIZE)}
    two = {((31.5, 15.5), (47.5, 15.5)), ((47.5, 15.5), (63.5, 15.5)), ((31.5, 31.5), (47.5, 31.5))}
    two |= {((47.5, 31.5), (63.5, 31.5)), ((31.5, 15.5), (31.5, 31.5)), ((63.5, 15.5), (63.5, 31.5))}
    corner = {((63.5, -0.5), (79.5, -0.5)), ((63.5, 15.5), (79.5, 15.5))}
    corner |= {((63.5, -0.5), (63.5, 15.5)), ((79.5, -0.5), (79.5, 15.5))}
    assert segments == two | corner
    assert len(boundary_segments(CHOSEN.numpy(), SIZE)) == 10, "none is drawn twice"
    assert boundary_segments(np.zeros(GRID, dtype=bool), SIZE) == []


@pytest.mark.parametrize("brightness", [-3.0, 0.0, 3.0])
def test_the_outline_is_seen_where_the_patches_are_on_dark_and_on_bright_photos(brightness: float) -> None:
    """Rendered: across an outer edge there is black beside white beside black; between two chosen ones there is not."""
    figure = explanation_figure(chosen(brightness=brightness))
    figure.set_dpi(600)  # the black line is twenty pixels wide, the white one on it nine
    image = drawn(figure)
    tiles = [axes for axes in figure.axes if any(isinstance(c, LineCollection) for c in axes.collections)]
    assert len(tiles) == 2, "the map, and the photo without them"
    for axes in tiles:
        across = profile(image, axes, (31.5, 23.5))  # the left side of the two
        assert across[16:21].min() > 0.95, "white in the middle"
        assert across[11] < 0.05 > across[25], "black on both sides"
        between = profile(image, axes, (47.5, 23.5))
        assert not (between[16:21].min() > 0.95 and between[11] < 0.05 > between[25]), "no line between the two"
    alone = explanation_figure(replace(chosen(brightness=brightness), chosen=None))
    assert not any(axes.collections for axes in alone.axes if axes.images)


def profile(image: np.ndarray, axes: Any, at: tuple[float, float]) -> np.ndarray:
    """Brightness of the eighteen rendered pixels to the left and to the right of a point of a picture, and its own."""
    x, y = axes.transData.transform(at)
    row, column = math.floor(image.shape[0] - y), math.floor(x)
    return image[row, column - 18 : column + 19].mean(-1)


def test_a_comparison_shows_the_outline_on_its_tile_only() -> None:
    figure = comparison_figure({"legrad": fake(grid=GRID, size=SIZE), "counterfactual": chosen()})
    lines = [[c for c in axes.collections if isinstance(c, LineCollection)] for axes in figure.axes if axes.images]
    assert [len(line) for line in lines[:3]] == [0, 0, 2], "photo, legrad, counterfactual in black and white"
    widths = [float(line.get_linewidth()[0]) for line in lines[2]]
    large = [float(c.get_linewidth()[0]) for axes in explanation_figure(chosen()).axes for c in axes.collections][:2]
    assert widths[0] > widths[1], "white on black"
    assert widths[0] < large[0], "thinner on a small tile"


def test_the_photo_without_them_lacks_them_and_nothing_else() -> None:
    photo = np.random.default_rng(0).random((*SIZE, 3))
    rest = photo_without(photo, CHOSEN.numpy())
    gone = CHOSEN.numpy().repeat(16, 0).repeat(16, 1)
    assert np.array_equal(rest[~gone], photo[~gone])
    assert set(np.unique(rest[gone])) == {PAPER, STRIPE}
    uneven = photo_without(np.zeros((50, 70, 3)), CHOSEN.numpy())  # patches that are no whole number of pixels
    assert (uneven[20, 30] > 0).all()
    assert (uneven[20, 20] == 0).all()


def test_the_figure_says_how_many_and_what_they_did() -> None:
    figure = explanation_figure(chosen())
    assert {"without 3 of 15 patches", "no longer Egyptian Mau"} <= set(written(figure))
    assert len(pictures(figure)) == 4, "photo, map, its bar, the photo without them"
    contrast = replace(chosen(), targets=("Bengal − Egyptian Mau",), classes=(None,))
    assert "Bengal − Egyptian Mau is no longer above 0" in written(explanation_figure(contrast))
    nothing = replace(chosen(), chosen=torch.zeros(1, *GRID, dtype=torch.bool))
    assert "no patch taken out" in written(explanation_figure(nothing))


def test_each_map_has_its_own_set() -> None:
    explanation = chosen(2)
    sets = torch.stack([CHOSEN, ~CHOSEN])
    figure = explanation_figure(replace(explanation, chosen=sets, names=("a.jpg", "b.jpg")))
    assert {"without 3 of 15 patches", "without 12 of 15 patches"} <= set(written(figure))
    second = replace(explanation, chosen=sets)[1]
    assert "without 12 of 15 patches" in written(explanation_figure(second))


def test_tiles_do_not_run_into_each_other() -> None:
    """Two targets of one image: map, bar and what is left, twice."""
    figure = explanation_figure(replace(chosen(2), targets=("Egyptian Mau", "Bengal"), classes=(2, 1)))
    boxes = sorted((axes.get_position() for axes in figure.axes), key=lambda box: box.x0)
    for left, right in itertools.pairwise(boxes):
        assert left.x1 <= right.x0
    assert boxes[-1].x1 <= 1


@pytest.mark.parametrize("draw", ["figure", "comparison", "plot"])
def test_what_a_target_is_about_is_outlined_in_the_same_style(draw: str) -> None:
    region = torch.zeros(1, *SIZE, dtype=torch.bool)
    region[0, 10:30, 20:50] = True
    explanation = replace(fake(1, grid=GRID, size=SIZE), regions=region)
    figures = {
        "figure": lambda: explanation_figure(explanation),
        "comparison": lambda: comparison_figure({"genatt": explanation}),
        "plot": lambda: explanation.plot().figure,
    }
    lines = [line for axes in figures[draw]().axes for line in axes.collections if isinstance(line, LineCollection)]
    outlines = [line for line in lines if len(line.get_segments()) == 2 * (20 + 30)]
    assert len(outlines) == 2, "a white line with black edges, on the map"
    corners = np.concatenate(outlines[0].get_segments())
    assert corners.min(0).tolist() == [19.5, 9.5]
    assert corners.max(0).tolist() == [49.5, 29.5]


def test_a_point_is_shown_by_a_ring() -> None:
    region = torch.zeros(1, *SIZE, dtype=torch.bool)
    region[0, 12, 40] = True
    axes = replace(fake(1, grid=GRID, size=SIZE), regions=region).plot()
    rings = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines]
    assert rings == [(40.0, 12.0)] * 2
    assert not axes.collections
    assert axes.get_xlim() == (-0.5, SIZE[1] - 0.5)
    whole = replace(fake(1, grid=GRID, size=SIZE), regions=torch.ones(1, *SIZE, dtype=torch.bool)).plot()
    assert not whole.collections
    assert not whole.lines
