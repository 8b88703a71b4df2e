"""Inner products and norms of tokens [B, N, d]; on CUDA by a kernel, without wide copies of half precision."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from clairvit.cuda import kernels
from clairvit.numerics import widened


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return sum_d a_d b_d of every token, [B, N], in float32 at least."""
    if kernels.tokens_apply(a, b):
        return products_and_norms(a, b)[:, 0]
    return (widened(a) * widened(b)).sum(-1)


def products_and_norms(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b, ||a|| and ||b|| of every token, [B, 3, N], in float32 at least."""
    if kernels.tokens_apply(a, b):
        from clairvit.cuda.kernels import tokens

        return tokens.products_and_norms(a, b)
    a, b = widened(a), widened(b)
    return torch.stack([torch.linalg.vecdot(a, b), vector_norm(a, dim=-1), vector_norm(b, dim=-1)], 1)
