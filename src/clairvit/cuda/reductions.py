"""Sums over attention and its gradient by kernels, where these apply: no [B, H, N, N] is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from clairvit._entries import NORMS_OF_G, READS_A, Entry, WeightedEntries
from clairvit.cuda import kernels
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.attention_reductions import AttentionReductions
from clairvit.tracing.layer import gradient_at


def reductions_of(call: AttentionCall, gradient: Tensor | None, limit: int) -> AttentionReductions:
    """Return the sums of a call, by kernels where these apply, else in tiles of at most `limit` bytes."""
    return (KernelReductions if kernels.attention_applies(call) else AttentionReductions)(call, gradient, limit)


class KernelReductions(AttentionReductions):
    """The sums of one layer, computed from q, k, v and dO: tiles of A and G live in registers."""

    def __init__(self, call: AttentionCall, gradient: Tensor | None, limit: int) -> None:
        super().__init__(call, gradient, limit)
        self._log_sums: Tensor | None = None  # of each row's exponentials, [B, H, queries]: from the row pass

    def _sum_rows(self, entries: Sequence[Entry]) -> dict[Entry, Tensor]:
        from clairvit.cuda.kernels import attention

        if any(entry in NORMS_OF_G for entry in entries):  # reading G is what costs
            entries = list(dict.fromkeys([*entries, *NORMS_OF_G]))
        sums, log_sums = attention.row_sums(self.call, self._gradient_of(entries), entries)
        self._log_sums = log_sums if self._log_sums is None else self._log_sums
        return dict(zip(entries, sums, strict=True))

    def _sum_columns(self, weighted: Sequence[WeightedEntries]) -> list[Tensor]:
        from clairvit.cuda.kernels import attention

        entries = list(dict.fromkeys(pair.entry for pair in weighted))
        log_sums = self._required_log_sums() if any(entry in READS_A for entry in entries) else None
        return attention.column_sums(self.call, self._gradient_of(entries), log_sums, weighted)

    def weighted_heads(self, entry: Entry, weights: Tensor, out: Tensor | None = None) -> Tensor:
        from clairvit.cuda.kernels import attention

        gradient = self._gradient_of([entry])
        log_sums = self._required_log_sums() if entry in READS_A else None
        return attention.weighted_heads(self.call, gradient, log_sums, entry, weights, out)

    def row_entries(self, entry: Literal["S", "G"], rows: Tensor) -> Tensor:
        """Return S or G of some query rows [n], [B, H, n, keys], of a call without a mask."""
        from clairvit.cuda.kernels import attention

        if entry == "S":
            assert self.call.q is not None
            assert self.call.k is not None
            return attention.row_products(self.call.q, self.call.k, rows, self.call.scale)
        return attention.row_products(gradient_at(self.gradient, "output of an attention"), self.call.v, rows)

    def _required_log_sums(self) -> Tensor:
        if self._log_sums is None:
            self.row_sums(["A"])
        assert self._log_sums is not None
        return self._log_sums
