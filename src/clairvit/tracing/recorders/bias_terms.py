"""What each operation adds on its own, and what the score's gradient makes of it, per token or as an image.

Every operation is out = J · in + b, J its Jacobian and b what is left: a bias, or, where the operation is nonlinear,
also the part of its value that its slope does not explain (`bias_term`). FullGrad adds up b · dy/dout. During the
forward pass a recorder registers a hook on the output of each operation with a b; in the backward pass the hook adds
b · dy/dout to an accumulator. No gradient is kept, and other recordings pay nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.models.model import Layout
from clairvit.numerics import wide_product, widened
from clairvit.tracing import ops
from clairvit.tracing.attention_call import repeated, scaled_scores
from clairvit.tracing.grid import MOST_PREFIX_TOKENS
from clairvit.tracing.recorders.base import GradientOf, Op, Recorder

if TYPE_CHECKING:
    from clairvit.tracing.recording import Recording
    from clairvit.tracing.structure import ModelStructure


EPS = 1e-6  # of FullGrad's authors
BiasKind = Literal["learned", "implicit"]


@dataclass(eq=False)
class BiasAccumulator:
    """b · dy/dout of one backward pass, summed per block: by token, and what belongs to no token."""

    tokens: dict[int, Tensor] = field(default_factory=dict)  # [B, N]
    other: dict[int, Tensor] = field(default_factory=dict)  # [B]: pooled vectors, the classifier
    is_open: bool = False

    def clear(self) -> None:
        self.tokens.clear()
        self.other.clear()

    def add(self, block: int, terms: Tensor, layout: Layout, *, pooled: bool) -> None:
        """Add terms [B, M] of an operation on M rows: all tokens, the patches, tokens after late ones, or no tokens."""
        rows, count = terms.shape[1], layout.tokens
        if pooled or not (rows == layout.patches or count <= rows <= count + MOST_PREFIX_TOKENS):
            _add_to(self.other, block, terms.sum(1))
        elif rows == layout.patches:
            _add_to(self.tokens, block, layout.pad_patches(terms))
        else:
            _add_to(self.tokens, block, terms[:, -count:] if rows > count else terms)
            if rows > count:
                _add_to(self.other, block, terms[:, :-count].sum(1))

    def by_layer(self, blocks: Sequence[int], tokens: int, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums [L, B, N] and [L, B] from each layer's block to the next; the last has the head's too."""
        wide = torch.promote_types(pixels.dtype, torch.float32)
        of_others = pixels.new_zeros(len(blocks), len(pixels), dtype=wide)
        of_tokens = of_others[..., None].repeat(1, 1, tokens)
        stops = [*blocks[1:], math.inf][: len(blocks)]  # no blocks, no stops: a CNN
        for layer, (start, stop) in enumerate(zip(blocks, stops, strict=True)):
            for sums, total in ((self.tokens, of_tokens), (self.other, of_others)):
                for block, value in sums.items():
                    if start <= block < stop:
                        total[layer] += value
        return of_tokens, of_others


def _add_to(sums: dict[int, Tensor], block: int, terms: Tensor) -> None:
    earlier = sums.get(block)
    sums[block] = terms if earlier is None else earlier + terms


