"""Chance that can be repeated: noise is drawn from the seed and the image itself, whatever the batch or the device."""

from __future__ import annotations

import hashlib
import numbers
import zlib
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput

_STRIDE, _MODULUS = 2654435761, 2**31 - 1  # a multiplicative hash: neighbouring places get far-away weights


def check_seed(seed: Any) -> int:
    """Return a seed as an int; anything but a whole number is refused."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise BadInput(f"seed={seed!r} is a {type(seed).__name__}; expected a whole number, such as 0.")
    return int(seed)


def image_seeds(images: Tensor, seed: int) -> list[int]:
    """One number an image, of its content: it gets the same noise in any batch and, being rounded first, precision."""
    bits = images.bfloat16().contiguous().view(torch.int16).flatten(1).long()  # [B, n]
    places = torch.arange(1, bits.shape[1] + 1, device=images.device) * _STRIDE % _MODULUS
    sums = (bits * places).remainder_(_MODULUS).sum(1).tolist()  # whole numbers: exact on every device
    return [zlib.crc32(number.to_bytes(8, "little"), seed & 0xFFFFFFFF) for number in sums]


def make_generator(mark: int, k: int = 0) -> torch.Generator:
    """The k-th generator of a fingerprint, or of a seed. It draws on the CPU, so that all devices see the same.

    Mark and k are hashed as two things: a checksum mixes them so that (0, 1) and (1, 0) are one, and then the samples
    of two seeds are the same ones in another order.
    """
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(f"{mark} {k}".encode(), digest_size=8).digest())
    )
