"""LayerProduct: what an aggregation reads of one layer's matrix M, without M: row vectors times M, and M's row sums.

A large layer is read in one of two ways. Any layer map whose rows can be computed one by one is computed a tile of rows
at a time (`add_tile`). A map of the form sum_h w_h f(A_h, G_h), which a method states as `Requires(heads=…)`, may be
read as sums over the entries of A and G (`from_sums`): no tile of it is written where a kernel computes these sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clairvit._entries import WeightedEntries
from clairvit.methods.aggregation import VectorAggregation
from clairvit.methods.layer_view import LayerView
from clairvit.methods.registry import WeightedHeads


class LayerProduct:
    """left · M [B, N], M·1 [B, N] and, on request, read · M [B, N] of one layer.

    Args:
        aggregation: What reads the layer; None: nothing but read · M is wanted.
        row: The aggregation's row before this layer.
        read: How much the head reads of each token, [1 or B, N].
        keep_layer: Compute read · M too.
    """

    def __init__(
        self, aggregation: VectorAggregation | None, row: Tensor | None, read: Tensor, *, keep_layer: bool
    ) -> None:
        self.aggregation, self.row, self.read, self.keep_layer = aggregation, row, read, keep_layer
        self._sums: list[Tensor] = []  # M·1 of each tile
        self._products: list[Tensor] = []  # those wanted of left · M and read · M

    def add_tile(self, tile: Tensor, rows: slice) -> None:
        """Add M's rows [B, rows, N]; tiles come in order."""
        sums = tile.sum(-1)  # [B, rows]
        parts = [(left[:, None] @ tile)[:, 0] for left in self._left_vectors(sums, rows)]
        self._sums.append(sums)
        self._products = (
            parts if not self._products else [a.add_(b) for a, b in zip(self._products, parts, strict=True)]
        )

    def _left_vectors(self, sums: Tensor, rows: slice) -> list[Tensor]:
        """Return the vectors that some rows of M are multiplied by, [1 or B, rows] each."""
        row, read = None if self.row is None else self.row[..., rows], self.read[:, rows]
        left = [] if self.aggregation is None else [self.aggregation.left(row, read, sums)]
        return [*left, read] if self.keep_layer else left

    def advance(self) -> Tensor:
        """Return the aggregation's row after this layer."""
        assert self.aggregation is not None
        return self.aggregation.advance(self.row, self._products[0], torch.cat(self._sums, -1))

    def layer_row(self) -> Tensor:
        """Return read · M, [B, N]."""
        assert self.keep_layer
        return self._products[-1]

    @staticmethod
    def from_sums(products: Sequence[LayerProduct], forms: Sequence[WeightedHeads], view: LayerView) -> None:
        """Fill in the products of maps of these forms, all from two passes over A and G: row sums, then column sums."""
        reductions = view.reductions
        entries = list(dict.fromkeys(entry for form in forms for entry in (form.entry, *form.head_sums)))
        sums = dict(zip(entries, reductions.row_sums(entries), strict=True))  # [B, H, N] each
        weighted: list[WeightedEntries] = []
        for product, form in zip(products, forms, strict=True):
            by_head = sums[form.entry]
            heads = by_head.new_full((1, by_head.shape[1]), 1 / by_head.shape[1])
            heads = (heads if form.weights is None else form.weights(view))[..., None]  # [1 or B, H, 1]
            product._sums = [(heads * by_head).sum(1)]
            vectors = product._left_vectors(product._sums[0], slice(None))
            weighted += [WeightedEntries(form.entry, heads * vector[:, None]) for vector in vectors]
        columns = iter(reductions.column_sums(weighted))
        for product in products:
            product._products = [next(columns) for _ in range((product.aggregation is not None) + product.keep_layer)]
