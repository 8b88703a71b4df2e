"""Quantus: presets of metrics that reproduce its numbers, its random draws, and formulas of its own.

Quantus draws for a whole batch from numpy's global stream, so that its scores depend on the batch. Here each image
draws from its own RandomState(seed), as Quantus does when it is given that image alone after np.random.seed(seed): all
images get the same noise. Maps have one value per patch, which every pixel of the patch gets where it counts pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor, nn

from clairvit._cost import Cost
from clairvit.errors import BadInput
from clairvit.metrics.complexity import entropy_of, gini, magnitudes
from clairvit.metrics.confidence_intervals import EVERYWHERE
from clairvit.metrics.context import EvalContext, ScoreKind, Upsampling
from clairvit.metrics.curves import (
    AtOnce,
    CurveScore,
    Region,
    RegionOrder,
    Regions,
    RemovalSchedule,
    area_under_curve,
    deletion_curve,
    passes,
    region_drops,
)
from clairvit.metrics.faithfulness import Runs, Subset, subset_size
from clairvit.metrics.localisation import Tolerance, highest_points, object_masks, share_on_object
from clairvit.metrics.pixel_ranking import (
    check_paints,
    painted,
    score_without_ranks,
    score_without_values,
    squares,
    sums_at_values,
    value_ranks,
)
from clairvit.metrics.randomisation import (
    MODULES,
    Bins,
    Layer,
    Order,
    Signed,
    Steps,
    Summary,
    can_reset,
    compared_steps,
    maps_of_other_classes,
    models_layer_by_layer,
    noise_of_copies,
    parameter_layers,
    reset,
    rise_of_entropy,
)
from clairvit.metrics.registry import MetricOutput, add_presets, preset
from clairvit.metrics.robustness import (
    SMALL,
    Change,
    Copies,
    Distance,
    Radius,
    Redraw,
    at_resolution,
    largest_defined,
    relative_changes,
    stability_ratios,
    steepest_slope,
)
from clairvit.metrics.similarity import Similarity, flat_ssim, map_similarity, pearson
from clairvit.models.model import Model
from clairvit.numerics import over_largest, widened
from clairvit.option_types import Doc, Range
from clairvit.perturbation.removal import Removal

LOWEST_NOISE = 0.02  # the relative stabilities draw uniformly from here up to the radius, never below


# Draws


def numpy_generator(seed: int) -> RandomState:
    """Return numpy's legacy generator in the state after np.random.seed(seed)."""
    return RandomState(seed % 2**32)


def numpy_noise(
    images: Tensor, seed: int, draw: Callable[[RandomState, tuple[int, ...]], NDArray[Any]]
) -> Iterator[Tensor]:
    """Yield noise [B, 3, H, W] without end: draw(generator, shape), the same for every image."""
    generator = numpy_generator(seed)
    while True:
        yield torch.from_numpy(draw(generator, tuple(images.shape[1:]))).to(images).expand_as(images)


@functools.lru_cache(maxsize=4)
def numpy_subsets(seed: int, runs: int, count: int, size: int) -> Tensor:
    """Return indices [runs, size] of random channel values out of `count`, the same for every image.

    Between two sets Quantus draws a fill value, which it uses for `uniform` fills only.
    """
    generator = numpy_generator(seed)
    subsets = []
    for _ in range(runs):
        subsets.append(generator.choice(count, size, replace=False))
        generator.uniform()
    return torch.from_numpy(np.stack(subsets))


def _uniform_noise(context: EvalContext, low: float, high: float) -> Iterator[Tensor]:
    return numpy_noise(
        widened(context.trace.pixels), context.seed, lambda generator, shape: generator.uniform(low, high, shape)
    )


# Faithfulness