class BiasTerms(Recorder):
    """Sum b · dy/dout of every operation from the first block on, per layer and token; see the two subclasses."""

    kinds = None
    bias_kind: ClassVar[BiasKind]

    def __init__(self) -> None:
        self.tokens = torch.empty(0)  # in a trace [L, B, N]
        self.other = torch.empty(0)  # in a trace [L, B]: vectors that are no token's, pooled ones, the classifier's
        self.opaque: tuple[str, ...] = ()  # operations whose biases, if they have any, are not seen
        self._unplaced = ""  # an operation whose rows could not be told apart as tokens
        self._sums = BiasAccumulator()
        self._layout: Layout | None = None
        self._batch = 0
        self._sequence_first = False
        self._layer_calls = 0  # attention calls up to the last layer's: what follows is a pool's
        self._scores = 0  # how many numbers the last q kᵀ has, until its attention is done
        self._calls = 0

    def start(self, structure: ModelStructure, pixels: Tensor) -> None:
        self._layout, self._sequence_first, self._batch = structure.layout, structure.sequence_first, len(pixels)
        self._layer_calls = structure.last_layer_call + 1
        site = next((site for site in structure.layers if site.kind in ("window", "reduced")), None)
        if self._layout is None:
            self._unplaced = "its input"
        elif site is not None:
            self._unplaced = f"an attention of {site.queries} × {site.keys}"

    def on_op(self, op: Op) -> None:
        out = op.output
        if op.function in _OPAQUE:
            self.opaque = (*self.opaque, op.function.__name__)
        if self._layout is None or op.block < 0 or not isinstance(out, Tensor) or not out.requires_grad:
            return
        if op.attended > self._calls:
            self._scores, self._calls = 0, op.attended
        elif is_activation_product(op) and out.ndim >= 3:
            self._scores = out.numel()
        # What is added to attention alone (relative positions, a mix of heads) is, like positions, no token's bias.
        if self.bias_kind == "learned" and self._scores == out.numel():
            return
        b = bias_term(self.bias_kind, op)
        if b is not None:
            self._register(op, b.detach() if isinstance(b, Tensor) else b, self._layout)

    def finish(self, recording: Recording) -> None:
        self.opaque = tuple(dict.fromkeys((*self.opaque, *_opaque_names(recording.logits))))

    def _register(self, op: Op, b: Tensor | float, layout: Layout) -> None:
        """Hook the output of an operation, so that a backward adds b · dy/dout to the sums."""
        out, batch, block, sums = op.output, self._batch, op.block, self._sums
        second = out.ndim > 2 and (op.kind in ops.CHANNELS_SECOND or _is_image_shaped(out, layout))
        shape = tuple(out.shape[:1] + out.shape[2:] if second else out.shape[:-1])
        end = op.after_blocks  # where pools come, and a stream [N, B, d] may have been transposed back
        turned = self._sequence_first and out.ndim == 3 and shape[1] == batch and not (end and shape[0] == batch)
        # torch's own multi-head attention works on [N, B, d] and [N·B, d], whatever the model does.
        transposed = op.kind == ops.LINEAR if op.nested else turned
        rows = _row_count(shape, batch, layout, transposed)
        rows = 1 if rows is None and end and shape[0] % batch == 0 else rows
        # What a pool has made, or the head reads, has rows that are no tokens, however many there are.
        pooled = shape == (batch,) or any(call.queries == rows for call in op.calls[self._layer_calls :])
        if rows is None or not (end or rows in (1, layout.patches, layout.tokens)):
            name = getattr(op.function, "__name__", op.function)
            self._unplaced = self._unplaced or f"{name} {list(out.shape)}"
            return
        if second and isinstance(b, Tensor) and b.ndim == 1:
            b = b.view(-1, *(1,) * (out.ndim - 2))

        def add_terms(gradient: Tensor | None) -> None:  # holds the sums alone, not this recorder
            if sums.is_open and gradient is not None:  # a rule may pass nothing on
                if isinstance(b, Tensor) and b.ndim == 1 and not second:  # a learned bias, the same for all rows
                    terms = _rows_times(gradient.detach(), b)
                else:
                    terms = (widened(gradient.detach()) * b).sum(1 if second else -1)
                sums.add(block, _by_row(terms, batch, rows, transposed), layout, pooled=pooled)

        out.register_hook(add_terms)

    def before_backward(self) -> None:
        self._sums.clear()
        self._sums.is_open = True

    def after_backward(self, recording: Recording, gradient_of: GradientOf) -> Self:
        self._sums.is_open = False
        value = copy.copy(self)
        count = 0 if self._layout is None else self._layout.tokens
        blocks = [call.block for call in recording.calls]
        value.tokens, value.other = self._sums.by_layer(blocks, count, recording.pixels)
        return value

    def checked(self) -> Self:
        """Return itself; raise NotApplicable if some biases cannot be told apart by token."""
        if self._unplaced:
            raise NotApplicable(
                f"The biases of this model cannot be told apart by token: {self._unplaced} lies on no grid of all "
                "tokens (windows, stages, a CNN)."
            )
        return self


