"""Several classes in one image: does a method tell them apart? Grids of images, and images with two objects.

grid_pointing_game(model, images, classes, "legrad", n=2)            # n · n images make a grid; a value for each
class_contrast(model, images, classes, others, masks, "legrad")      # masks of the objects of `classes`

Both build or need their own images, so that they are functions beside `evaluate` and not metrics inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.bind import bind
from clairvit.methods.explain import compare
from clairvit.methods.explanation import Cost, Explanation
from clairvit.metrics.case import constant
from clairvit.metrics.evaluate import BASELINES
from clairvit.metrics.score import Score
from clairvit.models.images import prepare
from clairvit.models.model import Model


def grid_pointing_game(
    model: Model, images: Any, classes: Sequence[Any], method: str = "legrad", n: int = 2, *, seed: int = 0
) -> Score:
    """sum of relu(map of c) in the cell of class c / sum of relu(map of c), on grids of n × n images (Böhle, 2021).

    Images are taken n² at a time in the order given, shrunk and put side by side, so that the grid is as large as one
    image. Each class of a grid is explained; a method that does not look at the class scores 1/n² in the mean, exactly.
    Give images that the model is sure of, of different classes; a note says how many it still sees in the grids. Maps
    are not smoothed (the authors blur by 15 pixels); one without any positive value has no score (theirs: 0).
    """
    batch = prepare(images, model)
    cells = n * n
    _check_grids(len(batch), classes, n)
    size = (int(batch.pixels.shape[-2]), int(batch.pixels.shape[-1]))
    inside = cell_masks(size, n)  # bool [n², H, W]
    names = _with_luck(method)
    made: dict[str, list[Explanation]] = {name: [] for name in names}
    for start in range(0, len(batch), cells):
        grid = side_by_side(batch.pixels[start : start + cells], n)
        for name, ex in compare(model, grid, names, list(classes[start : start + cells]), seed=seed).items():
            made[name].append(ex)
    seen = sum(_among_the_first(ex, cells) for ex in made[names[0]])
    note = f"{seen} of the {len(batch)} classes are among the first {cells} that the model sees in their grid"
    found = [
        Score(
            metric="grid-pointing-game",
            method=name,
            values=torch.cat([share_inside(ex.maps, inside) for ex in grids]),
            better="higher",
            span=(0, 1),
            degenerate=torch.cat([constant(ex.maps) for ex in grids]),
            names=batch.names,
            model=model.name,
            settings={"n": n},
            seed=seed,
            cost=sum((ex.cost for ex in grids), Cost()),
            notes=(note,),
        )
        for name, grids in made.items()
    ]
    return _beside_luck(found)


def class_contrast(
    model: Model,
    images: Any,
    classes: Sequence[Any],
    others: Sequence[Any],
    masks: Tensor,
    method: str = "legrad",
    *,
    seed: int = 0,
) -> Score:
    """share of relu(map of c) on the object of c − that of another class's map: 0 if the class makes no difference.

    `others` are classes of other objects in the same images, `masks` bool [B, H, W] the objects of `classes`, as the
    model sees the images. 1: each map lies wholly on its own object; −1: they are swapped.
    """
    batch = prepare(images, model)
    expected = (len(batch), *batch.pixels.shape[-2:])
    if tuple(masks.shape) != expected or not len(classes) == len(others) == len(batch):
        raise BadInput(
            f"masks of shape {list(masks.shape)}, {len(classes)} classes and {len(others)} others were given; expected "
            f"masks of shape {list(expected)} and a class and another one for each of the {len(batch)} images."
        )
    names = _with_luck(method)
    own, swapped = (compare(model, batch, names, list(goal), seed=seed) for goal in (classes, others))
    inside = (masks > 0).to(batch.pixels.device)
    values = {name: share_inside(own[name].maps, inside) - share_inside(swapped[name].maps, inside) for name in names}
    values = {name: one.masked_fill(~inside.flatten(1).any(1), torch.nan) for name, one in values.items()}
    found = [
        Score(
            metric="class-contrast",
            method=name,
            values=values[name],
            better="higher",
            span=(-1, 1),
            degenerate=constant(own[name].maps) | constant(swapped[name].maps),
            names=batch.names,
            model=model.name,
            seed=seed,
            cost=own[name].cost + swapped[name].cost,
        )
        for name in names
    ]
    return _beside_luck(found)


def side_by_side(pixels: Tensor, n: int) -> Tensor:
    """Images [n², 3, H, W], row by row -> one of [3, H, W]; each is shrunk to its cell."""
    height, width = (int(length) for length in pixels.shape[-2:])
    down, across = _edges(height, n), _edges(width, n)
    rows = []
    for row in range(n):
        line = []
        for col in range(n):
            cell = (down[row + 1] - down[row], across[col + 1] - across[col])
            one = pixels[row * n + col][None].float()
            line.append(F.interpolate(one, cell, mode="bilinear", align_corners=False, antialias=True)[0])
        rows.append(torch.cat(line, 2))
    return torch.cat(rows, 1).to(pixels.dtype)


def cell_masks(size: tuple[int, int], n: int) -> Tensor:
    """bool [n², H, W]: where each image of a grid is."""
    down, across = _edges(size[0], n), _edges(size[1], n)
    found = torch.zeros(n * n, *size, dtype=torch.bool)
    for row in range(n):
        for col in range(n):
            found[row * n + col, down[row] : down[row + 1], across[col] : across[col + 1]] = True
    return found


def share_inside(maps: Tensor, inside: Tensor) -> Tensor:
    """[B, rows, cols] and bool [B, H, W] -> [B]: the positive relevance that is inside; NaN where there is none."""
    size = (int(inside.shape[-2]), int(inside.shape[-1]))
    positive = F.interpolate(maps[:, None].double(), size, mode="nearest-exact")[:, 0].clamp(min=0)
    share = (positive * inside.to(positive.device)).sum((1, 2)) / positive.sum((1, 2))
    return share.masked_fill(~maps.isfinite().flatten(1).all(1), torch.nan)


def _edges(length: int, n: int) -> list[int]:
    return [round(k * length / n) for k in range(n + 1)]


def _check_grids(count: int, classes: Sequence[Any], n: int) -> None:
    if n < 2:
        raise BadInput(f"n={n} was given; expected 2 or more images in a row, such as n=2.")
    cells = n * n
    if count == 0 or count % cells or len(classes) != count:
        raise BadInput(
            f"{count} images and {len(classes)} classes were given for n={n}; expected a multiple of {cells} images "
            "and a class for each."
        )
    for start in range(0, count, cells):
        own = list(classes[start : start + cells])
        if len(set(own)) < cells:
            raise BadInput(f"A grid has the classes {own}; expected {cells} different ones, one a cell.")


def _among_the_first(ex: Explanation, count: int) -> int:
    """How many of a grid's classes are among the first `count` of the model's."""
    first = ex.logits[0].topk(min(count, ex.logits.shape[1])).indices.tolist()
    return sum(own in first for own in ex.classes)


def _with_luck(method: str) -> list[str]:
    own = bind(method).text
    return [own, *(name for name in BASELINES if name != own)]


def _beside_luck(found: list[Score]) -> Score:
    """The first, with the others as its baselines."""
    first, *luck = found
    return replace(first, baselines={one.method: one for one in luck})
