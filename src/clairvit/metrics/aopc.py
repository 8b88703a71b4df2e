"""Regions: the score is held to what it was as the best regions go one by one, and as the best parts go or stay."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from clairvit.methods.explanation import Cost
from clairvit.metrics.context import EvalContext, ScoreKind, Upsampling, steps_of
from clairvit.metrics.faithfulness import at_least
from clairvit.metrics.noise import Draws, numpy_chance
from clairvit.metrics.pixel_ranking import square_ranks, squares, without
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.perturbation.removal import Removal
from clairvit.perturbation.rng import make_generator

Order = Literal["morf", "lerf", "random"]
Summary = Literal["mean", "trapezoid"]
PARTS = (0.01, 0.05, 0.1, 0.2, 0.5)  # ERASER's


@metric(
    "aopc",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Samek et al., 2017",
    in_score=True,
    orders=True,
    turned_by=("order", "lerf"),
    cost=lambda regions, **_: Cost(regions),
    presets={"quantus": {"region": 8, "removal": "minimum", "area": "trapezoid", "draws": "quantus"}},
    discrepancies="Quantus calls lower better; a larger drop is better when the most relevant go first, worse when the "
    "least relevant do (`order=lerf`). Samek's mean counts the whole image, Quantus' area does not and is not divided "
    "by its width (`area=trapezoid`).",
)
def aopc(
    case: EvalContext,
    regions: int = 100,
    order: Order = "morf",
    removal: Removal = "token",
    score: ScoreKind = "prob",
    region: int | None = None,
    area: Summary = "mean",
    draws: Draws = "own",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """1/(K+1) sum_k f(x) − f(x_k): the mean drop while patches go one by one, most relevant first.

    `order=lerf` takes the least relevant first (lower is better then), `random` any. `region=8` takes squares of 8 × 8
    pixels of the enlarged map in the place of patches. `area=trapezoid` is the area under the drops k = 1, …, K, each
    step 1 wide. `draws=quantus` draws a random order as Quantus does after np.random.seed(seed). Drops of raw scores
    are divided by |f(x) − f(nothing left)|, undefined where that is 0.
    """
    rank, every = (case.rank, case.patches) if region is None else square_ranks(case, region, upsampling)
    count = min(regions, every - (region is None))  # patches: one is left, as models need
    at_least("regions", count, 1)
    chosen = _in_order(case, rank, order, draws)
    gone = torch.arange(1, count + 1, device=rank.device)
    if region is None:
        y = case.left(chosen[:, :, None, :] >= gone[:, None], removal, score, "aopc")
    else:
        own, _ = squares(case, region)
        y = without(case, chosen[:, :, own], torch.zeros_like(gone), gone, removal, score, "aopc")
    drop = case.normalised_drop(case.original(score)[:, None] - y, score, removal, "aopc")  # [M, B, K]
    x = torch.arange(count + 1, dtype=torch.float64) / every
    if area == "trapezoid":
        return MetricOutput(torch.trapezoid(drop, dim=-1), x[1:], drop, f"drop of {case.meaning(score)}")
    drop = torch.cat([torch.zeros_like(drop[..., :1]), drop], -1)
    return MetricOutput(drop.mean(-1), x, drop, f"drop of {case.meaning(score)}")


def _in_order(case: EvalContext, rank: Tensor, order: Order, draws: Draws) -> Tensor:
    """[M, B, n] places of regions whose place by relevance is `rank`."""
    count = rank.shape[-1]
    if order == "morf":
        return rank
    if order == "lerf":
        return count - 1 - rank
    if draws == "own":
        places = torch.stack([torch.randperm(count, generator=make_generator(mark, 1)) for mark in case.marks])
    else:  # the k-th number drawn is the region that goes k-th
        places = torch.from_numpy(numpy_chance(case.seed).permutation(count)).argsort()[None]
    return places.to(rank.device).expand_as(rank)


@metric(
    "comprehensiveness",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="DeYoung et al., ACL 2020",
    in_score=True,
    orders=True,
    cost=lambda **_: Cost(len(PARTS)),
)
def comprehensiveness(case: EvalContext, removal: Removal = "token", score: ScoreKind = "prob") -> Tensor:
    """mean_q f(x) − f(x without the top q), q = 1, 5, 10, 20, 50 %: high if what matters is among them.

    Drops of raw scores are divided by |f(x) − f(nothing left)|, undefined where that is 0.
    """
    gone = torch.tensor(steps_of(case.patches, PARTS), device=case.rank.device)
    y = case.left(case.rank[:, :, None, :] >= gone[:, None], removal, score, "comprehensiveness")
    return case.normalised_drop(case.original(score)[:, None] - y, score, removal, "comprehensiveness").mean(-1)


@metric(
    "sufficiency",
    family="faithfulness",
    better="lower",
    span=(-1, 1),
    paper="DeYoung et al., ACL 2020",
    in_score=True,
    orders=True,
    cost=lambda **_: Cost(len(PARTS)),
    discrepancies="Quantus has another metric of this name, which compares maps of images of a batch.",
)
def sufficiency(case: EvalContext, removal: Removal = "token", score: ScoreKind = "prob") -> Tensor:
    """mean_q f(x) − f(the top q alone), q = 1, 5, 10, 20, 50 %: low if they are enough.

    Drops of raw scores are divided by |f(x) − f(nothing left)|, undefined where that is 0.
    """
    shown = torch.tensor(steps_of(case.patches, PARTS), device=case.rank.device)
    y = case.left(case.rank[:, :, None, :] < shown[:, None], removal, score, "sufficiency")
    return case.normalised_drop(case.original(score)[:, None] - y, score, removal, "sufficiency").mean(-1)
