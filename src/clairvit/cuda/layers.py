"""Layers on a GPU: sums over heads by kernels, and several layers as one batch, since a launch costs more than a layer.

`view_of` and `visit_layers` are what the executor and encoder-decoder models ask for; on a CPU a layer is a plain
`LayerView`, and layers are shown one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from clairvit._entries import Entry
from clairvit.cuda import kernels
from clairvit.cuda.reductions import KernelReductions, reductions_of
from clairvit.methods.layer_view import LayerView, RunContext
from clairvit.numerics import widened
from clairvit.tracing.attention_call import AttentionCall, Rows, are_alike, is_large, merged, tile_bytes
from clairvit.tracing.attention_reductions import AttentionReductions
from clairvit.tracing.block_decomposition import BlockDecomposition
from clairvit.tracing.layer import Layer
from clairvit.tracing.trace import Trace

Pass = TypeVar("Pass")  # the state of one method while the layers are visited
Show = Callable[[Sequence[Pass], LayerView, list[int]], list[Pass]]
# How large a float32 tensor [layers·B, H, N, N] may be, as a multiple of the values of all layers: about a sixth of
# what the forward kept, which is free again by then, so that five of them fit.
STACKED_SHARE = 1.6


def is_launch_bound(trace: Trace) -> bool:
    """Return whether launching an operation costs more than a layer's arithmetic: not on a CPU, which has caches."""
    return trace.pixels.is_cuda


def view_of(layer: Layer, context: RunContext) -> LayerView:
    """Return the view of a layer; on a GPU, one whose sums over heads are computed by kernels."""
    return KernelView(layer, context) if is_launch_bound(context.trace) else LayerView(layer, context)


def visit_layers(
    passes: Sequence[Pass],
    indices: Sequence[int],
    context: RunContext,
    show: Show[Pass],
    visit_layer: Callable[[Sequence[Pass], LayerView], None],
) -> None:
    """Show several layers at once to all methods that treat them alike, and one by one to the others.

    Args:
        passes: The methods.
        indices: The layers that they read, in their order.
        context: What the methods share.
        show: Shows a view of some layers to methods; returns those that must see them one by one.
        visit_layer: Shows the view of a single layer to methods.
    """
    for group in layer_groups(indices, context.trace):
        _visit_group(passes, group, context, show, visit_layer)  # what its views hold is freed before the next one


def _visit_group(
    passes: Sequence[Pass],
    group: list[int],
    context: RunContext,
    show: Show[Pass],
    visit_layer: Callable[[Sequence[Pass], LayerView], None],
) -> None:
    layers = [context.trace.layers[index] for index in group]
    stack = stacked(layers, context, _stack_limit(layers[0])) if len(group) > 1 else None
    if stack is None:
        for layer in layers:
            visit_layer(passes, KernelView(layer, context))
        return
    singly = show(passes, stack, group)
    for position, (index, layer) in enumerate(zip(group, layers, strict=True)) if singly else ():
        show(singly, StackMember(layer, context, stack, position), [index])


def layer_groups(indices: Sequence[int], trace: Trace) -> Iterator[list[int]]:
    """Yield groups of layers whose N×N matrices are computed at once, up to a bound."""
    group: list[int] = []
    for index in indices:
        layer, first = trace.layers[index], trace.layers[group[0] if group else index]
        fits = layer.call is not None and (len(group) + 1) * _bytes_per_layer(layer.call, layer.count) <= _stack_limit(
            layer
        )
        if group and not (fits and _has_gradients(first) == _has_gradients(layer)):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _bytes_per_layer(call: AttentionCall, layers: int) -> int:
    """Return the bytes of the matrix that methods read of a layer: of all heads, or of a sum over heads by kernels."""
    by_kernels = kernels.attention_applies(call) and not is_large(call, layers)
    return attention_bytes(call) // (call.v.shape[1] if by_kernels else 1)


def _stack_limit(layer: Layer) -> int:
    """Return how many bytes the matrices of stacked layers may take: `STACKED_SHARE` of all layers' values."""
    assert layer.call is not None
    return int(STACKED_SHARE * layer.count * layer.call.v.nbytes)


def _has_gradients(layer: Layer) -> tuple[bool, bool]:
    return layer.out_gradient is not None, layer.tokens_gradient is not None


