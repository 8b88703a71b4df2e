"""Faithfulness: does the score move as the map says it should? Patches are taken away, and the two are compared."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.context import EvalContext, ScoreKind, Upsampling, steps_of
from clairvit.metrics.curves import Walk, Width, area, falling, passes, rising
from clairvit.metrics.noise import Draws
from clairvit.metrics.pixel_ranking import (
    check_paints,
    random_values,
    scores_without_values,
    sums_at_values,
    value_ranks,
    without,
)
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.metrics.similarity import pearson
from clairvit.perturbation.removal import Removal
from clairvit.perturbation.rng import make_generator

Features = Literal["patch", "channel"]


@metric(
    "insertion-deletion",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="RISE's two curves, one number",
    in_score=True,
    orders=True,
    cost=lambda steps, **_: Cost(2 * steps),
)
def insertion_deletion(
    case: EvalContext, steps: int = 9, removal: Removal = "token", score: ScoreKind = "prob", auc: Width = "width"
) -> Tensor:
    """insertion − deletion: high if the first patches are enough, and missed. Raw scores are normalised as there."""
    up, down = (curve(case, Walk(steps), removal, score, "insertion-deletion") for curve in (rising, falling))
    return area(*up, auc) - area(*down, auc)


@metric(
    "faithfulness-correlation",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Bhatt et al., IJCAI 2020",
    cost=lambda runs, **_: Cost(runs),
    presets={"quantus": {"features": "channel", "subset": 224.0, "removal": "minimum", "draws": "quantus"}},
    discrepancies="Quantus perturbs 224 of 150 528 channel values by default, which changes next to nothing; here a "
    "quarter of the patches goes.",
)
def faithfulness_correlation(
    case: EvalContext,
    runs: int = 100,
    subset: float = 0.25,
    features: Features = "patch",
    removal: Removal = "token",
    score: ScoreKind = "logit",
    draws: Draws = "own",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """corr_r(sum of the map in S_r, f(x) − f(x without S_r)) over random sets of patches S_r.

    `subset` is a part of them, or a count. The sets are an image's own and the same for all methods, so that these
    share the passes. One image's score varies by about 1/sqrt(runs) by luck alone; undefined for a constant map.
    `features=channel` takes away single channel values of the pixels, for a removal that paints. `draws=quantus` draws
    these as Quantus does for an image alone after np.random.seed(seed).
    """
    at_least("runs", runs, 3)
    what = "faithfulness-correlation"
    if features == "channel":
        places = random_values(case, runs, size_of(subset, case.trace.pixels[0].numel()), draws)
        drops = case.original(score)[:, None] - scores_without_values(case, places, removal, score, what)
        sums = sums_at_values(case, places, upsampling)
    else:
        if draws == "quantus":
            raise BadInput("draws=quantus was given for patches, which Quantus does not draw; add features=channel.")
        gone = _random_sets(case, runs, size_of(subset, case.patches))  # [B, runs, patches]
        drops = case.original(score)[:, None] - _shared(case, ~gone, removal, score, what)
        sums = torch.einsum("mbp,brp->mbr", case.maps.flatten(2), gone.to(case.maps))
    return pearson(sums, drops.expand(len(sums), -1, -1)).masked_fill(case.degenerate, math.nan)


@metric(
    "sensitivity-n",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Ancona et al., ICLR 2018",
    cost=lambda runs, sizes, **_: Cost(runs * sizes),
    discrepancies="Quantus correlates across the images of its first batch, so that one image has no score, and the "
    "sum of one step's values with the fall of all steps so far; here as in the paper, image by image.",
)
def sensitivity_n(
    case: EvalContext, runs: int = 20, sizes: int = 5, removal: Removal = "token", score: ScoreKind = "logit"
) -> MetricOutput:
    """mean_n corr_r(sum of the map in S, f(x) − f(x without S)), |S| = n, over set sizes from few to most patches."""
    at_least("runs", runs, 3)
    at_least("sizes", sizes, 1)
    parts = [(k + 1) / (sizes + 1) for k in range(sizes)]
    gone = torch.cat(
        [_random_sets(case, runs, size_of(part, case.patches), k) for k, part in enumerate(parts)], 1
    )  # [B, sizes·runs, P]
    drops = case.original(score)[:, None] - _shared(case, ~gone, removal, score, "sensitivity-n")
    sums = torch.einsum("mbp,brp->mbr", case.maps.flatten(2), gone.to(case.maps))
    by_size = (*sums.shape[:2], sizes, runs)
    found = pearson(sums.reshape(by_size), drops.expand_as(sums).reshape(by_size))  # [M, B, sizes]
    found = found.masked_fill(case.degenerate[..., None], math.nan)
    return MetricOutput(found.mean(-1), torch.tensor(parts, dtype=torch.float64), found, "correlation")


@metric(
    "faithfulness-estimate",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Alvarez-Melis & Jaakkola, NeurIPS 2018",
    orders=True,
    cost=lambda patches, steps, features, at_once, **_: passes(
        patches, features, at_once if features == "channel" else None, steps
    ),
    presets={"quantus": {"features": "channel", "removal": "minimum"}},
    discrepancies="Quantus takes away one channel value at a time, 150 528 passes (`at_once` makes it less).",
)
def faithfulness_estimate(
    case: EvalContext,
    steps: int = 14,
    features: Features = "patch",
    at_once: int = 1,
    removal: Removal = "token",
    score: ScoreKind = "logit",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """corr_k(sum of the map in group k, f(x) − f(x without group k)), groups of patches by falling relevance.

    There are `steps` groups; with `features=channel` they are of `at_once` channel values of the pixels each.
    """
    at_least("steps", steps, 3)
    if features == "channel":
        return _estimate_by_values(case, at_once, removal, score, upsampling).masked_fill(case.degenerate, math.nan)
    group = case.rank * steps // case.patches  # [M, B, patches]
    member = group[:, :, None, :] == torch.arange(steps, device=group.device)[:, None]  # [M, B, steps, patches]
    drops = case.original(score)[:, None] - case.left(~member, removal, score, "faithfulness-estimate")
    sums = (case.maps.flatten(2)[:, :, None] * member).sum(-1)
    return pearson(sums, drops).masked_fill(case.degenerate, math.nan)


def _estimate_by_values(case: EvalContext, at_once: int, removal: str, score: str, upsampling: Upsampling) -> Tensor:
    """[M, B]"""
    rank = value_ranks(case, upsampling)  # [M, B, C·H·W]
    count = rank.shape[-1]
    if not 1 <= at_once <= count // 3:
        raise BadInput(
            f"at_once={at_once} was given; expected 1 to {count // 3} channel values, so that there are 3 groups."
        )
    first = torch.arange(0, count, at_once, device=rank.device)
    drops = case.original(score)[:, None] - without(
        case, rank, first, (first + at_once).clamp(max=count), removal, score, "faithfulness-estimate"
    )
    values = torch.stack([maps.flatten(1) for maps in case.fine(upsampling)])  # [M, B, H·W], alike in every channel
    values = values.repeat(1, 1, count // values.shape[-1])
    sums = drops.new_zeros(drops.shape).scatter_add_(2, rank // at_once, values)
    return pearson(sums, drops)


@metric(
    "monotonicity",
    family="faithfulness",
    better="higher",
    span=(0, 1),
    paper="Arya et al., 2019",
    orders=True,
    cost=lambda steps, **_: Cost(steps - 1),  # the last step is the image itself
    discrepancies="The original asks whether all steps rise, yes or no; here the share of them that do. Quantus starts "
    "from an empty image and fills it with the same empty value, so that it says yes to every map: not reproduced.",
)
def monotonicity(
    case: EvalContext, steps: int = 10, removal: Removal = "token", score: ScoreKind = "prob"
) -> MetricOutput:
    """#{k: f rises as the k-th group comes} / steps, least relevant groups first: 1 if every group adds something.

    Patches that speak against the target lower it for every map, the best one too. Raw scores, of a model without
    probabilities, are taken as they are: a share of steps has no unit.
    """
    at_least("steps", steps, 2)
    place = case.patches - 1 - case.rank  # least relevant first
    shown = torch.tensor([round(k * case.patches / steps) for k in range(1, steps)], device=place.device)
    y = case.left(place[:, :, None, :] < shown[:, None], removal, score, "monotonicity")
    y = torch.cat([y, case.original(score).expand(len(y), -1)[..., None]], -1)
    parts = torch.tensor([k / steps for k in range(1, steps + 1)], dtype=torch.float64)
    meaning = "score" if case.falls_back(score) else case.meaning(score)
    return MetricOutput((y[..., 1:] >= y[..., :-1]).double().mean(-1), parts, y, meaning)


@metric(
    "completeness",
    family="faithfulness",
    better="lower",
    span=(0, math.inf),
    paper="Sundararajan et al., ICML 2017",
    undefined="the score with nothing left is that of the whole image",
    cost=lambda **_: Cost(1),
    turned_by=("exact", True),
    presets={"quantus": {"exact": True, "removal": "minimum"}},
    discrepancies="Quantus asks for exact equality of floating point numbers after dividing the map by its largest "
    "magnitude, and empties the first channel only if the map has no channels (`exact`): next to never true.",
)
def completeness(
    case: EvalContext,
    removal: Removal = "mean",
    score: ScoreKind = "logit",
    exact: bool = False,
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """|sum of the map − rise| / |rise|, rise = f(x) − f(nothing left): 0 if the map adds up to what it explains.

    Undefined where the rise is 0.
    `exact` is Quantus' question: 1 where the map's pixels, divided by the largest magnitude, add up to the rise from
    an empty first channel to the last bit, else 0; higher is better then.
    """
    if exact:
        return _adds_up(case, removal, score, upsampling)
    nothing = torch.zeros(1, 1, case.patches, dtype=torch.bool)
    rise = case.original(score) - _shared(case, nothing, removal, score, "completeness")[:, 0]
    return (case.maps.sum((2, 3)) - rise).abs() / rise.abs().masked_fill(rise == 0, math.nan)


def _adds_up(case: EvalContext, removal: str, score: str, upsampling: Upsampling) -> Tensor:
    """[M, B] 1 where the sum is equal to the rise, as numbers of the model's own precision are."""
    with case.probe(removal, "completeness", 1) as probe:
        check_paints(probe)
        emptied = torch.cat([probe.background[:, :1], probe.pixels[:, 1:]], 1)[:, None]
        found = probe.score_images(1, lambda ks: emptied, score=case.value(score))[:, 0]
    own = case.trace.pixels.dtype
    rise = (case.original(score).to(own) - found.to(own)).double()
    largest = [maps.abs().amax((1, 2), keepdim=True) for maps in case.fine(upsampling)]
    sums = [(maps / most).sum((1, 2)) for maps, most in zip(case.fine(upsampling), largest, strict=True)]
    return (torch.stack(sums) == rise).double()


def size_of(subset: float, count: int) -> int:
    """How many of `count` a part between 0 and 1 is, or a whole number of them."""
    if 0 < subset < 1:
        return steps_of(count, [subset])[0]
    if not float(subset).is_integer() or not 1 <= subset < count:
        raise BadInput(
            f"subset={subset} was given; expected a part between 0 and 1, such as 0.25, or a count of 1 to {count - 1}."
        )
    return int(subset)


def _random_sets(case: EvalContext, runs: int, count: int, stream: int = 0) -> Tensor:
    """bool [B, runs, patches]: sets of one size, an image's own, drawn from seed and image."""
    drawn = [torch.rand(runs, case.patches, generator=make_generator(mark, 2 + stream)) for mark in case.marks]
    return torch.stack(drawn).to(case.maps.device).argsort(-1).argsort(-1) < count


def _shared(case: EvalContext, keep: Tensor, removal: str, score: str, what: str) -> Tensor:
    """[B, V] scores that do not depend on the map, so that all methods share them."""
    with case.probe(removal, what, keep.shape[1]) as probe:
        return probe.score_kept(keep, case.value(score)).double()


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise BadInput(f"{name}={value} was given; expected {least} or more.")
