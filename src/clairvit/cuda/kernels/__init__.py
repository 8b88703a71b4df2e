"""Triton kernels, each next to nothing but numerics, and what says where they can be used.

`attention`, `decomposition`, `rollout` and `tokens` import Triton and are imported only where a kernel is launched;
each gives, up to rounding, what the torch code that calls it gives on a CPU.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

MOST_ROLLOUT_TOKENS = 256  # whose matrix fits into the registers of a program on a GPU


class Call(Protocol):
    """What kernels read of an attention call (`tracing.attention_call.AttentionCall`)."""

    v: Tensor  # [B, H, keys, dh]
    q: Tensor | None  # [B, H, queries, dh]
    k: Tensor | None  # [B, H, keys, dh]
    scale: float
    mask: Tensor | None
    weights: Tensor | None  # of attention that the model wrote out

    @property
    def queries(self) -> int:
        """How many queries there are."""

    @property
    def keys(self) -> int:
        """How many keys there are."""

    @property
    def lead(self) -> int:
        """How many sequences there are."""


@functools.cache
def has_triton() -> bool:
    """Return whether Triton, which kernels are written in, is installed."""
    return find_spec("triton") is not None


def attention_applies(call: Call) -> bool:
    """Return whether the kernels can compute the sums of a call: a fused call on CUDA, in float32 or half."""
    q = call.q
    if q is None or call.k is None or call.weights is not None or not q.is_cuda:
        return False
    if any(tensor.dtype.itemsize > 4 for tensor in (q, call.k, call.v)) or max(q.shape[-1], call.v.shape[-1]) > 128:
        return False
    return has_triton()


def tokens_apply(*tensors: Tensor) -> bool:
    """Return whether the kernel can compute products and norms of tokens: on CUDA, in half precision."""
    return all(tensor.is_cuda and tensor.dtype.itemsize == 2 for tensor in tensors) and has_triton()


def decomposition_applies(A: Tensor, f: Tensor) -> bool:
    """Return whether the kernel can compute norms: on CUDA, in float32 or half precision."""
    return A.is_cuda and A.dtype == torch.float32 and f.dtype.itemsize <= 4 and has_triton()


def rollout_applies(layer_maps: Tensor) -> bool:
    """Return whether the kernel can multiply several layers [layers, B, N, N]: on CUDA, in float32."""
    fits = len(layer_maps) > 1 and layer_maps.shape[-2] == layer_maps.shape[-1] <= MOST_ROLLOUT_TOKENS
    return fits and layer_maps.is_cuda and layer_maps.dtype == torch.float32 and has_triton()
