"""Robustness: how much does a map change when the image hardly changes? Noisy copies are explained.

With `draws=quantus` (in `preset=quantus`) the noise is that of `clairvit.compat.quantus`. Maps have one value per
patch, which every pixel of the patch gets where `resolution=pixel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit._progress import track
from clairvit._rng import Distribution, image_noise, make_generator
from clairvit.compat.quantus import LOWEST_NOISE, Draws, numpy_noise
from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext
from clairvit.metrics.registry import metric
from clairvit.numerics import over_largest, widened
from clairvit.option_types import Doc, Range

Copies = Annotated[
    int, Range(ge=1, unit="noisy copies", example=10), Doc("how many noisy copies of the image are explained")
]
Radius = Annotated[float, Range(gt=0, example=0.2), Doc("how strong the noise is, in normalised pixels")]
Resolution = Annotated[Literal["patch", "pixel"], Doc("whether patches are counted, or their pixels")]
NearZero = Annotated[Literal["largest", "exact"], Doc("what a relative change of an entry near zero is taken of")]
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
def max_sensitivity(
    context: EvalContext,
    samples: Copies = 10,
    radius: Radius = 0.2,
    redraw: Annotated[bool, Doc("give methods that draw masks a new seed for each copy")] = False,
    draws: Draws = "own",
) -> Tensor:
    """Return max_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius (normalised pixels): the largest change.

    Methods that draw masks (LIME, SHAP, RISE) draw the same for each copy; `redraw` gives them a new seed for each, so
    that their own randomness is included. What is drawn from the image itself (SmoothGrad's noise, the random map) is
    drawn anew for each copy either way.
    """
    return _relative_changes(context, samples, radius, redraw, draws).amax(0)


@metric(
    "avg-sensitivity",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
)
def avg_sensitivity(
    context: EvalContext,
    samples: Copies = 10,
    radius: Radius = 0.2,
    redraw: Annotated[bool, Doc("give methods that draw masks a new seed for each copy")] = False,
    draws: Draws = "own",
) -> Tensor:
    """Return mean_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius (normalised pixels): the mean change.

    `redraw` as in max-sensitivity.
    """
    return _relative_changes(context, samples, radius, redraw, draws).mean(0)


def _relative_changes(context: EvalContext, samples: int, radius: float, redraw: bool, draws: Draws) -> Tensor:
    """Return |a − a_j| / |a|, [samples, M, B]; NaN for a map of zeros."""
    norm = context.maps.flatten(2).norm(dim=-1)
    copies = explain_noisy_copies(context, samples, radius, "uniform", draws, redraw)
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
    distance: Annotated[
        Literal["euclidean", "manhattan"], Doc("how two maps are compared; images are always compared in L2")
    ] = "euclidean",
    resolution: Resolution = "patch",
    draws: Draws = "own",
) -> Tensor:
    """Return max_j |a(x) − a(x_j)| / |x − x_j|, x_j with normal noise of std `radius`, maps over their largest value.

    `distance` is that of the maps; images are measured in L2. `resolution=pixel` counts a patch once for each of its
    pixels.
    """
    p = 1 if distance == "manhattan" else 2
    slopes = []
    for maps, noise in explain_noisy_copies(context, samples, radius, "normal", draws):
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
    of: Annotated[
        Literal["input", "output"],
        Doc("what the change of the map is divided by: the change of the image, or of the scores"),
    ] = "input",
    near_zero: NearZero = "largest",
    changed: Annotated[
        Literal["keep", "leave", "nan"],
        Doc("what is done with copies of another class: kept, left out, or the score is NaN"),
    ] = "keep",
    resolution: Resolution = "patch",
    draws: Draws = "own",
) -> Tensor:
    """Return max_j |(a − a_j)/a| / max(|(x − x_j)/x|, small), the map's relative change over that of the image.

    `of=output` divides by the change of the scores |f(x) − f(x_j)| instead. Relative changes of entries near zero are
    taken of 1e-6 of the largest (`near_zero=largest`), or only those of exact zeros of 1e-6 (`exact`). Copies that the
    model predicts as another class are kept, left out (NaN if all are), or make the score NaN. `resolution` as in
    local-lipschitz. The noise is normal with std `radius`; with `draws=quantus` uniform between 0.02 and `radius`.
    """
    x = widened(context.trace.pixels).double()
    original = context.trace.logits.double()
    distribution: Distribution = "uniform" if draws == "quantus" else "normal"
    copies = explain_noisy_copies(context, samples, radius, distribution, draws, lowest=LOWEST_NOISE)
    ratios = []
    for maps, noise in copies:
        relative = (context.maps - maps) / away_from_zero(context.maps, (2, 3), near_zero)
        change = at_resolution(relative, resolution, context.size).flatten(2).norm(dim=-1)
        needs_logits = of == "output" or changed != "keep"
        logits = context.compute_logits(context.trace.pixels + noise) if needs_logits else original
        if of == "input":
            distance = (noise / away_from_zero(x, (1, 2, 3), near_zero)).flatten(1).norm(dim=-1)
        else:
            distance = (logits - original).norm(dim=-1)
        at_least_small = distance.clamp(min=SMALL) if near_zero == "largest" else _replace_zeros(distance)
        ratio = change / at_least_small
        ratios.append(
            ratio if changed == "keep" else ratio.masked_fill(logits.argmax(1) != original.argmax(1), math.nan)
        )
    all_ratios = torch.stack(ratios)  # [samples, M, B]
    if changed != "leave":
        return all_ratios.amax(0)
    largest = all_ratios.nan_to_num(nan=-math.inf).amax(0)
    return largest.masked_fill(largest == -math.inf, math.nan)


def explain_noisy_copies(
    context: EvalContext,
    samples: int,
    radius: float,
    distribution: Distribution,
    draws: Draws = "own",
    redraw: bool = False,
    lowest: float | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield maps [M, B, rows, cols] and noise [B, 3, H, W] of one noisy copy after the other.

    All methods explain the same copy from one trace. `redraw` gives each copy another seed of the methods; `lowest` is
    the smallest value of Quantus' uniform noise, -radius by default.
    """
    if draws == "quantus" and lowest is not None and radius <= lowest:
        raise BadInput(
            f"radius={radius} was given with draws=quantus, whose noise is {lowest} or more; expected a radius of more "
            f"than {lowest}, such as radius=0.2."
        )
    x = widened(context.trace.pixels)
    copies = _noise(context, x, distribution, radius, draws, lowest)
    for k, noise in zip(track(range(samples), "robustness"), copies, strict=False):
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


def _noise(
    context: EvalContext, x: Tensor, distribution: Distribution, radius: float, draws: Draws, lowest: float | None
) -> Iterator[Tensor]:
    """Return noise [B, 3, H, W] without end: in ±radius, or normal with std `radius`."""
    if draws == "own":
        return (radius * noise for noise in image_noise(x, context.image_seeds, distribution))
    if distribution == "normal":
        return numpy_noise(x, context.seed, lambda generator, shape: generator.normal(0.0, radius, shape))
    low = -radius if lowest is None else lowest
    return numpy_noise(x, context.seed, lambda generator, shape: generator.uniform(low, radius, shape))


def at_resolution(maps: Tensor, resolution: Resolution, size: tuple[int, int]) -> Tensor:
    """Return maps [M, B, rows, cols] as they are, or [M, B, H, W] where every pixel has the value of its patch."""
    return maps if resolution == "patch" else F.interpolate(maps, size, mode="nearest-exact")


def away_from_zero(values: Tensor, axes: tuple[int, ...], near_zero: NearZero) -> Tensor:
    """Return the denominator of a relative change: values, with those near zero (or exactly zero) replaced."""
    if near_zero == "exact":
        return _replace_zeros(values)
    least = SMALL * values.abs().amax(axes, keepdim=True).clamp(min=SMALL)
    return torch.where(values.abs() < least, least, values)


def _replace_zeros(values: Tensor) -> Tensor:
    return torch.where(values == 0, SMALL, values)
