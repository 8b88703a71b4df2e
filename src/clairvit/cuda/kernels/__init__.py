"""Triton kernels, each next to nothing but numerics, what says where they can be used, and products of tokens.

`attention`, `decomposition`, `rollout` and `tokens` import Triton and are imported only where a kernel is launched;
each gives, up to rounding, what the torch code that calls it gives on a CPU.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.linalg import vector_norm

from clairvit.numerics import widened

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


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return sum_d a_d b_d of every token, [B, N], in float32 at least."""
    if tokens_apply(a, b):
        return products_and_norms(a, b)[:, 0]
    return (widened(a) * widened(b)).sum(-1)


def products_and_norms(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b, ||a|| and ||b|| of every token, [B, 3, N], in float32 at least."""
    if tokens_apply(a, b):
        from clairvit.cuda.kernels import tokens

        return tokens.products_and_norms(a, b)
    a, b = widened(a), widened(b)
    return torch.stack([torch.linalg.vecdot(a, b), vector_norm(a, dim=-1), vector_norm(b, dim=-1)], 1)
