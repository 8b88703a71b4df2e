"""HeadReplay and LastLinear: what gradients of single blocks need of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map

from clairvit.errors import NotApplicable
from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.recorders.base import Op, Recorder

if TYPE_CHECKING:
    from clairvit.tracing.recording import Recording


class HeadReplay(Recorder):
    """Record the operations from the last block's output to the scores; `replay` runs them on other tokens."""

    kinds = None

    def __init__(self) -> None:
        self._start: Tensor | None = None  # the tensor that `replay` replaces
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], Any]] = []

    def on_op(self, op: Op) -> None:
        if op.after_blocks and not op.nested and any(isinstance(t, Tensor) for t in tree_flatten(op.output)[0]):
            self._steps.append((op.function, op.args, op.kwargs, op.output))

    def finish(self, recording: Recording) -> None:
        self._start = recording.end
        if not recording.structure.whole_blocks:  # recorded from the last attention on
            sums = [i for i, step in enumerate(self._steps) if ops.kind_of(step[0]) in ops.SUMS]
            last = max((i for i in sums if self._steps[i][3] is self._start), default=-1)
            del self._steps[: last + 1]

    def replay(self, tokens: Tensor, end: Tensor) -> Tensor:
        """Return the value that `end` would have had if `tokens` had been the last block's output."""
        assert self._start is not None
        new: dict[int, Tensor] = {id(self._start): tokens}

        def replaced(leaf: Any) -> Any:
            return new.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        for function, args, kwargs, out in self._steps:
            leaves = tree_flatten((args, kwargs))[0]
            if not any(id(leaf) in new for leaf in leaves if isinstance(leaf, Tensor)):
                continue  # does not depend on the tokens
            result = function(*tree_map(replaced, args), **tree_map(replaced, kwargs))
            for old, fresh in zip(tree_flatten(out)[0], tree_flatten(result)[0], strict=True):
                if isinstance(old, Tensor):
                    new[id(old)] = fresh
        if id(end) not in new:
            raise NotApplicable(
                "The score is read inside the last block and not from its output, so that there is no head to run on "
                "the outputs of other blocks; expected a class or where='block'.",
                alternative="a gradient method",
            )
        return new[id(end)]

    def release(self) -> None:
        self._start = None
        self._steps.clear()


@dataclass(frozen=True, eq=False)
class LinearEdges:
    """A linear layer as places in the graph: the tensors themselves (4 N d each) are not kept."""

    input: GradientEdge
    weight: Tensor
    output: GradientEdge


class LastLinear(Recorder):
    """Record the last linear layer of each block."""

    kinds = frozenset({ops.LINEAR})

    def __init__(self) -> None:
        self._last: Op | None = None  # since the block began
        self._edges: dict[int, LinearEdges] = {}  # block -> its last linear layer
        self._layers: dict[int, LinearEdges] = {}

    def on_op(self, op: Op) -> None:
        self._last = op

    def on_block(self, block: int, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        self._add_last(calls)
        self._last = None

    def on_blocks_end(self, tokens: Tensor | None, calls: Sequence[AttentionCall]) -> None:
        if tokens is not None:
            self._add_last(calls)

    def _add_last(self, calls: Sequence[AttentionCall]) -> None:
        if self._last is None or not calls:
            return
        call, out = ops.linear_arguments(self._last.args, self._last.kwargs), self._last.output
        if call["input"].requires_grad and out.requires_grad and out.grad_fn is not None:
            edges = LinearEdges(get_gradient_edge(call["input"]), call["weight"], get_gradient_edge(out))
            self._edges[calls[-1].block] = edges

    def finish(self, recording: Recording) -> None:
        blocks = [call.block for call in recording.calls]
        self._layers = {layer: self._edges[block] for layer, block in enumerate(blocks) if block in self._edges}
        self._last = None
        self._edges.clear()

    def edges(self, index: int) -> LinearEdges | None:
        """Return the last linear layer of a layer's block, if it was seen."""
        return self._layers.get(index)

    def release(self) -> None:
        self._layers.clear()
