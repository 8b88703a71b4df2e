"""Localisation: does the thresholded map lie on the object? Maps against masks; the model is not asked.

A void pixel counts nowhere. Where a source counts it as object (Coporan), hand over masks that say so, and no void.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.masks import on_masks
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.metrics.threshold import SWEEP, Threshold, binary, confusion

Over = Literal["images", "set"]
Shares = Callable[[Tensor], Tensor]  # […, 4] counts -> […, K, 2]: parts and wholes


def thresholded(
    case: EvalContext, name: str, threshold: Threshold, over: Over, upsampling: Upsampling, shares: Shares
) -> MetricOutput:
    """The mean of K shares for each image, or with `over=set` of the counts of all images.

    `sweep` is the mean over thresholds and comes with the curve; `best` is each image's best threshold.
    """
    if over == "set" and threshold == "best":
        raise BadInput(
            "threshold=best and over=set were given, and each image has its own best threshold, so that their counts "
            "belong to no common one; expected threshold=sweep with over=set, or threshold=best with over=images."
        )

    def counted(maps: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
        table = confusion(binary(maps, threshold), objects, counts)  # [T, B, 4]
        return shares(table).transpose(0, 1)  # [B, T, K, 2]

    parts = on_masks(case, upsampling, counted)  # [M, B, T, K, 2]
    lines = _share(parts).mean(-1)  # [M, B, T]
    values = lines.amax(-1) if threshold == "best" else lines.mean(-1)
    pooled = parts.flatten(2, 3) if over == "set" else None
    if threshold not in ("sweep", "best"):
        return MetricOutput(values, counts=pooled)
    return MetricOutput(values, torch.tensor(SWEEP, dtype=torch.float64), lines, name, "threshold", pooled)


def _share(parts: Tensor) -> Tensor:
    """[…, K, 2] -> […, K]; a part of nothing, such as the background of a full mask that is found fully, is whole."""
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
    discrepancies="Chefer's code cuts at the map's mean and counts the pixels of all images together "
    "(`preset=chefer`); Coporan cuts at 0.5 and takes the mean over images.",
)
def pixel_accuracy(
    case: EvalContext, threshold: Threshold = "half", over: Over = "images", upsampling: Upsampling = "bilinear"
) -> MetricOutput:
    """(TP + TN) / all: the pixels on which the thresholded map and the mask agree.

    `threshold` is 0.5 after min-max (`half`), the map's `mean`, `otsu`, `sweep` (the mean over 0.05 … 0.95, with the
    curve) or `best`, the best of the sweep. `over=set` counts the pixels of all images together.
    """

    def agreeing(table: Tensor) -> Tensor:
        tp, _, _, tn = table.unbind(-1)
        return _shares((tp + tn, table.sum(-1)))

    return thresholded(case, "pixel accuracy", threshold, over, upsampling, agreeing)


@metric(
    "iou",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Jaccard, 1901",
    needs=("masks",),
    presets={"coporan": {}, "chefer": {"classes": "two", "threshold": "mean", "over": "set"}},
    discrepancies="Chefer's mIoU is the mean of the foreground's and the background's, each of the counts of all "
    "images, cut at the map's mean (`preset=chefer`); Coporan's and LeGrad's is the foreground's, image by image, cut "
    "at 0.5.",
)
def iou(
    case: EvalContext,
    threshold: Threshold = "half",
    classes: Literal["foreground", "two"] = "foreground",
    over: Over = "images",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """TP / (TP + FP + FN): the overlap of the thresholded map and the mask; `two` is the mean with the background's.

    `threshold` as of pixel-accuracy. `over=set` adds up the counts of all images before they are divided.
    """

    def overlap(table: Tensor) -> Tensor:
        tp, fp, fn, tn = table.unbind(-1)
        own, ground = (tp, tp + fp + fn), (tn, tn + fp + fn)
        return _shares(own) if classes == "foreground" else _shares(own, ground)

    return thresholded(case, "IoU", threshold, over, upsampling, overlap)


@metric(
    "f1",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="van Rijsbergen, 1979",
    needs=("masks",),
    presets={"coporan": {}, "chefer": {"threshold": "mean", "rows": True}},
    discrepancies="Chefer's code takes the rows of an image for a batch: F1 row by row, 0 for rows without object, and "
    "the mean of that (`preset=chefer`). Here it is one F1 an image.",
)
def f1(
    case: EvalContext,
    threshold: Threshold = "half",
    over: Over = "images",
    rows: bool = False,
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """2 TP / (2 TP + FP + FN): precision and recall of the thresholded map in one number.

    `threshold` and `over` as of iou. `rows` is the mean over the rows of the image, as Chefer's code has it.
    """
    if rows:
        if over == "set" or threshold in ("sweep", "best"):
            raise BadInput(
                f"rows=True was given with threshold={threshold} and over={over}; expected one threshold (half, mean "
                "or otsu) and over=images, as in the code that it repeats."
            )
        return MetricOutput(on_masks(case, upsampling, lambda *given: _row_by_row(threshold, *given)))

    def both(table: Tensor) -> Tensor:
        tp, fp, fn, _ = table.unbind(-1)
        return _shares((2 * tp, 2 * tp + fp + fn))

    return thresholded(case, "F1", threshold, over, upsampling, both)


def _row_by_row(threshold: Threshold, maps: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
    """[B]: the mean over rows of F1; 0 where a row has nothing to find."""
    found = binary(maps, threshold)[0]
    table = confusion(*(each[:, :, None] for each in (found, objects, counts)))  # [B, H, 4]
    tp, fp, fn, _ = table.unbind(-1)
    return (2 * tp / (2 * tp + fp + fn).clamp(min=1)).mean(1)


def _shares(*each: tuple[Tensor, Tensor]) -> Tensor:
    """K pairs […] of part and whole -> […, K, 2]"""
    return torch.stack([torch.stack(pair, -1) for pair in each], -2)
