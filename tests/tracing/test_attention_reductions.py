"""Sums over f(A, G) of one layer, tile by tile, against the matrices themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clairvit._entries import ENTRIES, READS_A, WeightedEntries, entry_values
from clairvit.errors import CaptureError
from clairvit.tracing.attention_reductions import AttentionReductions, query_tiles
from helpers.attention_calls import attention_call
from helpers.rounding import assert_same

THREE_ROWS = 3 * 2 * 3 * 37 * 8  # bytes of three rows of A in float64: tiles of the smallest size, 16 rows


def dense_sums(A: Tensor, G: Tensor, weighted: list[WeightedEntries]) -> tuple[list[Tensor], list[Tensor]]:
    rows = [entry_values(entry, A, G).sum(-1) for entry in ENTRIES]
    columns = [(pair.weights[..., None] * entry_values(pair.entry, A, G)).sum((1, 2)) for pair in weighted]
    return rows, columns


@pytest.mark.numeric
@pytest.mark.parametrize("mask", [None, "added", "bool"])
def test_tiles_add_up_to_the_sums_of_the_matrices(mask: str | None) -> None:
    call, dO = attention_call(2, 3, 37, width=6, mask=mask, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(len(ENTRIES), 2, 3, 37, dtype=torch.float64, generator=generator)
    weighted = [WeightedEntries(entry, w) for entry, w in zip(ENTRIES, weights, strict=True)]
    sums = AttentionReductions(call, dO, THREE_ROWS)
    rows, columns = dense_sums(call.A(), call.G(dO), weighted)
    assert len(list(query_tiles(call, THREE_ROWS))) == 3
    for entry, computed, expected in zip(ENTRIES, sums.row_sums(ENTRIES), rows, strict=True):
        assert_same(computed, expected, dtype=torch.float64, label=f"rows of {entry}")
        assert_same(sums.head_sums(entry), expected.sum(-1), dtype=torch.float64)
    for pair, computed, expected in zip(weighted, sums.column_sums(weighted), columns, strict=True):
        assert_same(computed, expected, dtype=torch.float64, label=f"columns of {pair.entry}")
    assert_same(sums.column_means("G+"), call.G(dO).clamp(min=0).mean((1, 2)), dtype=torch.float64)
    heads = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    for entry in ENTRIES:
        expected = (heads[:, :, None, None] * entry_values(entry, call.A(), call.G(dO))).sum(1)
        assert_same(sums.weighted_heads(entry, heads), expected, dtype=torch.float64, label=f"heads of {entry}")
        assert_same(sums.weighted_heads(entry, heads, torch.empty_like(expected)), expected, dtype=torch.float64)


def test_weights_of_one_head_or_query_are_broadcast() -> None:
    call, dO = attention_call(2, 3, 20, width=6, dtype=torch.float64)
    heads = torch.rand(1, 3, 1, dtype=torch.float64)
    (computed,) = AttentionReductions(call, dO, 1).column_sums([WeightedEntries("AG+", heads)])
    assert_same(computed, (heads[..., None] * (call.A() * call.G(dO)).clamp(min=0)).sum((1, 2)), dtype=torch.float64)


def test_attention_that_the_model_wrote_out_is_taken_as_it_is() -> None:
    call, dO = attention_call(1, 2, 40, width=6, dtype=torch.float64)
    call.weights, call.q, call.k = torch.rand(1, 2, 40, 40, dtype=torch.float64), None, None
    assert_same(AttentionReductions(call, dO, 1).column_means("A"), call.weights.mean((1, 2)), dtype=torch.float64)


def test_without_a_gradient_only_attention_is_summed() -> None:
    call, _ = attention_call(1, 2, 20, width=6, dtype=torch.float64)
    sums = AttentionReductions(call, None, 1)
    assert_same(sums.row_sums(["A"])[0], torch.ones(1, 2, 20, dtype=torch.float64), dtype=torch.float64)
    with pytest.raises(CaptureError, match="no gradient"):
        sums.row_sums(["AG"])


@pytest.mark.parametrize(("rows", "limit"), [(13, 1), (13, 16 * 480), (19, 20 * 480), (37, 10**9)])
def test_tiles_cover_all_queries_within_their_bytes(rows: int, limit: int) -> None:
    call, _ = attention_call(1, 3, 37, 40, width=6)
    tiles = list(query_tiles(call, limit))  # a row takes 3 heads × 40 keys × 4 bytes = 480; no tile is a small rest
    assert [row for tile in tiles for row in range(tile.start, tile.stop)] == list(range(37))
    assert max(tile.stop - tile.start for tile in tiles) == rows


def test_entries_that_read_attention_are_named() -> None:
    """A is positive, so that relu(A·G) = A·relu(G), which the row kernel sums before it knows the total."""
    A, G = torch.rand(3, 4), torch.randn(3, 4)
    assert torch.equal(entry_values("AG+", A, G), A * G.clamp(min=0))
    for entry in ENTRIES:
        reads = not torch.equal(entry_values(entry, A, G), entry_values(entry, 2 * A, G))
        assert reads == (entry in READS_A), entry
