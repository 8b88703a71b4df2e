"""Faithfulness: compare the relevance of removed patches with how much the score drops without them."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rng import make_generator, random_sets
from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, ScoreKind, Upsampling, fraction_counts
from clairvit.metrics.pixel_ranking import (
    drops_and_sums_of_segments,
    pixel_ranks,
    score_without_ranks,
)
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.metrics.similarity import pearson, spearman
from clairvit.option_types import Doc, Range
from clairvit.perturbation.removal import Removal
from clairvit.perturbation.segments import grid_cells

Granularity = Annotated[Literal["patch", "pixel"], Doc("whether patches are ordered, or pixels of the enlarged map")]
Points = Annotated[int, Range(ge=3)]  # of a correlation
Runs = Annotated[Points, Doc("how many random sets are removed")]
Subset = Annotated[float, Doc("how much of the image a set is: a fraction, or a count")]


@metric(
    "faithfulness-correlation",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Bhatt et al., IJCAI 2020",
    cost=lambda runs, **_: Cost(runs),
)
def faithfulness_correlation(
    context: EvalContext,
    runs: Runs = 100,
    subset: Subset = 0.25,
    removal: Removal = "token",
    score: ScoreKind = "logit",
) -> Tensor:
    """Return corr_r(sum of the map in S_r, f(x) − f(x without S_r)) over random sets of patches S_r.

    `subset` is a fraction of them, or a count. Each image has its own sets, the same for all methods, so that these
    share the passes. One image's score has a random error of about 1/sqrt(runs); undefined for a constant map.
    """
    removed = _random_patches(context, runs, subset_size(subset, context.patches))  # [B, runs, patches]
    drops, sums = _drops_and_sums(context, removed, removal, score, "faithfulness-correlation")
    return pearson(sums, drops.expand(len(sums), -1, -1)).masked_fill(context.degenerate, math.nan)


@metric(
    "sensitivity-n",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Ancona et al., ICLR 2018",
    cost=lambda runs, sizes, **_: Cost(runs * sizes),
)
def sensitivity_n(
    context: EvalContext,
    runs: Annotated[Points, Doc("how many random sets of each size are removed")] = 20,
    sizes: Annotated[int, Range(ge=1), Doc("how many sizes of sets, from few to most patches")] = 5,
    removal: Removal = "token",
    score: ScoreKind = "logit",
) -> MetricOutput:
    """Return mean_n corr_r(sum of the map in S, f(x) − f(x without S)), |S| = n, for sizes from few to most patches."""
    fractions = [(k + 1) / (sizes + 1) for k in range(sizes)]
    counts = fraction_counts(context.patches, fractions)
    removed = torch.cat([_random_patches(context, runs, count, k) for k, count in enumerate(counts)], 1)
    drops, sums = _drops_and_sums(context, removed, removal, score, "sensitivity-n")  # [B, sizes·runs], [M, B, …]
    by_size = (*sums.shape[:2], sizes, runs)
    correlations = pearson(sums.reshape(by_size), drops.expand_as(sums).reshape(by_size))  # [M, B, sizes]
    correlations = correlations.masked_fill(context.degenerate[..., None], math.nan)
    x = torch.tensor(fractions, dtype=torch.float64)
    return MetricOutput(correlations.mean(-1), x, correlations, "correlation")


@metric(
    "faithfulness-estimate",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Alvarez-Melis & Jaakkola, NeurIPS 2018",
    rank_only=True,
    cost=lambda steps, **_: Cost(steps),
)
def faithfulness_estimate(
    context: EvalContext,
    steps: Annotated[Points, Doc("how many groups of patches are removed, one at a time")] = 14,
    removal: Removal = "token",
    score: ScoreKind = "logit",
) -> Tensor:
    """Return corr_k(sum of the map in group k, f(x) − f(x without group k)), groups of patches by falling relevance.

    There are `steps` groups.
    """
    group = context.rank * steps // context.patches  # [M, B, patches]
    member = group[:, :, None, :] == torch.arange(steps, device=group.device)[:, None]  # [M, B, steps, patches]
    drops = context.original(score)[:, None] - context.score_kept(~member, removal, score, "faithfulness-estimate")
    sums = (context.maps.flatten(2)[:, :, None] * member).sum(-1)
    return pearson(sums, drops).masked_fill(context.degenerate, math.nan)


@metric(
    "saco",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Wu et al., CVPR 2024",
    cost=lambda groups, **_: Cost(groups),
    presets={"wu": {"granularity": "pixel", "removal": "image-mean"}},
)
def saco(
    context: EvalContext,
    groups: Annotated[int, Range(ge=2), Doc("how many groups the patches are cut into, by falling relevance")] = 10,
    removal: Removal = "token",
    score: ScoreKind = "prob",
    granularity: Granularity = "patch",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return Σ_{i<j} ±(s_i − s_j) / Σ_{i<j} |s_i − s_j|, + where group i lowers the score as much as group j or more.

    The patches are cut by falling relevance into `groups` G_1 … G_K, at most as many as there are patches; s_i is the
    mean relevance in G_i, and the sign compares f(x) − f(x without G_i) with that of G_j (Salience-guided Faithfulness
    Coefficient). Where K does not divide their number, sizes differ by one. Patches of equal relevance are ordered by
    seed and image; equal drops count as +, groups of equal relevance not at all. Undefined for a constant map.
    `granularity=pixel` orders the pixels of the upsampled map. A coefficient has no unit, so that raw scores are taken
    as they are.
    """
    by_patch = granularity == "patch"
    rank = context.rank if by_patch else pixel_ranks(context, upsampling)  # [M, B, n]
    count = rank.shape[-1]
    if count < groups:
        groups = count
        context.settings["groups"] = str(count)
    edges = torch.tensor([math.ceil(k * count / groups) for k in range(groups + 1)], device=rank.device)
    group = rank * groups // count  # [M, B, n]
    if by_patch:
        member = group[:, :, None, :] == torch.arange(groups, device=rank.device)[:, None]  # [M, B, K, n]
        scores = context.score_kept(~member, removal, score, "saco")
        values = context.maps.flatten(2)
    else:
        scores = score_without_ranks(context, rank, edges[:-1], edges[1:], removal, score, "saco")
        values = torch.stack([maps.flatten(1) for maps in context.pixel_maps(upsampling)])
    drops = context.original(score)[:, None] - scores  # [M, B, K]
    means = values.new_zeros(drops.shape).scatter_add_(2, group, values) / edges.diff()
    return _signed_share(means, drops).masked_fill(context.degenerate, math.nan)


