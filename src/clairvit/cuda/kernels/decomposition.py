"""A Triton kernel for `methods/decomposition.py`: norms of y_i − T_ij, whose N × N vectors live in registers only.

T_ij = sum_h A_ij^h f_j^h + delta_ij x_i. A program holds a tile of rows i and goes through some columns j: for each of
them the heads' sum is a product [rows, H] · [H, d], taken in tiles of the width d and added up as |…| or squares.
Products run on tensor cores and are as exact as float32: for f in bfloat16 A is split into three bfloat16 parts, whose
sum is A; other products are made of three in TF32 ("tf32x3"). Everything is accumulated in float32.
This file imports Triton and is imported only where the kernel is launched.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS, BLOCK_WIDTH = 32, 64
COLUMNS_AT_ONCE = 8  # of one program: y is read from the cache for all but the first
WARPS = 4


@triton.jit
def _distance_kernel(
    A_pointer, f_pointer, x_pointer, y_pointer, tokens_pointer, out_pointer,
    A_batch, A_column, A_row, A_head, f_batch, f_head, f_column, f_width, x_batch, x_row, x_width,
    y_batch, y_row, y_width, heads, rows_count, columns_count, width,
    HAS_X: tl.constexpr, HAS_Y: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write ||y_i − T_ij||_p, [B, rows, columns], for a tile of rows and some columns."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_column = tl.program_id(1) * COLUMNS_AT_ONCE
    batch = tl.program_id(2).to(tl.int64)
    at_head = tl.arange(0, HEADS)
    inside = rows < rows_count
    tokens = tl.load(tokens_pointer + rows, mask=inside, other=-1)
    A_pointer += batch * A_batch
    f_pointer += batch * f_batch
    x_pointer += batch * x_batch
    y_pointer += batch * y_batch
    out_pointer += batch * rows_count * columns_count
    for column in range(first_column, tl.minimum(first_column + COLUMNS_AT_ONCE, columns_count)):
        A_tile = A_pointer + column * A_column + rows[:, None] * A_row + at_head[None, :] * A_head
        A = tl.load(A_tile, mask=inside[:, None] & (at_head[None, :] < heads), other=0.0)
        own = tokens == column
        is_row = tl.sum(own.to(tl.int32)) > 0
        powers = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
        for first in range(0, width, BLOCK_WIDTH):
            at = first + tl.arange(0, BLOCK_WIDTH)
            f_tile = f_pointer + at_head[:, None] * f_head + column * f_column + at[None, :] * f_width
            f = tl.load(f_tile, mask=(at_head[:, None] < heads) & (at[None, :] < width), other=0.0)
            if SPLIT:
                high = A.to(tl.bfloat16)
                middle = (A - high.to(tl.float32)).to(tl.bfloat16)
                low = (A - high.to(tl.float32) - middle.to(tl.float32)).to(tl.bfloat16)
                difference = tl.dot(high, f, tl.dot(middle, f, tl.dot(low, f)))
            else:
                difference = tl.dot(A, f.to(tl.float32), input_precision="tf32x3")
            if HAS_Y:
                y_tile = y_pointer + rows[:, None] * y_row + at[None, :] * y_width
                difference -= tl.load(y_tile, mask=inside[:, None] & (at[None, :] < width), other=0.0)
            if HAS_X:  # noqa: SIM102 (a constant, and a number of the program)
                if is_row:
                    x = tl.load(x_pointer + column * x_row + at * x_width, mask=at < width, other=0.0)
                    difference += tl.where(own[:, None], x[None, :], 0.0)
            powers += tl.abs(difference) if P == 1 else difference * difference
        total = tl.sum(powers, 1)
        if P == 2:
            total = tl.sqrt(total)
        tl.store(out_pointer + rows * columns_count + column, total, mask=inside)


def distances(
    A: Tensor, scale: Tensor, f: Tensor, x: Tensor | None, y: Tensor | None, tokens: Tensor, p: int
) -> Tensor:
    """Return ||y_i − s_i sum_h A_ij^h f_j^h − delta_ij x_i||_p, [B, rows, N], for p = 1 or 2; None stands for zeros.

    Args:
        A: [B, H, rows, N] in float32.
        scale: s, [B, rows, 1].
        f: [B, H, N, d].
        x: [B, N, d] in float32.
        y: [B, rows, d] in float32.
        tokens: Which token each row is, [rows].
        p: The norm.
    """
    batch, heads, rows, columns = A.shape
    out = torch.empty(batch, rows, columns, dtype=torch.float32, device=A.device)
    by_column = A.new_empty(batch, columns, rows, heads)  # a tile's heads lie next to each other
    torch.mul(A.permute(0, 3, 2, 1), scale[:, None], out=by_column)
    x_given, y_given = f[:, 0] if x is None else x, f[:, 0] if y is None else y  # not read where they are None
    grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, COLUMNS_AT_ONCE), batch)
    _distance_kernel[grid](
        by_column, f, x_given, y_given, tokens, out, *by_column.stride(), *f.stride(), *x_given.stride(),
        *y_given.stride(), heads, rows, columns, f.shape[-1], HAS_X=x is not None, HAS_Y=y is not None, P=p,
        SPLIT=f.dtype == torch.bfloat16, HEADS=max(16, triton.next_power_of_2(heads)), BLOCK_ROWS=BLOCK_ROWS,
        COLUMNS_AT_ONCE=COLUMNS_AT_ONCE, BLOCK_WIDTH=BLOCK_WIDTH, num_warps=WARPS,
    )  # fmt: skip
    return out
