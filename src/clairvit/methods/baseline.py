"""Baselines that know nothing of the model. A method that does not beat them has not explained anything."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.registry import NOTHING, method
from clairvit.perturbation.rng import image_seeds, make_generator
from clairvit.tracing.trace import Trace


@method("random", family="baseline", paper="—", output="image", requires=NOTHING, class_specific=False)
def noise(trace: Trace, seed: int = 0) -> Tensor:
    """Uniform noise, fixed by the seed and the image: what luck would score."""
    rows, cols = trace.layout.grid
    maps = [torch.rand(rows, cols, generator=make_generator(mark)) for mark in image_seeds(trace.pixels, seed)]
    return torch.stack(maps).to(trace.pixels.device)


@method("center", family="baseline", paper="—", output="image", requires=NOTHING, class_specific=False)
def centre(trace: Trace, sigma: float = 0.25) -> Tensor:
    """A Gaussian in the middle of the image, sigma in parts of its side: what a photographer's habit would score."""
    if sigma <= 0:
        raise BadInput(f"sigma={sigma} was given; expected a positive number such as 0.25.")
    bump = torch.outer(*(_bell(count, sigma) for count in trace.layout.grid))  # [rows, cols], float64
    wide = torch.promote_types(trace.pixels.dtype, torch.float32)
    return bump.to(trace.pixels.device, wide).expand(len(trace.pixels), -1, -1)


def _bell(count: int, sigma: float) -> Tensor:
    """Return exp(−d² / 2σ²) [count] at the middles of `count` cells, d from the middle of a side of 1.

    Cells that mirror each other have the same value to the last bit, on every CPU: otherwise rounding would order them.
    """
    distances = [(2 * k + 1 - count) / (2 * count) for k in range(count)]
    return torch.tensor([math.exp(-(d**2) / (2 * sigma**2)) for d in distances], dtype=torch.float64)
