"""A Triton kernel for `aggregation.Product`: the rows of a rollout through several layers in one launch.

A program has one image: the three rows that a product keeps stay in registers, and a layer's matrix is read once, a few
of its rows at a time. The row on the left goes through memory, where every thread finds the numbers it needs.
This file imports Triton and is imported only where the kernel is launched.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_AT_ONCE, WARPS = 64, 8  # the quickest for 197 tokens on an H200


@triton.jit
def _rollout_kernel(
    maps_pointer, row_pointer, totals_pointer, losses_pointer, left_pointer, out_pointer,
    map_layer, map_batch, map_row, map_column, row_batch, row_part, row_token, batches, layers, tokens,
    weight, residual, NORMALISED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write what start, shift and added become through all layers, [B, 3, tokens]."""
    batch = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < tokens
    row_pointer += batch * row_batch + at * row_token
    start = tl.load(row_pointer, mask=inside, other=0.0)
    shift = tl.load(row_pointer + row_part, mask=inside, other=0.0)
    added = tl.load(row_pointer + 2 * row_part, mask=inside, other=0.0)
    for layer in range(layers):
        passed = start + shift
        left = passed + added
        loss = residual - 1.0
        if NORMALISED:
            place = (layer * batches + batch) * tokens + at
            total = tl.load(totals_pointer + place, mask=inside, other=1.0)
            loss = tl.load(losses_pointer + place, mask=inside, other=0.0)
            left, added = left / total, added / total
        tl.store(left_pointer + batch * tokens + at, left, mask=inside)
        tl.debug_barrier()  # all threads have written
        products = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
        matrix = maps_pointer + layer * map_layer + batch * map_batch
        for first in range(0, tokens, BLOCK_ROWS):
            rows = first + tl.arange(0, BLOCK_ROWS)
            factors = tl.load(left_pointer + batch * tokens + rows, mask=rows < tokens, other=0.0)
            tile = matrix + rows[:, None] * map_row + at[None, :] * map_column
            entries = tl.load(tile, mask=(rows[:, None] < tokens) & inside[None, :], other=0.0)
            products += factors[:, None] * entries
        tl.debug_barrier()  # all threads have read
        added = residual * added + weight * tl.sum(products, 0)
        shift = shift + passed * loss
    out = out_pointer + batch * 3 * tokens + at
    tl.store(out, start, mask=inside)
    tl.store(out + tokens, shift, mask=inside)
    tl.store(out + 2 * tokens, added, mask=inside)


def product_steps(
    row: Tensor, layer_maps: Tensor, totals: Tensor | None, losses: Tensor | None, weight: float, residual: float
) -> Tensor:
    """Return the row [B, 3, N] of a product after several layers; totals and losses are of normalised rows.

    Args:
        row: [B, 3, N].
        layer_maps: [layers, B, N, N] in float32.
        totals: The row sums of M + residual·I, [layers, B, N]; None: rows are not normalised.
        losses: residual / total − 1, [layers, B, N].
        weight: Of the matrices.
        residual: Of the identity.
    """
    layers, batch, tokens, _ = layer_maps.shape
    out = torch.empty(batch, 3, tokens, dtype=torch.float32, device=row.device)
    left = torch.empty(batch, tokens, dtype=torch.float32, device=row.device)
    block = max(16, triton.next_power_of_2(tokens))
    _rollout_kernel[(batch,)](
        layer_maps, row, row if totals is None else totals, row if losses is None else losses, left, out,
        *layer_maps.stride(), *row.stride(), batch, layers, tokens, weight, residual,
        NORMALISED=totals is not None, BLOCK=block, BLOCK_ROWS=ROWS_AT_ONCE, num_warps=WARPS,
    )  # fmt: skip
    return out