class LearnedBiasTerms(BiasTerms):
    """The terms of learned biases: b is what an operation adds as it stands."""

    bias_kind = "learned"


class ImplicitBiasTerms(BiasTerms):
    """The terms of implicit biases: b is also what a nonlinear operation's slope does not explain."""

    bias_kind = "implicit"


class BiasMaps(Recorder):
    """Sum |b · dy/dout| of the biases of convolutions and BatchNorms as an image: FullGrad's own form, for CNNs."""

    kinds = None

    def __init__(self) -> None:
        self.image: Tensor | None = None  # [B, H, W]; in a trace None if no bias had a gradient
        self.total: Tensor | None = None  # [B], signed, of all biases of activations that have the images first
        self.sees_image = False  # an operation of the kinds whose biases are drawn makes an image
        self._pixels = torch.Size()
        self._is_open = False

    def start(self, structure: ModelStructure, pixels: Tensor) -> None:
        self._pixels = pixels.shape

    def on_op(self, op: Op) -> None:
        out = op.output
        if not isinstance(out, Tensor) or not out.requires_grad:
            return
        is_image = op.kind in ops.CHANNELS_SECOND and out.ndim == 4 == len(self._pixels)
        if is_image and 1 in out.shape[2:] and 1 not in self._pixels[2:]:
            is_image = max(out.shape[2:]) == 1  # [B, d, N, 1] are tokens
        self.sees_image |= is_image
        b = bias_term("learned", op)
        if b is None:
            return
        if op.kind in ops.CHANNELS_SECOND and isinstance(b, Tensor):
            b = b.detach().reshape(-1, *(1,) * (out.ndim - 2))

        def add_terms(gradient: Tensor | None) -> None:
            if self._is_open and gradient is not None:
                terms = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) * b
                if len(terms) == self._pixels[0]:
                    total = terms.flatten(1).sum(1)
                    self.total = total if self.total is None else self.total + total
                if is_image:
                    size = list(self._pixels[2:])
                    image = F.interpolate(rescaled(terms), size, mode="bilinear", align_corners=True).sum(1)
                    self.image = image if self.image is None else self.image + image

        out.register_hook(add_terms)  # type: ignore[no-untyped-call]

    def before_backward(self) -> None:
        self.image = self.total = None
        self._is_open = True

    def after_backward(self, recording: Recording, gradient_of: GradientOf) -> Self:
        self._is_open = False
        value = copy.copy(self)
        if self.total is not None and self.image is None:
            value.image = self.total.new_zeros(len(self.total), *self._pixels[2:])
        return value


def _opaque_names(scores: Tensor) -> Iterator[str]:
    """Yield the names of operations before the scores that keep their biases to themselves: autograd functions."""
    pending = [] if scores.grad_fn is None else [scores.grad_fn]
    visited = set(pending)
    while pending:
        node = pending.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None and not hasattr(node, "role"):
            yield function.__name__
        new = {parent for parent, _ in node.next_functions if parent is not None} - visited
        visited |= new
        pending.extend(new)


def _rows_times(gradient: Tensor, b: Tensor) -> Tensor:
    """Return gradient […, d] · b [d] in float32 at least; half precision is multiplied on tensor cores as it is."""
    if gradient.is_cuda and gradient.dtype == b.dtype:
        return wide_product(gradient.flatten(0, -2), b[:, None]).view(gradient.shape[:-1])
    wide = widened(gradient)
    return wide @ b.to(wide)


def rescaled(values: Tensor) -> Tensor:
    """Return |v| scaled to 0 … 1 over all channels [B, C, h, w] of an image."""
    size = values.abs()
    size = size - size.amin((1, 2, 3), keepdim=True)
    return size / (size.amax((1, 2, 3), keepdim=True) + EPS)


def _is_image_shaped(out: Tensor, layout: Layout) -> bool:
    """Return whether a tensor is [B, d, rows, cols] on the grid of the patches."""
    grid, shape = layout.grid, tuple(out.shape)
    return out.ndim == 4 and shape[2:] == grid and shape[1:3] != grid and shape[1] != layout.tokens


