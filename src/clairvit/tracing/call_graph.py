"""Call graph: which attention calls of a forward pass feed each other, and which are heads of one layer.

Heads may be modules or calls of their own. Two calls are heads of one layer if neither is computed from the other, if
their projections read the same tokens, and if their outputs meet before the stream that they are added to goes on.
Parallel blocks differ in the second: each of them has a norm of its own. Networks side by side differ in the third.

Who feeds whom, and where outputs meet, is told from the autograd graph: parameters are frozen, so that it holds what
depends on the pixels alone. What projections read is told from the operations of the forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall, can_join
from clairvit.tracing.recorders.base import Op, Recorder
from clairvit.tracing.residual_sums import VIEWS, node_names, without_views
from clairvit.tracing.rules.table import HeadsJoin

_WITH_A_WEIGHT = frozenset(
    {ops.LINEAR, ops.BIASED_MATMUL, *ops.CONVOLUTIONS, *ops.MATRIX_PRODUCTS}
)  # projections, if all but one of their tensors are weights
_MOVING = frozenset({"dropout", "to", "type", "float", "double", "half", "bfloat16", "type_as"})  # no new values
_JOINING = node_names("Add", "Sub", "Stack", "Cat")  # graph nodes in which a stream and a branch meet
_ON_THE_STREAM = VIEWS | _JOINING | node_names("Sum", "Mean", "Slice", "Select", "Index", "Split", "Unbind", "Unsafe")


_PRODUCTS = node_names("Addmm", "Mm", "Bmm", "Addbmm", "Baddbmm", "Convolution", "Linear")


@dataclass(frozen=True)
class _Producer:
    """The operation that made a value: what it read of the image, and what it did with it."""

    parents: tuple[int, ...]
    projects: bool  # a linear layer, a matrix product with a weight, a convolution
    moves: bool  # it changes no values: a view, dropout that is off, a cast


class TokensRead(Recorder):
    """Number the values of a forward pass, equal computations alike, and say what the projections of each call read.

    A norm that is computed anew for each head gives a value of the same number each time.
    """

    kinds = None

    def __init__(self) -> None:
        self.of_calls: list[frozenset[int] | None] = []  # for each attention call; None: it cannot be told
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # id -> tensor, version, number
        self._known: dict[Any, int] = {}  # operation and what it read -> number
        self._producers: dict[int, _Producer | None] = {}  # None: nobody saw how the value was made
        self._constants: dict[int, Tensor] = {}  # kept, so that an address means one tensor
        self._pending: tuple[Any, _Producer] | None = None

    def before_op(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at the arguments before the operation may overwrite one of them."""
        kind = ops.kind_of(function)
        if kind == ops.MULTI_HEAD:  # its own operations are seen, one by one
            self._pending = None
            return
        parents: list[int] = []
        constants: list[Tensor] = []
        key = (function, self._key(args, parents, constants), self._key(dict(kwargs), parents, constants))
        projects = kind in _WITH_A_WEIGHT and len(parents) == 1
        moves = function in ops.REARRANGEMENTS or kind == ops.CAST or getattr(function, "__name__", "") in _MOVING
        self._pending = key, _Producer(tuple(dict.fromkeys(parents)), projects, moves)

    def on_op(self, op: Op) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        key, producer = pending
        written = op.args[0] if op.args and (op.output is None or ops.is_in_place(op.function, op.kwargs)) else None
        for index, tensor in enumerate(_tensors((op.output, written))):
            if tensor.requires_grad and self._seen(tensor) is None:
                number = self._known.setdefault((key, index), len(self._producers))
                self._producers.setdefault(number, producer)
                self._numbers[id(tensor)] = weakref.ref(tensor), tensor._version, number
        while len(self.of_calls) < op.attended:
            self.of_calls.append(self._read(producer.parents))

    def forget(self) -> None:
        """Drop every reference to the pass."""
        self._numbers.clear()
        self._known.clear()
        self._constants.clear()

    def _seen(self, tensor: Tensor) -> int | None:
        entry = self._numbers.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[1] != tensor._version:
            return None
        return entry[2]

    def _number(self, tensor: Tensor) -> int:
        number = self._seen(tensor)
        if number is None:
            number = len(self._producers)
            # The pixels are where the graph begins; any other value must have been made by something.
            self._producers[number] = _Producer((), False, False) if tensor.grad_fn is None else None
            self._numbers[id(tensor)] = weakref.ref(tensor), tensor._version, number
        return number

    def _key(self, tree: Any, parents: list[int], constants: list[Tensor]) -> Any:
        """Return arguments in a form that is equal for equal arguments; note the values among them."""
        if isinstance(tree, Tensor):
            if tree.requires_grad:
                parents.append(self._number(tree))
                return ("value", parents[-1])
            self._constants.setdefault(id(tree), tree)
            constants.append(tree)
            if tree.layout != torch.strided or tree.is_quantized:
                return ("constant", id(tree))
            version = 0 if tree.is_inference() else tree._version
            return ("constant", tree.data_ptr(), tree.shape, tree.stride(), tree.dtype, version)
        if isinstance(tree, dict):
            return tuple((name, self._key(value, parents, constants)) for name, value in tree.items())
        if isinstance(tree, tuple | list):
            return tuple(self._key(value, parents, constants) for value in tree)
        return repr(tree)

    def _read(self, values: Iterable[int]) -> frozenset[int] | None:
        """Return the values that the projections behind `values` read; None if one was made by something unseen."""
        pending, visited, read = [(value, False) for value in values], set[tuple[int, bool]](), set[int]()
        while pending:
            value, projected = pending.pop()
            if (value, projected) in visited:
                continue
            visited.add((value, projected))
            producer = self._producers[value]
            if producer is None:
                return None
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
    read: Sequence[frozenset[int] | None]  # by each call, as `TokensRead` numbers the values
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
        return bool(self._bits(_inputs(self.calls[second])) >> first & 1)

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
            if layer and all(self._are_heads(other, index) for other in layer):
                sizes[-1] += 1
            else:
                sizes.append(1)
        return sizes

    def _are_heads(self, first: int, second: int) -> bool:
        tokens = self.read[first]
        return (
            can_join([self.calls[first], self.calls[second]])
            and all(self.calls[index].requires_grad for index in (first, second))
            and not self.feeds(first, second)
            and tokens is not None
            and tokens == self.read[second]
            and self.meet(first, second)
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


def _inputs(call: AttentionCall) -> list[Tensor]:
    return [tensor for tensor in (call.q, call.k, call.v, call.weights, call.mask) if tensor is not None]
