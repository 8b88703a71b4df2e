"""Robustness: does a map stay what it is when the image hardly changes? Noisy copies are explained again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.case import Case
from clairvit.metrics.metric import metric
from clairvit.perturb.chance import dice
from clairvit.perturb.watch import told
from clairvit.trace.attention import widened

Noise = Literal["uniform", "normal"]
SMALL = 1e-6  # below it a relative change is taken of this instead


@metric(
    "max-sensitivity",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
    presets={"quantus": {"samples": 200}},
    discrepancies="A maximum over samples grows with their number, so that numbers with another `samples` cannot be "
    "compared; Quantus takes 200. For sampling methods the draw of the method itself stays the same.",
)
def max_sensitivity(case: Case, samples: int = 10, radius: float = 0.2) -> Tensor:
    """max_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius (normalised pixels): the largest change of the map."""
    return torch.stack([*_changes(case, samples, radius, "uniform", _relative)]).amax(0)


@metric(
    "avg-sensitivity",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Yeh et al., NeurIPS 2019",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
    presets={"quantus": {"samples": 200}},
)
def avg_sensitivity(case: Case, samples: int = 10, radius: float = 0.2) -> Tensor:
    """mean_j |a(x) − a(x + u_j)| / |a(x)|, u_j uniform in ±radius (normalised pixels): the usual change of the map."""
    return torch.stack([*_changes(case, samples, radius, "uniform", _relative)]).mean(0)


@metric(
    "local-lipschitz",
    family="robustness",
    better="lower",
    span=(0, math.inf),
    paper="Alvarez-Melis & Jaakkola, NeurIPS 2018",
    needs=("methods",),
    cost=lambda samples, **_: Cost(samples),
    discrepancies="Quantus measures maps in L1 and images in L2, and scales all maps of a batch together "
    "(`distance=manhattan`); here both are L2 and each map is over its own largest value.",
)
def local_lipschitz(
    case: Case, samples: int = 10, radius: float = 0.1, distance: Literal["euclidean", "manhattan"] = "euclidean"
) -> Tensor:
    """max_j |a(x) − a(x_j)| / |x − x_j|, x_j with normal noise of std `radius`, maps over their largest value."""
    p = 1 if distance == "manhattan" else 2

    def slope(case: Case, maps: Tensor, noise: Tensor) -> Tensor:
        return _length((_scaled(case.maps) - _scaled(maps)).flatten(2), p) / _length(noise.flatten(1))

    return torch.stack([*_changes(case, samples, radius, "normal", slope)]).amax(0)


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
    case: Case, samples: int = 10, radius: float = 0.1, of: Literal["input", "output"] = "input"
) -> Tensor:
    """max_j |(a − a_j)/a| / max(|(x − x_j)/x|, small): the map's relative change over that of the image.

    `of=output` divides by the change of the scores |f(x) − f(x_j)| instead. Relative changes of entries near zero are
    taken of 1e-6 of the largest.
    """

    def ratio(case: Case, maps: Tensor, noise: Tensor) -> Tensor:
        change = _length(((case.maps - maps) / _away_from_zero(case.maps, (2, 3))).flatten(2))
        if of == "input":
            x = widened(case.trace.pixels).double()
            moved = _length((noise / _away_from_zero(x, (1, 2, 3))).flatten(1))
        else:
            moved = _length(case.logits_of(case.trace.pixels + noise) - case.trace.logits.double())
        return change / moved.clamp(min=SMALL)

    return torch.stack([*_changes(case, samples, radius, "normal", ratio)]).amax(0)


def _changes(
    case: Case, samples: int, radius: float, kind: Noise, of: Callable[[Case, Tensor, Tensor], Tensor]
) -> Iterator[Tensor]:
    """of(case, maps [M, B, rows, cols], noise [B, 3, H, W]) -> [M, B], for one noisy copy after the other.

    All methods explain the same copy from one trace.
    """
    if samples < 1 or radius <= 0:
        raise BadInput(
            f"samples={samples} and radius={radius} were given; expected 1 or more noisy copies and a positive radius, "
            "such as samples=10 and radius=0.2."
        )
    x = widened(case.trace.pixels)
    for k in told(range(samples), "robustness"):
        drawn = [_noise(kind, x.shape[1:], dice(mark, k)) for mark in case.marks]
        noise = radius * torch.stack(drawn).to(x)
        yield of(case, case.explained_again(x + noise), noise.double())


def _noise(kind: Noise, shape: torch.Size, chance: torch.Generator) -> Tensor:
    return 2 * torch.rand(shape, generator=chance) - 1 if kind == "uniform" else torch.randn(shape, generator=chance)


def _relative(case: Case, maps: Tensor, noise: Tensor) -> Tensor:
    """|a − a_j| / |a|; NaN for a map of zeros."""
    return _length((case.maps - maps).flatten(2)) / _length(case.maps.flatten(2))


def _length(values: Tensor, p: int = 2) -> Tensor:
    """[…, n] -> […]"""
    length: Tensor = values.norm(p, dim=-1)
    return length


def _scaled(maps: Tensor) -> Tensor:
    largest = maps.abs().amax((2, 3), keepdim=True)
    return maps / torch.where(largest == 0, torch.ones_like(largest), largest)


def _away_from_zero(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    least = SMALL * values.abs().amax(axes, keepdim=True).clamp(min=SMALL)
    return torch.where(values.abs() < least, least, values)
