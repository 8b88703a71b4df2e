"""Call graph: which attention calls of a forward pass feed each other, and which are heads of one layer.

Heads may be modules or calls of their own. Two calls are heads of one layer if neither is computed from the other, if
their projections read the same tokens, and if their outputs meet before the stream that they are added to goes on.
Parallel blocks differ in the second: each of them has a norm of its own. Networks side by side differ in the third.

Who feeds whom, and where outputs meet, is told from the autograd graph: parameters are frozen, so that it holds what
depends on the pixels alone. What projections read is told from the operations of the forward pass.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall, can_join
from clairvit.tracing.recorders.base import Op, Recorder
from clairvit.tracing.residual_sums import VIEWS, node_names, without_views
from clairvit.tracing.rules.table import HeadsJoin

# Kinds of operations that are projections, if all but one of their tensors are weights
_WITH_A_WEIGHT = frozenset({ops.LINEAR, ops.BIASED_MATMUL, *ops.CONVOLUTIONS, *ops.MATRIX_PRODUCTS})
_MOVING = frozenset({"dropout", "to", "type", "float", "double", "half", "bfloat16"})  # functions without new values
# Graph nodes: those in which a stream and a branch meet, those after which it is still the same stream, and projections
_JOINING = node_names("Add", "Sub", "Stack", "Cat")
_ON_THE_STREAM = VIEWS | _JOINING | node_names("Sum", "Mean", "Slice", "Select", "Index", "Split", "Unbind")
_PRODUCTS = node_names("Addmm", "Mm", "Bmm", "Addbmm", "Baddbmm", "Convolution", "Linear")


@dataclass(frozen=True)
class _Producer:
    """The operation that made a value: what it read of the image, and what it did with it."""

    parents: tuple[int, ...]
    shape: torch.Size  # of the value
    projects: bool = False  # a linear layer, a matrix product with a weight, a convolution; or nobody saw what it is
    moves: bool = False  # it changes no values: a view, dropout that is off, a cast


class TokensRead(Recorder):
    """Number the values of a forward pass, equal computations alike, and say what the projections of each call read.

    A norm that is computed anew for each head gives a value of the same number each time.
    """

    kinds = None

    def __init__(self) -> None:
        self.of_calls: list[frozenset[int]] = []  # for each attention call
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # id -> tensor, version, number
        self._known: dict[Any, int] = {}  # operation and what it read -> number
        self._producers: dict[int, _Producer] = {}
        self._nodes: dict[Any, int] = {}  # graph node -> number of the value that it made
        self._constants: dict[int, Tensor] = {}  # kept, so that an address means one tensor
        self._pending: tuple[Any, _Producer] | None = None  # its shape is not known yet

    def before_op(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at the arguments before the operation may overwrite one of them."""
        kind = ops.kind_of(function)
        if kind == ops.MULTI_HEAD:  # its own operations are seen, one by one
            self._pending = None
            return
        parents: list[int] = []
        key = (function, self._key(args, parents), self._key(dict(kwargs), parents))
        projects = kind in _WITH_A_WEIGHT and len(parents) == 1
        moves = function in ops.REARRANGEMENTS or kind == ops.CAST or getattr(function, "__name__", "") in _MOVING
        self._pending = key, _Producer(tuple(dict.fromkeys(parents)), torch.Size(), projects, moves)

    def on_op(self, op: Op) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        key, producer = pending
        written = op.args[0] if op.args and (op.output is None or ops.is_in_place(op.function, op.kwargs)) else None
        for index, tensor in enumerate(_tensors((op.output, written))):
            if tensor.requires_grad and self._seen(tensor) is None:
                number = self._known.setdefault((key, index), len(self._producers))
                self._producers.setdefault(number, replace(producer, shape=tensor.shape))
                self._keep(tensor, number)
        while len(self.of_calls) < op.attended:
            self.of_calls.append(self._read(producer.parents))

    def forget(self) -> None:
        """Drop every reference to the pass."""
        self._numbers.clear()
        self._nodes.clear()
        self._known.clear()
        self._constants.clear()

    def _seen(self, tensor: Tensor) -> int | None:
        entry = self._numbers.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[1] != tensor._version:
            return None
        return entry[2]

    def _number(self, tensor: Tensor) -> int:
        number = self._seen(tensor)
        if number is None:  # the pixels, or made by something unseen from values that the graph knows
            number = len(self._producers)
            self._producers[number] = _Producer(self._behind(tensor.grad_fn), tensor.shape, projects=True)
            self._keep(tensor, number)
        return number

    def _keep(self, tensor: Tensor, number: int) -> None:
        self._numbers[id(tensor)] = weakref.ref(tensor), tensor._version, number
        if tensor.grad_fn is not None:
            self._nodes[tensor.grad_fn] = number

    def _behind(self, node: Any) -> tuple[int, ...]:
        """Return the nearest values that a graph node is computed from."""
        values, visited, pending = dict[int, None](), {node}, [node]
        while pending:
            current = pending.pop()
            if current in self._nodes:
                values[self._nodes[current]] = None
                continue
            parents = [] if current is None else [parent for parent, _ in current.next_functions]
            pending += [parent for parent in parents if parent is not None and parent not in visited]
            visited.update(parents)
        return tuple(values)

    def _key(self, tree: Any, parents: list[int]) -> Any:
        """Return arguments in a form that is equal for equal arguments; note the values among them."""
        if isinstance(tree, Tensor):
            if tree.requires_grad:
                parents.append(self._number(tree))
                return ("value", parents[-1])
            self._constants.setdefault(id(tree), tree)
            if tree.layout != torch.strided or tree.is_quantized:
                return ("constant", id(tree))
            version = 0 if tree.is_inference() else tree._version
            return ("constant", tree.data_ptr(), tree.shape, tree.stride(), tree.dtype, version)
        if isinstance(tree, dict):
            return tuple((name, self._key(value, parents)) for name, value in tree.items())
        if isinstance(tree, tuple | list):
            return tuple(self._key(value, parents) for value in tree)
        return repr(tree)

    def rows(self, value: int) -> int | None:
        """Return how many tokens a value [..., N, d] has; None for the pixels."""
        producer = self._producers[value]
        return math.prod(producer.shape[:-1]) if producer.parents else None

    def _read(self, values: Iterable[int]) -> frozenset[int]:
        """Return the values that the projections behind `values` read."""
        pending, visited, read = [(value, False) for value in values], set[tuple[int, bool]](), set[int]()
        while pending:
            value, projected = pending.pop()
            if (value, projected) in visited:
                continue
            visited.add((value, projected))
            producer = self._producers[value]
            if not producer.parents or (projected and not (producer.projects or producer.moves)):
                read.add(value)
            else:
                pending += [(parent, projected or producer.projects) for parent in producer.parents]
        return frozenset(read)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in tree for tensor in _tensors(part)] if isinstance(tree, tuple | list) else []


