"""Chefer et al.'s evaluation code, which several papers took over: perturbation of pixels, and scores against masks."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.curves import CurveScore, RemovalSchedule, Reverse, Steps, area_under_curve, deletion_curve
from clairvit.metrics.localisation import Ranked, Split, average_precision_of, binarise, confusion, score_against_masks
from clairvit.metrics.registry import MetricOutput, add_presets, preset
from clairvit.numerics import min_max
from clairvit.option_types import Doc
from clairvit.perturbation.removal import Removal


@preset("deletion", "chefer", moved=("counting", "whole"))
def perturbation(
    context: EvalContext,
    steps: Steps = 9,
    removal: Removal = "black",
    score: CurveScore = "accuracy",
    reverse: Reverse = False,
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return the area under the accuracy over 10 to 90 % of the pixels removed, divided by that width.

    10 % of n pixels are int(n / 10), and the whole image does not count.
    """
    schedule = RemovalSchedule(steps, granularity="pixel", counting="down", upsampling=upsampling)
    x, y = deletion_curve(context, schedule, removal, score, "deletion", whole=False, reverse=reverse)
    return MetricOutput(area_under_curve(x, y), x, y, context.meaning(score))


add_presets("deletion", **{"chefer-negative": {"preset": "chefer", "reverse": True}})


@preset("f1", "chefer", moved=("rows",))
def f1_of_rows(context: EvalContext, threshold: Split = "mean", upsampling: Upsampling = "bilinear") -> MetricOutput:
    """Return the mean of F1 over the rows of the image, 0 for rows without object and prediction: rows as a batch."""

    def score(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        predicted = binarise(maps, threshold)[0]
        table = confusion(*(each[:, :, None] for each in (predicted, objects, valid)))  # [B, H, 4]
        tp, fp, fn, _ = table.unbind(-1)
        return (2 * tp / (2 * tp + fp + fn).clamp(min=1)).mean(1)

    return MetricOutput(score_against_masks(context, upsampling, score))


@preset("ap", "chefer", moved=("pooled",))
def pooled_average_precision(
    context: EvalContext,
    on: Ranked = "soft",
    threshold: Annotated[Split, Doc("where the map is cut for on=binary")] = "half",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return the average precision of every pixel twice: as foreground by r, the map in 0…1, as background by 1 − r."""

    def score(maps: Tensor, objects: Tensor, valid: Tensor) -> Tensor:
        r = min_max(maps, (1, 2)) if on == "soft" else binarise(maps, threshold)[0].double()
        both = torch.cat([1 - r, r], 1)  # [B, 2 H, W], the background above the foreground
        return average_precision_of(both, torch.cat([~objects, objects], 1), torch.cat([valid, valid], 1))

    return score_against_masks(context, upsampling, score)
