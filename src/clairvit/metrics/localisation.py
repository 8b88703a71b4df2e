"""Localisation: does the map lie on the object? Maps against masks, without the model.

By threshold (pixel-accuracy, iou, f1), by rank (ap, roc-auc, relevance-rank, top-k), by the highest point
(pointing-game), and by the share of relevance on the object (relevance-mass, energy-pointing-game, faf, baf).

A void pixel is not counted. Where a source counts it as object (Coporan), pass masks that include it, and no void.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.pixel_ranking import rankable_maps
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.numerics import min_max
from clairvit.option_types import Doc, Range

Threshold = Annotated[
    Literal["half", "mean", "otsu", "sweep", "best"],
    Doc("where the map is cut: at half its range, its mean, by Otsu, at every step of a sweep, or the best step"),
]
Split = Annotated[Literal["half", "mean", "otsu"], Doc("where the map is cut: at half its range, its mean, or by Otsu")]
Over = Annotated[
    Literal["images", "set"], Doc("whether images are scored one by one, or the counts of the whole set together")
]
Overlap = Annotated[
    Literal["area", "nearest", "soft"],
    Doc("when a patch is foreground: by half its area, by its middle pixel, or in part"),
]
Ranked = Annotated[Literal["soft", "binary"], Doc("rank the map as it is, or after it was cut")]
Tolerance = Annotated[
    int, Range(ge=0, unit="pixels", example=15), Doc("how many pixels beside the object still count as a hit")
]
Ties = Literal["share", "any", "first"]  # which of several highest points counts
Shares = Callable[[Tensor], Tensor]  # […, 4] counts -> […, K, 2]: parts and wholes
MapScore = Callable[[Tensor, Tensor, Tensor], Tensor]  # (maps [B, H, W], objects, valid, both bool [B, H, W]) -> [B, …]
SWEEP = tuple(k / 20 for k in range(1, 20))  # thresholds of maps in 0 … 1: 0.05, 0.10 … 0.95
SideBox = Annotated[bool, Doc("inside is the mask's bounding box; false: the mask itself")]
NO_SIDES = "an object that fills half of no patch, or of all of them, has no two sides, nor has a map of zeros inside"
FULL = (
    "a mask covers its whole image: scores against it are defined, and say nothing about the map "
    "(leave such images out)"
)


# Masks: undefined scores, void pixels, masks that cover all


def score_against_masks(
    context: EvalContext, upsampling: Upsampling, score: MapScore, *, ranks: bool = False
) -> Tensor:
    """Return [M, B, …]: `score(maps, objects, valid)`, method by method.

    NaN where the map has NaN or infinity, or where there is no object at all. `ranks` says that only the order of the
    values matters: then values that differ by the rounding of the upsampling alone are made equal.
    """
    objects, valid = object_masks(context)
    all_maps = rankable_maps(context, upsampling) if ranks else context.pixel_maps(upsampling)
    scores = []
    for maps, invalid in zip(all_maps, context.invalid, strict=True):
        values = score(maps.masked_fill(invalid[:, None, None], 0), objects, valid)
        undefined = invalid | ~_any_pixel(objects)
        scores.append(values.masked_fill(undefined.reshape(-1, *[1] * (values.ndim - 1)), math.nan))
    return torch.stack(scores)


def object_masks(context: EvalContext) -> tuple[Tensor, Tensor]:
    """Return the objects and the valid pixels, both bool [B, H, W]; void pixels are neither object nor background."""
    masks = context.require_masks()
    valid = torch.ones_like(masks) if context.void is None else ~context.void
    objects = masks & valid
    if bool((_any_pixel(objects) & ~_any_pixel(valid & ~objects)).any()):
        context.notes_log.note(FULL)
    return objects, valid


def _any_pixel(pixels: Tensor) -> Tensor:
    """Return whether any pixel of [B, H, W] is True, bool [B]."""
    return pixels.flatten(1).any(1)


# Thresholds


def binarise(maps: Tensor, threshold: Threshold) -> Tensor:
    """Return which pixels of maps [B, H, W] exceed the threshold after min-max, bool [T, B, H, W].

    One threshold (T = 1) is 0.5, the map's mean or Otsu's split of its histogram; `sweep` and `best` are those of
    SWEEP.
    """
    scaled = min_max(maps, (1, 2))
    if threshold in ("sweep", "best"):
        return torch.stack([scaled > edge for edge in SWEEP])
    if threshold == "half":
        return (scaled > 0.5)[None]
    if threshold == "mean":
        return (scaled > scaled.mean((1, 2), keepdim=True))[None]
    return torch.stack([values > otsu(values) for values in scaled])[None]


def otsu(values: Tensor, bins: int = 256) -> Tensor:
    """Return Otsu's threshold of values in 0 … 1: the largest variance between the two parts of the histogram."""
    counts = torch.histc(values.flatten(), bins, 0, 1)
    centres = (torch.arange(bins, dtype=values.dtype, device=values.device) + 0.5) / bins
    below, above = counts.cumsum(0)[:-1], counts.flip(0).cumsum(0).flip(0)[1:]
    mass = counts * centres
    low = mass.cumsum(0)[:-1] / below.clamp(min=1)
    high = mass.flip(0).cumsum(0).flip(0)[1:] / above.clamp(min=1)
    return centres[(below * above * (low - high) ** 2).argmax()]


