"""Several classes in one image: does a method tell them apart? Grids of images, and images with two objects."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.explanation import Cost
from clairvit.metrics.context import EvalContext
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.randomisation import elsewhere
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.perturbation.progress import track

GRIDS = 500  # as in the paper


@metric(
    "grid-pointing-game",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Böhle et al., CVPR 2021",
    needs=("methods",),
    scope="set",
    cost=lambda **_: Cost(1),
    presets={"bohle": {"smooth": 15, "empty": "zero"}},
    discrepancies="The authors blur maps by 15 pixels and count a map without any positive value as 0 "
    "(`preset=bohle`); here it has no score. Their grids are n times as large as an image, which position embeddings "
    "of a ViT do not take: here each image is shrunk to its cell.",
    undefined="images that are in no grid, because the model is not sure of them or too few classes are left",
)
def grid_pointing_game(
    gallery: DatasetContext, n: int = 2, sure: float = 0.5, grids: int = GRIDS, smooth: int = 0, empty: str = "none"
) -> MetricOutput:
    """sum of relu(map of c) in the cell of class c / sum of relu(map of c), on grids of n × n images of n² classes.

    Images that the model is sure of (probability above `sure`, and right where labels are given) are taken by falling
    probability, each into the first grid without its class, shrunk and put side by side, so that a grid is as large as
    one image. Each class of a grid is explained; an image's score is that of its cell. A method that does not look at
    the class scores 1/n² in the mean, exactly. `smooth` blurs maps by so many pixels; a map without positive value has
    no score, or 0 with `empty=zero`. A note says how many of the classes the model still sees in the grids.
    """
    if n < 2 or grids < 1 or smooth < 0 or empty not in ("none", "zero"):
        raise BadInput(
            f"n={n}, grids={grids}, smooth={smooth}, empty={empty} were given; expected n=2 or more images in a row, "
            "1 or more grids, smooth=0 or more pixels, and empty=none or zero."
        )
    classes, chosen = _grids(gallery, n, sure)
    if not chosen:
        raise BadInput(
            f"No grid of {n} × {n} images of different classes can be made of these {len(gallery)} images with "
            f"probability above {sure:g}; expected at least {n * n} such images. Give more, or a smaller sure=."
        )
    values = torch.full((len(gallery.specs), len(gallery)), math.nan, dtype=torch.float64)
    seen = 0
    for places in track(chosen[:grids], "grid-pointing-game"):
        own = [classes[place] for place in places]
        grid = side_by_side(gallery.pixels(places), n)
        maps, logits = gallery.explained(grid, own)
        inside = cell_masks((int(grid.shape[-2]), int(grid.shape[-1])), n)
        for method, found in enumerate(maps):
            share = share_inside(found, inside, smooth)
            nothing = (found <= 0).flatten(1).all(1) & (empty == "zero")
            values[method, places] = share.masked_fill(nothing, 0).cpu()
        first = logits.topk(min(n * n, len(logits))).indices.tolist()
        seen += sum(one in first for one in own)
    count = min(len(chosen), grids)
    gallery.aside.note(
        f"grid-pointing-game: {count} grid{'s' * (count != 1)} of {len(gallery)} images; {seen} of the {count * n * n} "
        f"classes are among the first {n * n} that the model sees in their grid"
    )
    return MetricOutput(values)


def _grids(gallery: DatasetContext, n: int, sure: float) -> tuple[list[int], list[list[int]]]:
    """The class of each image, and the places of the n² images of each full grid."""
    chances = gallery.model.probabilities(gallery.logits.double())
    if chances is None:
        raise NotApplicable(
            "grid-pointing-game takes images that the model is sure of, by their probability, and this model's scores "
            "are raw: they have none. Use a metric that needs no probability, such as pointing-game."
        )
    most, predicted = chances.max(1)
    classes: list[int] = predicted.tolist()
    truth = gallery.labels or classes
    fit = [place for place in range(len(gallery)) if float(most[place]) > sure and truth[place] == classes[place]]
    fit.sort(key=lambda place: -float(most[place]))
    open_grids: list[list[int]] = []
    for place in fit:
        for grid in open_grids:
            if len(grid) < n * n and classes[place] not in {classes[other] for other in grid}:
                grid.append(place)
                break
        else:
            open_grids.append([place])
    return classes, [grid for grid in open_grids if len(grid) == n * n]


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
def class_contrast(case: EvalContext) -> Tensor:
    """share of relu(map of c) on the object of c − that of another class's map: 0 if the class makes no difference.

    The masks are of the objects of the target class; `others` names the class of another object in each image, and an
    image without one has no score. 1: each map lies wholly on its own object; −1: they are swapped.
    """
    masks = case.needed_masks()
    if case.others is None:
        raise BadInput(
            "class-contrast compares the maps of two objects in one image, and the other classes were not given; "
            "expected distractors=[…], a class or None for each image.",
            parameters={"others": "FILE"},
        )
    alone = torch.tensor([one is None for one in case.others], device=masks.device)
    instead = [own if one is None else one for own, one in zip(case.target.classes, case.others, strict=True)]
    if None in instead:
        raise BadInput("class-contrast was asked of a target that is no class; expected one: target='label', say.")
    maps = case.explained_again(case.trace.pixels, target=elsewhere(case, [one for one in instead if one is not None]))
    own, swapped = (
        torch.stack([share_inside(one, masks, void=case.void) for one in both]) for both in (case.maps, maps)
    )
    return (own - swapped).masked_fill(alone | ~masks.flatten(1).any(1), math.nan)


def side_by_side(pixels: Tensor, n: int) -> Tensor:
    """Images [n², 3, H, W], row by row -> one of [3, H, W]; each is shrunk to its cell."""
    height, width = (int(length) for length in pixels.shape[-2:])
    down, across = _edges(height, n), _edges(width, n)
    wide = pixels.to(torch.promote_types(pixels.dtype, torch.float32))  # bfloat16 weights would be too coarse
    rows = []
    for row in range(n):
        line = []
        for col in range(n):
            cell = (down[row + 1] - down[row], across[col + 1] - across[col])
            one = wide[row * n + col][None]
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


def share_inside(maps: Tensor, inside: Tensor, smooth: int = 0, void: Tensor | None = None) -> Tensor:
    """[B, rows, cols] and bool [B, H, W] -> [B]: the positive relevance that is inside; NaN where there is none.

    `smooth` takes the mean over squares of so many pixels first; pixels of the `void` count nowhere.
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
    return [round(k * length / n) for k in range(n + 1)]
