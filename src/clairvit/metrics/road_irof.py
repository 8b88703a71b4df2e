"""Removal: patches are imputed, superpixels painted over, blocks taken away; what the score does is held to the map."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.context import EvalContext, ScoreKind, Upsampling
from clairvit.metrics.curves import kept_after
from clairvit.metrics.faithfulness import at_least
from clairvit.metrics.pixel_ranking import check_paints, painted, squares
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.perturbation.removal import Removal
from clairvit.perturbation.rng import make_generator
from clairvit.perturbation.segments import segments_on_patches, superpixels_of

RoadOrder = Literal["combined", "morf", "lerf"]
# Streams of an image's chance that no other metric draws from: all of them share `case.marks`.
BLOCKS, TIES = 1001, 1002


@metric(
    "road",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Rong et al., ICML 2022",
    in_score=True,
    orders=True,
    cost=lambda steps, order, **_: Cost(steps * (2 if order == "combined" else 1)),
    turned_by=("order", "morf"),
    presets={"morf": {"order": "morf"}, "lerf": {"order": "lerf"}},
    discrepancies="The authors and Quantus report accuracy over a data set, pytorch-grad-cam the confidence, which is "
    "what is defined for one image and is done here; all of them take away single pixels, here whole patches go. "
    "Quantus fails on images of three channels.",
)
def road(
    case: EvalContext,
    steps: int = 9,
    order: RoadOrder = "combined",
    removal: Removal = "road",
    score: ScoreKind = "prob",
) -> MetricOutput:
    """mean_q (f(x without the last q) − f(x without the top q)) / 2, gaps imputed from what is around them.

    q = 10 %, …, 90 % with `steps=9`. `order=morf` is the mean of f(x without the top q) alone, where lower is better.
    `order=lerf` is the mean of f(x without the last q): higher is better. Raw scores are taken as
    (f − f(nothing left)) / |f(x) − f(nothing left)|, undefined where this divides by 0.
    """
    at_least("steps", steps, 1)
    parts, best_gone = kept_after(case, steps)  # bool [M, B, S, patches]
    counts = (~best_gone).sum(-1, keepdim=True)
    last_gone = case.rank[:, :, None, :] < case.patches - counts
    x = torch.tensor(parts, dtype=torch.float64)
    if order != "combined":
        y = case.left(best_gone if order == "morf" else last_gone, removal, score, "road")
        y = case.normalised(y, score, removal, "road")
        return MetricOutput(y.mean(-1), x, y, case.meaning(score))
    both = case.left(torch.cat([best_gone, last_gone], 2), removal, score, "road")
    both = case.normalised(both, score, removal, "road")
    morf, lerf = both[..., :steps], both[..., steps:]
    y = (lerf - morf) / 2
    return MetricOutput(y.mean(-1), x, y, f"half the difference of {case.meaning(score)}")


@metric(
    "irof",
    family="faithfulness",
    better="higher",
    span=(-math.inf, 1),
    paper="Rieger & Hansen, 2020",
    undefined="an image of one superpixel has no order of superpixels, and a score of 0 no shares",
    orders=True,
    cost=lambda patches, **_: Cost(patches),
    discrepancies="The paper cuts images up with SLIC and to the pixel; here with quickshift (as LIME does), and each "
    "patch belongs to the superpixel that has most of it. Quantus fails on images of three channels, and its area is "
    "not over the number of superpixels.",
)
def irof(case: EvalContext, removal: Removal = "mean", score: ScoreKind = "prob") -> Tensor:
    """1 − area under f(x_k)/f(x), superpixels gone one by one, those of the highest mean relevance first.

    x_k lacks the first k of L superpixels, the area is over k/L. Costs at most as many passes as there are patches.
    Undefined for an image of one superpixel, which has no order; meant for scores that are positive, as `prob` is. Of
    raw scores the share is (f(x_k) − f(nothing left)) / |f(x) − f(nothing left)|; undefined where a share divides by 0.
    """
    segments = superpixels_of(case.trace.pixels, case.model.preprocess)
    groups = [segments_on_patches(own, case.trace.layout.grid) for own in segments]
    keep, images = [], []
    for image, own in enumerate(groups):
        left = _after_groups(case, image, own)  # [M, L, patches]
        keep.append(left.flatten(0, 1))
        images += [image] * len(keep[-1])
    with case.probe(removal, "irof", math.ceil(len(images) / len(groups))) as probe:
        asked = torch.tensor(images, device=case.maps.device)
        y = probe.score_pairs(asked, torch.cat(keep), case.value(score)).double()
    whole = case.original(score)
    nothing, unit = torch.zeros_like(whole), whole.masked_fill(whole == 0, math.nan)
    if case.falls_back(score):
        nothing, unit = case.nothing_left(removal, "irof")
    start, shares = (whole - nothing) / unit, (y - nothing[asked]) / unit[asked]
    found = [
        _over(part.reshape(len(case.maps), -1), start[image])
        for image, part in enumerate(torch.split(shares, [len(own) for own in keep]))
    ]
    return torch.stack(found, 1)


def _after_groups(case: EvalContext, image: int, groups: Tensor) -> Tensor:
    """bool [M, L, patches]: what is left of an image when 1, …, L of its groups are gone, best first."""
    own = groups.flatten().to(case.maps.device)
    count = int(own.max()) + 1
    member = (own == torch.arange(count, device=own.device)[:, None]).to(case.maps)  # [L, patches]
    means = case.maps[:, image].flatten(1) @ (member / member.sum(1, keepdim=True)).T  # [M, L]
    luck = torch.randperm(count, generator=make_generator(case.marks[image], TIES)).to(own.device)
    order = luck[means[:, luck].argsort(dim=1, descending=True, stable=True)]
    place = torch.empty_like(order).scatter_(1, order, torch.arange(count, device=own.device).expand_as(order))
    gone = torch.arange(1, count + 1, device=own.device)
    return place[:, own][:, None, :] >= gone[:, None]


def _over(shares: Tensor, start: Tensor) -> Tensor:
    """Shares [M, L] of the whole image's score after 1, …, L steps from `start` -> the area over their curve, [M]."""
    if shares.shape[1] < 2:
        return shares.new_full((len(shares),), math.nan)
    curve = torch.cat([start.expand(len(shares), 1), shares], 1)
    return 1 - torch.trapezoid(curve, dx=1 / shares.shape[1], dim=1)


