"""Deletion and insertion: how the score falls as the best patches (or pixels) go, and rises as they come."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.case import Case, Upsampling
from clairvit.metrics.metric import Measured, metric
from clairvit.perturb.chance import dice
from clairvit.perturb.removal import Removal

Width = Literal["width", "none"]
CurveScore = Literal["prob", "logit", "logprob", "accuracy"]
Granularity = Literal["patch", "pixel"]
_PIXELS: dict[str, Any] = {"granularity": "pixel"}
_DIFFER = (
    "What is removed, how (three different zeros: mean colour, black, image minimum), in which steps, and which score "
    "differ from paper to paper; the presets are theirs. SkipPLUS's code divides by nothing, so that a constant 1 "
    "gives 0.9 (`auc=none`)."
)


@metric(
    "deletion",
    family="faithfulness",
    better="lower",
    span=(0, 1),
    paper="Petsiuk et al., BMVC 2018 (RISE)",
    orders=True,
    turned_by=("reverse", True),
    cost=lambda steps, **_: Cost(steps),
    presets={
        "rise": {**_PIXELS, "removal": "mean", "steps": 27, "ends": True},
        "coporan": {**_PIXELS, "removal": "black", "steps": 99, "ends": True},
        "chefer": {**_PIXELS, "removal": "black", "score": "accuracy"},
        "skipplus": {"score": "accuracy", "auc": "none"},
    },
    discrepancies=_DIFFER,
)
def deletion(
    case: Case,
    steps: int = 9,
    removal: Removal = "token",
    score: CurveScore = "prob",
    granularity: Granularity = "patch",
    ends: bool = False,
    reverse: bool = False,
    auc: Width = "width",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Area under p(target) while the patches go, best first: low if the map found what matters.

    `steps=9` takes away 10 %, …, 90 %; the point with nothing taken away is there already, and `ends` adds the one with
    everything. `reverse` begins with the worst (Chefer's negative perturbation; higher is better then). `auc=width`
    divides the area by the width of the curve, so that a constant 1 gives 1. `granularity=pixel` orders the pixels of
    the enlarged map. `score=accuracy` asks whether the target is still the answer.
    """
    x, y = falling(case, steps, removal, score, "deletion", granularity, ends, reverse, upsampling)
    return Measured(area(x, y, auc), x, y, score)


