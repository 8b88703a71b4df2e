"""Triton kernels for sums over A and G of one layer: tiles of A and G live in registers, only sums are written.

Four kernels. Two are a pass over the tiles of one head. The row kernel holds a tile of queries and goes through the
keys: it computes the logarithm of each row's sum of exponentials with the row sums (a running maximum rescales both).
The column kernel holds a tile of keys and goes through the queries: A = exp(S − log-sum), and all column sums of the
pass are one small product  weights [sums, queries] · f(A, G) [queries, keys].  No atomic additions: the results do not
depend on the order in which programs run. The third kernel writes a weighted sum over heads, [B, queries, keys]: a
program holds one tile of it and goes through the heads. The fourth writes products of a few queries with all keys.

Inputs in half precision are multiplied on tensor cores; float32 is multiplied in float32 ("ieee"), never in TF32.
Everything is accumulated in float32. This file imports Triton and is imported only where a kernel is launched.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clairvit._entries import ENTRIES, READS_A, READS_G, Entry, WeightedEntries
from clairvit.cuda.kernels import Call
from clairvit.numerics import widened

SUMS_AT_ONCE = 16  # column sums of one launch: the smallest side of a product in Triton
ROWS_AT_ONCE, ROW_PRODUCT_COLUMNS = 64, 64  # tiles of products of a few rows


@triton.jit
def _tile(pointer, rows, columns, row_stride, column_stride, row_count, column_count):
    """Load a tile [rows, columns] of a matrix, 0 outside it."""
    inside = (rows[:, None] < row_count) & (columns[None, :] < column_count)
    return tl.load(pointer + rows[:, None] * row_stride + columns[None, :] * column_stride, mask=inside, other=0.0)


@triton.jit
def _scores(q, k_transposed, scale, mask_pointer, rows, columns, mask_row, mask_column, queries, keys, MASK, PRECISION):
    """Return scale · q kᵀ + mask of a tile, −inf beyond the last key."""
    scores = tl.dot(q, k_transposed, input_precision=PRECISION) * scale
    if MASK == "added":
        scores += _tile(mask_pointer, rows, columns, mask_row, mask_column, queries, keys).to(tl.float32)
    if MASK == "bool":
        allowed = _tile(mask_pointer, rows, columns, mask_row, mask_column, queries, keys)
        scores = tl.where((allowed != 0) | (rows[:, None] >= queries), scores, float("-inf"))
    return tl.where(columns[None, :] < keys, scores, float("-inf"))


@triton.jit
def _row_kernel(
    q_pointer, k_pointer, v_pointer, gradient_pointer, mask_pointer, log_sum_pointer, sums_pointer,
    q_batch, q_head, q_row, q_width, k_batch, k_head, k_row, k_width, v_batch, v_head, v_row, v_width,
    g_batch, g_head, g_row, g_width, mask_batch, mask_head, mask_row, mask_column,
    heads, queries, keys, width, value_width, scale,
    SUM_AG: tl.constexpr, SUM_AG_POSITIVE: tl.constexpr, SUM_G_POSITIVE: tl.constexpr, SUM_G_ABSOLUTE: tl.constexpr,
    SUM_G_SQUARE: tl.constexpr, READ_A: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the log-sums [B, H, queries] and row sums [5, B, H, queries] of AG, AG+, G+, |G| and G² of some rows."""
    READ_G: tl.constexpr = SUM_AG or SUM_AG_POSITIVE or SUM_G_POSITIVE or SUM_G_ABSOLUTE or SUM_G_SQUARE
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    at, at_value = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    k_pointer += batch * k_batch + head * k_head
    v_pointer += batch * v_batch + head * v_head
    mask_pointer += batch * mask_batch + head * mask_head
    if READ_A:
        q = _tile(q_pointer + batch * q_batch + head * q_head, rows, at, q_row, q_width, queries, width)
    if READ_G:
        dO = _tile(
            gradient_pointer + batch * g_batch + head * g_head, rows, at_value, g_row, g_width, queries, value_width
        )
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    AG, AG_positive = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    G_positive, G_absolute = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    G_square = tl.zeros([BLOCK_Q], tl.float32)
    for first in range(0, keys, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        if READ_G:
            v_transposed = _tile(v_pointer, at_value, columns, v_width, v_row, value_width, keys)
            G = tl.dot(dO, v_transposed, input_precision=PRECISION)
            G_positive += tl.sum(tl.maximum(G, 0.0), 1)
            G_absolute += tl.sum(tl.abs(G), 1)
            if SUM_G_SQUARE:
                G_square += tl.sum(G * G, 1)
        if READ_A:
            k_transposed = _tile(k_pointer, at, columns, k_width, k_row, width, keys)
            scores = _scores(
                q,
                k_transposed,
                scale,
                mask_pointer,
                rows,
                columns,
                mask_row,
                mask_column,
                queries,
                keys,
                MASK,
                PRECISION,
            )
            larger = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            rescale = tl.exp(largest - shift)
            exponentials = tl.exp(scores - shift[:, None])
            total = total * rescale + tl.sum(exponentials, 1)
            if SUM_AG:
                AG = AG * rescale + tl.sum(exponentials * G, 1)
            if SUM_AG_POSITIVE:
                AG_positive = AG_positive * rescale + tl.sum(exponentials * tl.maximum(G, 0.0), 1)
            largest = larger
    inside = rows < queries
    out = tl.program_id(1).to(tl.int64) * queries + rows
    plane = tl.num_programs(1).to(tl.int64) * queries
    if READ_A:
        tl.store(log_sum_pointer + out, largest + tl.log(total), mask=inside)
    if SUM_AG:
        tl.store(sums_pointer + out, AG / total, mask=inside)
    if SUM_AG_POSITIVE:
        tl.store(sums_pointer + plane + out, AG_positive / total, mask=inside)
    if SUM_G_POSITIVE:
        tl.store(sums_pointer + 2 * plane + out, G_positive, mask=inside)
    if SUM_G_ABSOLUTE:
        tl.store(sums_pointer + 3 * plane + out, G_absolute, mask=inside)
    if SUM_G_SQUARE:
        tl.store(sums_pointer + 4 * plane + out, G_square, mask=inside)


@triton.jit
def _weighted(total, values, weights_pointer, sums, rows, sum_stride, row_stride, FIRST, LAST, queries):
    """Return total + weights [sums, queries] · values [queries, keys], of the sums FIRST … LAST − 1."""
    inside = (sums[:, None] >= FIRST) & (sums[:, None] < LAST) & (rows[None, :] < queries)
    weights = tl.load(weights_pointer + sums[:, None] * sum_stride + rows[None, :] * row_stride, mask=inside, other=0.0)
    return total + tl.dot(weights, values, input_precision="ieee")


@triton.jit
def _column_kernel(
    q_pointer, k_pointer, v_pointer, gradient_pointer, mask_pointer, log_sum_pointer, weights_pointer, out_pointer,
    q_batch, q_head, q_row, q_width, k_batch, k_head, k_row, k_width, v_batch, v_head, v_row, v_width,
    g_batch, g_head, g_row, g_width, mask_batch, mask_head, mask_row, mask_column, w_sum, w_batch, w_head, w_row,
    heads, queries, keys, width, value_width, scale,
    END_A: tl.constexpr, END_AG: tl.constexpr, END_AG_POSITIVE: tl.constexpr, END_G_POSITIVE: tl.constexpr,
    END_G_ABSOLUTE: tl.constexpr, END_G_SQUARE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SUMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write sum_i w_i f(A_ij, G_ij) of one head, [B·H, SUMS, keys], for a tile of keys.

    The sums are ordered by entry: those of A are 0 … END_A − 1, those of AG END_A … END_AG − 1, and so on.
    """
    READ_A: tl.constexpr = END_AG_POSITIVE > 0
    READ_G: tl.constexpr = END_G_SQUARE > END_A
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    at, at_value, sums = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH), tl.arange(0, SUMS)
    q_pointer += batch * q_batch + head * q_head
    gradient_pointer += batch * g_batch + head * g_head
    mask_pointer += batch * mask_batch + head * mask_head
    weights_pointer += batch * w_batch + head * w_head
    log_sum_pointer += tl.program_id(1).to(tl.int64) * queries
    if READ_A:
        k_transposed = _tile(k_pointer + batch * k_batch + head * k_head, at, columns, k_width, k_row, width, keys)
    if READ_G:
        v_start = v_pointer + batch * v_batch + head * v_head
        v_transposed = _tile(v_start, at_value, columns, v_width, v_row, value_width, keys)
    total = tl.zeros([SUMS, BLOCK_K], tl.float32)
    for first in range(0, queries, BLOCK_Q):
        rows = first + tl.arange(0, BLOCK_Q)
        if READ_G:
            dO = _tile(gradient_pointer, rows, at_value, g_row, g_width, queries, value_width)
            G = tl.dot(dO, v_transposed, input_precision=PRECISION)
        if READ_A:
            q = _tile(q_pointer, rows, at, q_row, q_width, queries, width)
            scores = _scores(
                q,
                k_transposed,
                scale,
                mask_pointer,
                rows,
                columns,
                mask_row,
                mask_column,
                queries,
                keys,
                MASK,
                PRECISION,
            )
            log_sum = tl.load(log_sum_pointer + rows, mask=rows < queries, other=0.0)
            A = tl.where(rows[:, None] < queries, tl.exp(scores - log_sum[:, None]), 0.0)
            if END_A > 0:
                total = _weighted(total, A, weights_pointer, sums, rows, w_sum, w_row, 0, END_A, queries)
            if END_AG > END_A:
                total = _weighted(total, A * G, weights_pointer, sums, rows, w_sum, w_row, END_A, END_AG, queries)
            if END_AG_POSITIVE > END_AG:
                AG_positive = A * tl.maximum(G, 0.0)
                total = _weighted(
                    total, AG_positive, weights_pointer, sums, rows, w_sum, w_row, END_AG, END_AG_POSITIVE, queries
                )
        if END_G_POSITIVE > END_AG_POSITIVE:
            G_positive = tl.maximum(G, 0.0)
            total = _weighted(
                total, G_positive, weights_pointer, sums, rows, w_sum, w_row, END_AG_POSITIVE, END_G_POSITIVE, queries
            )
        if END_G_ABSOLUTE > END_G_POSITIVE:
            total = _weighted(
                total, tl.abs(G), weights_pointer, sums, rows, w_sum, w_row, END_G_POSITIVE, END_G_ABSOLUTE, queries
            )
        if END_G_SQUARE > END_G_ABSOLUTE:
            total = _weighted(
                total, G * G, weights_pointer, sums, rows, w_sum, w_row, END_G_ABSOLUTE, END_G_SQUARE, queries
            )
    out = (tl.program_id(1).to(tl.int64) * SUMS + sums[:, None]) * keys + columns[None, :]
    tl.store(out_pointer + out, total, mask=columns[None, :] < keys)


@triton.jit
def _heads_kernel(
    q_pointer, k_pointer, v_pointer, gradient_pointer, mask_pointer, log_sum_pointer, weights_pointer, out_pointer,
    q_batch, q_head, q_row, q_width, k_batch, k_head, k_row, k_width, v_batch, v_head, v_row, v_width,
    g_batch, g_head, g_row, g_width, mask_batch, mask_head, mask_row, mask_column, w_batch, w_head,
    heads, queries, keys, width, value_width, scale,
    READ_A: tl.constexpr, READ_G: tl.constexpr, CLAMP: tl.constexpr, ABSOLUTE: tl.constexpr, SQUARE: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a tile of sum_h w_h f(A_h, G_h), [B, queries, keys]."""
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    batch = tl.program_id(2).to(tl.int64)
    at, at_value = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for head in range(heads):
        if READ_G:
            g_start = gradient_pointer + batch * g_batch + head * g_head
            v_start = v_pointer + batch * v_batch + head * v_head
            dO = _tile(g_start, rows, at_value, g_row, g_width, queries, value_width)
            v_transposed = _tile(v_start, at_value, columns, v_width, v_row, value_width, keys)
            values = tl.dot(dO, v_transposed, input_precision=PRECISION)
            if CLAMP:
                values = tl.maximum(values, 0.0)
            if ABSOLUTE:
                values = tl.abs(values)
            if SQUARE:
                values = values * values
        if READ_A:
            q = _tile(q_pointer + batch * q_batch + head * q_head, rows, at, q_row, q_width, queries, width)
            k_transposed = _tile(k_pointer + batch * k_batch + head * k_head, at, columns, k_width, k_row, width, keys)
            mask_start = mask_pointer + batch * mask_batch + head * mask_head
            scores = _scores(
                q, k_transposed, scale, mask_start, rows, columns, mask_row, mask_column, queries, keys, MASK, PRECISION
            )
            log_sum_start = log_sum_pointer + (batch * heads + head) * queries
            log_sum = tl.load(log_sum_start + rows, mask=rows < queries, other=0.0)
            A = tl.exp(scores - log_sum[:, None])
            if READ_G:
                values = A * values
            else:
                values = A
        total += tl.load(weights_pointer + batch * w_batch + head * w_head) * values
    inside = (rows[:, None] < queries) & (columns[None, :] < keys)
    out = (batch * queries + rows[:, None]) * keys + columns[None, :]
    tl.store(out_pointer + out, total, mask=inside)


@triton.jit
def _row_product_kernel(
    a_pointer, b_pointer, rows_pointer, out_pointer, a_batch, a_head, a_row, a_width, b_batch, b_head, b_row, b_width,
    heads, rows_count, columns_count, width, scale,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write scale · a_i · b_j of chosen rows i, [B, H, rows, columns], for a tile of columns j of one head."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    at, places = tl.arange(0, WIDTH), tl.arange(0, BLOCK_ROWS)
    rows = tl.load(rows_pointer + places, mask=places < rows_count, other=0)
    a = a_pointer + batch * a_batch + head * a_head + rows[:, None] * a_row + at[None, :] * a_width
    a = tl.load(a, mask=(places[:, None] < rows_count) & (at[None, :] < width), other=0.0)
    b = _tile(b_pointer + batch * b_batch + head * b_head, at, columns, b_width, b_row, width, columns_count)
    products = tl.dot(a, b, input_precision=PRECISION) * scale
    out = (tl.program_id(1).to(tl.int64) * rows_count + places[:, None]) * columns_count + columns[None, :]
    tl.store(out_pointer + out, products, mask=(places[:, None] < rows_count) & (columns[None, :] < columns_count))


def row_products(a: Tensor, b: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale · a_i · b_j of the rows i of a [B, H, N, dh] and all j of b [B, H, keys, dh], [B, H, rows, keys]."""
    a, b = a.detach(), b.detach()
    if a.dtype != b.dtype:
        a, b = widened(a), widened(b)
    batch, heads, columns, width = b.shape
    out = torch.empty(batch, heads, len(rows), columns, dtype=torch.float32, device=a.device)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        piece = rows[first : first + ROWS_AT_ONCE]
        part = out if len(piece) == len(rows) else out.new_empty(batch, heads, len(piece), columns)
        _row_product_kernel[(triton.cdiv(columns, ROW_PRODUCT_COLUMNS), batch * heads)](
            a, b, piece, part, *a.stride(), *b.stride(), heads, len(piece), columns, width, scale,
            PRECISION="ieee" if a.dtype == torch.float32 else "tf32", WIDTH=max(16, triton.next_power_of_2(width)),
            BLOCK_ROWS=max(16, triton.next_power_of_2(len(piece))), BLOCK_COLUMNS=ROW_PRODUCT_COLUMNS,
        )  # fmt: skip
        if part is not out:
            out[:, :, first : first + ROWS_AT_ONCE] = part
    return out


def row_sums(call: Call, gradient: Tensor | None, entries: Sequence[Entry]) -> tuple[list[Tensor], Tensor | None]:
    """Return sum_j f(A_hij, G_hij) of each entry, and log sum_j exp(S_hij) if one reads A, [B, H, queries] each."""
    tensors = _Operands(call, gradient)
    shape = (call.lead, call.v.shape[1], call.queries)
    log_sums = torch.empty(shape, dtype=torch.float32, device=call.v.device)
    by_entry = torch.empty(5, *shape, dtype=torch.float32, device=call.v.device)
    reads_a = any(entry in READS_A for entry in entries)
    _row_kernel[(triton.cdiv(call.queries, tensors.block), shape[0] * shape[1])](
        *tensors.pointers, log_sums, by_entry, *tensors.strides, *tensors.sizes, **tensors.options,
        SUM_AG="AG" in entries, SUM_AG_POSITIVE="AG+" in entries, SUM_G_POSITIVE="G+" in entries,
        SUM_G_ABSOLUTE="|G|" in entries, SUM_G_SQUARE="G²" in entries, READ_A=reads_a,
    )  # fmt: skip
    ones = torch.ones_like(log_sums)
    sums = [ones if entry == "A" else by_entry[ENTRIES.index(entry) - 1] for entry in entries]
    return sums, log_sums if reads_a else None


def column_sums(
    call: Call, gradient: Tensor | None, log_sums: Tensor | None, weighted: Sequence[WeightedEntries]
) -> list[Tensor]:
    """Return sum_h sum_i w_hi f(A_hij, G_hij) of each pair of an entry and weights [B, H, queries], [B, keys] each."""
    order = sorted(range(len(weighted)), key=lambda place: ENTRIES.index(weighted[place].entry))
    results: dict[int, Tensor] = {}
    for first in range(0, len(order), SUMS_AT_ONCE):
        places = order[first : first + SUMS_AT_ONCE]
        sums = _column_sums(call, gradient, log_sums, [weighted[place] for place in places])  # [B, H, sums, keys]
        results |= dict(zip(places, sums.sum(1).unbind(1), strict=True))
    return [results[place] for place in range(len(weighted))]


def weighted_heads(
    call: Call,
    gradient: Tensor | None,
    log_sums: Tensor | None,
    entry: Entry,
    weights: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Return sum_h w_h f(A_h, G_h), [B, queries, keys], for weights [B or 1, H]; written to `out` if it is given."""
    tensors = _Operands(call, gradient)
    lead, heads = call.lead, call.v.shape[1]
    weights = weights.float().expand(lead, heads)
    if out is None:
        out = torch.empty(lead, call.queries, call.keys, dtype=torch.float32, device=call.v.device)
    tiles = (triton.cdiv(call.queries, tensors.block), triton.cdiv(call.keys, tensors.block))
    _heads_kernel[(*tiles, lead)](
        *tensors.pointers, weights if log_sums is None else log_sums, weights, out, *tensors.strides, *weights.stride(),
        *tensors.sizes, **tensors.options, READ_A=entry in READS_A, READ_G=entry in READS_G,
        CLAMP=entry in ("AG+", "G+"), ABSOLUTE=entry == "|G|", SQUARE=entry == "G²",
    )  # fmt: skip
    return out


def _column_sums(
    call: Call, gradient: Tensor | None, log_sums: Tensor | None, weighted: Sequence[WeightedEntries]
) -> Tensor:
    """Return the column sums of each head, [B, H, sums, keys], of pairs in the order of their entries."""
    entries = [pair.entry for pair in weighted]
    tensors = _Operands(call, gradient if any(entry in READS_G for entry in entries) else None)
    weights = torch.stack([pair.weights.float() for pair in weighted])  # [sums, B, H, queries]
    heads = (call.lead, call.v.shape[1])
    out = torch.empty(*heads, SUMS_AT_ONCE, call.keys, dtype=torch.float32, device=call.v.device)
    ends = [sum(ENTRIES.index(entry) <= place for entry in entries) for place in range(len(ENTRIES))]
    _column_kernel[(triton.cdiv(call.keys, tensors.block), heads[0] * heads[1])](
        *tensors.pointers, weights if log_sums is None else log_sums, weights, out, *tensors.strides, *weights.stride(),
        *tensors.sizes, **tensors.options, END_A=ends[0], END_AG=ends[1], END_AG_POSITIVE=ends[2],
        END_G_POSITIVE=ends[3], END_G_ABSOLUTE=ends[4], END_G_SQUARE=ends[5], SUMS=SUMS_AT_ONCE,
    )  # fmt: skip
    return out[:, :, : len(weighted)]


class _Operands:
    """The arguments that both kernels share: q, k, v, dO and the mask, their strides and sizes, and the tile sizes."""

    def __init__(self, call: Call, gradient: Tensor | None) -> None:
        assert call.q is not None
        assert call.k is not None
        operands = [call.q.detach(), call.k.detach(), call.v.detach()]
        operands.append(operands[2] if gradient is None else gradient.detach())
        if len({tensor.dtype for tensor in operands}) > 1 or operands[0].dtype.itemsize > 4:
            operands = [widened(tensor).float() for tensor in operands]
        shape = (call.lead, call.v.shape[1], call.queries, call.keys)
        mask = operands[0][..., :1] if call.mask is None else call.mask.detach().expand(shape)
        kind = "none" if call.mask is None else "bool" if mask.dtype == torch.bool else "added"
        mask = mask.view(torch.uint8) if kind == "bool" else mask  # same strides: one byte each
        self.pointers = (*operands, mask)
        self.strides = [stride for tensor in self.pointers for stride in tensor.stride()]
        width, value_width = call.q.shape[-1], call.v.shape[-1]
        self.sizes = (shape[1], call.queries, call.keys, width, value_width, call.scale)
        padded = [max(16, triton.next_power_of_2(size)) for size in (width, value_width)]
        is_float32 = operands[0].dtype == torch.float32
        # The largest tiles whose products stay in registers, as the assembler reports for compute capability 9.0.
        self.block, warps = (32, 4) if is_float32 else (64, 8)
        self.options: dict[str, Any] = {
            "MASK": kind, "PRECISION": "ieee" if is_float32 else "tf32",  # of half precision: no choice to make
            "WIDTH": padded[0], "VALUE_WIDTH": padded[1], "BLOCK_Q": self.block, "BLOCK_K": self.block,
            "num_warps": warps,
        }  # fmt: skip