def _row_count(shape: tuple[int, ...], batch: int, layout: Layout, transposed: bool) -> int | None:
    """Return the rows per image in terms of this shape (channels summed); None if images cannot be told apart."""
    if transposed or len(shape) == 1:
        return math.prod(shape) // batch if math.prod(shape) % batch == 0 else None
    if shape[0] % batch:
        return None
    for count in (layout.tokens, layout.patches):  # [B, N], [B, H, N], [B·H, N], [B, N, H], [B, rows, cols]
        if shape[-1] == count or shape[1] == count or (shape[0] == batch and math.prod(shape[1:]) == count):
            return count
    return (shape[1] if len(shape) == 2 else 1) if shape[0] == batch else None


def _by_row(terms: Tensor, batch: int, rows: int, transposed: bool) -> Tensor:
    """Return the terms as [B, rows], heads summed."""
    if transposed:
        return terms.reshape(rows, batch).T
    if terms.shape == (batch, rows):
        return terms
    if terms.ndim > 2 and terms.shape[1] == rows:  # [B, N, H], [B, queries, keys]
        return terms.flatten(2).sum(-1)
    return terms.reshape(batch, -1, rows).sum(1)


# b = out − J · in, per kind of operation

_OPAQUE = frozenset({torch.native_layer_norm, torch.native_group_norm, torch.native_batch_norm})  # called directly
_FACTORS = ops.MATRIX_PRODUCTS | {ops.MULTIPLY, ops.MULTIPLY_IN_PLACE}
_BIAS_FIRST = (ops.MULTIPLY_ADD, ops.BIASED_MATMUL, ops.BIASED_PRODUCT)
_NONLINEAR = frozenset(
    {ops.NORM, ops.GROUP_NORM, ops.NORMALIZE, ops.SOFTMAX, ops.ACTIVATION, ops.GATE, ops.VECTOR_NORM, ops.DIVIDE}
)


def bias_term(kind: BiasKind, op: Op) -> Tensor | float | None:
    """Return b as wide as the output or its channels; None where nothing is left.

    "learned": what is added as it stands, a bias. "implicit": also what a nonlinear operation's slope does not explain.
    """
    if kind == "implicit":
        if op.kind == ops.ATTENTION:
            return _attention_term(op)
        if op.kind in _FACTORS:  # ab − (ab + ab); a constant factor leaves nothing
            return -op.output.detach() if sum(map(_is_traced, (*_factors(op), *op.kwargs.values()))) > 1 else None
        if op.kind == ops.DIVIDE_IN_PLACE and sum(map(_is_traced, op.args)) > 1:  # a/b − (a/b − a/b)
            quotient: Tensor = op.output.detach().clone()
            return quotient
        if op.kind in _NONLINEAR or op.function in ops.SMOOTH:
            return _nonlinear_term(op)
    if op.kind in ops.SUMS or op.kind in ops.DIFFERENCES:
        b = _added_constant(op)
        # The eps of a norm and the 1 of 1 + erf(x) are part of a function, and no biases.
        if kind == "learned" and op.trait is not None and op.trait.bent:
            return None if op.trait.statistic or not isinstance(b, Tensor) else b
        return b
    if op.kind in _BIAS_FIRST:
        b = op.args[0]
        return b if len(op.args) == 3 and not op.kwargs and isinstance(b, Tensor) and not _is_traced(b) else None
    term = None if op.kind is None else _LEARNED.get(op.kind)
    return None if term is None else term(op)


def is_activation_product(op: Op) -> bool:
    """Return whether it is a matrix product of two activations: q kᵀ, or A v."""
    return op.kind in ops.MATRIX_PRODUCTS and sum(map(_is_traced, _factors(op))) == 2


