"""Localisation by rank: are the pixels of the object those with the highest values? No threshold is chosen.

The mean of `ap` over images is what papers call mAP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.masks import on_masks
from clairvit.metrics.registry import metric
from clairvit.metrics.threshold import binary, min_max


@metric(
    "ap",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="area under precision–recall",
    needs=("masks",),
    presets={"chefer": {"pooled": True, "upsampling": "bilinear"}, "skipplus": {}},
    discrepancies="Chefer's code pools background and foreground (`pooled`), so that a good background gives a high "
    "value; SkipPLUS ranks the foreground alone, patches as squares (its later code: bicubic). Deep Vision does not "
    "say whether its maps are cut first (`on=binary`).",
)
def average_precision(
    case: EvalContext,
    pooled: bool = False,
    on: Literal["soft", "binary"] = "soft",
    threshold: Literal["half", "mean", "otsu"] = "half",
    upsampling: Upsampling = "nearest",
) -> Tensor:
    """sum_n (R_n − R_{n−1}) P_n over the map's values as thresholds: how well the map ranks object above background.

    The score of a set, the mean over images, is the mAP of the papers. Equal values are one threshold. Shifting or
    stretching the map changes nothing; the mask's area is what luck gets. `on=binary` ranks the map after it was cut at
    `threshold`. `pooled` ranks every pixel twice, once as foreground by r, the map in 0…1, and once as background by
    1 − r.
    """

    def ap(maps: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
        soft = on == "soft"
        if not pooled:
            return _ranked(maps if soft else binary(maps, threshold)[0].double(), objects, counts, _ap)
        r = min_max(maps) if soft else binary(maps, threshold)[0].double()
        both = torch.cat([1 - r, r], 1)  # [B, 2 H, W], the background above the foreground
        return _ranked(both, torch.cat([~objects, objects], 1), torch.cat([counts, counts], 1), _ap)

    return on_masks(case, upsampling, ap, ranks=not pooled)


@metric(
    "roc-auc",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="area under ROC",
    needs=("masks",),
    presets={"quantus": {}},
)
def roc_auc(case: EvalContext, upsampling: Upsampling = "nearest") -> Tensor:
    """P(map on the object > map off it), equals count half: 0.5 by luck; undefined where there is no background."""
    return on_masks(case, upsampling, lambda maps, objects, counts: _ranked(maps, objects, counts, _roc), ranks=True)


def _ranked(maps: Tensor, objects: Tensor, counts: Tensor, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found = []
    for values, mask, valid in zip(maps, objects, counts, strict=True):
        found.append(of(*_at_thresholds(values[valid], mask[valid])) if valid.any() else values.new_zeros(()))
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


@metric(
    "relevance-rank",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Arras et al., 2022",
    needs=("masks",),
    orders=True,
    presets={"quantus": {}},
    discrepancies="Quantus breaks ties by an unstable sort, so that its value depends on the order in memory; here "
    "pixels that tie for the last place count in part.",
)
def relevance_rank(case: EvalContext, upsampling: Upsampling = "bilinear") -> Tensor:
    """|top-K of the map ∩ object| / K, K the object's area; pixels that tie for the last place count in part."""

    def share(maps: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
        return _in_top(maps, objects, counts, objects.flatten(1).sum(1))

    return on_masks(case, upsampling, share, ranks=True)


@metric(
    "top-k",
    family="localisation",
    better="higher",
    span=(0, 1),
    paper="Theiner et al., 2022",
    needs=("masks",),
    orders=True,
    presets={"quantus": {}},
    discrepancies="Quantus breaks ties by an unstable sort; here what ties for the last place counts in part. Its "
    "concept_influence (times all pixels / the object's) leaves 0 … 1 and is not offered.",
)
def top_k(case: EvalContext, k: int = 1000, upsampling: Upsampling = "bilinear") -> Tensor:
    """|top-k of the map ∩ object| / k: the share of the k highest pixels that lie on the object.

    Where fewer than k pixels count, of all of them.
    """
    if k < 1:
        raise BadInput(f"k={k} was given; expected 1 or more pixels, such as k=1000.")

    def share(maps: Tensor, objects: Tensor, counts: Tensor) -> Tensor:
        return _in_top(maps, objects, counts, counts.flatten(1).sum(1).clamp(max=k))

    return on_masks(case, upsampling, share, ranks=True)


def _in_top(maps: Tensor, objects: Tensor, counts: Tensor, sizes: Tensor) -> Tensor:
    """[B]: how much of the `sizes` highest pixels that count is object; what ties for the last place counts in part."""
    found = []
    for values, mask, valid, size in zip(maps, objects, counts, sizes.tolist(), strict=True):
        if size == 0:  # no object: undefined, whatever stands here
            found.append(values.new_zeros(()))
            continue
        seen, hit = values[valid], mask[valid]
        edge = seen.topk(size).values[-1]
        sure, tied = (seen > edge).double(), (seen == edge).double()
        part = (size - sure.sum()) / tied.sum()
        found.append(((sure + part * tied) * hit).sum() / size)
    return torch.stack(found)
