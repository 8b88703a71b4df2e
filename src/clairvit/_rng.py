"""Reproducible randomness: noise depends on the seed and the image itself, not on the batch or the device."""

from __future__ import annotations

import functools
import hashlib
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

Distribution = Literal["uniform", "normal"]  # in ±1, or standard normal
# Streams that had numbers before they had names, with the first of them: index k draws from number + k, so that maps
# and scores of earlier versions stay. Those of one seed that share numbers draw other things from them (ties, noise,
# masks). New streams have names alone.
NUMBERS = {
    # of the seed of an image
    "metrics/ties": 0,
    "metrics/pixel ties": 1,
    "metrics/random sets": 2,
    "calibrate/token sets": 2001,
    "random-logit/other class": 0,
    "robustness/noise": 0,
    "random/map": 0,
    "smoothgrad/noise": 0,
    "expected-gradients/draws": 0,
    "removal/noise": 0,
    "road/noise": 0,  # of a seed of image and mask
    # of the seed itself
    "mprt/parameters": 0,
    "robustness/method seeds": 0,
    "expected-gradients/files": 0,
    "shift/offsets": 0,
    "hsic/points": 0,
    "hsic/strata": 1,
    "lime/coalitions": 0,
    "kernelshap/coalitions": 0,
    "rise/cells": 0,
    "rise/shifts": 1,
    "rise/levels": 2,
    "page/random map": 0,
    "benchmarks/shuffled maps": 0,
    # of the seed of a training
    "training/crops": 0,  # two for each epoch
    "training/validation rows": -1,
    "training/poisoned validation": (1 << 32) - 1,
    "training/poisoned": 1 << 32,
    "training/dropped tokens": 1 << 33,
}
_STRIDE, _MODULUS = 2654435761, 2**31 - 1  # a multiplicative hash: neighbouring positions get distant weights


def image_seeds(images: Tensor, seed: int) -> list[int]:
    """Return one seed per image [B, C, H, W], from its content: the same in any batch, device and precision.

    Pixels are rounded to bfloat16 and summed as whole numbers, which is exact everywhere.
    """
    bits = images.bfloat16().contiguous().view(torch.int16).flatten(1).long()  # [B, n]
    sums = (bits * _position_weights(bits.shape[1], images.device)).remainder_(_MODULUS).sum(1).tolist()
    return [zlib.crc32(number.to_bytes(8, "little"), seed & 0xFFFFFFFF) for number in sums]


@functools.lru_cache(maxsize=4)
def _position_weights(count: int, device: torch.device) -> Tensor:
    """Return one weight per pixel value, int64 [count]."""
    return torch.arange(1, count + 1, device=device) * _STRIDE % _MODULUS


def make_generator(seed: int, stream: str, index: int = 0) -> torch.Generator:
    """Return the generator of a seed, the name of a stream and an index in it, such as a sample or an epoch.

    It draws on the CPU, so that all devices get the same numbers. Seed and stream are hashed together: a checksum gives
    (0, 1) and (1, 0) the same value, and then two seeds have the same samples in another order. Give what draws a name
    of its own, "metric/what"; `NUMBERS` is closed.
    """
    name = str(NUMBERS[stream] + index) if stream in NUMBERS else f"{stream} {index}"
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest())
    )


def random_sets(seeds: Sequence[int], runs: int, total: int, count: int, stream: str, index: int = 0) -> Tensor:
    """Return random sets of `count` of `total` items, bool [B, runs, total], drawn from the seed of each image."""
    keys = torch.stack(
        [
            torch.rand(runs, total, generator=make_generator(seed, stream, index), dtype=torch.float32, device="cpu")
            for seed in seeds
        ]
    )
    return keys.argsort(-1).argsort(-1) < count


def image_noise(images: Tensor, seeds: list[int], distribution: Distribution) -> Iterator[Tensor]:
    """Yield noise [B, 3, H, W] of robustness metrics without end, image by image from `seeds`, whatever the batch."""
    for k in itertools.count():
        noise = [_draw(images.shape[1:], distribution, make_generator(seed, "robustness/noise", k)) for seed in seeds]
        yield torch.stack(noise).to(images)


def _draw(shape: torch.Size, distribution: Distribution, generator: torch.Generator) -> Tensor:
    if distribution == "uniform":
        return 2 * torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") - 1
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