class KernelView(LayerView):
    """A layer whose sums over heads are computed from q, k, v and dO by kernels, where these apply."""

    @property
    def uses_kernels(self) -> bool:
        """Whether sums of heads are computed from q, k, v and dO by a kernel: no [B, H, N, N] is written."""
        call = self.layer.call
        if self._rows is not None or call is None or call.kind != "tokens":
            return False
        return isinstance(self.reductions, KernelReductions)

    @property
    def reads_sums(self) -> bool:
        return isinstance(self.reductions, KernelReductions)

    def _reductions_of(self, call: AttentionCall, gradient: Tensor | None) -> AttentionReductions:
        return reductions_of(call, gradient, tile_bytes(call, self.count, sums_only=True))

    def _sum_of_heads(self, entry: Entry, weights: Tensor | None) -> Tensor:
        if not self.uses_kernels:
            return super()._sum_of_heads(entry, weights)
        return self.reductions.weighted_heads(entry, self._mean_weights() if weights is None else weights)

    def _mean_weights(self) -> Tensor:
        """Return 1/H for each head, [1, H] in float32 at least."""
        v = self._layer.between_tokens().v
        return v.new_full((1, v.shape[1]), 1 / v.shape[1], dtype=torch.promote_types(v.dtype, torch.float32))

    def G_norm(self, p: int) -> Tensor:
        if self.uses_kernels and p == 1:
            return self.once("G1", lambda: self.reductions.head_sums("|G|"))
        if self.uses_kernels and not self.is_large:
            return self.once("G2", lambda: self.reductions.head_sums("G²").sqrt())
        return super().G_norm(p)

    def local_column_means(self, pool: str) -> Tensor:
        of_pool = self.layout.pooling == "map" and pool == "mean"
        if self.is_large or not self.uses_kernels or of_pool:
            return super().local_column_means(pool)
        call = self.layer.between_tokens()
        sums = self._reductions_of(call, call.heads(self.context.local(self.index, pool)))
        return sums.weighted_heads("G+", self._mean_weights()).mean(1)  # quicker where [B, N, N] may be written


class StackMember(KernelView):
    """One of several layers that were shown at once: what is computed for all of them is not computed again."""

    def __init__(self, layer: Layer, context: RunContext, stack: StackedLayers, position: int) -> None:
        super().__init__(layer, context)
        self._stack, self._position = stack, position

    def tile(self, rows: Rows) -> LayerView:
        return KernelView(self.layer, self.context, self, rows)

    def _shared(self, key: Hashable) -> Tensor | None:
        if key in self._cache:
            return self._cache[key]
        value = self._stack._shared(key)
        return None if value is None else value.chunk(self._stack.layers)[self._position]


class NotStackable(Exception):
    """A method asked a view of several layers for its index: show it one layer at a time."""