def _factors(op: Op) -> Sequence[Any]:
    return ops.einsum_operands(op.args) if op.kind == ops.EINSUM else op.args


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _nonlinear_term(op: Op) -> Tensor:
    """Return out − J · in, `in` being every tensor that depends on the image."""
    args = (*op.args[:1], *op.args[2:]) if op.function in ops.INPLACE_SECOND else op.args
    kwargs = {name: value for name, value in op.kwargs.items() if name != "inplace"}
    if "input" in kwargs:
        args = (kwargs.pop("input"), *args)
    with torch.enable_grad():
        inputs = tuple(a.detach().requires_grad_(True) for a in args if _is_traced(a))
        new = iter(inputs)
        out = op.function(*(next(new) if _is_traced(a) else a for a in args), **kwargs)
        # J · in by two backward passes: Jᵀ u is linear in u, and its slope along u is J.
        u = torch.zeros_like(out, requires_grad=True)
        transposed = torch.autograd.grad(out, inputs, u, create_graph=True)  # Jᵀ u
        (product,) = torch.autograd.grad(transposed, u, inputs)  # J · in
    return op.output.detach() - product  # type: ignore[no-any-return]


def _attention_term(op: Op) -> Tensor:
    """Return b of softmax(q kᵀ) v, linear in v: along q, and along k, it changes by (A ∘ (S − sum A S)) v."""
    call = ops.attention_arguments(op.args, op.kwargs)
    q, k, v, mask = call["query"], call["key"], call["value"], call.get("attn_mask")
    scale = ops.attention_scale(q, call.get("scale"))
    wide_k, wide_v = (repeated(k, q), repeated(v, q)) if call.get("enable_gqa") else (k, v)
    products = scaled_scores(q, wide_k, scale)
    if call.get("is_causal"):
        mask = ops.causal_mask(q, k)
    A = scaled_scores(q, wide_k, scale, mask).softmax(-1)
    along = products * (int(q.requires_grad) + int(k.requires_grad))  # a pool's latent query is a constant
    if mask is not None and mask.requires_grad:  # positions that depend on the queries
        along = along + mask.detach()
    return -(A * (along - (A * along).sum(-1, keepdim=True))) @ wide_v.detach().to(A.dtype)


def _added_constant(op: Op) -> Tensor | float | None:
    """Return b of x + b, x − b, b − x, where b does not depend on the image."""
    args = op.args
    constants = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor | float | int) and not _is_traced(a)]
    if len(args) != 2 or len(constants) != 1:
        return None
    position, b = constants[0]
    return -b if position == 1 and op.kind == ops.SUBTRACT else b


def _concatenated_constants(op: Op) -> Tensor | None:
    """Return the constants that are joined to the sequence (a late class token), and zeros at the other tokens."""
    tensors, dim = op.args[0], op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    if all(tensor.requires_grad for tensor in tensors):
        return None
    return torch.cat([torch.zeros_like(t) if t.requires_grad else t.detach() for t in tensors], dim)


def _batch_norm_bias(op: Op) -> Tensor | None:
    """Return beta − gamma·mean / sqrt(var + eps): evaluated, a BatchNorm is a linear layer with this bias."""
    if op.function is not F.batch_norm:
        return None
    call = ops.batch_norm_arguments(op.args, op.kwargs)
    shift = -call["running_mean"] * (call["running_var"] + call.get("eps", 1e-5)).rsqrt()
    shift = shift if call.get("weight") is None else shift * call["weight"]
    return shift if call.get("bias") is None else shift + call["bias"]  # type: ignore[no-any-return]


def _bias_of(
    arguments: Callable[[Sequence[Any], Mapping[str, Any]], dict[str, Any]],
) -> Callable[[Op], Tensor | None]:
    return lambda op: arguments(op.args, op.kwargs).get("bias")


_LEARNED: dict[str, Callable[[Op], Tensor | None]] = {
    ops.LINEAR: _bias_of(ops.linear_arguments),
    ops.CONV: _bias_of(ops.conv_arguments),
    ops.CONV1D: _bias_of(ops.conv_arguments),
    ops.NORM: lambda op: ops.NormArguments.of(op.function, op.args, op.kwargs).bias,
    ops.GROUP_NORM: _bias_of(ops.group_norm_arguments),
    ops.BATCH_NORM: _batch_norm_bias,
    ops.CONCATENATE: _concatenated_constants,
}
