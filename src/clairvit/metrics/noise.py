"""Noise for copies of an image: from our own chance, or as numpy draws it for Quantus."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from clairvit.perturbation.rng import make_generator

Draws = Literal["own", "quantus"]  # from seed and image; or as numpy does after np.random.seed, for parity
Law = Literal["uniform", "normal"]


def own_noise(images: Tensor, marks: list[int], law: Law) -> Iterator[Tensor]:
    """[B, 3, H, W] without end: uniform in ±1 or standard normal, of each image's mark, so the same in any batch."""
    for k in itertools.count():
        drawn = [_unit(law, images.shape[1:], make_generator(mark, k)) for mark in marks]
        yield torch.stack(drawn).to(images)


def _unit(law: Law, shape: torch.Size, chance: torch.Generator) -> Tensor:
    return 2 * torch.rand(shape, generator=chance) - 1 if law == "uniform" else torch.randn(shape, generator=chance)


def numpy_noise(
    images: Tensor, seed: int, draw: Callable[[RandomState, tuple[int, ...]], NDArray[Any]]
) -> Iterator[Tensor]:
    """[B, 3, H, W] without end, as Quantus draws after np.random.seed(seed).

    Quantus draws for a whole batch from one stream, so that its scores depend on the batch. Here each image draws from
    its own RandomState(seed), as Quantus does when it is given that image alone: all images meet the same noise.
    """
    chance = numpy_chance(seed)
    while True:
        yield torch.from_numpy(draw(chance, tuple(images.shape[1:]))).to(images).expand_as(images)


def numpy_chance(seed: int) -> RandomState:
    return RandomState(seed % 2**32)