def _signed_share(means: Tensor, drops: Tensor) -> Tensor:
    """Return Σ_{i<j} ±w_ij / Σ_{i<j} |w_ij|, w_ij = s_i − s_j, + where drop_i >= drop_j; s and drops [M, B, K]."""
    i, j = torch.triu_indices(means.shape[-1], means.shape[-1], 1, device=means.device)
    weights = means[..., i] - means[..., j]  # [M, B, pairs]
    signed = torch.where(drops[..., i] >= drops[..., j], weights, -weights).sum(-1)
    total = weights.abs().sum(-1)
    return signed / total.masked_fill(total == 0, math.nan)


@metric(
    "idsds",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Hesse et al., NeurIPS 2024",
    cost=lambda cells, **_: Cost(cells**2),
    presets={"hesse": {"granularity": "pixel", "removal": "mean"}},
)
def idsds(
    context: EvalContext,
    cells: Annotated[int, Range(ge=2), Doc("how many cells the image has along each side")] = 4,
    removal: Removal = "token",
    score: ScoreKind = "logit",
    granularity: Granularity = "patch",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return Spearman's corr_k(sum of the map in cell k, f(x) − f(x without cell k)) over cells × cells squares.

    Each cell alone is removed, and the methods share the passes (single deletion score; in-domain if the model has been
    trained with cells removed). Cells are of whole patches, whose number differs by one row or column where the grid
    is not divisible, and never smaller than a patch; `granularity=pixel` cuts to the pixel, for a removal that paints.
    Undefined for a constant map, and where no cell changes the score.
    """
    if granularity == "pixel":
        labels = grid_cells(context.size, cells).flatten().to(context.maps.device)
        drops, sums = drops_and_sums_of_segments(context, labels, removal, score, upsampling, "idsds")
    else:
        labels = grid_cells(context.trace.layout.grid, cells).flatten().to(context.maps.device)
        removed = labels == torch.arange(int(labels.max()) + 1, device=labels.device)[:, None]  # [K, patches]
        drops, sums = _drops_and_sums(context, removed[None], removal, score, "idsds")
    return spearman(sums, drops.expand_as(sums)).masked_fill(context.degenerate, math.nan)


@metric(
    "f-fidelity",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Zheng et al., ICLR 2025",
    in_score=True,
    rank_only=True,
    flipped_by=("order", "lerf"),
    cost=lambda steps, runs, **_: Cost(steps * runs),
)
def fine_tuned_fidelity(
    context: EvalContext,
    steps: Annotated[int, Range(ge=1, example=9), Doc("how many sizes of the top set: 9 are 10 %, …, 90 %")] = 9,
    runs: Annotated[int, Range(ge=1, example=10), Doc("how many random subsets of each top set are removed")] = 10,
    share: Annotated[float, Range(gt=0, le=1, example=0.5), Doc("which share of the set is removed")] = 0.5,
    trained: Annotated[
        float,
        Range(gt=0, le=1, example=0.1),
        Doc("at most this share of the patches goes: that of the training"),
    ] = 0.1,
    order: Annotated[
        Literal["morf", "lerf"], Doc("remove from the top set, or from all but the top set: lower is then better")
    ] = "morf",
    removal: Removal = "token",
    score: ScoreKind = "prob",
) -> MetricOutput:
    """Return mean over top sets T, mean over random R ⊂ T of f(x) − f(x without R): high if any part of the top counts.

    R is a random `share` of T, and at most the share `trained` of all patches, so that images lose no more than the
    model has seen to be missing. Each image has its own sets R. `order=lerf` takes R from the other patches: lower is
    better then. The authors fine-tune the model first, with random patches removed; here it is taken as it is, so that
    the number is theirs for a model that was trained so (`clairvit finetune --drop-tokens 0.1`). Drops of raw scores
    are divided by |f(x) − f(nothing left)|, undefined where that is 0.
    """
    count = context.patches
    fractions = [k / (steps + 1) for k in range(1, steps + 1)]
    tops = [min(max(1, round(fraction * count)), count - 1) for fraction in fractions] if count > 1 else [1] * steps
    sizes = torch.tensor(tops, device=context.rank.device)[:, None]  # [S, 1]
    top = context.rank[:, :, None, :] < sizes  # [M, B, S, patches]
    chosen = top if order == "morf" else ~top
    most = max(1, math.floor(trained * count))
    removed_counts = (chosen.sum(-1, keepdim=True) * share).round().clamp(min=1, max=most)  # [M, B, S, 1]
    keys = _random_keys(context, steps * runs).reshape(-1, steps, runs, count)  # [B, S, R, patches]
    places = keys.masked_fill(~chosen[:, :, :, None, :], math.inf).argsort(-1).argsort(-1)  # [M, B, S, R, patches]
    removed = (places < removed_counts[..., None]) & chosen[:, :, :, None, :]
    y = context.score_kept(~removed.flatten(2, 3), removal, score, "f-fidelity")  # [M, B, S·R]
    drop = context.normalise_raw_drop(context.original(score)[:, None] - y, score, removal, "f-fidelity")
    curve = drop.reshape(*drop.shape[:2], steps, runs).mean(-1)
    x = torch.tensor(fractions, dtype=torch.float64)
    return MetricOutput(curve.mean(-1), x, curve, f"drop of {context.meaning(score)}", "top share of the patches")


def _random_keys(context: EvalContext, runs: int) -> Tensor:
    """Return random numbers in 0 … 1 for each image and run, [B, runs, patches], drawn from the seed of the image."""
    shape = (runs, context.patches)
    generators = [make_generator(seed, "f-fidelity/sets") for seed in context.image_seeds]
    drawn = [torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") for generator in generators]
    return torch.stack(drawn).to(context.maps.device)


@metric(
    "monotonicity",
    family="faithfulness",
    better="higher",
    span=(0, 1),
    paper="Arya et al., 2019",
    rank_only=True,
    cost=lambda steps, **_: Cost(steps - 1),  # the last step is the image itself
)
def monotonicity(
    context: EvalContext,
    steps: Annotated[int, Range(ge=2), Doc("how many groups of patches are shown, one after the other")] = 10,
    removal: Removal = "token",
    score: ScoreKind = "prob",
) -> MetricOutput:
    """Return #{k ≥ 2: f does not fall as the k-th group is shown} / (steps − 1), least relevant groups first.

    1 if no group lowers f. The first group is the start, as in the authors' code: nothing is shown before it. Patches
    that are evidence against the target lower it for every map, the best one too. Raw scores, of a model without
    probabilities, are taken as they are: a share of steps has no unit.
    """
    rank = context.patches - 1 - context.rank  # least relevant first
    shown = torch.tensor([round(k * context.patches / steps) for k in range(1, steps)], device=rank.device)
    y = context.score_kept(rank[:, :, None, :] < shown[:, None], removal, score, "monotonicity")
    y = torch.cat([y, context.original(score).expand(len(y), -1)[..., None]], -1)
    fractions = torch.tensor([k / steps for k in range(1, steps + 1)], dtype=torch.float64)
    meaning = "score" if context.uses_raw_score(score) else context.meaning(score)
    return MetricOutput((y[..., 1:] >= y[..., :-1]).double().mean(-1), fractions, y, meaning)


@metric(
    "completeness",
    family="faithfulness",
    better="lower",
    span=(0, math.inf),
    paper="Sundararajan et al., ICML 2017",
    undefined="the score with nothing left is that of the whole image",
    cost=lambda **_: Cost(1),
)
def completeness(context: EvalContext, removal: Removal = "mean", score: ScoreKind = "logit") -> Tensor:
    """Return |sum of the map − rise| / |rise|, rise = f(x) − f(nothing left): 0 if the map sums to what it explains.

    Undefined where the rise is 0.
    """
    nothing = torch.zeros(1, 1, context.patches, dtype=torch.bool)
    rise = context.original(score) - context.score_shared(nothing, removal, score, "completeness")[:, 0]
    return (context.maps.sum((2, 3)) - rise).abs() / rise.abs().masked_fill(rise == 0, math.nan)


@metric(
    "infidelity",
    family="faithfulness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    cost=lambda runs, **_: Cost(runs),
)
def infidelity(
    context: EvalContext,
    runs: Annotated[int, Range(ge=1), Doc("how many random blocks are removed")] = 100,
    side: Annotated[
        int | None,
        Range(ge=1, unit="patches", example=2),
        Doc("how many patches a block has along each side; None: drawn anew each time"),
    ] = None,
    scaled: Annotated[bool, Doc("fit the factor between map and score, so that maps in any unit compare")] = True,
    removal: Removal = "token",
    score: ScoreKind = "logit",
) -> Tensor:
    """Return mean_I (β · sum of the map in I − (f(x) − f(x without I)))² over random square blocks I of patches.

    The map is read as what each patch adds to the score. `scaled` takes the factor β >= 0 that makes the error least,
    so that maps in any unit compare; without it β = 1, and the map must be in the score's own unit. Blocks have sides
    of 1 to half the grid, or `side`; each image has its own, the same for all methods, which share the passes. The
    error is in the unit of the score squared, raw scores too.
    """
    removed = _random_blocks(context, runs, side).to(context.maps.device)  # [B, runs, patches]
    drops, sums = _drops_and_sums(context, removed, removal, score, "infidelity")
    factor = _least_squares_factor(sums, drops) if scaled else sums.new_ones(())
    return (factor * sums - drops).square().mean(-1)


def _least_squares_factor(sums: Tensor, drops: Tensor) -> Tensor:
    """Return β = max(0, Σ s d / Σ s²), [M, B, 1], of sums s [M, B, R] and drops d [B, R]."""
    squared = sums.square().sum(-1, keepdim=True)
    factor = (sums * drops).sum(-1, keepdim=True) / torch.where(squared == 0, torch.ones_like(squared), squared)
    return factor.clamp(min=0)


def _random_blocks(context: EvalContext, runs: int, side: int | None) -> Tensor:
    """Return random square blocks of patches, bool [B, runs, patches], drawn from seed and image."""
    lengths = context.trace.layout.grid  # frames first for clips
    largest = min(lengths[-2:])
    if side is not None and side > largest:
        raise BadInput(f"side={side} was given; expected a block of 1 to {largest} patches per side.")
    blocks = []
    for seed in context.image_seeds:
        generator = make_generator(seed, "infidelity/blocks")
        sides = torch.randint(1, max(1, largest // 2) + 1, (runs,), generator=generator, device="cpu")
        sides = sides if side is None else torch.full_like(sides, side)
        starts = torch.rand(len(lengths), runs, generator=generator, dtype=torch.float32, device="cpu")
        *frames, down, across = (
            _stretch(length, sides.clamp(max=length), start) for length, start in zip(lengths, starts, strict=True)
        )
        block = down[:, :, None] & across[:, None, :]  # [runs, rows, cols]
        blocks.append((frames[0][:, :, None, None] & block[:, None] if frames else block).flatten(1))
    return torch.stack(blocks)


def _stretch(length: int, sides: Tensor, start: Tensor) -> Tensor:
    """Return bool [runs, length]: `sides` adjacent positions from a start in 0 … 1 of where they can begin."""
    first = (start * (length - sides + 1)).long().clamp(max=length - 1)[:, None]
    position = torch.arange(length)
    return (position >= first) & (position < first + sides[:, None])


def subset_size(subset: float, count: int) -> int:
    """Return how many of `count` a subset has: a fraction between 0 and 1, or a whole number."""
    if 0 < subset < 1:
        return fraction_counts(count, [subset])[0]
    if not float(subset).is_integer() or not 1 <= subset < count:
        raise BadInput(
            f"subset={subset} was given; expected a part between 0 and 1, such as 0.25, or a count of 1 to {count - 1}."
        )
    return int(subset)


def _random_patches(context: EvalContext, runs: int, count: int, stream: int = 0) -> Tensor:
    """Return random sets of `count` patches, bool [B, runs, patches], drawn from seed and image."""
    return random_sets(context.image_seeds, runs, context.patches, count, "metrics/random sets", stream).to(
        context.maps.device
    )


def _drops_and_sums(
    context: EvalContext, removed: Tensor, removal: str, score: str, name: str
) -> tuple[Tensor, Tensor]:
    """Return f(x) − f(x without S) [B, R] and the sums of the maps in S [M, B, R], for sets S, bool [B, R, patches]."""
    drops = context.original(score)[:, None] - context.score_shared(~removed, removal, score, name)
    return drops, torch.einsum("mbp,brp->mbr", context.maps.flatten(2), removed.to(context.maps))
