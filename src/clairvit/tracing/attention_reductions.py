"""Sums over the entries f(A_hij, G_hij) of one layer's attention and its gradient, without a tensor [B, H, N, N].

    row sums       s_hi = sum_j f(A_hij, G_hij)                 [B, H, N]
    column sums    c_j  = sum_h sum_i w_hi f(A_hij, G_hij)      [B, N]
    sums of heads  M_ij = sum_h w_h f(A_hij, G_hij)             [B, N, N]

A row vector times a combination of heads, r · sum_h w_h f(A_h, G_h), is the column sums of the weights w_h r_i; a mean
over heads and queries has weights 1 / (H·N); a head's norm is a sum of row sums. A = softmax(scale · q kᵀ + mask) and
G = dO vᵀ are computed from q, k, v and dO for a tile of query rows at a time, [B, H, tile, N], or, on CUDA, in
registers (`attention_kernels.py`). Both give the sums of the whole matrices up to the order of the additions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from clairvit.numerics import has_triton, widened
from clairvit.tracing.attention_call import AttentionCall, Rows
from clairvit.tracing.layer import gradient_at

# A; A·G; relu(A·G); relu(G); |G|; G²
Entry = Literal["A", "AG", "AG+", "G+", "|G|", "G²"]
ENTRIES: tuple[Entry, ...] = get_args(Entry)
READS_A: tuple[Entry, ...] = ("A", "AG", "AG+")
READS_G: tuple[Entry, ...] = ("AG", "AG+", "G+", "|G|", "G²")
NORMS_OF_G: tuple[Entry, ...] = ("|G|", "G²")  # their row sums are computed together
TILE_SHARE = 0.25  # how large a tile [B, H, tile, N] may be, as a share of the values v of all layers
SUMS_TILE_SHARE = 0.03  # the same where only sums are wanted: the graph of the forward may still be there
SMALLEST_TILE_BYTES = 2**22  # 4 MiB: smaller tiles cost more in calls than they save
SMALLEST_TILE_ROWS = 16


def tile_bytes(call: AttentionCall, layers: int, *, sums_only: bool = False) -> int:
    """Return how many bytes a tile [B, H, tile, N] of one of `layers` such attentions may take.

    A trace keeps x, q, k, v and their gradients, about a third of what a plain forward + backward holds at its peak; a
    handful of tiles of this size fit into the rest.
    """
    share = min(SUMS_TILE_SHARE, TILE_SHARE) if sums_only else TILE_SHARE
    return max(SMALLEST_TILE_BYTES, int(share * layers * widened_bytes(call.v)))


def is_large(call: AttentionCall, layers: int) -> bool:
    """Return whether A of one of `layers` such attentions is more than two tiles: better not computed as a whole."""
    return call.queries * _row_bytes(call) > 2 * tile_bytes(call, layers)


def widened_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in float32 at least."""
    return tensor.numel() * max(4, tensor.dtype.itemsize)