@metric(
    "insertion",
    family="faithfulness",
    better="higher",
    span=(0, 1),
    paper="Petsiuk et al., BMVC 2018 (RISE)",
    orders=True,
    cost=lambda steps, **_: Cost(steps),
    presets={
        "rise": {**_PIXELS, "removal": "blur", "steps": 27, "ends": True},
        "skipplus": {"score": "accuracy", "auc": "none"},
    },
    discrepancies=_DIFFER,
)
def insertion(
    case: Case,
    steps: int = 9,
    removal: Removal = "token",
    score: CurveScore = "prob",
    granularity: Granularity = "patch",
    ends: bool = False,
    auc: Width = "width",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Area under p(target) while the patches come, best first: high if few of them are enough.

    `steps=9` shows 10 %, …, 90 %; the whole image is there already, and `ends` adds the point with nothing shown.
    """
    x, y = rising(case, steps, removal, score, "insertion", granularity, ends, upsampling)
    return Measured(area(x, y, auc), x, y, score)


def falling(
    case: Case,
    steps: int,
    removal: str,
    score: str,
    what: str,
    granularity: Granularity = "patch",
    ends: bool = False,
    reverse: bool = False,
    upsampling: Upsampling = "bilinear",
) -> tuple[Tensor, Tensor]:
    """Parts taken away [S + 1] and scores [M, B, S + 1], nothing taken away first."""
    parts = _parts(steps) + [1.0] * ends
    y = _left(case, parts, removal, score, what, granularity, upsampling, shown=False, reverse=reverse)
    whole = case.original(score).expand(len(y), -1)[..., None]
    return torch.tensor([0.0, *parts], dtype=torch.float64), torch.cat([whole, y], -1)


def rising(
    case: Case,
    steps: int,
    removal: str,
    score: str,
    what: str,
    granularity: Granularity = "patch",
    ends: bool = False,
    upsampling: Upsampling = "bilinear",
) -> tuple[Tensor, Tensor]:
    """Parts shown [S + 1] and scores [M, B, S + 1], the whole image last."""
    parts = [0.0] * ends + _parts(steps)
    y = _left(case, parts, removal, score, what, granularity, upsampling, shown=True, reverse=False)
    whole = case.original(score).expand(len(y), -1)[..., None]
    return torch.tensor([*parts, 1.0], dtype=torch.float64), torch.cat([y, whole], -1)


def kept_after(case: Case, steps: int) -> tuple[list[float], Tensor]:
    """Parts 1/(S+1) … S/(S+1), and what is left when each of them is taken away: bool [M, B, S, patches]."""
    parts = _parts(steps)
    gone = torch.tensor([_some(part, case.patches) for part in parts], device=case.rank.device)
    return parts, case.rank[:, :, None, :] >= gone[:, None]


def _parts(steps: int) -> list[float]:
    if steps < 1:
        raise BadInput(f"steps={steps} was given; expected 1 or more, such as steps=9.")
    return [k / (steps + 1) for k in range(1, steps + 1)]


def _left(
    case: Case,
    parts: list[float],
    removal: str,
    score: str,
    what: str,
    granularity: Granularity,
    upsampling: Upsampling,
    *,
    shown: bool,
    reverse: bool,
) -> Tensor:
    """[M, B, S] scores when the first parts of each map are shown alone, or taken away."""
    if granularity == "patch":
        rank, count = case.rank, case.patches
    else:
        rank, count = _pixel_ranks(case, upsampling), math.prod(case.size)
    rank = count - 1 - rank if reverse else rank
    first = torch.tensor([_some(part, count) for part in parts], device=rank.device)
    if granularity == "patch":
        within = rank[:, :, None, :] < first[:, None]  # [M, B, S, patches]
        return case.left(within if shown else ~within, removal, score, what)
    return _painted(case, rank, first, removal, score, what, shown)


def _some(part: float, count: int) -> int:
    """Rounded; a part that is not none is one at least, and all but all."""
    return round(part * count) if part in (0.0, 1.0) else min(max(1, round(part * count)), count - 1)


def _pixel_ranks(case: Case, upsampling: Upsampling) -> Tensor:
    """[M, B, H·W] the place of each pixel, highest first; ties in an order drawn from seed and image."""
    count = math.prod(case.size)
    luck = torch.stack([torch.randperm(count, generator=dice(mark, 1)) for mark in case.marks]).to(case.maps.device)
    places = torch.arange(count, device=luck.device).expand_as(luck)
    found = []
    for maps in case.fine(upsampling):
        flat = maps.flatten(1).nan_to_num(nan=-math.inf).gather(1, luck)
        order = luck.gather(1, flat.argsort(dim=1, descending=True, stable=True))
        found.append(torch.empty_like(order).scatter_(1, order, places))
    return torch.stack(found)


def _painted(case: Case, rank: Tensor, first: Tensor, removal: str, score: str, what: str, shown: bool) -> Tensor:
    """As `_left`, pixel by pixel: rank [M, B, H·W], first [S]."""
    methods, steps = len(rank), len(first)
    with case.probe(removal, what, methods * steps) as probe:
        if not probe.paints:
            raise BadInput(
                f"granularity=pixel was given with removal={removal}, which takes whole patches; expected one that "
                "paints: mean, black, blur, gaussian-blur or noise."
            )

        def variant(ks: range) -> Tensor:
            own = torch.tensor(list(ks), device=rank.device)
            within = rank[own // steps] < first[own % steps][:, None, None]  # [k, B, H·W]
            masks = (within if shown else ~within).transpose(0, 1).reshape(-1, len(ks), *case.size)
            return probe.blend(masks)

        found = probe.painting(methods * steps, variant, value=case.value(score)).double()
    return found.reshape(-1, methods, steps).transpose(0, 1)


def area(x: Tensor, y: Tensor, auc: Width) -> Tensor:
    """[…, S] -> […], by the trapezoid rule."""
    whole = torch.trapezoid(y.double(), x.to(y.device, torch.float64), dim=-1)
    return whole / float(x[-1] - x[0]) if auc == "width" else whole
