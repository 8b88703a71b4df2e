"""Occlusion and PAMI: windows of patches are hidden, or shown alone; a patch gets the mean over its windows."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import BadInput
from clairvit.methods.registry import FORWARD_ON_PLANE, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import Removal
from clairvit.tracing.trace import Trace

Box = tuple[int, int, int, int]  # top, left, height, width, in patches
Side = Annotated[int, Range(ge=1, unit="patches", example=1)]


@method(
    "occlusion",
    family="perturbation",
    paper="Zeiler & Fergus, ECCV 2014",
    output="image",
    requires=FORWARD_ON_PLANE,
    # a window starts at a patch: never more windows than patches
    extra_cost=ExtraCost(lambda patches, **_: Cost(patches), at_most=True, slow=True),
    score="prob",
    is_stochastic=False,
    signed=True,
)
def occlusion(
    trace: Trace,
    *,
    window: Annotated[Side, Doc("how many patches the window has along each side")] = 3,
    stride: Annotated[Side, Doc("how many patches the window moves at a time")] = 1,
    share: Annotated[bool, Doc("share the loss of a window among its patches; false gives each the whole loss")] = True,
    removal: Removal = "mean",
    seed: int = 0,
) -> MapResult:
    """mean of f(x) − f(x without W) over the windows W that cover a patch: what is lost behind a sliding grey square.

    `window` and `stride` count patches; the last window is cut off at the border. The loss of a window is shared among
    its patches, so that the map is right where all patches matter alike; share=false gives each the whole loss, as
    captum does. window=1 takes away one patch at a time, as leave-one-out does.
    """
    if stride > window:
        raise BadInput(
            f"stride={stride} was given with window={window}; expected a stride of at most the window, or some patches "
            f"are never covered. Use stride={window}."
        )
    grid = trace.layout.plane
    height, width = (min(window, max(1, side - 1)) for side in grid)  # something must be left to see
    notes = []
    if max(height, width) < window:
        cut = max(height, width)
        notes.append(f"occlusion: a window of {window} patches leaves nothing to see here; it was cut to {cut}")
    covered = box_masks(sliding_boxes(grid, (height, width), stride), grid)  # [V, rows, cols]
    with probing(trace, removal, label="occlusion", forwards=len(covered), seed=seed) as probe:
        scores = probe.score_kept(~covered.flatten(1)[None])  # [B, V]
        drops = (probe.original[:, None] - scores).double()
    if share:
        drops = drops / covered.flatten(1).sum(1).to(drops)
    return MapResult.from_probe(mean_over_boxes(drops, covered).to(scores.dtype), probe, notes=notes)


@method(
    "pami",
    family="perturbation",
    paper="Shi et al., 2023",
    output="image",
    requires=FORWARD_ON_PLANE,
    # at most: on small grids windows of different scales are the same
    extra_cost=ExtraCost(
        lambda scales, **_: Cost(sum((2 * k + 1) ** 2 for k in range(1, scales + 1))), at_most=True, slow=True
    ),
    score="prob",
    is_stochastic=False,
)
def pami(
    trace: Trace,
    *,
    scales: Annotated[int, Range(ge=1, example=4), Doc("how many sizes of windows are used")] = 4,
    removal: Removal = "blur",
    seed: int = 0,
) -> MapResult:
    """sum_k f(x with only part k) m_k / sum_k m_k: how well the parts that contain a patch do without all the rest.

    The parts are our choice, as no code was released: at scale s = 1 … `scales` windows of 1/(s+1) of each side, 2s+1
    of them along it, so that neighbours share about a half. Everything else is hidden by `removal`.
    """
    grid = trace.layout.plane
    shown = box_masks(multi_scale_boxes(grid, scales), grid)  # [V, rows, cols]
    with probing(trace, removal, label="pami", forwards=len(shown), seed=seed) as probe:
        scores = probe.score_kept(shown.flatten(1)[None])  # [B, V]
    return MapResult.from_probe(mean_over_boxes(scores.double(), shown).to(scores.dtype), probe)


def sliding_boxes(grid: tuple[int, int], window: tuple[int, int], stride: int) -> list[Box]:
    """Return windows from the first corner on, until the last one reaches the border."""
    starts = []
    for side, size in zip(grid, window, strict=True):
        step = min(stride, size)  # of a window that was cut: no patch is stepped over
        starts.append(range(0, step * math.ceil((side - size) / step) + 1, step))
    return [(top, left, *window) for top in starts[0] for left in starts[1]]


def multi_scale_boxes(grid: tuple[int, int], scales: int) -> list[Box]:
    """Return windows of several sizes, evenly spread from border to border; each once, where scales coincide."""
    boxes: dict[Box, None] = {}
    for scale in range(1, scales + 1):
        height, width = (math.ceil(side / (scale + 1)) for side in grid)
        tops, lefts = (_spread(side - size, 2 * scale + 1) for side, size in zip(grid, (height, width), strict=True))
        boxes |= {(top, left, height, width): None for top in tops for left in lefts}
    return list(boxes)


def _spread(last: int, count: int) -> list[int]:
    """Return at most `count` integers from 0 to `last`, evenly spaced."""
    count = min(count, last + 1)
    return [(2 * i * last + count - 1) // (2 * (count - 1)) for i in range(count)] if count > 1 else [0]


def box_masks(boxes: list[Box], grid: tuple[int, int]) -> Tensor:
    """Return the patches of each box, bool [V, rows, cols]; what reaches over the border is cut off."""
    masks = torch.zeros(len(boxes), *grid, dtype=torch.bool)
    for mask, (top, left, height, width) in zip(masks, boxes, strict=True):
        mask[top : top + height, left : left + width] = True
    return masks


def mean_over_boxes(values: Tensor, masks: Tensor) -> Tensor:
    """Return sum_k v_k m_k / sum_k m_k, [B, rows, cols], for values [B, V] of boxes, bool [V, rows, cols]."""
    m = masks.to(values)
    return torch.einsum("bv,vrc->brc", values, m) / m.sum(0)
