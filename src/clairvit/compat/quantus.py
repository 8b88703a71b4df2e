"""Quantus: presets of metrics that reproduce its numbers, its random draws, and two of its formulas.

Quantus draws for a whole batch from numpy's global stream, so that its scores depend on the batch. Here each image
draws from its own RandomState(seed), as Quantus does when it is given that image alone after np.random.seed(seed): all
images get the same noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.pixel_ranking import check_paints, painted, squares
from clairvit.option_types import Doc

Draws = Annotated[
    Literal["own", "quantus"],
    Doc("who draws: this package from seed and image, or numpy after np.random.seed(seed), as Quantus does"),
]
LOWEST_NOISE = 0.02  # the relative stabilities draw uniformly from here up to the radius, never below


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


def exact_completeness(context: EvalContext, removal: str, score: str, upsampling: Upsampling) -> Tensor:
    """Return [M, B]: 1 where sum(a / max |a|) equals f(x) − f(x without its first channel) to the last bit, else 0.

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


def infidelity_terms(
    context: EvalContext, side: int, removal: str, score: str, upsampling: Upsampling
) -> tuple[Tensor, Tensor]:
    """Return sums of map times change [M, B, K] and drops [B, K] after 1, …, K squares are gone, row by row."""
    square, count = squares(context, side)
    if context.size[0] % side or context.size[1] % side:
        raise BadInput(
            f"region={side} was given for images of {context.size} pixels; expected a side that divides both."
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
    return torch.stack(by_square).cumsum(-1), drops.double()
