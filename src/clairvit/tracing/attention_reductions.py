"""Sums over the entries f(A_hij, G_hij) of one layer's attention and its gradient, without a tensor [B, H, N, N].

    row sums       s_hi = sum_j f(A_hij, G_hij)                 [B, H, N]
    column sums    c_j  = sum_h sum_i w_hi f(A_hij, G_hij)      [B, N]
    sums of heads  M_ij = sum_h w_h f(A_hij, G_hij)             [B, N, N]

A row vector times a combination of heads, r · sum_h w_h f(A_h, G_h), is the column sums of the weights w_h r_i; a mean
over heads and queries has weights 1 / (H·N); a head's norm is a sum of row sums. A = softmax(scale · q kᵀ + mask) and
G = dO vᵀ are computed from q, k, v and dO for a tile of query rows at a time, [B, H, tile, N]. That gives the sums of
the whole matrices up to the order of the additions, as the kernels of `cuda/reductions.py` do on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clairvit._entries import READS_A, READS_G, Entry, WeightedEntries, entry_values
from clairvit.numerics import widened
from clairvit.tracing.attention_call import AttentionCall, Rows
from clairvit.tracing.layer import gradient_at

SMALLEST_TILE_ROWS = 16


def query_tiles(call: AttentionCall, limit: int) -> Iterator[slice]:
    """Yield slices of query rows, about alike, whose A takes at most `limit` bytes (16 rows at least)."""
    row = call.lead * call.v.shape[1] * call.keys * max(4, call.v.dtype.itemsize)  # bytes of one of all heads
    most = max(SMALLEST_TILE_ROWS, limit // row)
    rows = -(-call.queries // -(-call.queries // most))
    for first in range(0, call.queries, rows):
        yield slice(first, min(first + rows, call.queries))


class AttentionReductions:
    """The sums of one layer: of its attention call, and the gradient dO [B, H, queries, dh] of the call's output.

    Tiles take at most `limit` bytes.
    """

    def __init__(self, call: AttentionCall, gradient: Tensor | None, limit: int) -> None:
        self.call, self.gradient, self.limit = call, gradient, limit
        self._row_sums: dict[Entry, Tensor] = {}

    def row_sums(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Return s_hi = sum_j f(A_hij, G_hij), [B, H, queries], of each entry; computed once."""
        missing = [entry for entry in entries if entry not in self._row_sums]
        if missing:
            self._row_sums |= self._sum_rows(missing)
        return [self._row_sums[entry] for entry in entries]

    def _sum_rows(self, entries: Sequence[Entry]) -> dict[Entry, Tensor]:
        """Return the row sums of these entries, perhaps with those of others."""
        tiles = [[values.sum(-1) for values in self._tile(entries, rows)] for rows in self._tiles()]
        return dict(zip(entries, (torch.cat(parts, -1) for parts in zip(*tiles, strict=True)), strict=True))

    def column_sums(self, weighted: Sequence[WeightedEntries]) -> list[Tensor]:
        """Return c_j = sum_h sum_i w_hi f(A_hij, G_hij), [B, keys], of each pair of an entry and weights."""
        shape = (self.call.lead, self.call.v.shape[1], self.call.queries)
        return self._sum_columns([WeightedEntries(pair.entry, pair.weights.expand(shape)) for pair in weighted])

    def _sum_columns(self, weighted: Sequence[WeightedEntries]) -> list[Tensor]:
        """Return the column sums of pairs with weights [B, H, queries]."""
        entries = list(dict.fromkeys(pair.entry for pair in weighted))
        totals: list[Tensor | None] = [None] * len(weighted)
        for rows in self._tiles():
            values = dict(zip(entries, self._tile(entries, rows), strict=True))
            for place, pair in enumerate(weighted):
                totals[place] = _plus_product(totals[place], pair.weights[..., rows], values[pair.entry])
        return [total for total in totals if total is not None]

    def head_sums(self, entry: Entry) -> Tensor:
        """Return sum_ij f(A_hij, G_hij), [B, H]."""
        return self.row_sums([entry])[0].sum(-1)

    def weighted_heads(self, entry: Entry, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Return M = sum_h w_h f(A_h, G_h), [B, queries, keys], for weights [B or 1, H]; in `out` if it is given."""
        left = weights.expand(self.call.lead, -1)[:, None]  # [B, 1, H]
        tiles = [self._tile([entry], rows)[0] for rows in self._tiles()]  # [B, H, rows, keys] each
        parts = [(left.to(tile.dtype) @ tile.flatten(2)).view(len(tile), *tile.shape[2:]) for tile in tiles]
        matrix = torch.cat(parts, 1)
        return matrix if out is None else out.copy_(matrix)

    def column_means(self, entry: Entry) -> Tensor:
        """Return the mean over heads and queries, [B, keys]."""
        count = self.call.v.shape[1] * self.call.queries
        ones = widened(self.call.v.new_ones(1, 1, 1))
        return self.column_sums([WeightedEntries(entry, ones)])[0] / count

    def _tiles(self) -> Iterator[slice]:
        return query_tiles(self.call, self.limit)

    def _tile(self, entries: Sequence[Entry], rows: Rows) -> list[Tensor]:
        """Return f(A, G) of each entry for some query rows, [B, H, rows, keys]."""
        A = self.call.A(rows) if any(entry in READS_A for entry in entries) else None
        gradient = self._gradient_of(entries)
        G = None if gradient is None else self.call.G(gradient, rows)
        return [entry_values(entry, A, G) for entry in entries]

    def _gradient_of(self, entries: Sequence[Entry]) -> Tensor | None:
        """Return dO if one of the entries reads G."""
        if not any(entry in READS_G for entry in entries):
            return None
        return gradient_at(self.gradient, "output of an attention")


def _plus_product(total: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    """Return total + sum_h sum_i w_hi f_hij, [B, keys], for weights [B, H, rows] and values [B, H, rows, keys]."""
    left, right = (
        weights.flatten(1)[:, None].to(values.dtype),
        values.flatten(1, 2),
    )  # [B, 1, H·rows], [B, H·rows, keys]
    product = (left @ right)[:, 0]
    return product if total is None else total.add_(product)
