"""Localisation: does the map lie on the object? Maps against masks; the model is not asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.metrics.case import Case, Upsampling
from clairvit.metrics.metric import metric
from clairvit.metrics.threshold import Threshold, binary, confusion, min_max, steady

Overlap = Literal["area", "nearest", "soft"]


def on_masks(case: Case, upsampling: Upsampling, of: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Tensor:
    """[M, B]: `of` a map [B, H, W], the masks and the void, method by method; NaN where there is no object at all."""
    masks = case.needed_masks()
    empty = ~masks.flatten(1).any(1)
    found = torch.stack([of(one, masks, case.void) for one in case.fine(upsampling)])
    return found.masked_fill(empty, math.nan)


# Thresholded maps


@metric("pixel-accuracy", family="localisation", better="higher", span=(0, 1), paper="standard", needs=("masks",))
def pixel_accuracy(case: Case, threshold: Threshold = "half", upsampling: Upsampling = "bilinear") -> Tensor:
    """(TP + TN) / all: the pixels on which the thresholded map and the mask agree."""

    def agreeing(maps: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
        tp, fp, fn, tn = confusion(binary(maps, threshold), masks, void).unbind(1)
        return (tp + tn) / (tp + fp + fn + tn)

    return on_masks(case, upsampling, agreeing)


@metric(
    "iou",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Jaccard, 1901",
    needs=("masks",),
    presets={"coporan": {}, "chefer": {"classes": "two", "threshold": "mean"}},
)
def iou(
    case: Case,
    threshold: Threshold = "half",
    classes: Literal["foreground", "two"] = "foreground",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """TP / (TP + FP + FN): the overlap of the thresholded map and the mask; `two` is the mean with the background's."""

    def overlap(maps: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
        tp, fp, fn, tn = confusion(binary(maps, threshold), masks, void).unbind(1)
        own = tp / (tp + fp + fn)
        if classes == "foreground":
            return own
        ground = tn / (tn + fp + fn)
        return (own + torch.where(tn + fp + fn == 0, own, ground)) / 2  # a full mask has no background

    return on_masks(case, upsampling, overlap)


@metric("f1", family="localisation", better="higher", span=(0, 1), paper="van Rijsbergen, 1979", needs=("masks",))
def f1(case: Case, threshold: Threshold = "half", upsampling: Upsampling = "bilinear") -> Tensor:
    """2 TP / (2 TP + FP + FN): precision and recall of the thresholded map in one number."""

    def both(maps: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
        tp, fp, fn, _ = confusion(binary(maps, threshold), masks, void).unbind(1)
        return 2 * tp / (2 * tp + fp + fn)

    return on_masks(case, upsampling, both)


# Ranked maps


@metric(
    "ap",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="area under precision–recall",
    needs=("masks",),
    presets={"chefer": {"pooled": True, "upsampling": "bilinear"}},
    discrepancies="Chefer's code pools background and foreground (`pooled`), so that a good background gives a high "
    "value; SkipPLUS ranks the foreground alone.",
)
def average_precision(case: Case, pooled: bool = False, upsampling: Upsampling = "nearest") -> Tensor:
    """sum_n (R_n − R_{n−1}) P_n over the map's values as thresholds: how well the map ranks object above background.

    Equal values are one threshold. Shifting or stretching the map changes nothing; the mask's area is what luck gets.
    `pooled` ranks every pixel twice, once as foreground by r, the map in 0…1, and once as background by 1 − r.
    """

    def ap(maps: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
        if not pooled:
            return _ranked(steady(maps), masks, void, _ap)
        r = min_max(maps)
        both = torch.cat([1 - r, r], 1)  # [B, 2 H, W], the background above the foreground
        return _ranked(both, torch.cat([~masks, masks], 1), None if void is None else torch.cat([void, void], 1), _ap)

    return on_masks(case, upsampling, ap)


@metric("roc-auc", family="localisation", better="higher", span=(0, 1), paper="area under ROC", needs=("masks",))
def roc_auc(case: Case, upsampling: Upsampling = "nearest") -> Tensor:
    """P(map on the object > map off it), equals count half: 0.5 by luck; undefined where there is no background."""
    return on_masks(case, upsampling, lambda maps, masks, void: _ranked(steady(maps), masks, void, _roc))


def _ranked(maps: Tensor, masks: Tensor, void: Tensor | None, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found = []
    for image, (values, mask) in enumerate(zip(maps, masks, strict=True)):
        counts = torch.ones_like(mask) if void is None else ~void[image]
        found.append(of(*_at_thresholds(values[counts], mask[counts])))
    return torch.stack(found)


def _at_thresholds(values: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """True and false positives at each different value taken as threshold, highest first."""
    order = values.argsort(descending=True)
    values, hits = values[order], positive[order].double()
    last = torch.cat([values[1:] != values[:-1], values.new_ones(1, dtype=torch.bool)])
    true = hits.cumsum(0)[last]
    return true, (last.nonzero()[:, 0] + 1).double() - true


def _ap(true: Tensor, false: Tensor) -> Tensor:
    steps = torch.diff(true, prepend=true.new_zeros(1))
    return (steps * true / (true + false)).sum() / true[-1]


def _roc(true: Tensor, false: Tensor) -> Tensor:
    zero = true.new_zeros(1)
    area = torch.trapezoid(torch.cat([zero, true]), torch.cat([zero, false]))
    return area / (true[-1] * false[-1])  # 0/0 where there is no background: undefined


# Points and mass


@metric(
    "pointing-game",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Zhang et al., ECCV 2016",
    needs=("masks",),
    orders=True,
    discrepancies="TorchRay hits within less than 15 pixels; Coporan and Quantus allow no distance; Quantus counts an "
    "empty mask as a hit.",
)
def pointing_game(case: Case, tolerance: int = 15, upsampling: Upsampling = "bilinear") -> Tensor:
    """1 if the map's highest point lies on the object, or less than `tolerance` pixels from it; 0 if not.

    Where several points are highest, the share of them that hit: a constant map scores what luck would.
    """

    def hits(maps: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
        near = torch.stack([within(mask, tolerance) for mask in masks])
        top = steady(maps) == steady(maps).amax((1, 2), keepdim=True)
        return (top & near).flatten(1).sum(1).double() / top.flatten(1).sum(1)

    return on_masks(case, upsampling, hits)


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
)
def relevance_mass(
    case: Case, negative: Literal["drop", "keep"] = "drop", upsampling: Upsampling = "bilinear"
) -> Tensor:
    """sum of the map on the object / sum of the map: its share of the positive relevance; `keep` uses signed sums."""

    def mass(maps: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
        values = maps.clamp(min=0) if negative == "drop" else maps
        values = values if void is None else values.masked_fill(void, 0)
        return (values * masks).sum((1, 2)) / values.sum((1, 2))

    return on_masks(case, upsampling, mass)


@metric(
    "energy-pointing-game",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Wang et al., 2020 (Score-CAM)",
    needs=("masks",),
)
def energy_pointing_game(case: Case, box: bool = False, upsampling: Upsampling = "bilinear") -> Tensor:
    """sum of relu(map) on the object / sum of relu(map); `box` takes the mask's bounding box, as the paper does."""

    def energy(maps: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
        where = torch.stack([boxed(mask) for mask in masks]) if box else masks
        positive = maps.clamp(min=0)
        return (positive * where).sum((1, 2)) / positive.sum((1, 2))

    return on_masks(case, upsampling, energy)


def boxed(mask: Tensor) -> Tensor:
    rows, cols = mask.any(1), mask.any(0)
    found = torch.zeros_like(mask)
    if mask.any():
        top, left = int(rows.nonzero()[0]), int(cols.nonzero()[0])
        found[top : int(rows.nonzero()[-1]) + 1, left : int(cols.nonzero()[-1]) + 1] = True
    return found


@metric(
    "relevance-rank",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Arras et al., 2022",
    needs=("masks",),
    orders=True,
)
def relevance_rank(case: Case, upsampling: Upsampling = "bilinear") -> Tensor:
    """|top-K of the map ∩ object| / K, K the object's area; pixels that tie for the last place count in part."""
    return on_masks(case, upsampling, lambda maps, masks, void: _in_top(maps, masks, masks.flatten(1).sum(1)))


@metric(
    "top-k",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Theiner et al., 2022",
    needs=("masks",),
    orders=True,
)
def top_k(case: Case, k: int = 1000, upsampling: Upsampling = "bilinear") -> Tensor:
    """|top-k of the map ∩ object| / k: the share of the k highest pixels that lie on the object."""

    def share(maps: Tensor, masks: Tensor, void: Tensor | None) -> Tensor:
        return _in_top(maps, masks, torch.full((len(maps),), min(k, maps[0].numel()), device=maps.device))

    return on_masks(case, upsampling, share)


def _in_top(maps: Tensor, masks: Tensor, counts: Tensor) -> Tensor:
    """[B]: how much of the `counts` highest pixels is on the masks; what ties for the last place is counted in part."""
    found = []
    for values, mask, count in zip(steady(maps).flatten(1), masks.flatten(1), counts.tolist(), strict=True):
        if count == 0:
            found.append(values.new_tensor(math.nan))
            continue
        edge = values.topk(count).values[-1]
        sure, tied = values > edge, values == edge
        part = (count - sure.sum()) / tied.sum()
        found.append(((sure & mask).sum() + part * (tied & mask).sum()) / count)
    return torch.stack([one.double() for one in found])


# Attention fractions on the patch grid


def patch_foreground(masks: Tensor, grid: tuple[int, int], overlap: Overlap) -> Tensor:
    """[B, rows, cols]: is a patch foreground? By half of its area or more, by its middle pixel, or in part."""
    area = F.adaptive_avg_pool2d(masks[:, None].double(), grid)[:, 0]
    if overlap == "soft":
        return area
    if overlap == "area":
        return (area >= 0.5).double()
    return F.interpolate(masks[:, None].double(), grid, mode="nearest-exact")[:, 0]


@metric(
    "faf",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="CMI report (foreground attention fraction)",
    needs=("masks",),
)
def foreground_fraction(case: Case, overlap: Overlap = "area", lift: bool = False) -> Tensor:
    """sum A M / sum A on the patch grid: how much of the attention lies on the foreground.

    `lift` divides by the foreground's area, which is what a uniform map gets.
    """
    masks = case.needed_masks()
    inside = patch_foreground(masks, case.trace.layout.grid, overlap)
    values = case.maps.clamp(min=0)
    fraction = (values * inside).sum((2, 3)) / values.sum((2, 3))
    fraction = fraction / inside.mean((1, 2)) if lift else fraction
    return fraction.masked_fill(~masks.flatten(1).any(1), math.nan)


@metric(
    "baf",
    family="localisation",
    better="lower",
    span=(0, 1),
    paper="CMI report (background attention fraction)",
    needs=("masks",),
)
def background_fraction(case: Case, overlap: Overlap = "area") -> Tensor:
    """1 − FAF: how much of the attention lies beside the foreground."""
    fraction: Tensor = foreground_fraction(case, overlap)
    return 1 - fraction
