"""Which sums of a forward pass are residual sums, told from the autograd graph.

A residual sum is z_out = z_in + z_up of two activations of one shape, where the branch z_up is computed from the stream
z_in: x + attention(norm(x)), x + mlp(norm(x)). Sums that are none: a bias or a position embedding (a constant, not
computed from the image), two branches of the same input (rotary embeddings, LoRA, attention + mlp before they join the
stream), and formulas of one number (z + 0.04 z³ inside a GELU that is written out).

A branch may also read an earlier stage of the stream, as parallel blocks do: in x + attention(x) + mlp(x) both sums are
residual.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


def node_names(*operations: str) -> frozenset[str]:
    """Return the names of the graph nodes of elementwise operations."""
    return frozenset(f"{operation}Backward{overload}" for operation in operations for overload in (0, 1))


# Nodes that change the shape or the memory of a tensor, not its entries.
VIEWS = node_names(
    *("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T", "Unsqueeze", "Squeeze", "Clone", "Alias"),
    *("Contiguous", "ToCopy", "Expand"),
)
_LINEAR = VIEWS | node_names("Mul", "Div", "Add", "Sub", "Rsub", "Neg")
_NONLINEAR = node_names("Pow", "Exp", "Sqrt", "Abs", "Tanh", "Sigmoid", "Erf", "Gelu", "Silu", "Relu")
_LAYERS = ("Linear", "Addmm", "Mm", "Bmm", "Baddbmm", "Mkldnn", "Convolution", "ScaledDotProduct")
_LAYER_ROLES = ("linear", "conv", "attention", "mix")
_NONLINEAR_ROLES = ("activation", "gate", "product", "factor")  # of operations that follow a rule table


class ResidualSum(NamedTuple):
    """A sum of the stream and a branch."""

    z_in: int  # which term is the stream, 0 or 1
    stage: Any  # the graph node of the stage of the stream that the branch read


@dataclass(eq=False)
class ResidualStream:
    """Tell residual sums from other sums while a forward pass runs. It refers to the graph: drop it afterwards."""

    # node of a residual sum -> node of the stream that its branch read
    _earlier: dict[Any, Any] = field(default_factory=dict, init=False)
    _same: dict[Any, Any] = field(default_factory=dict, init=False)  # node of 0 + x -> node of x

    def match(self, a: Tensor, b: Tensor) -> ResidualSum | None:
        """Return what a + b is as a residual sum, before it is computed; None where it is none."""
        if a.shape != b.shape or a.grad_fn is None or b.grad_fn is None:
            return None
        nodes = self._node(a), self._node(b)
        for index in (0, 1):
            stage = self._read_by(nodes[1 - index], nodes[index])
            if stage is not None:
                return ResidualSum(index, stage)
        return None

    def match_layers(self, a: Tensor, b: Tensor) -> int | None:
        """Return which of two terms is the stream, if the other is what layers make of it; x − mean(x) has none."""
        residual = self.match(a, b)
        if residual is None:
            return None
        branch = self._node((b, a)[residual.z_in])
        return residual.z_in if _has_layer(_nodes_between(branch, [residual.stage])[0]) else None

    def add(self, total: Tensor, residual: ResidualSum) -> None:
        """Take the value of a residual sum into the stream."""
        if total.grad_fn is not None:
            self._earlier[without_views(total.grad_fn)] = residual.stage

    def add_alias(self, total: Tensor, x: Tensor) -> None:
        """Take 0 + x, the first step of sum([x, branch]), for x itself."""
        if total.grad_fn is not None and x.grad_fn is not None and total is not x:
            self._same[without_views(total.grad_fn)] = self._node(x)

    def _node(self, tensor: Tensor) -> Any:
        node = without_views(tensor.grad_fn)
        return self._same.get(node, node)

    def _read_by(self, branch: Any, stream: Any) -> Any:
        """Return the latest stage of the stream that the branch is computed from; None for elementwise formulas."""
        stages = [stream, *([self._earlier[stream]] if stream in self._earlier else [])]
        if branch in stages:
            return None
        between, reached = _nodes_between(branch, stages)
        return None if _is_formula(between) else next((stage for stage in stages if stage in reached), None)


def joins_stream_and_layers(nodes: Sequence[Any]) -> bool:
    """Return whether among the nodes of several terms there is a stream, and what layers make of it."""
    terms = [without_views(node) for node in nodes]
    for branch, stream in itertools.permutations(terms, 2):
        if branch is not stream:
            between, reached = _nodes_between(branch, [stream])
            if reached and _has_layer(between):
                return True
    return False


def _nodes_between(branch: Any, stages: Sequence[Any]) -> tuple[set[Any], set[Any]]:
    """Return the nodes that are visited from a branch down to stages of the stream, and the stages that are reached."""
    oldest = min(stage._sequence_nr() for stage in stages)
    reached, visited, pending = set(), {branch}, [branch]
    while pending:
        node = pending.pop()
        if node in stages:
            reached.add(node)
            continue
        for parent, _ in node.next_functions:
            # A node that is older than the stream cannot be computed from it.
            if parent is not None and parent not in visited and parent._sequence_nr() >= oldest:
                visited.add(parent)
                pending.append(parent)
    return visited - set(stages), reached


def without_views(node: Any) -> Any:
    """Return the node that computed the entries of a tensor, behind reshapes and copies."""
    while node.name() in VIEWS and node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _is_formula(nodes: set[Any]) -> bool:
    """Return whether operations are all elementwise, and some of them not linear: a formula such as 0.04 z³."""
    nonlinear = [_is_nonlinear(node) for node in nodes]
    return any(nonlinear) and all(bent or node.name() in _LINEAR for node, bent in zip(nodes, nonlinear, strict=True))


def _has_layer(nodes: set[Any]) -> bool:
    """Return whether a linear layer, a convolution or attention is among operations."""
    return any(
        getattr(node, "role", None) in _LAYER_ROLES or node.name().rpartition("::")[2].startswith(_LAYERS)
        for node in nodes
    )


def _is_nonlinear(node: Any) -> bool:
    """Return whether a node is a bent elementwise function, or a product of two tensors of the graph."""
    of_two = sum(parent is not None for parent, _ in node.next_functions) > 1 and node.name().startswith(("Mul", "Div"))
    return of_two or node.name() in _NONLINEAR or getattr(node, "role", None) in _NONLINEAR_ROLES


def is_computed_from(node: Any, source: Any) -> bool:
    """Return whether a node of the graph is computed from another one."""
    if node is None or source is None:
        return False
    visited, pending = {node}, [node]
    while pending:
        current = pending.pop()
        if current is source:
            return True
        for parent, _ in current.next_functions:
            # A node that is older than the source cannot be computed from it.
            if parent is not None and parent not in visited and parent._sequence_nr() >= source._sequence_nr():
                visited.add(parent)
                pending.append(parent)
    return False
