"""Robustness: does a map stay what it is when the image hardly changes? Noisy copies are explained again.

With `draws=quantus` (in `preset=quantus`) the noise is numpy's, drawn for each image from RandomState(seed) as Quantus
does when it is given that image alone after np.random.seed(seed); so a score does not depend on the batch, as its own
scores do. Maps are ours: one value a patch, which every pixel of the patch has where `resolution=pixel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.context import EvalContext
from clairvit.metrics.noise import Draws, Law, numpy_noise, own_noise
from clairvit.metrics.registry import metric
from clairvit.perturbation.progress import track
from clairvit.perturbation.rng import make_generator
from clairvit.tracing.attention import widened

Resolution = Literal["patch", "pixel"]
NearZero = Literal["largest", "exact"]
Change = Callable[
    [EvalContext, Tensor, Tensor], Tensor
]  # (case, maps [M, B, rows, cols], noise [B, 3, H, W]) -> [M, B]
SMALL = 1e-6  # below it a relative change is taken of this instead
QUANTUS_LEAST = 0.02  # Quantus's relative stabilities draw from here up to the radius, never below


@metric(
    "max-sensitivity",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
    presets={"quantus": {"samples": 200, "draws": "quantus"}},
    discrepancies="A maximum over samples grows with their number, so that numbers with another `samples` cannot be "
    "compared; Quantus takes 200. Masks that LIME, SHAP or RISE draw stay the same unless `redraw`: their large values "
    "in papers contain the change of masks.",
)
def max_sensitivity(
    case: EvalContext, samples: int = 10, radius: float = 0.2, redraw: bool = False, draws: Draws = "own"
) -> Tensor:
    """max_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius (normalised pixels): the largest change of the map.

    Methods that draw masks (LIME, SHAP, RISE) draw the same for each copy; `redraw` gives them a new seed for each, so
    that their own chance is counted too. What is drawn from the image itself (SmoothGrad's noise, the random map) is
    drawn anew for each copy either way.
    """
    return torch.stack([*_changes(case, samples, radius, "uniform", _relative, draws, redraw)]).amax(0)


@metric(
    "avg-sensitivity",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
    presets={"quantus": {"samples": 200, "draws": "quantus"}},
)
def avg_sensitivity(
    case: EvalContext, samples: int = 10, radius: float = 0.2, redraw: bool = False, draws: Draws = "own"
) -> Tensor:
    """mean_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius (normalised pixels): the usual change of the map.

    `redraw` as of max-sensitivity.
    """
    return torch.stack([*_changes(case, samples, radius, "uniform", _relative, draws, redraw)]).mean(0)


@metric(
    "local-lipschitz",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Alvarez-Melis & Jaakkola, NeurIPS 2018",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
    presets={"quantus": {"samples": 200, "draws": "quantus", "resolution": "pixel"}},
    discrepancies="Quantus scales all maps of a batch together, and each noisy batch again by itself; here each map is "
    "over its own largest value, which is what Quantus does with one image at a time (`preset=quantus`). Its metric "
    "measures maps and images in L2, the function of the same name maps in L1 (`distance=manhattan`); both count "
    "pixels (`resolution=pixel`) and add 1e-10 to the distance of the images, which is left out here.",
)
def local_lipschitz(
    case: EvalContext,
    samples: int = 10,
    radius: float = 0.1,
    distance: Literal["euclidean", "manhattan"] = "euclidean",
    resolution: Resolution = "patch",
    draws: Draws = "own",
) -> Tensor:
    """max_j |a(x) − a(x_j)| / |x − x_j|, x_j with normal noise of std `radius`, maps over their largest value.

    `distance` is that of the maps; images are measured in L2. `resolution=pixel` counts a patch once for each of its
    pixels.
    """
    p = 1 if distance == "manhattan" else 2

    def slope(case: EvalContext, maps: Tensor, noise: Tensor) -> Tensor:
        change = _at(resolution, _scaled(case.maps) - _scaled(maps), case.size)
        return _length(change.flatten(2), p) / _length(noise.flatten(1))

    return torch.stack([*_changes(case, samples, radius, "normal", slope, draws)]).amax(0)


@metric(
    "relative-stability",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Agarwal et al., 2022",
    needs=("methods",),
    cost=lambda samples, **_: Cost(2 * samples),
    presets={
        "quantus": {
            "samples": 200,
            "radius": 0.2,
            "draws": "quantus",
            "near_zero": "exact",
            "changed": "nan",
            "resolution": "pixel",
        }
    },
    discrepancies="Quantus draws the noise uniformly between 0.02 and 0.2, so that every pixel gets brighter, divides "
    "by entries however near to zero they are (1e-6 only for an exact zero), and gives NaN to an image if a single "
    "copy is predicted as another class (`preset=quantus`). Here noise has mean 0, entries are kept from zero by 1e-6 "
    "of the largest, and copies count whatever the model says of them (`changed=leave` drops those that change class, "
    "as the paper asks).",
)
def relative_stability(
    case: EvalContext,
    samples: int = 10,
    radius: float = 0.1,
    of: Literal["input", "output"] = "input",
    near_zero: NearZero = "largest",
    changed: Literal["keep", "leave", "nan"] = "keep",
    resolution: Resolution = "patch",
    draws: Draws = "own",
) -> Tensor:
    """max_j |(a − a_j)/a| / max(|(x − x_j)/x|, small): the map's relative change over that of the image.

    `of=output` divides by the change of the scores |f(x) − f(x_j)| instead. Relative changes of entries near zero are
    taken of 1e-6 of the largest (`near_zero=largest`), or only those of exact zeros of 1e-6 (`exact`). Copies that the
    model takes for another class are kept, left out (NaN if all are), or make the score NaN. `resolution` as of
    local-lipschitz. The noise is normal with std `radius`; with `draws=quantus` uniform between 0.02 and `radius`.
    """

    def ratio(case: EvalContext, maps: Tensor, noise: Tensor) -> Tensor:
        relative = (case.maps - maps) / away_from_zero(case.maps, (2, 3), near_zero)
        change = _length(_at(resolution, relative, case.size).flatten(2))
        x = widened(case.trace.pixels).double()
        usual = case.trace.logits.double()
        seen = case.logits_of(case.trace.pixels + noise) if of == "output" or changed != "keep" else usual
        if of == "input":
            moved = _length((noise / away_from_zero(x, (1, 2, 3), near_zero)).flatten(1))
        else:
            moved = _length(seen - usual)
        found = change / (moved.clamp(min=SMALL) if near_zero == "largest" else torch.where(moved == 0, SMALL, moved))
        return found if changed == "keep" else found.masked_fill(seen.argmax(1) != usual.argmax(1), math.nan)

    law: Law = "uniform" if draws == "quantus" else "normal"
    every = torch.stack([*_changes(case, samples, radius, law, ratio, draws, least=QUANTUS_LEAST)])
    if changed != "leave":
        return every.amax(0)
    kept = every.nan_to_num(nan=-math.inf).amax(0)
    return kept.masked_fill(kept == -math.inf, math.nan)


def _changes(
    case: EvalContext,
    samples: int,
    radius: float,
    law: Law,
    of: Change,
    draws: Draws = "own",
    redraw: bool = False,
    least: float | None = None,
) -> Iterator[Tensor]:
    """`of` [M, B], for one noisy copy after the other. All methods explain the same copy from one trace."""
    if samples < 1 or radius <= 0 or (draws == "quantus" and radius <= (least or 0)):
        smallest = f"a radius of more than {least}" if least and draws == "quantus" else "a positive radius"
        raise BadInput(
            f"samples={samples} and radius={radius} were given; expected 1 or more noisy copies and {smallest}, "
            "such as samples=10 and radius=0.2."
        )
    x = widened(case.trace.pixels)
    every = _noise(case, x, law, radius, draws, least)
    for k, noise in zip(track(range(samples), "robustness"), every, strict=False):
        seed = int(torch.randint(2**31, (), generator=make_generator(case.seed, k))) if redraw else None
        yield of(case, case.explained_again(x + noise, seed=seed), noise.double())


def _noise(
    case: EvalContext, x: Tensor, law: Law, radius: float, draws: Draws, least: float | None
) -> Iterator[Tensor]:
    """[B, 3, H, W] without end."""
    if draws == "own":
        return (radius * one for one in own_noise(x, case.marks, law))
    if law == "normal":
        return numpy_noise(x, case.seed, lambda chance, shape: chance.normal(0.0, radius, shape))
    low = -radius if least is None else least
    return numpy_noise(x, case.seed, lambda chance, shape: chance.uniform(low, radius, shape))


def _relative(case: EvalContext, maps: Tensor, noise: Tensor) -> Tensor:
    """|a − a_j| / |a|; NaN for a map of zeros."""
    return _length((case.maps - maps).flatten(2)) / _length(case.maps.flatten(2))


def _length(values: Tensor, p: int = 2) -> Tensor:
    """[…, n] -> […]"""
    length: Tensor = values.norm(p, dim=-1)
    return length


def _at(resolution: Resolution, maps: Tensor, size: tuple[int, int]) -> Tensor:
    """[M, B, rows, cols] -> the same, or [M, B, H, W] with every pixel as its patch."""
    return maps if resolution == "patch" else F.interpolate(maps, size, mode="nearest-exact")


def _scaled(maps: Tensor) -> Tensor:
    largest = maps.abs().amax((2, 3), keepdim=True)
    return maps / torch.where(largest == 0, torch.ones_like(largest), largest)


def away_from_zero(values: Tensor, axes: tuple[int, ...], near_zero: NearZero) -> Tensor:
    """What a relative change is taken of: values, but for those near zero (or exactly zero)."""
    if near_zero == "exact":
        return torch.where(values == 0, SMALL, values)
    least = SMALL * values.abs().amax(axes, keepdim=True).clamp(min=SMALL)
    return torch.where(values.abs() < least, least, values)
