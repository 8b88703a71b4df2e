"""OpLog: every operation of a forward from the first block on, with its values, for methods that look inside blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.recorders.base import Op, Recorder

if TYPE_CHECKING:
    from clairvit.tracing.lineage import Trait
    from clairvit.tracing.recording import Recording


@dataclass(frozen=True, eq=False)
class Step:
    """One operation. `stale`: a tensor of it was overwritten later, in a way that could not be followed."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    versions: tuple[tuple[Tensor, int], ...] = ()
    stale: bool = False
    held: Tensor | None = None  # the factor of a product that is held fixed
    holds_spread: bool = False  # that factor is a norm's spread
    is_part: bool = False  # of a norm that is written out, and is a step of its own further on

    @functools.cached_property
    def kind(self) -> str | None:
        return ops.kind_of(self.function)

    @functools.cached_property
    def inputs(self) -> list[Tensor]:
        return _tensors((self.args, self.kwargs))

    @functools.cached_property
    def outputs(self) -> list[Tensor]:
        return _tensors(self.output)

    def replaced(self, change: Callable[[Any], Any], **fields: Any) -> Step:
        """Return the step with every tensor changed."""
        args, kwargs, output = (map_leaves(change, tree) for tree in (self.args, self.kwargs, self.output))
        forgotten: dict[str, Any] = {"versions": (), "stale": False}
        return replace(self, args=args, kwargs=kwargs, output=output, held=change(self.held), **(forgotten | fields))


class OpLog(Recorder):
    """Record every operation from the first block on; sealed after the forward pass, outside the graph."""

    kinds = None

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.block_inputs: list[tuple[Tensor, int]] = []  # each block's input, and how many steps came before it
        self.attention_outputs: list[tuple[int, tuple[Tensor, ...]]] = []  # each layer's block and attention outputs
        self.last_block_output: Tensor | None = None
        self.scores: Tensor | None = None
        self._args: tuple[Any, ...] = ()  # of the operation that is running
        self._traits: list[Trait | None] = []  # of the steps' outputs

    def on_block(self, block: int, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        self.block_inputs.append((tokens, len(self.steps)))

    def before_op(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep a copy of a tensor that the operation is about to overwrite, in all steps that have read it."""
        self._args = args
        if not (self.block_inputs and args and isinstance(args[0], Tensor) and ops.is_in_place(function, kwargs)):
            return
        written, copy = args[0], args[0].detach().clone()

        def replaced(leaf: Any) -> Any:
            return copy if leaf is written else leaf

        self.steps = [
            step.replaced(
                replaced,
                versions=tuple((copy, _version(copy)) if t is written else (t, v) for t, v in step.versions),
            )
            for step in self.steps
        ]
        self.block_inputs = [(replaced(tokens), index) for tokens, index in self.block_inputs]
        self._args = (copy, *args[1:])

    def on_op(self, op: Op) -> None:
        if not self.block_inputs or op.kind == ops.MULTI_HEAD:  # its own operations are logged, one by one
            return
        outputs = _tensors(op.output)
        if outputs:
            tensors = (*_tensors((self._args, op.kwargs)), *outputs)
            versions = tuple((t, _version(t)) for t in tensors)
            step = Step(
                op.function, self._args, op.kwargs, op.output, versions, held=op.held, holds_spread=op.holds_spread
            )
            norm = _written_norm(op)
            if norm is not None:
                self._mark_parts(norm.args[0], op)
            self.steps.append(norm or step)
            self._traits.append(op.trait)

    def _mark_parts(self, x: Tensor, op: Op) -> None:
        """Mark the steps since x that compute its mean, its spread, and the norm so far."""
        for index in reversed(range(len(self.steps))):
            step, trait = self.steps[index], self._traits[index]
            if any(t is x for t in step.outputs):
                break
            if trait is not None and op.trait is not None and trait.origin is op.trait.origin:
                self.steps[index] = replace(step, is_part=True)

    def finish(self, recording: Recording) -> None:
        """Detach every tensor, so that the log does not keep the graph."""
        detached_by_id: dict[int, Tensor] = {}
        alive: list[Tensor] = []  # an id is good for as long as its tensor lives

        def detached(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in detached_by_id:
                detached_by_id[id(leaf)] = leaf.detach()
                alive.append(leaf)
            return detached_by_id[id(leaf)]

        self.steps = [
            step.replaced(detached, stale=any(_version(t) != version for t, version in step.versions))
            for step in self.steps
        ]
        self.block_inputs = [(detached(tokens), index) for tokens, index in self.block_inputs]
        self.attention_outputs = [(call.block, tuple(map(detached, call.outputs))) for call in recording.calls]
        self.last_block_output, self.scores = detached(recording.end), detached(recording.logits)
        self._args, self._traits = (), []


def _written_norm(op: Op) -> Step | None:
    """Return the norm, from its input to what has been computed of it, that an operation completes; else None."""
    part = None if op.trait is None else op.trait.norm
    spread = None if part is None else part.spread
    if part is None or spread is None or op.output.shape != part.x.shape:
        return None
    spread = spread.detach().clone()
    spread = spread.reshape((1,) * (part.x.ndim - spread.ndim) + spread.shape)
    axes = tuple(i - spread.ndim for i, size in enumerate(spread.shape) if size == 1 and part.x.shape[i] > 1)
    weight = torch.tensor(part.weight) if isinstance(part.weight, int | float) else part.weight
    args = (part.x, ops.Spread(spread), weight, part.bias, axes if part.centred else ())
    return Step(ops.written_norm, args, {}, op.output, tuple((t, _version(t)) for t in (part.x, op.output)))


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree; for the usual trees ten times as fast as torch's own walk."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list):
        return [leaf for branch in tree for leaf in _tensors(branch)]
    if type(tree) is dict:
        return [leaf for branch in tree.values() for leaf in _tensors(branch)]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)] if isinstance(tree, tuple) else []


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with every leaf changed, as torch's tree_map does."""
    if type(tree) in (tuple, list):
        return type(tree)(map_leaves(change, branch) for branch in tree)
    if type(tree) is dict:
        return {name: map_leaves(change, branch) for name, branch in tree.items()}
    return tree_map(change, tree) if isinstance(tree, tuple) else change(tree)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
