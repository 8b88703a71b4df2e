"""Robustness: how much does a map change when the image hardly changes? Noisy copies are explained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit._progress import track
from clairvit._rng import Distribution, image_noise, make_generator
from clairvit.metrics.context import EvalContext
from clairvit.metrics.registry import metric
from clairvit.numerics import over_largest, widened
from clairvit.option_types import Doc, Range

Copies = Annotated[
    int, Range(ge=1, unit="noisy copies", example=10), Doc("how many noisy copies of the image are explained")
]
Radius = Annotated[float, Range(gt=0, example=0.2), Doc("how strong the noise is, in normalised pixels")]
Redraw = Annotated[bool, Doc("give methods that draw masks a new seed for each copy")]
Distance = Annotated[
    Literal["euclidean", "manhattan"], Doc("how two maps are compared; images are always compared in L2")
]
Change = Annotated[
    Literal["input", "output"],
    Doc("what the change of the map is divided by: the change of the image, or of the scores"),
]
Resolution = Literal["patch", "pixel"]
SMALL = 1e-6  # the smallest denominator of a relative change


@metric(
    "max-sensitivity",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
)
def max_sensitivity(context: EvalContext, samples: Copies = 10, radius: Radius = 0.2, redraw: Redraw = False) -> Tensor:
    """Return max_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius (normalised pixels): the largest change.

    Methods that draw masks (LIME, SHAP, RISE) draw the same for each copy; `redraw` gives them a new seed for each, so
    that their own randomness is included. What is drawn from the image itself (SmoothGrad's noise, the random map) is
    drawn anew for each copy either way.
    """
    return relative_changes(context, samples, scaled_noise(context, "uniform", radius), redraw).amax(0)


@metric(
    "avg-sensitivity",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
)
def avg_sensitivity(context: EvalContext, samples: Copies = 10, radius: Radius = 0.2, redraw: Redraw = False) -> Tensor:
    """Return mean_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius (normalised pixels): the mean change.

    `redraw` as in max-sensitivity.
    """
    return relative_changes(context, samples, scaled_noise(context, "uniform", radius), redraw).mean(0)


def relative_changes(context: EvalContext, samples: int, noise: Iterator[Tensor], redraw: bool) -> Tensor:
    """Return |a − a_j| / |a|, [samples, M, B]; NaN for a map of zeros."""
    norm = context.maps.flatten(2).norm(dim=-1)
    copies = explain_noisy_copies(context, samples, noise, redraw)
    return torch.stack([(context.maps - maps).flatten(2).norm(dim=-1) / norm for maps, _ in copies])


@metric(
    "local-lipschitz",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Alvarez-Melis & Jaakkola, NeurIPS 2018",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
)
def local_lipschitz(
    context: EvalContext,
    samples: Copies = 10,
    radius: Radius = 0.1,
    distance: Distance = "euclidean",
) -> Tensor:
    """Return max_j |a(x) − a(x_j)| / |x − x_j|, x_j with normal noise of std `radius`, maps over their largest value.

    `distance` is that of the maps; images are measured in L2.
    """
    return steepest_slope(context, samples, scaled_noise(context, "normal", radius), distance, "patch")


def steepest_slope(
    context: EvalContext, samples: int, noises: Iterator[Tensor], distance: Distance, resolution: Resolution
) -> Tensor:
    """Return max_j |a(x) − a(x_j)| / |x − x_j|, [M, B]; at `pixel`, a patch counts once for each of its pixels."""
    p = 1 if distance == "manhattan" else 2
    slopes = []
    for maps, noise in explain_noisy_copies(context, samples, noises):
        change = over_largest(context.maps, (2, 3)) - over_largest(maps, (2, 3))
        length: Tensor = at_resolution(change, resolution, context.size).flatten(2).norm(p, dim=-1)
        slopes.append(length / noise.flatten(1).norm(dim=-1))
    return torch.stack(slopes).amax(0)


@metric(
    "relative-stability",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Agarwal et al., 2022",
    needs=("methods",),
    cost=lambda samples, **_: Cost(2 * samples),
)
def relative_stability(
    context: EvalContext,
    samples: Copies = 10,
    radius: Radius = 0.1,
    of: Change = "input",
    changed: Annotated[
        Literal["keep", "leave"], Doc("what is done with copies of another class: kept, or left out")
    ] = "keep",
) -> Tensor:
    """Return max_j |(a − a_j)/a| / max(|(x − x_j)/x|, small), the map's relative change over that of the image.

    `of=output` divides by the change of the scores |f(x) − f(x_j)| instead. Relative changes of entries near zero are
    taken of 1e-6 of the largest. Copies that the model predicts as another class are kept, or left out (`changed`; NaN
    if all are). The noise is normal with std `radius`.
    """
    noise = scaled_noise(context, "normal", radius)
    ratios = stability_ratios(
        context, samples, noise, of, away_from_zero, lambda distance: distance.clamp(min=SMALL), changed == "leave"
    )
    return ratios.amax(0) if changed == "keep" else largest_defined(ratios)


def largest_defined(ratios: Tensor) -> Tensor:
    """Return the largest of ratios [samples, M, B] that are not NaN, [M, B]; NaN if all are."""
    largest = ratios.nan_to_num(nan=-math.inf).amax(0)
    return largest.masked_fill(largest == -math.inf, math.nan)


def stability_ratios(
    context: EvalContext,
    samples: int,
    noises: Iterator[Tensor],
    of: Change,
    denominator: Callable[[Tensor, tuple[int, ...]], Tensor],
    at_least_small: Callable[[Tensor], Tensor],
    drop_changed: bool,
    resolution: Resolution = "patch",
) -> Tensor:
    """Return the ratios of `relative_stability` of each copy, [samples, M, B]; NaN for copies of another class.

    `denominator(values, axes)` and `at_least_small(distance)` keep denominators from zero; `drop_changed` says whether
    copies of another class are NaN.
    """
    x = widened(context.trace.pixels).double()
    original = context.trace.logits.double()
    ratios = []
    for maps, noise in explain_noisy_copies(context, samples, noises):
        relative = (context.maps - maps) / denominator(context.maps, (2, 3))
        change = at_resolution(relative, resolution, context.size).flatten(2).norm(dim=-1)
        needs_logits = of == "output" or drop_changed
        logits = context.compute_logits(context.trace.pixels + noise) if needs_logits else original
        if of == "input":
            distance = (noise / denominator(x, (1, 2, 3))).flatten(1).norm(dim=-1)
        else:
            distance = (logits - original).norm(dim=-1)
        ratio = change / at_least_small(distance)
        is_changed = logits.argmax(1) != original.argmax(1)
        ratios.append(ratio.masked_fill(is_changed, math.nan) if drop_changed else ratio)
    return torch.stack(ratios)


def explain_noisy_copies(
    context: EvalContext, samples: int, noises: Iterator[Tensor], redraw: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield maps [M, B, rows, cols] and noise [B, 3, H, W] of one noisy copy after the other.

    All methods explain the same copy from one trace. `redraw` gives each copy another seed of the methods.
    """
    x = widened(context.trace.pixels)
    for k, noise in zip(track(range(samples), "robustness"), noises, strict=False):
        seed = (
            int(
                torch.randint(
                    2**31, (), generator=make_generator(context.seed, "robustness/method seeds", k), device="cpu"
                )
            )
            if redraw
            else None
        )
        yield context.explain(x + noise, seed=seed), noise.double()


def scaled_noise(context: EvalContext, distribution: Distribution, radius: float) -> Iterator[Tensor]:
    """Return noise [B, 3, H, W] without end, drawn from seed and image: in ±radius, or normal with std `radius`."""
    noises = image_noise(widened(context.trace.pixels), context.image_seeds, distribution)
    return (radius * noise for noise in noises)


def at_resolution(maps: Tensor, resolution: Resolution, size: tuple[int, int]) -> Tensor:
    """Return maps [M, B, rows, cols] as they are, or [M, B, H, W] where every pixel has the value of its patch."""
    return maps if resolution == "patch" else F.interpolate(maps, size, mode="nearest-exact")


def away_from_zero(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the denominator of a relative change: values, those below 1e-6 of the largest replaced by that."""
    least = SMALL * values.abs().amax(axes, keepdim=True).clamp(min=SMALL)
    return torch.where(values.abs() < least, least, values)
