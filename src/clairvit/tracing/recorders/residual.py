"""PostAttentionResidual: the residual stream between a block's attention and its MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.numerics import widened
from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.recorders.base import Op, Recorder

if TYPE_CHECKING:
    from clairvit.tracing.recording import Recording


class PostAttentionResidual(Recorder):
    """Record x_mid = x + attention: the first sum after a block's attention that the block's input is a term of.

    Nothing else is kept. A method that decomposes the sum needs the operations of the block (`OpLog`).
    """

    kinds = ops.SUMS

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # attention call -> x_mid, outside the graph
        self._values: dict[int, Tensor] = {}  # layer -> the same
        self._block_input: Tensor | None = None
        self._calls = 0

    def on_block(self, block: int, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        self._block_input, self._calls = tokens, len(calls)

    def on_op(self, op: Op) -> None:
        x = self._block_input
        if x is None or len(op.calls) != self._calls + 1:
            return
        terms = [a for a in op.args if isinstance(a, Tensor) and a.shape == x.shape]
        if len(terms) == 2 and any(a is x for a in terms):  # not 0 + x, the first step of sum([x, attention])
            total = op.output.detach()
            # In place, the MLP will be added to the same tensor.
            self._sums[len(op.calls) - 1] = total.clone() if op.kind == ops.ADD_IN_PLACE else total
            self._block_input = None

    def finish(self, recording: Recording) -> None:
        calls = recording.structure.layer_calls
        self._values = {layer: self._sums[call] for layer, call in enumerate(calls) if call in self._sums}
        self._sums, self._block_input = {}, None

    def at_layer(self, index: int, recording: Recording) -> Tensor | None:
        """Return x_mid of a layer, [B, N, d]."""
        tokens = self.tokens_at(index, recording)
        return None if tokens is None else widened(tokens)

    def tokens_at(self, index: int, recording: Recording) -> Tensor | None:
        """Return the same as `at_layer`, in the model's precision."""
        value = self._values.get(index)
        return None if value is None else recording.as_tokens(value)

    def missing(self, index: int) -> NotApplicable:
        return no_residual(index)


def no_residual(index: int) -> NotApplicable:
    """Return the error for a block whose attention is not added to its input."""
    return NotApplicable(
        f"Layer {index} does not add its attention to its own input (x + attention) as a step of its own; this method "
        "takes that sum apart. Parallel branches, gated attention and blocks that are no modules have no such sum.",
        alternative="a method that reads attention and its gradient",
    )
