"""TorchRay, Böhle et al. and FocusViT: one metric each that their code or tables take in another way."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from clairvit.metrics.complexity import Resolution, gini, magnitudes
from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.grid_pointing import GRIDS, Grids, ImagesInRow, Sure, score_grids, share_inside
from clairvit.metrics.localisation import Tolerance, highest_points
from clairvit.metrics.registry import MetricOutput, preset
from clairvit.numerics import over_largest
from clairvit.option_types import Doc, Range


@preset("pointing-game", "torchray", moved=("ties",))
def pointing_game(context: EvalContext, tolerance: Tolerance = 15, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return 1 if the first of the map's highest points lies less than `tolerance` pixels from the object, 0 if not."""
    return highest_points(context, tolerance, "first", upsampling)


@preset("grid-pointing-game", "bohle", moved=("smooth", "empty"))
def grid_pointing_game(
    context: DatasetContext, n: ImagesInRow = 2, sure: Sure = 0.5, grids: Grids = GRIDS
) -> MetricOutput:
    """Return the grid pointing game of maps blurred by 15 pixels; 0 for a map without any positive value."""

    def share(maps: Tensor, cells: Tensor) -> Tensor:
        return share_inside(maps, cells, smooth=15).masked_fill((maps <= 0).flatten(1).all(1), 0)

    return score_grids(context, n, sure, grids, share)


@preset("sparseness", "focusvit", moved=("direction", "offset"), better="lower")
def sparseness(
    context: EvalContext,
    resolution: Resolution = "patch",
    upsampling: Upsampling = "bilinear",
    offset: Annotated[
        float, Range(ge=0, example=1e-7), Doc("a small number that Quantus adds to the scaled relevance")
    ] = 0.0,
) -> Tensor:
    """Return the Gini index of |a| / max |a| + offset, of which FocusViT's tables call the lower one better."""
    maps = magnitudes(context, resolution, upsampling)
    return torch.stack([gini(over_largest(values, 1) + offset) for values in maps])
