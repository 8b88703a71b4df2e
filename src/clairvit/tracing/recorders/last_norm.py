"""LastNorm: the normalised tokens that the last attention, or the head, reads."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.lineage import plain_name
from clairvit.tracing.recorders.base import GradientOf, Op, Recorder

if TYPE_CHECKING:
    from clairvit.tracing.recording import Recording
    from clairvit.tracing.structure import ModelStructure
    from clairvit.tracing.trace import GradientScope


class LastNorm(Recorder):
    """Record the norm before the last block's attention; where patches are averaged, the one after the last block."""

    kinds = None  # a norm may be written out

    def __init__(self) -> None:
        self.tokens: Tensor | None = None  # in a trace [B, N, d]; None: no such norm
        self.gradient: Tensor | None = None
        self._outputs: list[Tensor] = []  # of the norm: several where it is computed anew for each head
        self._norm: tuple[Any, ...] = ()  # its function and arguments
        self.is_unrecognised = False  # there is a norm, in a form that is not known
        self._input: Tensor | None = None  # of the norm
        self._views: list[Tensor] = []  # of the input
        self._origin: object = None  # of what is computed from the input entry by entry
        self._read: dict[
            int, tuple[Tensor, bool]
        ] = {}  # what is computed from the input, and whether it is moved alone
        self._calls = 0  # attention calls before it
        self._last_call = -1
        self._after_blocks = False

    def start(self, structure: ModelStructure, pixels: Tensor) -> None:
        self._last_call = structure.last_layer_call
        self._after_blocks = structure.layout is not None and structure.layout.pooling == "avg"

    def on_block(self, block: int, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        is_last = len(calls) == self._last_call and not self._after_blocks
        self._input, self._calls = tokens if is_last else None, len(calls)
        self._read = {id(tokens): (tokens, True)} if is_last else {}

    def on_blocks_end(self, tokens: Tensor | None, calls: Sequence[AttentionCall]) -> None:
        if tokens is not None and self._after_blocks:
            self._input, self._calls = tokens, len(calls)

    def on_op(self, op: Op) -> None:
        if self._input is None or len(op.calls) != self._calls:
            return
        if self.tokens is None:
            self._look_for_unknown_norm(op)
            self._look_for_projection(op)
        part = None if op.trait is None else op.trait.norm
        if op.kind == ops.NORM:
            self._add(op)
        elif part is not None and part.of_original is self._input:  # a step of a norm that is written out
            before = next((i for i, out in enumerate(self._outputs) if any(a is out for a in op.args)), None)
            if before is None:
                self._outputs.append(op.output)
            else:
                self._outputs[before] = op.output  # its weight or bias
            self.tokens = self._outputs[0]

    def _add(self, op: Op) -> None:
        """Keep the output of a norm of the tokens: the first, and others with the same arguments."""
        if ops.first_argument(op.args, op.kwargs) is not self._input:
            return
        norm = (op.function, *op.args, *op.kwargs.values())
        if not self._outputs:
            self.tokens, self._norm = op.output, norm
        if len(norm) == len(self._norm) and all(_is_same(a, b) for a, b in zip(norm, self._norm, strict=True)):
            self._outputs.append(op.output)

    def _look_for_unknown_norm(self, op: Op) -> None:
        """Notice statistics of the input, and fused norms of other names."""
        reads_input = any(a is x for a in op.args for x in (self._input, *self._views))
        if reads_input and op.function in ops.REARRANGEMENTS and isinstance(op.output, Tensor):
            self._views.append(op.output)
        if reads_input and op.trait is not None:
            self._origin = op.trait.origin
        is_statistic = op.trait is not None and op.trait.statistic and op.trait.bent and op.trait.origin is self._origin
        is_statistic = is_statistic and _is_per_token(op.output, self._input)
        is_other = reads_input and (op.kind == ops.GROUP_NORM or op.function is torch.native_layer_norm)
        self.is_unrecognised |= is_statistic or is_other

    def _look_for_projection(self, op: Op) -> None:
        """Notice that the first projection reads neither the block's input nor the output of a norm of it."""
        operands = [a for a in (*op.args, *op.kwargs.values()) for a in (a if isinstance(a, list | tuple) else (a,))]
        read = [self._read[id(a)][1] for a in operands if id(a) in self._read]
        if not self._read or not read:
            return
        tensors = sum(isinstance(a, Tensor) for a in operands)
        if op.kind in ops.PROJECTIONS and len(read) == 1 and tensors > 1:
            self.is_unrecognised |= not all(read)
            self._read.clear()
            return
        moved = op.kind in ops.SUMS and len(read) == 1  # a position or a mask may be added
        moved = moved or op.function in ops.REARRANGEMENTS or plain_name(op.function) in _MOVING
        for out in op.output if isinstance(op.output, list | tuple) else (op.output,):
            if isinstance(out, Tensor):
                self._read[id(out)] = out, moved and all(read)

    def finish(self, recording: Recording) -> None:
        first = self._outputs[:1]
        if len(self._outputs) > 1 and not self._norm:  # written out more than once: for other heads, or another norm
            self._outputs = [out for out in self._outputs if out is first[0] or torch.equal(out, first[0])]
        self._input, self._norm, self._origin, self._views = None, (), None, []
        self._read.clear()
        self.is_unrecognised &= self.tokens is None

    def differentiated(self, scope: GradientScope) -> Sequence[Tensor]:
        return self._outputs

    def after_backward(self, recording: Recording, gradient_of: GradientOf) -> Self:
        value = copy.copy(self)
        value.tokens = None if self.tokens is None else recording.as_tokens(self.tokens.detach())
        gradients = [gradient for gradient in map(gradient_of, self._outputs) if gradient is not None]
        value.gradient = recording.as_tokens(functools.reduce(torch.add, gradients)) if gradients else None
        value._outputs = []
        return value

    def release(self) -> None:
        self.tokens = None
        self._outputs = []


# Functions that leave the values of tokens as they are
_MOVING = frozenset(
    {
        *("dropout", "to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach"),
        *("pad", "roll", "flip", "cat", "concat", "stack", "index_select", "gather", "masked_fill", "narrow", "select"),
        *("unfold", "repeat", "expand_as", "broadcast_to", "view_as", "reshape_as", "get", "getitem", "rot90"),
        *("split_with_sizes", "tensor_split", "moveaxis", "swapdims", "unflatten", "ravel", "hsplit", "vsplit"),
    }
)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))


def _is_per_token(statistic: Tensor, tokens: Tensor | None) -> bool:
    """Return whether a statistic is a number for each token, and not for each channel as that of a pool."""
    if tokens is None:
        return False
    width = tokens.shape[-1]
    return statistic.numel() * width == tokens.numel() and statistic.shape[-1] != width