@metric(
    "infidelity",
    family="faithfulness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    cost=lambda runs, region, patches, **_: Cost(runs if region is None else math.ceil(patches * (16 / region) ** 2)),
    presets={"quantus": {"region": 4, "removal": "minimum", "scaled": False}},
    discrepancies="Yeh's factor may be negative, so that a map and its opposite are equally good; here it is never "
    "below 0. Quantus takes blocks away one after the other without putting them back (`region`), and its repeats are "
    "all alike: one is made here. It fails where blocks do not fit the image.",
)
def infidelity(
    case: EvalContext,
    runs: int = 100,
    side: int | None = None,
    scaled: bool = True,
    removal: Removal = "token",
    score: ScoreKind = "logit",
    region: int | None = None,
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """mean_I (β sum of the map in I − (f(x) − f(x without I)))² over random square blocks I of patches.

    The map is read as what each patch adds to the score. `scaled` takes the factor β >= 0 that makes the error least,
    so that maps in any unit compare; without it β = 1, and the map must be in the score's own unit. Blocks have sides
    of 1 to half the grid, or `side`; they are an image's own and the same for all methods, which share the passes. The
    error is in the unit of the score squared, raw scores too.
    `region=4` is Quantus' walk: squares of 4 × 4 pixels go row by row and stay away, and the enlarged map, read as a
    gradient, is multiplied with what changed in every channel.
    """
    at_least("runs", runs, 1)
    if region is not None:
        sums, drops = _walk(case, region, removal, score, upsampling)
        return _error(sums, drops, scaled)
    gone = _blocks(case, runs, side).to(case.maps.device)  # [B, runs, patches]
    with case.probe(removal, "infidelity", runs) as probe:
        drops = case.original(score)[:, None] - probe.score_kept(~gone, case.value(score)).double()
    sums = torch.einsum("mbp,brp->mbr", case.maps.flatten(2), gone.to(case.maps))
    return _error(sums, drops, scaled)


def _error(sums: Tensor, drops: Tensor, scaled: bool) -> Tensor:
    """sums [M, B, R], drops [B, R] -> [M, B]"""
    factor = _best_factor(sums, drops) if scaled else sums.new_ones(())
    return (factor * sums - drops).square().mean(-1)


def _walk(case: EvalContext, side: int, removal: str, score: str, upsampling: Upsampling) -> tuple[Tensor, Tensor]:
    """Sums of map times change [M, B, K] and drops [B, K] after 1, …, K squares are gone, row by row."""
    own, count = squares(case, side)
    if case.size[0] % side or case.size[1] % side:
        raise BadInput(f"region={side} was given for images of {case.size} pixels; expected a side that divides both.")
    with case.probe(removal, "infidelity", count) as probe:
        check_paints(probe)
        drops = case.original(score)[:, None] - probe.score_images(
            count,
            lambda ks: painted(probe, (own <= torch.tensor(list(ks), device=own.device)[:, None])[None]),
            score=case.value(score),
        )
        change = (probe.pixels - probe.background).double().sum(1).flatten(1)  # [B, H·W]
    by_square = [
        change.new_zeros(len(change), count).index_add_(1, own, maps.flatten(1) * change)
        for maps in case.fine(upsampling)
    ]
    return torch.stack(by_square).cumsum(-1), drops.double()


def _best_factor(sums: Tensor, drops: Tensor) -> Tensor:
    """[M, B, 1]: the least-squares factor from sums [M, B, R] to drops [B, R], 0 where it would be negative."""
    size = sums.square().sum(-1, keepdim=True)
    factor = (sums * drops).sum(-1, keepdim=True) / torch.where(size == 0, torch.ones_like(size), size)
    return factor.clamp(min=0)


def _blocks(case: EvalContext, runs: int, side: int | None) -> Tensor:
    """bool [B, runs, patches]: a square block somewhere in each, drawn from seed and image."""
    rows, cols = case.trace.layout.grid
    most = min(rows, cols)
    if side is not None and not 1 <= side <= most:
        raise BadInput(f"side={side} was given; expected a block of 1 to {most} patches a side.")
    found = []
    for mark in case.marks:
        chance = make_generator(mark, BLOCKS)
        sides = torch.randint(1, max(1, most // 2) + 1, (runs,), generator=chance)
        sides = sides if side is None else torch.full_like(sides, side)
        where = torch.rand(2, runs, generator=chance)
        down, across = (_along(length, sides, part) for length, part in zip((rows, cols), where, strict=True))
        found.append((down[:, :, None] & across[:, None, :]).flatten(1))
    return torch.stack(found)


def _along(length: int, sides: Tensor, where: Tensor) -> Tensor:
    """bool [runs, length]: a stretch of each side, its beginning at a part 0 … 1 of where it can begin."""
    start = (where * (length - sides + 1)).long().clamp(max=length - 1)[:, None]
    place = torch.arange(length)
    return (place >= start) & (place < start + sides[:, None])
