"""Inner products and norms of tokens [B, N, d]; on CUDA by a kernel, without wide copies of half precision."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from clairvit.numerics import has_triton, widened


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return sum_d a_d b_d of every token, [B, N], in float32 at least."""
    if kernel_applies(a, b):
        return products_and_norms(a, b)[:, 0]
    return (widened(a) * widened(b)).sum(-1)


def products_and_norms(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b, ||a|| and ||b|| of every token, [B, 3, N], in float32 at least."""
    if kernel_applies(a, b):
        from clairvit.methods import token_kernels

        return token_kernels.products_and_norms(a, b)
    a, b = widened(a), widened(b)
    return torch.stack([torch.linalg.vecdot(a, b), vector_norm(a, dim=-1), vector_norm(b, dim=-1)], 1)


def kernel_applies(*tensors: Tensor) -> bool:
    """Return whether the Triton kernel can compute them: on CUDA, in half precision."""
    return all(tensor.is_cuda and tensor.dtype.itemsize == 2 for tensor in tensors) and has_triton()
