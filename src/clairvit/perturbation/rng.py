"""Reproducible randomness: noise depends on the seed and the image itself, not on the batch or the device."""

from __future__ import annotations

import functools
import hashlib
import itertools
import numbers
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput

Distribution = Literal["uniform", "normal"]  # in ±1, or standard normal
_STRIDE, _MODULUS = 2654435761, 2**31 - 1  # a multiplicative hash: neighbouring positions get distant weights


def check_seed(seed: Any) -> int:
    """Return a seed as an int; raise BadInput for anything but a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise BadInput(f"seed={seed!r} is a {type(seed).__name__}; expected a whole number, such as 0.")
    return int(seed)


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


def make_generator(seed: int, stream: int = 0) -> torch.Generator:
    """Return the generator of a seed and stream. It draws on the CPU, so that all devices get the same numbers.

    Seed and stream are hashed as a pair: a checksum gives (0, 1) and (1, 0) the same value, and then two seeds have
    the same samples in another order.
    """
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(f"{seed} {stream}".encode(), digest_size=8).digest())
    )


def random_sets(seeds: Sequence[int], runs: int, total: int, count: int, stream: int) -> Tensor:
    """Return random sets of `count` of `total` items, bool [B, runs, total], drawn from the seed of each image."""
    keys = torch.stack(
        [
            torch.rand(runs, total, generator=make_generator(seed, stream), dtype=torch.float32, device="cpu")
            for seed in seeds
        ]
    )
    return keys.argsort(-1).argsort(-1) < count


def image_noise(images: Tensor, seeds: list[int], distribution: Distribution) -> Iterator[Tensor]:
    """Yield noise [B, 3, H, W] without end, image by image from `seeds`: the same for an image in any batch."""
    for k in itertools.count():
        noise = [_draw(images.shape[1:], distribution, make_generator(seed, k)) for seed in seeds]
        yield torch.stack(noise).to(images)


def _draw(shape: torch.Size, distribution: Distribution, generator: torch.Generator) -> Tensor:
    if distribution == "uniform":
        return 2 * torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") - 1
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
