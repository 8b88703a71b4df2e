"""Several classes in one image: does a map depend on the class? Grids of images, and images with two objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit._progress import track
from clairvit.errors import Argument, BadInput, NotApplicable
from clairvit.metrics.context import EvalContext
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.randomisation import target_of_classes
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.option_types import Doc, Range

GRIDS = 500  # as in the paper
ImagesInRow = Annotated[
    int, Range(ge=2, unit="images in a row", example=2), Doc("how many images a grid has along each side")
]
Sure = Annotated[
    float,
    Range(ge=0, lt=1, unit="(a probability)", example=0.5),
    Doc("images count only where the model is surer of their class than this"),
]
Grids = Annotated[int, Range(ge=1, unit="grids", example=GRIDS), Doc("how many grids are made at most")]


@metric(
    "grid-pointing-game",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Böhle et al., CVPR 2021",
    needs=("methods",),
    scope="set",
    cost=lambda **_: Cost(1),
    undefined="images that are in no grid, because the model is not sure of them or too few classes are left",
)
def grid_pointing_game(
    context: DatasetContext,
    n: ImagesInRow = 2,
    sure: Sure = 0.5,
    grids: Grids = GRIDS,
) -> MetricOutput:
    """Return Σ relu(map of c) in the cell of class c / Σ relu(map of c), on grids of n × n images of n² classes.

    Images that the model is sure of (probability above `sure`, and right where labels are given) are taken by falling
    probability, each into the first grid without its class, shrunk and put side by side, so that a grid is as large as
    one image. Each class of a grid is explained; an image's score is that of its cell. A method that does not depend on
    the class scores 1/n² in the mean, exactly. A map without positive value has no score. A note says how many of the
    classes the model still predicts in the grids.
    """
    return score_grids(context, n, sure, grids, share_inside)


def score_grids(
    context: DatasetContext, n: int, sure: float, grids: int, share: Callable[[Tensor, Tensor], Tensor]
) -> MetricOutput:
    """Return `share(maps, cells)` [n²] of each image that is in a grid, [M, B]; NaN for the others."""
    if context.model.preprocess.frames is not None:
        raise NotApplicable(f"Grids are made of images, and {context.model.name} takes clips.")
    classes, chosen = _choose_grids(context, n, sure)
    if not chosen:
        raise BadInput(
            f"No grid of {n} × {n} images of different classes can be made of these {len(context)} images with "
            f"probability above {sure:g}; expected at least {n * n} such images. Give more, or a smaller sure=."
        )
    values = torch.full((len(context.specs), len(context)), math.nan, dtype=torch.float64)
    recognised = 0
    for images in track(chosen[:grids], "grid-pointing-game"):
        grid_classes = [classes[image] for image in images]
        grid = side_by_side(context.pixels(images), n)
        all_maps, logits = context.explain(grid, grid_classes)
        cells = cell_masks((int(grid.shape[-2]), int(grid.shape[-1])), n)
        for method, maps in enumerate(all_maps):
            values[method, images] = share(maps, cells).cpu()
        first = logits.topk(min(n * n, len(logits))).indices.tolist()
        recognised += sum(c in first for c in grid_classes)
    count = min(len(chosen), grids)
    context.notes_log.note(
        f"grid-pointing-game: {count} grid{'s' * (count != 1)} of {len(context)} images; {recognised} of the "
        f"{count * n * n} classes are among the first {n * n} that the model sees in their grid"
    )
    return MetricOutput(values)


def _choose_grids(context: DatasetContext, n: int, sure: float) -> tuple[list[int], list[list[int]]]:
    """Return the class of each image, and the indices of the n² images of each full grid."""
    probabilities = context.model.probabilities(context.logits.double())
    if probabilities is None:
        raise NotApplicable(
            "grid-pointing-game takes images that the model is sure of, by their probability, and this model's scores "
            "are raw: they have none. Use a metric that needs no probability, such as pointing-game."
        )
    highest, predicted = probabilities.max(1)
    classes: list[int] = predicted.tolist()
    labels = context.labels or classes
    is_sure = [float(highest[i]) > sure and labels[i] == classes[i] for i in range(len(context))]
    images = sorted((i for i in range(len(context)) if is_sure[i]), key=lambda i: -float(highest[i]))
    grids: list[list[int]] = []
    for image in images:
        for grid in grids:
            if len(grid) < n * n and classes[image] not in {classes[other] for other in grid}:
                grid.append(image)
                break
        else:
            grids.append([image])
    return classes, [grid for grid in grids if len(grid) == n * n]


@metric(
    "class-contrast",
    family="localisation",
    better="higher",
    span=(-1, 1),
    paper="SkipPLUS; CMI report",
    needs=("masks", "others", "methods"),
    cost=lambda **_: Cost(1),
    undefined="images in which no other class is named",
)
def class_contrast(context: EvalContext) -> Tensor:
    """Return the share of relu(map of c) on the object of c − that of another class's map: 0 if the maps are equal.

    The masks are of the objects of the target class; `others` names the class of another object in each image, and an
    image without one has no score. 1: each map lies wholly on its own object; −1: they are swapped.
    """
    masks = context.require_masks()
    if context.others is None:
        raise BadInput(
            "class-contrast compares the maps of two objects in one image, and the other classes were not given; "
            "expected ",
            Argument("distractors", [...]),
            ", a class or None for each image.",
        )
    has_no_other = torch.tensor([other is None for other in context.others], device=masks.device)
    pairs = zip(context.target.classes, context.others, strict=True)
    classes = [target if other is None else other for target, other in pairs]
    if None in classes:
        raise BadInput("class-contrast was asked of a target that is no class; expected one: target='label', say.")
    other_target = target_of_classes(context, [c for c in classes if c is not None])
    other_maps = context.explain(context.trace.pixels, target=other_target)
    own_share, other_share = (
        torch.stack([share_inside(values, masks, void=context.void) for values in maps])
        for maps in (context.maps, other_maps)
    )
    return (own_share - other_share).masked_fill(has_no_other | ~masks.flatten(1).any(1), math.nan)


def side_by_side(pixels: Tensor, n: int) -> Tensor:
    """Return one image [3, H, W] of images [n², 3, H, W], row by row, each shrunk to its cell."""
    height, width = (int(length) for length in pixels.shape[-2:])
    down, across = _edges(height, n), _edges(width, n)
    wide = pixels.to(torch.promote_types(pixels.dtype, torch.float32))  # bfloat16 weights would be too coarse
    rows = []
    for row in range(n):
        line = []
        for col in range(n):
            cell = (down[row + 1] - down[row], across[col + 1] - across[col])
            image = wide[row * n + col][None]
            line.append(F.interpolate(image, cell, mode="bilinear", align_corners=False, antialias=True)[0])
        rows.append(torch.cat(line, 2))
    return torch.cat(rows, 1).to(pixels.dtype)


def cell_masks(size: tuple[int, int], n: int) -> Tensor:
    """Return where each image of a grid is, bool [n², H, W]."""
    down, across = _edges(size[0], n), _edges(size[1], n)
    cells = torch.zeros(n * n, *size, dtype=torch.bool)
    for row in range(n):
        for col in range(n):
            cells[row * n + col, down[row] : down[row + 1], across[col] : across[col + 1]] = True
    return cells


def share_inside(maps: Tensor, inside: Tensor, smooth: int = 0, void: Tensor | None = None) -> Tensor:
    """Return the share [B] of the positive relevance of maps [B, rows, cols] that is inside masks, bool [B, H, W].

    NaN where there is none. `smooth` averages over squares of so many pixels first; `void` pixels are not counted.
    """
    size = (int(inside.shape[-2]), int(inside.shape[-1]))
    fine = F.interpolate(maps[:, None].double(), size, mode="nearest-exact")
    if smooth > 1:
        fine = F.avg_pool2d(fine, smooth | 1, stride=1, padding=smooth // 2)
    positive = fine[:, 0].clamp(min=0)
    positive = positive if void is None else positive.masked_fill(void, 0)
    share = (positive * inside.to(positive.device)).sum((1, 2)) / positive.sum((1, 2))
    return share.masked_fill(~maps.isfinite().flatten(1).all(1), torch.nan)


def _edges(length: int, n: int) -> list[int]:
    """Return the n + 1 edges of n cells along an axis."""
    return [round(k * length / n) for k in range(n + 1)]
