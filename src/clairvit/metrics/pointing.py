"""Localisation by points and mass: does the map peak on the object, and how much of it lies there?"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.masks import objects_of, on_masks, present
from clairvit.metrics.registry import metric

Overlap = Literal["area", "nearest", "soft"]
Ties = Literal["share", "any", "first"]


@metric(
    "pointing-game",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Zhang et al., ECCV 2016",
    needs=("masks",),
    orders=True,
    presets={
        "torchray": {"ties": "first"},
        "coporan": {"tolerance": 0, "ties": "first"},
        "quantus": {"tolerance": 0, "ties": "any", "empty": "hit"},
    },
    discrepancies="TorchRay hits within less than 15 pixels of the original image, which at distance 0 never hits; "
    "Coporan and Quantus allow no distance. Of several highest points TorchRay and Coporan take the first, Quantus any "
    "that hits; Quantus counts an empty mask as a hit.",
)
def pointing_game(
    case: EvalContext,
    tolerance: int = 15,
    ties: Ties = "share",
    constant: Literal["luck", "nan"] = "luck",
    empty: Literal["nan", "hit"] = "nan",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """1 if the map's highest point lies on the object, or less than `tolerance` pixels from it; 0 if not.

    Where several points are highest, the share of them that hit (`ties=share`), whether any hits, or the first of them.
    A constant map scores what a random point would (`constant=luck`), or NaN. `tolerance=0` hits on the mask itself.
    `empty=hit` is Quantus's score of an empty mask.
    """
    if tolerance < 0:
        raise BadInput(f"tolerance={tolerance} was given; expected a number of pixels, such as 15, or 0 for none.")

    def hits(maps: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
        near = torch.stack([within(mask, tolerance) for mask in objects])
        values = maps.masked_fill(~counts, -math.inf)
        top = ((values == values.amax((1, 2), keepdim=True)) & counts).flatten(1)
        hit = (top & near.flatten(1)).double()
        share = hit.sum(1) / top.sum(1)
        if ties == "share":
            return share
        first = hit.gather(1, top.int().argmax(1, keepdim=True))[:, 0]
        same = (top | ~counts.flatten(1)).all(1)  # a constant map has no first point
        return torch.where(same, share, first if ties == "first" else (share > 0).double())

    found = on_masks(case, upsampling, hits, ranks=True)
    if constant == "nan":
        found = found.masked_fill(case.degenerate, math.nan)
    if empty == "hit":
        hit = ~present(objects_of(case)[0]) & ~case.invalid
        found = found.masked_fill(hit, 1)
    return found


def within(mask: Tensor, tolerance: int) -> Tensor:
    """bool [H, W]: pixels at a distance of less than `tolerance` from the mask; 0 is the mask itself."""
    if tolerance == 0 or not mask.any():
        return mask
    from scipy.ndimage import distance_transform_edt

    far = torch.from_numpy(distance_transform_edt(~mask.cpu().numpy()))
    return (far < tolerance).to(mask.device)


@metric(
    "relevance-mass",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Arras et al., 2022",
    needs=("masks",),
    presets={"quantus": {"negative": "keep"}, "quantus-attribution-localisation": {"negative": "size"}},
    discrepancies="Quantus's RelevanceMassAccuracy keeps negative values, so that it leaves 0 … 1 for signed maps "
    "(`preset=quantus`); its AttributionLocalisation takes absolute values and adds 1e-9 to the sum "
    "(`preset=quantus-attribution-localisation`, without the 1e-9).",
)
def relevance_mass(
    case: EvalContext, negative: Literal["drop", "keep", "size"] = "drop", upsampling: Upsampling = "bilinear"
) -> Tensor:
    """sum of the map on the object / sum of the map: its share of the positive relevance.

    `negative=keep` uses signed sums, `size` absolute values.
    """

    def mass(maps: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
        values = {"drop": maps.clamp(min=0), "keep": maps, "size": maps.abs()}[negative] * counts
        return (values * objects).sum((1, 2)) / values.sum((1, 2))

    return on_masks(case, upsampling, mass)


@metric(
    "energy-pointing-game",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Wang et al., 2020 (Score-CAM)",
    needs=("masks",),
)
def energy_pointing_game(case: EvalContext, box: bool = False, upsampling: Upsampling = "bilinear") -> Tensor:
    """sum of relu(map) on the object / sum of relu(map); `box` takes the mask's bounding box, as the paper does."""

    def energy(maps: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
        where = torch.stack([boxed(mask) for mask in objects]) if box else objects
        positive = maps.clamp(min=0) * counts
        return (positive * where).sum((1, 2)) / positive.sum((1, 2))

    return on_masks(case, upsampling, energy)


def boxed(mask: Tensor) -> Tensor:
    rows, cols = mask.any(1), mask.any(0)
    found = torch.zeros_like(mask)
    if mask.any():
        top, left = int(rows.nonzero()[0]), int(cols.nonzero()[0])
        found[top : int(rows.nonzero()[-1]) + 1, left : int(cols.nonzero()[-1]) + 1] = True
    return found


# Attention fractions on the patch grid


def patch_foreground(objects: Tensor, counts: Tensor, grid: tuple[int, int], overlap: Overlap) -> tuple[Tensor, Tensor]:
    """[B, rows, cols] twice: how far a patch is foreground, and how far it counts at all.

    `area` is foreground by half or more of what counts in the patch, and counts if at least half of it does; `nearest`
    asks the pixel in the middle; `soft` takes both in part.
    """
    pixels = torch.stack([objects, counts], 1).double()
    if overlap == "nearest":
        inside, valid = F.interpolate(pixels, grid, mode="nearest-exact").unbind(1)
        return inside, valid
    inside, valid = F.adaptive_avg_pool2d(pixels, grid).unbind(1)
    if overlap == "soft":
        return inside, valid
    sure = valid >= 0.5
    return ((inside >= 0.5 * valid) & sure).double(), sure.double()


@metric(
    "faf",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="CMI report (foreground attention fraction)",
    needs=("masks",),
)
def foreground_fraction(case: EvalContext, overlap: Overlap = "area", lift: bool = False) -> Tensor:
    """sum A M / sum A on the patch grid: how much of the attention lies on the foreground.

    `overlap` says when a patch is foreground: by half of its `area`, by its middle pixel (`nearest`), or in part
    (`soft`). `lift` divides by the foreground's area, which is what a uniform map gets; it is NaN where the foreground
    is less than any patch.
    """
    objects, counts = objects_of(case)
    inside, valid = patch_foreground(objects, counts, case.trace.layout.grid, overlap)
    values = case.maps.clamp(min=0)
    fraction = (values * inside).sum((2, 3)) / (values * valid).sum((2, 3))  # what is inside is valid
    fraction = fraction / (inside.sum((1, 2)) / valid.sum((1, 2))) if lift else fraction
    return fraction.masked_fill(case.invalid | ~present(objects), math.nan)


@metric(
    "baf",
    family="localisation",
    better="lower",
    span=(0, 1),
    paper="CMI report (background attention fraction)",
    needs=("masks",),
)
def background_fraction(case: EvalContext, overlap: Overlap = "area") -> Tensor:
    """1 − FAF: how much of the attention lies beside the foreground."""
    fraction: Tensor = foreground_fraction(case, overlap)
    return 1 - fraction