@dataclass(eq=False)
class CallGraph:
    """Which attention calls of one forward pass the calls after them, and the scores, are computed from."""

    calls: Sequence[AttentionCall]
    scores: Sequence[Tensor]
    read: TokensRead
    _sources: dict[Any, int] = field(default_factory=dict)  # graph node -> bits of the calls that it is computed from

    def __post_init__(self) -> None:
        ends = {output.grad_fn: 1 << index for index, call in enumerate(self.calls) for output in call.outputs}
        ends.pop(None, None)
        roots = [tensor.grad_fn for tensor in (*self.scores, *(t for call in self.calls for t in _inputs(call)))]
        pending = [node for node in roots if node is not None]
        while pending:  # parents first
            node = pending[-1]
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            unknown = [parent for parent in parents if parent not in self._sources]
            if unknown and node not in self._sources:
                pending += unknown
                continue
            pending.pop()
            if node not in self._sources:
                bits = ends.get(node, 0)
                for parent in parents:
                    bits |= self._sources[parent]
                self._sources[node] = bits

    def feeds(self, first: int, second: int) -> bool:
        """Return whether a call is computed from an earlier one."""
        return bool(self._sources_of_calls[second] >> first & 1)

    @cached_property
    def _sources_of_calls(self) -> list[int]:
        return [self._bits(_inputs(call)) for call in self.calls]

    @cached_property
    def read_by_scores(self) -> frozenset[int]:
        """The calls that the scores are computed from."""
        bits = self._bits(self.scores)
        return frozenset(index for index in range(len(self.calls)) if bits >> index & 1)

    def heads(self) -> list[int]:
        """Return how many calls in a row are heads of one layer, for each layer; they add up to all calls."""
        sizes: list[int] = []
        for index in range(len(self.calls)):
            layer = range(index - sizes[-1], index) if sizes else ()
            if layer and self._is_head_of(layer, index):
                sizes[-1] += 1
            else:
                sizes.append(1)
        return sizes

    def _is_head_of(self, layer: range, index: int) -> bool:
        """Return whether a call computes further heads of the layer that consists of the calls before it."""
        call, tokens = self.calls[index], self.read.of_calls[index]
        rows = {count for value in tokens if (count := self.read.rows(value)) is not None}
        return (
            can_join([self.calls[layer[0]], call])
            and all(self.calls[other].requires_grad for other in (layer[0], index))
            and not any(self.feeds(other, index) for other in layer)
            and tokens == self.read.of_calls[layer[0]]
            # All tokens that were read are queries or keys; else the calls are windows, one after the other.
            and (not rows or not rows.isdisjoint((call.lead * call.queries, call.lead * call.keys)))
            and self._sums_before_meeting([*layer, index]) is not None
        )

    def meet(self, first: int, second: int) -> bool:
        """Return whether the outputs of two calls that do not feed each other meet before either stream goes on.

        A stream goes on where something other than a sum reads x + attention(x), without the other call in it.
        """
        return self._sums_before_meeting([first, second]) is not None

    def join_of(self, first: int, count: int) -> HeadsJoin:
        """Return how the outputs of the heads of a layer, `count` calls from the first on, meet."""
        heads = range(first, first + count)
        if count > 1 and self._sums_before_meeting(heads):
            return "added"
        outputs = {output.grad_fn for index in heads for output in self.calls[index].outputs}
        apart = (node for node in self._before_meeting(heads) if node not in outputs)
        return "projected" if count > 1 and any(node.name() in _PRODUCTS for node in apart) else "concatenated"

    def _before_meeting(self, calls: Iterable[int]) -> Iterator[Any]:
        """Yield the graph nodes between the outputs of some calls and the scores that hold some, not all of them."""
        together = sum(1 << call for call in calls)
        # In the order of the forward pass: parents come first.
        return (node for node, bits in self._nodes_read.items() if 0 != bits & together != together)

    def _sums_before_meeting(self, calls: Sequence[int]) -> set[Any] | None:
        """Return the sums of a stream and some of the calls; None if such a stream goes on."""
        together = sum(1 << call for call in calls)
        read = self._ancestors([t.grad_fn for call in calls for t in _inputs(self.calls[call])])
        added: set[Any] = set()
        for node in self._before_meeting(calls):
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if any(parent in added for parent in parents):
                if node.name() not in _ON_THE_STREAM:
                    return None
                added.add(node)
            elif node.name() in _JOINING and any(
                not self._sources[parent] & together and without_views(parent) in read for parent in parents
            ):
                added.add(node)
        return added

    def feed_another(self, first: int, second: int) -> bool:
        """Return whether a later call is computed from both."""
        return any(
            self.feeds(first, later) and self.feeds(second, later) for later in range(second + 1, len(self.calls))
        )

    def joins_networks(self) -> bool:
        """Return whether vectors of networks that share no projection of the image meet before the scores.

        So do those of an ensemble of CNNs, or of a model with attention and one without. What joins feature maps or
        tokens is part of one network.
        """
        for node in self._nodes_read:
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if len(parents) < 2 or not all(map(_is_of_vectors, parents)):
                continue
            products = [{part for part in self._ancestors([parent]) if part.name() in _PRODUCTS} for parent in parents]
            if any(a and b and a.isdisjoint(b) for a, b in itertools.combinations(products, 2)):
                return True
        return False

    @cached_property
    def _nodes_read(self) -> dict[Any, int]:
        """The sources of the nodes that the scores are computed from, parents first."""
        reached = self._ancestors([score.grad_fn for score in self.scores])
        return {node: bits for node, bits in self._sources.items() if node in reached}

    def _ancestors(self, nodes: Iterable[Any]) -> set[Any]:
        pending = [node for node in nodes if node is not None]
        reached = set(pending)
        while pending:
            for parent, _ in pending.pop().next_functions:
                if parent is not None and parent not in reached:
                    reached.add(parent)
                    pending.append(parent)
        return reached

    def _bits(self, tensors: Iterable[Tensor]) -> int:
        bits = 0
        for tensor in tensors:
            bits |= self._sources.get(tensor.grad_fn, 0)
        return bits


def _is_of_vectors(node: Any) -> bool:
    """Return whether the results of a graph node are vectors of the image [1, d], such as scores; or numbers."""
    return all(math.prod(result.shape[:-1]) == 1 and len(result.shape) < 3 for result in node._input_metadata)


def _inputs(call: AttentionCall) -> list[Tensor]:
    return [tensor for tensor in (call.q, call.k, call.v, call.weights, call.mask) if tensor is not None]
