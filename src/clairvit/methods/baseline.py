"""Baselines that know nothing of the model. A method that does not beat them has not explained anything."""

from __future__ import annotations

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.method import method
from clairvit.perturb.chance import dice, fingerprints
from clairvit.trace.trace import Trace


@method("random", family="baseline", paper="—", gives="image", passes="none", class_specific=False)
def noise(trace: Trace, seed: int = 0) -> Tensor:
    """Uniform noise, fixed by the seed and the image: what luck would score."""
    rows, cols = trace.layout.grid
    maps = [torch.rand(rows, cols, generator=dice(mark)) for mark in fingerprints(trace.pixels, seed)]
    return torch.stack(maps).to(trace.pixels.device)


@method("center", family="baseline", paper="—", gives="image", passes="none", class_specific=False)
def centre(trace: Trace, sigma: float = 0.25) -> Tensor:
    """A Gaussian in the middle of the image, sigma in parts of its side: what a photographer's habit would score."""
    if sigma <= 0:
        raise BadInput(f"sigma={sigma} was given; expected a positive number such as 0.25.")
    rows, cols = trace.layout.grid
    y = (torch.arange(rows) + 0.5) / rows - 0.5
    x = (torch.arange(cols) + 0.5) / cols - 0.5
    bump = torch.exp(-(y[:, None] ** 2 + x[None] ** 2) / (2 * sigma**2))
    return bump.expand(len(trace.pixels), -1, -1).to(trace.pixels.device)
