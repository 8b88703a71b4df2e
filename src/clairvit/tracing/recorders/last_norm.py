"""LastNorm: the normalised tokens that the last attention, or the head, reads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from torch import Tensor

from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.recorders.base import GradientOf, Op, Recorder

if TYPE_CHECKING:
    from clairvit.tracing.recording import Recording
    from clairvit.tracing.structure import ModelStructure
    from clairvit.tracing.trace import GradientScope


class LastNorm(Recorder):
    """Record the norm before the last block's attention; where patches are averaged, the one after the last block."""

    kinds = frozenset({ops.NORM}) | ops.PRODUCTS | ops.QUOTIENTS | ops.SUMS  # also one that is written out

    def __init__(self) -> None:
        self.tokens: Tensor | None = None  # in a trace [B, N, d]; None: no such norm
        self.gradient: Tensor | None = None
        self._input: Tensor | None = None  # of the norm
        self._calls = 0  # attention calls before it
        self._last_call = -1
        self._after_blocks = False

    def start(self, structure: ModelStructure, pixels: Tensor) -> None:
        self._last_call = structure.last_layer_call
        self._after_blocks = structure.layout is not None and structure.layout.pooling == "avg"

    def on_block(self, block: int, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        is_last = len(calls) == self._last_call and not self._after_blocks
        self._input, self._calls = tokens if is_last else None, len(calls)

    def on_blocks_end(self, tokens: Tensor | None, calls: Sequence[AttentionCall]) -> None:
        if tokens is not None and self._after_blocks:
            self._input, self._calls = tokens, len(calls)

    def on_op(self, op: Op) -> None:
        if self._input is None or len(op.calls) != self._calls:
            return
        part = None if op.trait is None else op.trait.norm
        if self.tokens is None:
            normalised = ops.first_argument(op.args, op.kwargs) if op.kind == ops.NORM else part and part.x
            if normalised is self._input:
                self.tokens = op.output
        elif part is not None and part.x is self._input and any(a is self.tokens for a in op.args):
            self.tokens = op.output  # its weight or bias

    def finish(self, recording: Recording) -> None:
        self._input = None

    def differentiated(self, scope: GradientScope) -> Sequence[Tensor]:
        return () if self.tokens is None else (self.tokens,)

    def after_backward(self, recording: Recording, gradient_of: GradientOf) -> Self:
        value = copy.copy(self)
        value.tokens = None if self.tokens is None else recording.as_tokens(self.tokens.detach())
        gradient = gradient_of(self.tokens)
        value.gradient = None if gradient is None else recording.as_tokens(gradient)
        return value

    def release(self) -> None:
        self.tokens = None