def confusion(predicted: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
    """Return TP, FP, FN and TN among the valid pixels, […, 4], of three bool […, H, W]."""
    parts = (predicted & objects, predicted & ~objects, ~predicted & objects, ~predicted & ~objects)
    return torch.stack([(part & valid).flatten(-2).sum(-1) for part in parts], -1).double()


def score_thresholded(
    context: EvalContext, name: str, threshold: Threshold, over: Over, upsampling: Upsampling, shares: Shares
) -> MetricOutput:
    """Return the mean of K shares per image, or with `over=set` of the counts of all images.

    `sweep` is the mean over thresholds and comes with the curve; `best` is each image's best threshold.
    """
    if over == "set" and threshold == "best":
        raise BadInput(
            "threshold=best and over=set were given, and each image has its own best threshold, so that their counts "
            "belong to no common one; expected threshold=sweep with over=set, or threshold=best with over=images."
        )

    def counts(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        table = confusion(binarise(maps, threshold), objects, valid)  # [T, B, 4]
        return shares(table).transpose(0, 1)  # [B, T, K, 2]

    parts = score_against_masks(context, upsampling, counts)  # [M, B, T, K, 2]
    curves = _divide(parts).mean(-1)  # [M, B, T]
    values = curves.amax(-1) if threshold == "best" else curves.mean(-1)
    pooled = parts.flatten(2, 3) if over == "set" else None
    if threshold not in ("sweep", "best"):
        return MetricOutput(values, counts=pooled)
    return MetricOutput(values, torch.tensor(SWEEP, dtype=torch.float64), curves, name, "threshold", pooled)


def _pairs(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return K pairs […] of part and whole as […, K, 2]."""
    return torch.stack([torch.stack(pair, -1) for pair in pairs], -2)


def _divide(parts: Tensor) -> Tensor:
    """Return part / whole, […, K] of […, K, 2]; 1 where the whole is 0, as the background of a full mask."""
    part, whole = parts.unbind(-1)
    return torch.where(whole == 0, torch.ones_like(part), part / whole)


@metric(
    "pixel-accuracy",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="standard",
    needs=("masks",),
    presets={"coporan": {}, "chefer": {"threshold": "mean", "over": "set"}},
)
def pixel_accuracy(
    context: EvalContext, threshold: Threshold = "half", over: Over = "images", upsampling: Upsampling = "bilinear"
) -> MetricOutput:
    """Return (TP + TN) / all, the share of pixels on which the thresholded map and the mask agree.

    `threshold` is 0.5 after min-max (`half`), the map's `mean`, `otsu`, `sweep` (the mean over 0.05 … 0.95, with the
    curve) or `best`, the best of the sweep. `over=set` counts the pixels of all images together.
    """

    def accuracy(table: Tensor) -> Tensor:
        tp, _, _, tn = table.unbind(-1)
        return _pairs((tp + tn, table.sum(-1)))

    return score_thresholded(context, "pixel accuracy", threshold, over, upsampling, accuracy)


@metric(
    "iou",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Jaccard, 1901",
    needs=("masks",),
    presets={"coporan": {}, "chefer": {"classes": "two", "threshold": "mean", "over": "set"}},
)
def iou(
    context: EvalContext,
    threshold: Threshold = "half",
    classes: Annotated[
        Literal["foreground", "two"], Doc("the overlap of the foreground, or the mean with the background's")
    ] = "foreground",
    over: Over = "images",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return TP / (TP + FP + FN), the overlap of thresholded map and mask; `two` is the mean with the background's.

    `threshold` as in pixel-accuracy. `over=set` sums the counts of all images before they are divided.
    """

    def overlap(table: Tensor) -> Tensor:
        tp, fp, fn, tn = table.unbind(-1)
        foreground, background = (tp, tp + fp + fn), (tn, tn + fp + fn)
        return _pairs(foreground) if classes == "foreground" else _pairs(foreground, background)

    return score_thresholded(context, "IoU", threshold, over, upsampling, overlap)


@metric(
    "f1",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="van Rijsbergen, 1979",
    needs=("masks",),
    presets={"coporan": {}},
)
def f1(
    context: EvalContext,
    threshold: Threshold = "half",
    over: Over = "images",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return 2 TP / (2 TP + FP + FN), the harmonic mean of precision and recall of the thresholded map.

    `threshold` and `over` as in iou.
    """

    def f1_score(table: Tensor) -> Tensor:
        tp, fp, fn, _ = table.unbind(-1)
        return _pairs((2 * tp, 2 * tp + fp + fn))

    return score_thresholded(context, "F1", threshold, over, upsampling, f1_score)


# Ranks


@metric(
    "ap",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="area under precision–recall",
    needs=("masks",),
    presets={"skipplus": {}},
)
def average_precision(
    context: EvalContext,
    on: Ranked = "soft",
    threshold: Annotated[Split, Doc("where the map is cut for on=binary")] = "half",
    upsampling: Upsampling = "nearest",
) -> Tensor:
    """Return Σ_n (R_n − R_{n−1}) P_n over the map's values as thresholds: how well it ranks object above background.

    The score of a set, the mean over images, is the mAP of the papers. Equal values are one threshold. Shifting or
    stretching the map changes nothing; a random map scores the mask's area. `on=binary` ranks the map after it was cut
    at `threshold`.
    """

    def score(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        values = maps if on == "soft" else binarise(maps, threshold)[0].double()
        return average_precision_of(values, objects, valid)

    return score_against_masks(context, upsampling, score, ranks=True)


def average_precision_of(values: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
    """Return the average precision [B] of values [B, H, W] as scores of pixels, objects and valid ones bool."""
    return _score_ranking(values, objects, valid, _average_precision)


@metric(
    "roc-auc",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="area under ROC",
    needs=("masks",),
)
def roc_auc(context: EvalContext, upsampling: Upsampling = "nearest") -> Tensor:
    """Return P(map on the object > map off it), ties count half: 0.5 for a random map; undefined without background."""
    return score_against_masks(
        context,
        upsampling,
        lambda maps, objects, valid: _score_ranking(maps, objects, valid, _area_under_roc),
        ranks=True,
    )


def _score_ranking(maps: Tensor, objects: Tensor, valid: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return `score(true, false)` of the positives at each threshold, image by image, [B]; 0 without valid pixels."""
    scores = []
    for values, mask, counted in zip(maps, objects, valid, strict=True):
        positives = _positives_at_thresholds(values[counted], mask[counted]) if counted.any() else None
        scores.append(values.new_zeros(()) if positives is None else score(*positives))
    return torch.stack(scores)


def _positives_at_thresholds(values: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return true and false positives at each different value taken as threshold, highest first."""
    order = values.argsort(descending=True)
    values, hits = values[order], positive[order].double()
    last = torch.cat([values[1:] != values[:-1], values.new_ones(1, dtype=torch.bool)])
    true = hits.cumsum(0)[last]
    return true, (last.nonzero()[:, 0] + 1).double() - true


def _average_precision(true: Tensor, false: Tensor) -> Tensor:
    steps = torch.diff(true, prepend=true.new_zeros(1))
    return (steps * true / (true + false)).sum() / true[-1]


def _area_under_roc(true: Tensor, false: Tensor) -> Tensor:
    zero = true.new_zeros(1)
    area = torch.trapezoid(torch.cat([zero, true]), torch.cat([zero, false]))
    return area / (true[-1] * false[-1])  # 0/0 where there is no background: undefined


@metric(
    "relevance-rank",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Arras et al., 2022",
    needs=("masks",),
    rank_only=True,
)
def relevance_rank(context: EvalContext, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return |top-K of the map ∩ object| / K, K the object's area; pixels that tie for the last place count in part."""

    def share(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        return _share_of_top(maps, objects, valid, objects.flatten(1).sum(1))

    return score_against_masks(context, upsampling, share, ranks=True)


@metric(
    "top-k",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Theiner et al., 2022",
    needs=("masks",),
    rank_only=True,
)
def top_k(
    context: EvalContext,
    k: Annotated[
        int, Range(ge=1, unit="pixels", example=1000), Doc("how many of the highest pixels are counted")
    ] = 1000,
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return |top-k of the map ∩ object| / k, the share of the k highest pixels that lie on the object.

    Where fewer than k pixels are valid, k is their number.
    """

    def share(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        return _share_of_top(maps, objects, valid, valid.flatten(1).sum(1).clamp(max=k))

    return score_against_masks(context, upsampling, share, ranks=True)


def _share_of_top(maps: Tensor, objects: Tensor, valid: Tensor, sizes: Tensor) -> Tensor:
    """Return the object's share of the `sizes` highest valid pixels, [B]; ties for the last place count in part."""
    shares = []
    for all_values, mask, counted, size in zip(maps, objects, valid, sizes.tolist(), strict=True):
        if size == 0:  # no object: the score is undefined, whatever stands here
            shares.append(all_values.new_zeros(()))
            continue
        values, is_object = all_values[counted], mask[counted]
        lowest = values.topk(size).values[-1]
        above, tied = (values > lowest).double(), (values == lowest).double()
        part = (size - above.sum()) / tied.sum()
        shares.append(((above + part * tied) * is_object).sum() / size)
    return torch.stack(shares)


# The highest point, and the share of relevance on the object


@metric(
    "pointing-game",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Zhang et al., ECCV 2016",
    needs=("masks",),
    rank_only=True,
)
def pointing_game(
    context: EvalContext,
    tolerance: Tolerance = 15,
    constant: Annotated[
        Literal["luck", "nan"], Doc("how a constant map scores: as a random point would, or not at all")
    ] = "luck",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return 1 if the map's highest point lies on the object, or less than `tolerance` pixels from it; 0 if not.

    Where several points are highest, the share of them that hit. A constant map scores as a random point would
    (`constant=luck`), or NaN. `tolerance=0` hits on the mask itself.
    """
    scores = highest_points(context, tolerance, "share", upsampling)
    return scores.masked_fill(context.degenerate, math.nan) if constant == "nan" else scores


def highest_points(context: EvalContext, tolerance: int, ties: Ties, upsampling: Upsampling) -> Tensor:
    """Return whether the highest point hits, [M, B]; of several, their share, whether any does, or the first."""

    def hits(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        near = torch.stack([dilate(mask, tolerance) for mask in objects])
        values = maps.masked_fill(~valid, -math.inf)
        highest = ((values == values.amax((1, 2), keepdim=True)) & valid).flatten(1)
        hit = (highest & near.flatten(1)).double()
        share = hit.sum(1) / highest.sum(1)
        if ties == "share":
            return share
        first = hit.gather(1, highest.int().argmax(1, keepdim=True))[:, 0]
        is_constant = (highest | ~valid.flatten(1)).all(1)  # a constant map has no first point
        return torch.where(is_constant, share, first if ties == "first" else (share > 0).double())

    return score_against_masks(context, upsampling, hits, ranks=True)


def dilate(mask: Tensor, tolerance: int) -> Tensor:
    """Return which pixels are at a distance of less than `tolerance` from the mask, bool [H, W]; 0 is the mask."""
    if tolerance == 0 or not mask.any():
        return mask
    from scipy.ndimage import distance_transform_edt

    distance = torch.from_numpy(distance_transform_edt(~mask.cpu().numpy()))
    return (distance < tolerance).to(mask.device)


@metric(
    "relevance-mass",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Arras et al., 2022",
    needs=("masks",),
)
def relevance_mass(context: EvalContext, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return sum of relu(map) on the object / sum of relu(map), the object's share of the positive relevance."""
    return share_on_object(context, lambda maps: maps.clamp(min=0), upsampling)


def share_on_object(context: EvalContext, relevance: Callable[[Tensor], Tensor], upsampling: Upsampling) -> Tensor:
    """Return sum of relevance(map) on the object / sum of relevance(map), [M, B]."""

    def mass(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        values = relevance(maps) * valid
        return (values * objects).sum((1, 2)) / values.sum((1, 2))

    return score_against_masks(context, upsampling, mass)


@metric(
    "energy-pointing-game",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Wang et al., 2020 (Score-CAM)",
    needs=("masks",),
)
def energy_pointing_game(
    context: EvalContext,
    box: Annotated[bool, Doc("use the mask's bounding box in place of the mask")] = False,
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return sum of relu(map) on the object / sum of relu(map); `box` takes the mask's bounding box, as the paper."""

    def energy(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        regions = torch.stack([bounding_box(mask) for mask in objects]) if box else objects
        positive = maps.clamp(min=0) * valid
        return (positive * regions).sum((1, 2)) / positive.sum((1, 2))

    return score_against_masks(context, upsampling, energy)


def bounding_box(mask: Tensor) -> Tensor:
    """Return the mask's bounding box, bool [H, W]."""
    rows, cols = mask.any(1), mask.any(0)
    box = torch.zeros_like(mask)
    if mask.any():
        top, left = int(rows.nonzero()[0]), int(cols.nonzero()[0])
        box[top : int(rows.nonzero()[-1]) + 1, left : int(cols.nonzero()[-1]) + 1] = True
    return box


# Attention fractions on the patch grid


def patch_foreground(objects: Tensor, valid: Tensor, grid: tuple[int, int], overlap: Overlap) -> tuple[Tensor, Tensor]:
    """Return how far each patch is foreground, and how far it is valid, both [B, rows, cols] in 0 … 1.

    `area` is foreground by half or more of the valid pixels in the patch, and valid if at least half of it is;
    `nearest` takes the pixel in the middle; `soft` takes both in part.
    """
    pixels = torch.stack([objects, valid], 1).double()
    if overlap == "nearest":
        foreground, counted = F.interpolate(pixels, grid, mode="nearest-exact").unbind(1)
        return foreground, counted
    foreground, counted = F.adaptive_avg_pool2d(pixels, grid).unbind(1)
    if overlap == "soft":
        return foreground, counted
    mostly_valid = counted >= 0.5
    return ((foreground >= 0.5 * counted) & mostly_valid).double(), mostly_valid.double()


@metric(
    "faf",
    family="localisation",
    better="higher",
    span=(0, 1),
    span_with=lambda lift, **_: (0, math.inf) if lift else None,
    paper="CMI report (foreground attention fraction)",
    needs=("masks",),
)
def foreground_fraction(
    context: EvalContext,
    overlap: Overlap = "area",
    lift: Annotated[bool, Doc("divide by the foreground's area, which a uniform map would score")] = False,
) -> Tensor:
    """Return Σ A M / Σ A on the patch grid, the foreground's share of the attention.

    `overlap` says when a patch is foreground: by half of its `area`, by its middle pixel (`nearest`), or in part
    (`soft`). `lift` divides by the foreground's area, which is the score of a uniform map; it is NaN where the
    foreground is less than any patch.
    """
    objects, valid = object_masks(context)
    foreground, counted = patch_foreground(objects, valid, context.trace.layout.plane, overlap)
    values = context.maps.clamp(min=0)
    fraction = (values * foreground).sum((2, 3)) / (values * counted).sum((2, 3))  # foreground is counted
    fraction = fraction / (foreground.sum((1, 2)) / counted.sum((1, 2))) if lift else fraction
    return fraction.masked_fill(context.invalid | ~_any_pixel(objects), math.nan)


@metric(
    "baf",
    family="localisation",
    better="lower",
    span=(0, 1),
    paper="CMI report (background attention fraction)",
    needs=("masks",),
)
def background_fraction(context: EvalContext, overlap: Overlap = "area") -> Tensor:
    """Return 1 − FAF, the background's share of the attention."""
    fraction: Tensor = foreground_fraction(context, overlap)
    return 1 - fraction


# Relevance outside the object over that inside it


@metric(
    "a-tsi",
    family="localisation",
    better="lower",
    span=(0, math.inf),
    paper="Kang et al., TMLR 2026",
    undefined=NO_SIDES,
    needs=("masks",),
)
def average_spuriosity(context: EvalContext, box: SideBox = True) -> Tensor:
    """Return mean |a| over the patches outside the object / mean |a| over those inside it, by its bounding box.

    Of the map of `leave-one-out`, z_k = |p − p without patch k|, it is the paper's Average Token Spuriosity Index: how
    much the model depends on the background. Of other maps it is what they say of it.
    """
    values, inside, outside = _sides(context, box)
    return _ratio(*((values * side).sum(-1) / side.sum(-1) for side in (outside, inside)))


@metric(
    "m-tsi",
    family="localisation",
    better="lower",
    span=(0, math.inf),
    paper="Kang et al., TMLR 2026",
    undefined=NO_SIDES,
    needs=("masks",),
)
def maximum_spuriosity(context: EvalContext, box: SideBox = True) -> Tensor:
    """Return max |a| over the patches outside the object / max |a| over those inside it, as `a-tsi` (Maximum TSI)."""
    values, inside, outside = _sides(context, box)
    largest = ((values * side).amax(-1).masked_fill(~side.any(-1), math.nan) for side in (outside, inside))
    return _ratio(*largest)


def _sides(context: EvalContext, box: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return |a| [M, B, patches], and which patches lie in the object by half or more, and which do not, [B, patches].

    Patches that are void by more than half are on neither side.
    """
    objects, valid = object_masks(context)
    regions = torch.stack([bounding_box(mask) for mask in objects]) & valid if box else objects
    inside, counted = patch_foreground(regions, valid, context.trace.layout.plane, "area")
    inside, counted = inside.flatten(1) > 0, counted.flatten(1) > 0
    return context.maps.flatten(2).abs(), inside, counted & ~inside


def _ratio(outside: Tensor, inside: Tensor) -> Tensor:
    """Return outside / inside, each NaN where it has no patch; NaN where there is no relevance inside."""
    return outside / inside.masked_fill(inside == 0, math.nan)
