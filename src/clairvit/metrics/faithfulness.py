"""Faithfulness: does the score move as the map says it should? Patches are taken away, and the two are compared."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.case import Case, ScoreKind, steps_of
from clairvit.metrics.curves import Width, area, falling, rising
from clairvit.metrics.metric import Measured, metric
from clairvit.perturb.chance import dice
from clairvit.perturb.removal import Removal

Order = Literal["morf", "lerf", "random"]
PARTS = (0.01, 0.05, 0.1, 0.2, 0.5)  # ERASER's


@metric(
    "insertion-deletion",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="RISE's two curves, one number",
    orders=True,
    cost=lambda steps, **_: Cost(2 * steps),
)
def insertion_deletion(
    case: Case, steps: int = 9, removal: Removal = "token", score: ScoreKind = "prob", auc: Width = "width"
) -> Tensor:
    """insertion − deletion: high if the first patches are enough, and missed."""
    up, down = (curve(case, steps, removal, score, "insertion-deletion") for curve in (rising, falling))
    return area(*up, auc) - area(*down, auc)


@metric(
    "aopc",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Samek et al., 2017",
    orders=True,
    turned_by=("order", "lerf"),
    cost=lambda regions, **_: Cost(regions),
    discrepancies="Quantus calls lower better; a larger drop is better when the most relevant go first, worse when the "
    "least relevant do (`order=lerf`).",
)
def aopc(
    case: Case,
    regions: int = 100,
    order: Order = "morf",
    removal: Removal = "token",
    score: ScoreKind = "prob",
) -> Measured:
    """1/(K+1) sum_k f(x) − f(x_k): the mean drop while patches go one by one, most relevant first.

    `order=lerf` takes the least relevant first (lower is better then), `random` any.
    """
    count = min(regions, case.patches - 1)
    at_least("regions", count, 1)
    rank = {"morf": case.rank, "lerf": case.patches - 1 - case.rank, "random": _any_order(case)}[order]
    gone = torch.arange(1, count + 1, device=rank.device)
    y = case.left(rank[:, :, None, :] >= gone[:, None], removal, score, "aopc")
    drop = case.original(score)[:, None] - y  # [M, B, K]
    drop = torch.cat([torch.zeros_like(drop[..., :1]), drop], -1)
    return Measured(
        drop.mean(-1), torch.arange(count + 1, dtype=torch.float64) / case.patches, drop, f"drop of {score}"
    )


def _any_order(case: Case) -> Tensor:
    places = [torch.randperm(case.patches, generator=dice(mark, 1)) for mark in case.marks]
    return torch.stack(places).to(case.rank.device).expand_as(case.rank)


@metric(
    "comprehensiveness",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="DeYoung et al., ACL 2020",
    orders=True,
    cost=lambda **_: Cost(len(PARTS)),
)
def comprehensiveness(case: Case, removal: Removal = "token", score: ScoreKind = "prob") -> Tensor:
    """mean_q f(x) − f(x without the top q), q = 1, 5, 10, 20, 50 %: high if what matters is among them."""
    gone = torch.tensor(steps_of(case.patches, PARTS), device=case.rank.device)
    y = case.left(case.rank[:, :, None, :] >= gone[:, None], removal, score, "comprehensiveness")
    return (case.original(score)[:, None] - y).mean(-1)


@metric(
    "sufficiency",
    family="faithfulness",
    better="lower",
    span=(-1, 1),
    paper="DeYoung et al., ACL 2020",
    orders=True,
    cost=lambda **_: Cost(len(PARTS)),
    discrepancies="Quantus has another metric of this name, which compares maps of images of a batch.",
)
def sufficiency(case: Case, removal: Removal = "token", score: ScoreKind = "prob") -> Tensor:
    """mean_q f(x) − f(the top q alone), q = 1, 5, 10, 20, 50 %: low if they are enough."""
    shown = torch.tensor(steps_of(case.patches, PARTS), device=case.rank.device)
    y = case.left(case.rank[:, :, None, :] < shown[:, None], removal, score, "sufficiency")
    return (case.original(score)[:, None] - y).mean(-1)


@metric(
    "faithfulness-correlation",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Bhatt et al., IJCAI 2020",
    cost=lambda runs, **_: Cost(runs),
    discrepancies="Quantus perturbs 224 of 150 528 channel values by default, which changes next to nothing; here a "
    "quarter of the patches goes.",
)
def faithfulness_correlation(
    case: Case,
    runs: int = 100,
    subset: float = 0.25,
    removal: Removal = "token",
    score: ScoreKind = "logit",
) -> Tensor:
    """corr_r(sum of the map in S_r, f(x) − f(x without S_r)) over random sets of patches S_r.

    The sets are an image's own and the same for all methods, so that these share the passes. One image's score varies
    by about 1/sqrt(runs) by luck alone; undefined for a constant map.
    """
    at_least("runs", runs, 3)
    gone = _random_sets(case, runs, subset)  # [B, runs, patches]
    drops = case.original(score)[:, None] - _shared(case, ~gone, removal, score, "faithfulness-correlation")
    sums = torch.einsum("mbp,brp->mbr", case.maps.flatten(2), gone.to(case.maps))
    return pearson(sums, drops.expand(len(sums), -1, -1)).masked_fill(case.degenerate, math.nan)


@metric(
    "sensitivity-n",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Ancona et al., ICLR 2018",
    cost=lambda runs, sizes, **_: Cost(runs * sizes),
    discrepancies="Quantus correlates across the images of its first batch; here as in the paper, image by image.",
)
def sensitivity_n(
    case: Case, runs: int = 20, sizes: int = 5, removal: Removal = "token", score: ScoreKind = "logit"
) -> Measured:
    """mean_n corr_r(sum of the map in S, f(x) − f(x without S)), |S| = n, over set sizes from few to most patches."""
    at_least("runs", runs, 3)
    at_least("sizes", sizes, 1)
    parts = [(k + 1) / (sizes + 1) for k in range(sizes)]
    gone = torch.cat([_random_sets(case, runs, part, k) for k, part in enumerate(parts)], 1)  # [B, sizes·runs, P]
    drops = case.original(score)[:, None] - _shared(case, ~gone, removal, score, "sensitivity-n")
    sums = torch.einsum("mbp,brp->mbr", case.maps.flatten(2), gone.to(case.maps))
    by_size = (*sums.shape[:2], sizes, runs)
    found = pearson(sums.reshape(by_size), drops.expand_as(sums).reshape(by_size))  # [M, B, sizes]
    found = found.masked_fill(case.degenerate[..., None], math.nan)
    return Measured(found.mean(-1), torch.tensor(parts, dtype=torch.float64), found, "correlation")


@metric(
    "faithfulness-estimate",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Alvarez-Melis & Jaakkola, NeurIPS 2018",
    orders=True,
    cost=lambda steps, **_: Cost(steps),
)
def faithfulness_estimate(
    case: Case, steps: int = 14, removal: Removal = "token", score: ScoreKind = "logit"
) -> Tensor:
    """corr_k(sum of the map in group k, f(x) − f(x without group k)), groups of patches by falling relevance."""
    at_least("steps", steps, 3)
    group = case.rank * steps // case.patches  # [M, B, patches]
    member = group[:, :, None, :] == torch.arange(steps, device=group.device)[:, None]  # [M, B, steps, patches]
    drops = case.original(score)[:, None] - case.left(~member, removal, score, "faithfulness-estimate")
    sums = (case.maps.flatten(2)[:, :, None] * member).sum(-1)
    return pearson(sums, drops).masked_fill(case.degenerate, math.nan)


@metric(
    "monotonicity",
    family="faithfulness",
    better="higher",
    span=(0, 1),
    paper="Arya et al., 2019",
    orders=True,
    cost=lambda steps, **_: Cost(steps - 1),  # the last step is the image itself
    discrepancies="The original asks whether all steps rise, yes or no; here the share of them that do.",
)
def monotonicity(case: Case, steps: int = 10, removal: Removal = "token", score: ScoreKind = "prob") -> Measured:
    """#{k: f rises as the k-th group comes} / steps, least relevant groups first: 1 if every group adds something."""
    at_least("steps", steps, 2)
    place = case.patches - 1 - case.rank  # least relevant first
    shown = torch.tensor([round(k * case.patches / steps) for k in range(1, steps)], device=place.device)
    y = case.left(place[:, :, None, :] < shown[:, None], removal, score, "monotonicity")
    y = torch.cat([y, case.original(score).expand(len(y), -1)[..., None]], -1)
    parts = torch.tensor([k / steps for k in range(1, steps + 1)], dtype=torch.float64)
    return Measured((y[..., 1:] >= y[..., :-1]).double().mean(-1), parts, y, score)


