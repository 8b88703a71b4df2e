"""Masks: what all metrics that compare maps with masks share: undefined cases, void pixels, masks that cover all."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.threshold import steady

FULL = (
    "a mask covers its whole image: scores against it are defined, and say nothing about the map "
    "(leave such images out)"
)


def on_masks(
    case: EvalContext, upsampling: Upsampling, of: Callable[[Tensor, Tensor, Tensor], Tensor], *, ranks: bool = False
) -> Tensor:
    """[M, B, …]: `of` a map [B, H, W], objects and pixels that count, both bool [B, H, W], method by method.

    NaN where the map has NaN or infinity, or where there is no object at all. `ranks` says that only the order of the
    values counts: then plateaus that upsampling made are levelled, as they are equal but for round-off.
    """
    objects, counts = objects_of(case)
    found = []
    for raw, one, broken in zip(case.raw, case.fine(upsampling), case.invalid, strict=True):
        clean = one.masked_fill(broken[:, None, None], 0)
        computed = upsampling != "nearest" and raw.shape[-2:] != one.shape[-2:]
        values = of(steady(clean) if ranks and computed else clean, objects, counts)
        found.append(left_out(values, broken | ~present(objects)))
    return torch.stack(found)


def objects_of(case: EvalContext) -> tuple[Tensor, Tensor]:
    """bool [B, H, W] twice: the objects and the pixels that count. Void pixels are neither object nor background."""
    masks = case.needed_masks()
    counts = torch.ones_like(masks) if case.void is None else ~case.void
    objects = masks & counts
    if bool((present(objects) & ~present(counts & ~objects)).any()):
        case.aside.note(FULL)
    return objects, counts


def present(pixels: Tensor) -> Tensor:
    """bool [B, H, W] -> bool [B]: is there any?"""
    return pixels.flatten(1).any(1)


def left_out(values: Tensor, where: Tensor) -> Tensor:
    """[B, …] with NaN in the rows of `where`, bool [B]."""
    return values.masked_fill(where.reshape(-1, *[1] * (values.ndim - 1)), math.nan)
