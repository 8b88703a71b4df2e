"""Baselines that do not look at the model: a method that does not beat them has not explained anything."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from clairvit._rng import make_generator
from clairvit.methods.registry import NOTHING, Caveats, method
from clairvit.option_types import Doc, Range
from clairvit.tracing.trace import Trace

NO_LAYERS = "does not look at the model, and has the same map for each of its layers"


@method(
    "random",
    family="baseline",
    paper="—",
    output="image",
    requires=NOTHING,
    class_specific=False,
    caveats=Caveats(no_tails=NO_LAYERS),
)
def uniform_noise(trace: Trace, seed: int = 0) -> Tensor:
    """Uniform noise, fixed by the seed and the image: the score of a random map."""
    seeds = trace.image_seeds(seed)
    maps = [
        torch.rand(
            trace.layout.grid, generator=make_generator(image_seed, "random/map"), dtype=torch.float32, device="cpu"
        )
        for image_seed in seeds
    ]
    return torch.stack(maps).to(trace.pixels.device)


@method(
    "center",
    family="baseline",
    paper="—",
    output="image",
    requires=NOTHING,
    class_specific=False,
    caveats=Caveats(no_tails=NO_LAYERS),
)
def centre_gaussian(
    trace: Trace,
    sigma: Annotated[float, Range(gt=0, example=0.25), Doc("the width of the bell, in parts of a side")] = 0.25,
) -> Tensor:
    """exp(−d² / 2σ²), d from the centre in parts of a side: the score of assuming that objects are in the centre."""
    *frames, rows, cols = trace.layout.grid
    gaussian = torch.outer(_gaussian(rows, sigma), _gaussian(cols, sigma)).expand(*frames, -1, -1)  # in every frame
    dtype = torch.promote_types(trace.pixels.dtype, torch.float32)
    return gaussian.to(trace.pixels.device, dtype).expand(len(trace.pixels), *gaussian.shape)


def _gaussian(count: int, sigma: float) -> Tensor:
    """Return exp(−d² / 2σ²) [count] at the centres of `count` cells, d from the centre of a side of 1.

    Cells that mirror each other have the same value to the last bit, on every CPU: otherwise rounding would order them.
    """
    distances = [(2 * k + 1 - count) / (2 * count) for k in range(count)]
    return torch.tensor([math.exp(-(d**2) / (2 * sigma**2)) for d in distances], dtype=torch.float64)