@metric(
    "completeness",
    family="faithfulness",
    better="lower",
    span=(0, math.inf),
    paper="Sundararajan et al., ICML 2017",
    cost=lambda **_: Cost(1),
    discrepancies="Quantus asks for exact equality of floating point numbers after normalising the map: never true.",
)
def completeness(case: Case, removal: Removal = "mean", score: ScoreKind = "logit") -> Tensor:
    """|sum of the map − rise| / |rise|, rise = f(x) − f(nothing left): 0 if the map adds up to what it explains."""
    nothing = torch.zeros(1, 1, case.patches, dtype=torch.bool)
    rise = case.original(score) - _shared(case, nothing, removal, score, "completeness")[:, 0]
    return (case.maps.sum((2, 3)) - rise).abs() / rise.abs()


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """[…, n] twice -> […]; NaN where one of them is constant."""
    a, b = (one.double() - one.double().mean(-1, keepdim=True) for one in (a, b))
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def _random_sets(case: Case, runs: int, part: float, stream: int = 0) -> Tensor:
    """bool [B, runs, patches]: sets of one size, an image's own, drawn from seed and image."""
    if not 0 < part < 1:
        raise BadInput(f"subset={part} was given; expected a part of the patches between 0 and 1, such as 0.25.")
    (count,) = steps_of(case.patches, [part])
    drawn = [torch.rand(runs, case.patches, generator=dice(mark, 2 + stream)) for mark in case.marks]
    return torch.stack(drawn).to(case.maps.device).argsort(-1).argsort(-1) < count


def _shared(case: Case, keep: Tensor, removal: str, score: str, what: str) -> Tensor:
    """[B, V] scores that do not depend on the map, so that all methods share them."""
    with case.probe(removal, what, keep.shape[1]) as probe:
        return probe.keeping(keep, case.value(score)).double()


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise BadInput(f"{name}={value} was given; expected {least} or more.")
