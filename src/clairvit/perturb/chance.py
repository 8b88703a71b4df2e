"""Chance that can be repeated: noise is drawn from the seed and the image itself, whatever the batch or the device."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_STRIDE, _MODULUS = 2654435761, 2**31 - 1  # a multiplicative hash: neighbouring places get far-away weights


def fingerprints(images: Tensor, seed: int) -> list[int]:
    """One number an image, of its content: it gets the same noise in any batch and, being rounded first, precision."""
    bits = images.bfloat16().contiguous().view(torch.int16).flatten(1).long()  # [B, n]
    places = torch.arange(1, bits.shape[1] + 1, device=images.device) * _STRIDE % _MODULUS
    sums = (bits * places).remainder_(_MODULUS).sum(1).tolist()  # whole numbers: exact on every device
    return [zlib.crc32(number.to_bytes(8, "little"), seed & 0xFFFFFFFF) for number in sums]


def dice(mark: int, k: int = 0) -> torch.Generator:
    """The k-th generator of a fingerprint. It draws on the CPU, so that all devices see the same."""
    return torch.Generator().manual_seed(zlib.crc32(k.to_bytes(4, "little"), mark))