class StackedLayers(KernelView):
    """Several layers as one larger batch [layers·B, …]: on a GPU, a kernel launch costs more than a layer's arithmetic.

    A method that treats every layer alike cannot tell the difference; asking for the index raises `NotStackable`, and
    so does asking for all rows of A or G where they would take too much memory.
    """

    def __init__(self, layers: Sequence[Layer], context: RunContext, limit: int) -> None:
        super().__init__(layers[0], context)
        self._joined: Layer | None = None
        self.members = [KernelView(layer, context) for layer in layers]
        self.layers = len(layers)
        self.limit = limit  # bytes of A

    @property
    def index(self) -> int:
        raise NotStackable

    @property
    def trace(self) -> Trace:
        raise NotStackable

    @property
    def layer(self) -> Layer:
        raise NotStackable

    @property
    def _merged_layer(self) -> Layer:
        """The attention of all layers as one, [layers·B, H, N, …]; joined when it is first read: kernels need none."""
        if isinstance(self._all_rows, StackedLayers):
            return self._all_rows._merged_layer
        if self._joined is None:
            layers = [member.layer for member in self.members]
            call = merged([layer.attention for layer in layers])
            gradient = joined([layer.out_gradient for layer in layers])
            self._joined = replace(layers[0], call=call, out_gradient=gradient)
        return self._joined

    @property
    def _call(self) -> AttentionCall:
        return self._merged_layer.between_tokens()

    @property
    def _dO(self) -> Tensor:
        return self._merged_layer.dO

    @property
    def reductions(self) -> AttentionReductions:
        if self._all_rows is not None:
            return self._all_rows.reductions
        if self._reductions is None:
            self._reductions = self._reductions_of(self._call, self._merged_layer.out_gradient)
        return self._reductions

    @property
    def count(self) -> int:
        return self.members[0].count

    @property
    def uses_kernels(self) -> bool:
        return self._rows is None and all(member.uses_kernels for member in self.members)

    @property
    def A(self) -> Tensor:
        self._check_size()
        return self.once("A", lambda: self.S.softmax(-1)) if self._reads_members else super().A

    @property
    def S(self) -> Tensor:
        self._check_size()
        return self.once("S", lambda: self._row_entries("S")) if self._reads_members else super().S

    @property
    def G(self) -> Tensor:
        self._check_size()
        return self.once("G", lambda: self._row_entries("G")) if self._reads_members else super().G

    @property
    def _reads_members(self) -> bool:
        """Whether it has a few rows of fused calls, which a kernel reads without joining all keys and values."""
        return isinstance(self._rows, Tensor) and all(member.uses_kernels for member in self.members)

    def _row_entries(self, entry: Literal["S", "G"]) -> Tensor:
        """Return S or G of some rows, [layers·B, H, rows, N], each layer's by a kernel."""
        assert isinstance(self._rows, Tensor)
        parts = []
        for member in self.members:
            sums = member.reductions
            assert isinstance(sums, KernelReductions)
            parts.append(sums.row_entries(entry, self._rows))
        return torch.cat(parts)

    def _check_size(self) -> None:
        """Raise NotStackable where a tensor [layers·B, H, N, N] would be too large."""
        if self._rows is None and self.layers * attention_bytes(self.members[0].layer.attention) > self.limit:
            raise NotStackable

    @property
    def x(self) -> Tensor:
        return self.once_per_layer(
            "x", lambda: widened(_joined_tokens([member.layer.tokens for member in self.members]))
        )

    @property
    def dx(self) -> Tensor:
        return self.once_per_layer(
            "dx", lambda: widened(_joined_tokens([member.layer.tokens_gradient for member in self.members]))
        )

    @property
    def is_large(self) -> bool:
        return any(member.is_large for member in self.members)

    @property
    def decomposition(self) -> BlockDecomposition:
        raise NotStackable

    @property
    def x_dx(self) -> Tensor:
        return self.once_per_layer("x dx", self._x_dx)

    def _x_dx(self) -> Tensor:
        if all(kernels.tokens_apply(member.layer.x, member.layer.dx) for member in self.members):
            return torch.cat([member.x_dx for member in self.members])
        return (self.x * self.dx).sum(-1)

    def combine_tokens(
        self, function: Callable[[Tensor, Tensor], Tensor], tensors_of: Callable[[LayerView], tuple[Tensor, Tensor]]
    ) -> Tensor:
        pairs = [tensors_of(member) for member in self.members]
        if all(kernels.tokens_apply(*pair) for pair in pairs):
            return _joined_tokens([function(*pair) for pair in pairs])
        first, second = (_joined_tokens(tensors) for tensors in zip(*pairs, strict=True))
        return function(first, second)

    def at_first_layer(self, values: Tensor, otherwise: float) -> Tensor:
        result = torch.full_like(values, otherwise)
        for member, part, of_layer in zip(
            self.members, result.chunk(self.layers), values.chunk(self.layers), strict=True
        ):
            if member.index == 0:
                part.copy_(of_layer)
        return result

    def tile(self, rows: Rows) -> LayerView:
        view = copy(self)
        view._all_rows, view._rows, view._cache = self, rows, {}
        return view

    def _sum_of_heads(self, entry: Entry, weights: Tensor | None) -> Tensor:
        if not self.uses_kernels:
            return super()._sum_of_heads(entry, weights)
        call = self._layer.between_tokens()
        matrices = self._mean_weights().new_empty(self.layers, call.lead, call.queries, call.keys)
        parts = [self._mean_weights()] * self.layers if weights is None else weights.chunk(self.layers)
        for member, part, matrix in zip(self.members, parts, matrices, strict=True):
            member.reductions.weighted_heads(entry, part, matrix)
        return matrices.flatten(0, 1)

    def G_norm(self, p: int) -> Tensor:
        if self.uses_kernels:
            return self.once(f"G{p}", lambda: torch.cat([member.G_norm(p) for member in self.members]))
        return super().G_norm(p)


def stacked(layers: Sequence[Layer], context: RunContext, limit: int) -> StackedLayers | None:
    """Return one view of layers that are built alike; None if they are not. Their A may take `limit` bytes in all."""
    calls = [layer.call for layer in layers if layer.call is not None]
    return StackedLayers(layers, context, limit) if len(calls) == len(layers) and are_alike(calls) else None


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Return tensors of several layers as one batch; None if one is missing."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if len(present) == len(tensors) else None


def _joined_tokens(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return tensors of several layers as one batch; layers are shown one by one where one is missing, or differs."""
    if any(tensor is None for tensor in tensors) or len({tensor.shape for tensor in tensors if tensor is not None}) > 1:
        raise NotStackable
    return torch.cat([tensor for tensor in tensors if tensor is not None])


def attention_bytes(call: AttentionCall) -> int:
    """Return the bytes of its A in float32."""
    return 4 * call.lead * call.v.shape[1] * call.queries * call.keys
