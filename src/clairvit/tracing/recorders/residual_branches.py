"""ResidualBranches: which sums of a forward pass add the attention's output, and the MLP's, to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.recorders.base import Op, Recorder
from clairvit.tracing.residual_sums import ResidualStream, ResidualSum, is_computed_from

if TYPE_CHECKING:
    from clairvit.tracing.recording import Recording


class Branch(NamedTuple):
    """A term of a sum: its sum's number among all sums from the first block on, and which of the two terms it is."""

    number: int
    term: int


class _BlockSum(NamedTuple):
    """A residual sum inside a block."""

    block: int
    shape: torch.Size
    branch: Branch
    after_attention: bool  # the branch is computed from the block's attention


class ResidualBranches(Recorder):
    """Record the branches of each layer's two residual sums: x + attention(x), then + mlp(x).

    The sums are told from others by the graph (`tracing/residual_sums.py`). The attention's is the first of the two
    whose branch is computed from the block's attention; the other one is the MLP's. Layers with more or fewer residual
    sums have no such branches.
    """

    kinds = ops.SUMS

    def __init__(self) -> None:
        self._stream = ResidualStream()
        self._number = -1
        self._pending: tuple[ResidualSum, Any] | None = None  # the sum that is being computed, its branch's node
        self._sums: list[_BlockSum] = []
        self._input_shapes: dict[int, torch.Size] = {}  # block -> of its input
        self._first_sums: dict[int, int] = {}  # block -> the number of the first sum after it was entered
        self._blocks: list[int] = []  # of each layer
        self._layers: list[tuple[Branch, Branch] | None] = []

    def before_op(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at the terms before the sum may overwrite one of them."""
        self._pending = None
        if ops.kind_of(function) not in ops.SUMS:
            return
        self._number += 1
        if len(args) == 2 and not kwargs and all(isinstance(term, Tensor) for term in args):
            residual = self._stream.match(*args)
            if residual is not None:
                self._pending = residual, args[1 - residual.z_in].grad_fn

    def on_op(self, op: Op) -> None:
        if self._pending is None:
            return
        (residual, node), self._pending = self._pending, None
        self._stream.add(op.output, residual)
        if op.block < 0 or op.after_blocks:
            return
        call = op.calls[-1] if op.calls and op.calls[-1].block == op.block else None
        after_attention = call is not None and any(is_computed_from(node, out.grad_fn) for out in call.outputs)
        branch = Branch(self._number, 1 - residual.z_in)
        self._sums.append(_BlockSum(op.block, op.output.shape, branch, after_attention))

    def on_block(self, block: int, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        self._pending = None
        if block == 0:  # what comes before may add up image by image, such as a vision tower
            self._number = -1
        self._input_shapes[block] = tokens.shape
        self._first_sums[block] = self._number + 1

    def finish(self, recording: Recording) -> None:
        self._stream, self._pending = ResidualStream(), None
        self._blocks = [call.block for call in recording.calls]
        self._layers = [self._branches(block) for block in self._blocks]

    def branches(self, index: int) -> tuple[Branch, Branch] | None:
        """Return the branches of attention and MLP of a layer; None where its block has no two residual sums."""
        return self._layers[index]

    def branches_in_block(self, index: int) -> tuple[Branch, Branch] | None:
        """Return the same, with sums numbered from 0 where the layer's block is entered."""
        branches = self._layers[index]
        if branches is None:
            return None
        first = self._first_sums[self._blocks[index]]
        attention, mlp = (Branch(branch.number - first, branch.term) for branch in branches)
        return attention, mlp

    def _branches(self, block: int) -> tuple[Branch, Branch] | None:
        sums = [s for s in self._sums if s.block == block and s.shape == self._input_shapes.get(block)]
        if len(sums) != 2 or not any(s.after_attention for s in sums):
            return None
        first, second = sums if sums[0].after_attention else reversed(sums)
        return first.branch, second.branch