@preset(
    "deletion",
    "quantus",
    moved=("granularity=channel", "whole", "auc"),
    span_with=lambda **_: EVERYWHERE,  # a sum over steps, not a mean
    cost=lambda patches, at_once, **_: passes(patches, "channel", at_once),
)
def pixel_flipping(
    context: EvalContext,
    at_once: AtOnce = 1,
    removal: Removal = "minimum",
    score: CurveScore = "prob",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return the area under p(target) while channel values are removed, each step 1 wide, without the whole image."""
    schedule = RemovalSchedule(at_once=at_once, granularity="channel", upsampling=upsampling)
    x, y = deletion_curve(context, schedule, removal, score, "deletion", whole=False)
    return MetricOutput(area_under_curve(x, y, "steps"), x, y, context.meaning(score))


@preset("aopc", "quantus", moved=("area", "draws"), span_with=lambda **_: EVERYWHERE)
def region_perturbation(
    context: EvalContext,
    regions: Regions = 100,
    order: RegionOrder = "morf",
    removal: Removal = "minimum",
    score: ScoreKind = "prob",
    region: Region = 8,
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return the area under the drops f(x) − f(x_k), k = 1, …, K, each step 1 wide; numpy draws a random order."""

    def drawn(count: int) -> Tensor:  # the k-th number drawn is the region that is removed k-th
        return torch.from_numpy(numpy_generator(context.seed).permutation(count)).argsort()[None]

    x, drop = region_drops(context, regions, order, removal, score, region, upsampling, drawn)
    return MetricOutput(torch.trapezoid(drop, dim=-1), x[1:], drop, f"drop of {context.meaning(score)}")


@preset("faithfulness-correlation", "quantus", moved=("features", "draws", "upsampling"))
def correlation_of_values(
    context: EvalContext,
    runs: Runs = 100,
    subset: Subset = 224.0,
    removal: Removal = "minimum",
    score: ScoreKind = "logit",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return corr_r(sum of the map in S_r, f(x) − f(x without S_r)) over sets of channel values that numpy draws."""
    total = context.trace.pixels[0].numel()
    indices = numpy_subsets(context.seed, runs, total, subset_size(subset, total))[None].to(context.maps.device)
    without = score_without_values(context, indices, removal, score, "faithfulness-correlation")
    drops = context.original(score)[:, None] - without
    sums = sums_at_values(context, indices, upsampling)
    return pearson(sums, drops.expand(len(sums), -1, -1)).masked_fill(context.degenerate, math.nan)


@preset(
    "faithfulness-estimate",
    "quantus",
    moved=("features", "at_once", "upsampling"),
    cost=lambda patches, at_once, **_: passes(patches, "channel", at_once),
)
def estimate_by_values(
    context: EvalContext,
    at_once: Annotated[int, Range(ge=1, example=1), Doc("how many channel values a group has")] = 1,
    removal: Removal = "minimum",
    score: ScoreKind = "logit",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return corr_k(sum of the map in group k, f(x) − f(x without group k)), groups of `at_once` channel values."""
    rank = value_ranks(context, upsampling)  # [M, B, C·H·W]
    count = rank.shape[-1]
    if at_once > count // 3:
        raise BadInput(
            f"at_once={at_once} was given; expected 1 to {count // 3} channel values, so that there are 3 groups."
        )
    first = torch.arange(0, count, at_once, device=rank.device)
    drops = context.original(score)[:, None] - score_without_ranks(
        context, rank, first, (first + at_once).clamp(max=count), removal, score, "faithfulness-estimate"
    )
    # [M, B, H·W], the same in every channel
    values = torch.stack([maps.flatten(1) for maps in context.pixel_maps(upsampling)])
    values = values.repeat(1, 1, count // values.shape[-1])
    sums = drops.new_zeros(drops.shape).scatter_add_(2, rank // at_once, values)
    return pearson(sums, drops).masked_fill(context.degenerate, math.nan)


@preset("completeness", "quantus", moved=("exact", "upsampling"), better="higher", span=(0, 1))
def exact_completeness(
    context: EvalContext,
    removal: Removal = "minimum",
    score: ScoreKind = "logit",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return 1 where sum(a / max |a|) equals f(x) − f(x without its first channel) to the last bit, else 0.

    Numbers are compared in the model's own precision.
    """
    with context.probe(removal, "completeness", 1) as probe:
        check_paints(probe)
        emptied = torch.cat([probe.background[:, :1], probe.pixels[:, 1:]], 1)[:, None]
        scores = probe.score_images(1, lambda ks: emptied, score=context.score_function(score))[:, 0]
    dtype = context.trace.pixels.dtype
    rise = (context.original(score).to(dtype) - scores.to(dtype)).double()
    sums = [
        (maps / maps.abs().amax((1, 2), keepdim=True)).sum((1, 2)) for maps in context.pixel_maps(upsampling)
    ]  # a map of zeros has no sum
    return (torch.stack(sums) == rise).double()


@preset(
    "infidelity",
    "quantus",
    moved=("region", "upsampling"),
    cost=lambda region, patches, **_: Cost(math.ceil(patches * (16 / region) ** 2)),
)
def infidelity_of_squares(
    context: EvalContext,
    region: Annotated[
        int, Range(ge=1, unit="pixels", example=4), Doc("how many pixels a square has along each side")
    ] = 4,
    removal: Removal = "minimum",
    score: ScoreKind = "logit",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return mean_k (sum of map · change in squares 1, …, k − (f(x) − f(x without them)))²; they stay removed.

    Squares of `region` × `region` pixels go row by row; the upsampled map, read as a gradient, is multiplied with the
    change of every channel.
    """
    square, count = squares(context, region)
    if context.size[0] % region or context.size[1] % region:
        raise BadInput(
            f"region={region} was given for images of {context.size} pixels; expected a side that divides both."
        )
    with context.probe(removal, "infidelity", count) as probe:
        check_paints(probe)
        drops = context.original(score)[:, None] - probe.score_images(
            count,
            lambda ks: painted(probe, (square <= torch.tensor(list(ks), device=square.device)[:, None])[None]),
            score=context.score_function(score),
        )
        change = (probe.pixels - probe.background).double().sum(1).flatten(1)  # [B, H·W]
    by_square = [
        change.new_zeros(len(change), count).index_add_(1, square, maps.flatten(1) * change)
        for maps in context.pixel_maps(upsampling)
    ]
    sums = torch.stack(by_square).cumsum(-1)  # [M, B, K]
    return (sums - drops.double()).square().mean(-1)


# Robustness


@preset("max-sensitivity", "quantus", moved=("draws",))
def max_sensitivity(
    context: EvalContext, samples: Copies = 200, radius: Radius = 0.2, redraw: Redraw = False
) -> Tensor:
    """Return max_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius, drawn by numpy."""
    return relative_changes(context, samples, _uniform_noise(context, -radius, radius), redraw).amax(0)


@preset("avg-sensitivity", "quantus", moved=("draws",))
def avg_sensitivity(
    context: EvalContext, samples: Copies = 200, radius: Radius = 0.2, redraw: Redraw = False
) -> Tensor:
    """Return mean_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius, drawn by numpy."""
    return relative_changes(context, samples, _uniform_noise(context, -radius, radius), redraw).mean(0)


@preset("local-lipschitz", "quantus", moved=("draws", "resolution"))
def local_lipschitz(
    context: EvalContext, samples: Copies = 200, radius: Radius = 0.1, distance: Distance = "euclidean"
) -> Tensor:
    """Return max_j |a(x) − a(x_j)| / |x − x_j| over pixels, x_j with normal noise of std `radius` drawn by numpy."""
    noises = numpy_noise(
        widened(context.trace.pixels), context.seed, lambda generator, shape: generator.normal(0.0, radius, shape)
    )
    return steepest_slope(context, samples, noises, distance, "pixel")


def replace_zeros(values: Tensor, axes: tuple[int, ...] = ()) -> Tensor:
    """Return values with 1e-6 for exact zeros, however near to zero others are."""
    return torch.where(values == 0, SMALL, values)


@preset("relative-stability", "quantus", moved=("near_zero", "changed=nan", "resolution", "draws"))
def relative_stability(
    context: EvalContext,
    samples: Copies = 200,
    radius: Annotated[
        float, Range(gt=LOWEST_NOISE, example=0.2), Doc("how strong the noise is at most, in normalised pixels")
    ] = 0.2,
    of: Change = "input",
    changed: Annotated[
        Literal["keep", "leave", "nan"],
        Doc("what is done with copies of another class: kept, left out, or the score is NaN"),
    ] = "nan",
) -> Tensor:
    """Return max_j |(a − a_j)/a| / |(x − x_j)/x| over pixels; NaN if a copy is predicted as another class.

    The noise is uniform between 0.02 and `radius`; exact zeros alone are replaced by 1e-6. `changed` keeps or leaves
    out copies of another class instead.
    """
    noises = _uniform_noise(context, LOWEST_NOISE, radius)
    ratios = stability_ratios(context, samples, noises, of, replace_zeros, replace_zeros, changed != "keep", "pixel")
    return largest_defined(ratios) if changed == "leave" else ratios.amax(0)


# Complexity


@preset("sparseness", "quantus", moved=("offset",))
def sparseness(context: EvalContext, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return the Gini index of |a| / max |a| + 1e-7 over pixels."""
    return torch.stack([gini(over_largest(values, 1) + 1e-7) for values in magnitudes(context, "pixel", upsampling)])


@preset("complexity", "quantus", moved=("offset",), span=(-math.log1p(1e-12), math.inf))
def entropy(context: EvalContext, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return −Σ_i p_i ln(p_i + 1e-12) over pixels, p = |a| / Σ |a|: Σ p = 1, so it may fall below 0 by 1e-12."""
    return torch.stack([entropy_of(values, 1e-12) for values in magnitudes(context, "pixel", upsampling)])


add_presets("effective-complexity", quantus={"resolution": "pixel"})


# Randomisation


def _reset_models(context: EvalContext, order: Order, layers: int | None) -> Iterator[tuple[float, Model]]:
    """Yield models whose modules initialise themselves, each from the same seed; other parameters stay."""

    def resettable(module: nn.Module) -> list[Layer]:
        return [layer for layer in parameter_layers(module) if can_reset(layer[0])]

    return models_layer_by_layer(
        context, order, layers, resettable, lambda layer: reset(layer, context.seed + 1), "preset=quantus"
    )


@preset("mprt", "quantus", moved=("by=quantus", "original"))
def mprt(
    context: EvalContext,
    order: Order = "top-down",
    layers: Steps | None = None,
    similarity: Similarity = "spearman",
    signed: Signed = False,
    summary: Summary = "mean",
    original: Annotated[bool, Doc("count the model itself as the first step of the curve")] = True,
) -> MetricOutput:
    """Return mean_l ρ(|a(x; θ)|, |a(x; θ_l)|), l = 0, 1, …: modules are reset, and the model itself counts as 1.

    `original=False` does not count it.
    """
    steps = [(0.0, context.maps)] if original else []
    for fraction, model in _reset_models(context, order, layers):
        steps.append((fraction, context.explain(context.trace.pixels, model=model)))
    return compared_steps(context.maps, steps, similarity, signed, summary)


@preset(
    "smooth-mprt",
    "quantus",
    moved=("by=quantus", "original", "clean", "draws"),
    cost=lambda layers, samples, **_: Cost(((layers or MODULES) + 2) * samples),
)
def smooth_mprt(
    context: EvalContext,
    samples: Copies = 50,
    order: Order = "bottom-up",
    layers: Steps | None = None,
    similarity: Similarity = "spearman",
    signed: Signed = False,
    summary: Summary = "mean",
) -> MetricOutput:
    """Return the MPRT of means over noisy copies of which the last has no noise; the original is explained twice.

    numpy's noise continues from model to model.
    """
    x = widened(context.trace.pixels)
    std = noise_of_copies(x)
    noises = numpy_noise(x, context.seed, lambda generator, shape: generator.standard_normal(shape))

    def smooth_maps(model: Model) -> Tensor:
        copies = (x if k == samples - 1 else x + std * next(noises) for k in range(samples))
        return torch.stack([context.explain(pixels, model=model) for pixels in copies]).mean(0)

    reference = smooth_maps(context.model)
    steps = [(0.0, smooth_maps(context.model))]
    for fraction, model in _reset_models(context, order, layers):
        steps.append((fraction, smooth_maps(model)))
    return compared_steps(reference, steps, similarity, signed, summary)


@preset("efficient-mprt", "quantus", moved=("by=quantus",))
def efficient_mprt(context: EvalContext, bins: Bins = 100) -> Tensor:
    """Return (H(a_random) − H(a)) / H(a), H the entropy of the histogram of the map, of a model that was reset."""
    return rise_of_entropy(context, _reset_models(context, "top-down", 1), bins)


@preset("random-logit", "quantus", moved=("other=quantus", "resolution", "similarity=ssim-flat"))
def random_logit(
    context: EvalContext,
    similarity: Annotated[
        Literal["spearman", "pearson", "ssim", "ssim-flat", "hog"],
        Doc("how two maps are compared: rank or linear correlation, SSIM (2-D or flat), or HOG"),
    ] = "ssim-flat",
    signed: Signed = True,
) -> Tensor:
    """Return SSIM(a(x; y), a(x; y′)) of flattened maps over pixels, y′ drawn by numpy from the seed alone."""

    def choose(row: int, others: list[int]) -> int:
        return others[int(numpy_generator(context.seed).randint(0, len(others), 1)[0])]

    maps = maps_of_other_classes(context, choose)
    a, b = (at_resolution(values, "pixel", context.size) for values in (context.maps, maps))
    if similarity == "ssim-flat":
        return flat_ssim(a, b) if signed else flat_ssim(a.abs(), b.abs())
    return map_similarity(similarity, a, b, signed=signed)


# Localisation


@preset("pointing-game", "quantus", moved=("ties", "empty"))
def pointing_game(context: EvalContext, tolerance: Tolerance = 0, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return 1 if any of the map's highest points lies on the object, and for an empty mask; 0 if not."""
    scores = highest_points(context, tolerance, "any", upsampling)
    is_empty = ~object_masks(context)[0].flatten(1).any(1)  # [B]
    return scores.masked_fill(is_empty & ~context.invalid, 1)


@preset("relevance-mass", "quantus", moved=("negative",), span_with=lambda **_: EVERYWHERE)
def relevance_mass_accuracy(context: EvalContext, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return sum of the map on the object / sum of the map, negative values too."""
    return share_on_object(context, lambda maps: maps, upsampling)


@preset("relevance-mass", "quantus-attribution-localisation", moved=("negative",))
def attribution_localisation(context: EvalContext, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return sum of |map| on the object / sum of |map|."""
    return share_on_object(context, torch.abs, upsampling)


for _name in ("relevance-rank", "top-k", "roc-auc"):
    add_presets(_name, quantus={})