def query_tiles(call: AttentionCall, limit: int) -> Iterator[slice]:
    """Yield slices of query rows, about alike, whose A takes at most `limit` bytes (16 rows at least)."""
    most = max(SMALLEST_TILE_ROWS, limit // _row_bytes(call))
    rows = -(-call.queries // -(-call.queries // most))
    for first in range(0, call.queries, rows):
        yield slice(first, min(first + rows, call.queries))


def _row_bytes(call: AttentionCall) -> int:
    return int(call.lead * call.v.shape[1] * call.keys * max(4, call.v.dtype.itemsize))


def entry_values(entry: Entry, A: Tensor | None, G: Tensor | None) -> Tensor:
    """Return f(A, G), entry by entry; None stands for a factor that f does not read."""
    if entry == "A":
        return _read(A)
    if entry == "G+":
        return _read(G).clamp(min=0)
    if entry == "|G|":
        return _read(G).abs()
    if entry == "G²":
        return _read(G).square()
    product = _read(A) * _read(G)
    return product.clamp_(min=0) if entry == "AG+" else product


@dataclass(frozen=True, eq=False)
class WeightedEntries:
    """w_hi f(A_hij, G_hij), to be summed over heads and queries."""

    entry: Entry
    weights: Tensor  # [B or 1, H or 1, queries or 1]


class AttentionReductions:
    """The sums of one layer: of its attention call, and the gradient dO [B, H, queries, dh] of the call's output."""

    def __init__(
        self, call: AttentionCall, gradient: Tensor | None, limit: int, *, use_kernels: bool | None = None
    ) -> None:
        """Prepare the sums, in tiles of at most `limit` bytes; on CUDA by kernels where these apply.

        `use_kernels` decides instead: True for tests in Triton's interpreter, False for the tiles alone.
        """
        self.call, self.gradient, self.limit = call, gradient, limit
        self.use_kernels = kernels_apply(call) if use_kernels is None else use_kernels
        self._log_sums: Tensor | None = None  # of each row's exponentials, [B, H, queries]: from the kernels' row pass
        self._row_sums: dict[Entry, Tensor] = {}

    def row_sums(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Return s_hi = sum_j f(A_hij, G_hij), [B, H, queries], of each entry; computed once."""
        missing = [entry for entry in entries if entry not in self._row_sums]
        if missing and self.use_kernels:
            from clairvit.tracing import attention_kernels

            if any(entry in NORMS_OF_G for entry in missing):  # reading G is what costs
                missing = list(dict.fromkeys([*missing, *NORMS_OF_G]))
            sums, log_sums = attention_kernels.row_sums(self.call, self._gradient_of(missing), missing)
            self._log_sums = log_sums if self._log_sums is None else self._log_sums
            self._row_sums |= zip(missing, sums, strict=True)
        elif missing:
            tiles = [[values.sum(-1) for values in self._tile(missing, rows)] for rows in self._tiles()]
            self._row_sums |= zip(missing, (torch.cat(parts, -1) for parts in zip(*tiles, strict=True)), strict=True)
        return [self._row_sums[entry] for entry in entries]

    def column_sums(self, weighted: Sequence[WeightedEntries]) -> list[Tensor]:
        """Return c_j = sum_h sum_i w_hi f(A_hij, G_hij), [B, keys], of each pair of an entry and weights."""
        entries = list(dict.fromkeys(pair.entry for pair in weighted))
        shape = (self.call.lead, self.call.v.shape[1], self.call.queries)
        weights = [pair.weights.expand(shape) for pair in weighted]  # [B, H, queries]
        if self.use_kernels:
            from clairvit.tracing import attention_kernels

            log_sums = self._required_log_sums() if any(entry in READS_A for entry in entries) else None
            pairs = [WeightedEntries(pair.entry, weight) for pair, weight in zip(weighted, weights, strict=True)]
            return attention_kernels.column_sums(self.call, self._gradient_of(entries), log_sums, pairs)
        totals: list[Tensor | None] = [None] * len(weighted)
        for rows in self._tiles():
            values = dict(zip(entries, self._tile(entries, rows), strict=True))
            for place, (pair, weight) in enumerate(zip(weighted, weights, strict=True)):
                totals[place] = _plus_product(totals[place], weight[..., rows], values[pair.entry])
        return [total for total in totals if total is not None]

    def head_sums(self, entry: Entry) -> Tensor:
        """Return sum_ij f(A_hij, G_hij), [B, H]."""
        return self.row_sums([entry])[0].sum(-1)

    def weighted_heads(self, entry: Entry, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Return M = sum_h w_h f(A_h, G_h), [B, queries, keys], for weights [B or 1, H]; in `out` if it is given."""
        if self.use_kernels:
            from clairvit.tracing import attention_kernels

            gradient = self._gradient_of([entry])
            log_sums = self._required_log_sums() if entry in READS_A else None
            return attention_kernels.weighted_heads(self.call, gradient, log_sums, entry, weights, out)
        left = weights.expand(self.call.lead, -1)[:, None]  # [B, 1, H]
        tiles = [self._tile([entry], rows)[0] for rows in self._tiles()]  # [B, H, rows, keys] each
        parts = [(left.to(tile.dtype) @ tile.flatten(2)).view(len(tile), *tile.shape[2:]) for tile in tiles]
        matrix = torch.cat(parts, 1)
        return matrix if out is None else out.copy_(matrix)

    def row_entries(self, entry: Literal["S", "G"], rows: Tensor) -> Tensor:
        """Return S or G of some query rows [n], [B, H, n, keys], of a call without a mask; by a kernel."""
        from clairvit.tracing import attention_kernels

        if entry == "S":
            assert self.call.q is not None
            assert self.call.k is not None
            return attention_kernels.row_products(self.call.q, self.call.k, rows, self.call.scale)
        return attention_kernels.row_products(gradient_at(self.gradient, "output of an attention"), self.call.v, rows)

    def _required_log_sums(self) -> Tensor:
        if self._log_sums is None:
            self.row_sums(["A"])
        assert self._log_sums is not None
        return self._log_sums

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


def kernels_apply(call: AttentionCall) -> bool:
    """Return whether the Triton kernels can compute the sums of a call: a fused call on CUDA, in float32 or half."""
    q = call.q
    if q is None or call.k is None or call.weights is not None or not q.is_cuda:
        return False
    if any(tensor.dtype.itemsize > 4 for tensor in (q, call.k, call.v)) or max(q.shape[-1], call.v.shape[-1]) > 128:
        return False
    return has_triton()


def _plus_product(total: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    """Return total + sum_h sum_i w_hi f_hij, [B, keys], for weights [B, H, rows] and values [B, H, rows, keys]."""
    left, right = (
        weights.flatten(1)[:, None].to(values.dtype),
        values.flatten(1, 2),
    )  # [B, 1, H·rows], [B, H·rows, keys]
    product = (left @ right)[:, 0]
    return product if total is None else total.add_(product)


def _read(matrix: Tensor | None) -> Tensor:
    assert matrix is not None
    return matrix
