"""A Triton kernel for `products_and_norms`: reads two tensors in half precision once and adds up in float32.

This file imports Triton and is imported only where the kernel is launched.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS, BLOCK_WIDTH = 8, 256


@triton.jit
def _products_kernel(
    a_pointer, b_pointer, out_pointer, a_batch, a_token, a_width, b_batch, b_token, b_width, tokens, width,
    BLOCK_TOKENS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a·b, ||a|| and ||b||, [B, 3, tokens], of some tokens."""
    rows = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    batch = tl.program_id(1).to(tl.int64)
    products = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
    a_squares = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
    b_squares = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
    for first in range(0, width, BLOCK_WIDTH):
        at = first + tl.arange(0, BLOCK_WIDTH)
        inside = (rows[:, None] < tokens) & (at[None, :] < width)
        a_tile = a_pointer + batch * a_batch + rows[:, None] * a_token + at[None, :] * a_width
        b_tile = b_pointer + batch * b_batch + rows[:, None] * b_token + at[None, :] * b_width
        a = tl.load(a_tile, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_tile, mask=inside, other=0.0).to(tl.float32)
        products += a * b
        a_squares += a * a
        b_squares += b * b
    out = out_pointer + batch * 3 * tokens + rows
    tl.store(out, tl.sum(products, 1), mask=rows < tokens)
    tl.store(out + tokens, tl.sqrt(tl.sum(a_squares, 1)), mask=rows < tokens)
    tl.store(out + 2 * tokens, tl.sqrt(tl.sum(b_squares, 1)), mask=rows < tokens)


def products_and_norms(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b, ||a|| and ||b|| of every token of [B, N, d], [B, 3, N] in float32."""
    batch, tokens, width = a.shape
    out = torch.empty(batch, 3, tokens, dtype=torch.float32, device=a.device)
    _products_kernel[(triton.cdiv(tokens, BLOCK_TOKENS), batch)](
        a, b, out, *a.stride(), *b.stride(), tokens, width, BLOCK_TOKENS=BLOCK_TOKENS, BLOCK_WIDTH=BLOCK_WIDTH
    )
    return out
