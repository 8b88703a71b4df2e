"""Capture functions, not modules: a torch function mode that sees every attention, whoever wrote the model.

Nothing is patched. Inside `with Capture(…)` each torch function the model calls passes through `__torch_function__`:
fused attention is recorded with its q, k, v; the explicit path (product, softmax, product) is recognised by following
the softmax output until it meets the values; recorders are shown the operations they ask for; and, if an
`ActiveRuleTable` is given, operations get a backward that follows a rule table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from clairvit.models.readout import token_stream
from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall, common_form, joined, repeated
from clairvit.tracing.lineage import (
    VIEWS,
    Held,
    Lineage,
    TensorTable,
    held_factor,
    is_formula,
    is_weight,
    norm_before_bias,
    plain_name,
)
from clairvit.tracing.module_state import this_thread_only
from clairvit.tracing.recorders.base import Op, Recorder
from clairvit.tracing.residual_sums import ResidualStream
from clairvit.tracing.rules.table import ActiveRuleTable, gelu_slope, with_custom_backward

# > 0 inside torch's own multi-head attention, for all captures of the thread: one may run inside another.
_multi_head_depth: ContextVar[int] = ContextVar("_multi_head_depth", default=0)


@dataclass(frozen=True, eq=False)
class LinearProduct:
    """A matrix product of an activation and a weight: a linear layer without bias, however it is spelled."""

    x: Tensor
    weight: Tensor
    product: Callable[[Tensor, Tensor], Tensor]

    def followed_by(self, view: Callable[..., Tensor], args: Any, kwargs: Any) -> LinearProduct:
        """Return the product of the same two, its result seen through a view."""
        return replace(self, product=lambda x, weight: view(self.product(x, weight), *args, **kwargs))


class Capture(TorchFunctionMode):
    """Record the attention calls of one forward pass over `batch` images, and show operations to recorders."""

    def __init__(
        self,
        batch: int,
        switch: ActiveRuleTable | None = None,
        recorders: Sequence[Recorder] = (),
        *,
        sequence_first: bool = False,
        final_call: int = -1,
        differentiated: Sequence[int] = (),
        heads_apart: Sequence[int] = (),
    ) -> None:
        """Prepare a pass; blocks work on [N, B, d] if `sequence_first`, and end with attention call `final_call`.

        The outputs of the attention calls `differentiated` get a gradient also where they do not depend on the image.
        `heads_apart` says how many calls of the model make up each of the `calls`, whose heads they are; one where
        nothing is said.
        """
        super().__init__()
        # A plain function, not a method: a call that held on to the capture that holds it would outlive both.
        self._common = functools.partial(common_form, batch=batch)
        self.calls: list[AttentionCall] = []
        self.attended = 0  # attention calls of the model so far, each head that is a call of its own counted
        self._heads_apart = tuple(heads_apart)
        self._parts: list[AttentionCall] = []  # calls that wait for other heads of their layer
        self.keeps_calls = True  # False: attention that is not part of the token stream, such as a vision tower's
        self._batch = batch
        self._switch = switch
        self._handlers = _handlers(frozenset() if switch is None else switch.roles)
        self._recorders = tuple(recorders)
        self._before = [r.before_op for r in recorders if type(r).before_op is not Recorder.before_op]
        self._on_any = [r.on_op for r in recorders if r.kinds is None]
        self._on_kind: dict[str, list[Callable[[Op], None]]] = {}
        for recorder in recorders:
            for kind in recorder.kinds or ():
                self._on_kind.setdefault(kind, []).append(recorder.on_op)
        self._sequence_first = sequence_first
        self._final_call = final_call
        self._differentiated = frozenset(differentiated)
        self._after_blocks = False
        self._block = -1
        # By the id of a tensor that was derived from it: the last softmax and earlier ones of its shape, until they
        # meet v, and the last product q kᵀ and earlier ones of its shape, until they meet a softmax.
        self._attending: dict[int, tuple[Tensor, _Softmax]] = {}
        self._products: dict[int, tuple[Tensor, _Product]] = {}
        self._activated: Tensor | None = None  # the last activation output: a gate, if it is multiplied next
        self._stream = ResidualStream()
        self._linear_products = TensorTable[LinearProduct]()  # to which a bias may be added
        # Whether it does more than to record attention: rules of other operations, or recorders that ask for some.
        self.sees_operations = switch is not None or bool(self._before or self._on_any or self._on_kind)
        self._lineage = Lineage() if self.sees_operations else None

    def enter_block(self, tokens: Tensor) -> None:
        """Begin the next block, whose input is `tokens`."""
        self._block += 1
        self.forget_products()
        for recorder in self._recorders:
            recorder.on_block(self._block, tokens, self.calls)

    def forget_products(self) -> None:
        """Drop the products and activations that an attention call or a gate to come might refer to."""
        self._attending.clear()
        self._products.clear()
        self._activated = None

    def end_blocks(self, tokens: Tensor | None) -> None:
        """End the last block, whose output is `tokens`."""
        self._after_blocks = True
        for recorder in self._recorders:
            recorder.on_blocks_end(tokens, self.calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:  # tensors of torch.vmap have no storage to follow
            return func(*args, **kwargs)
        if isinstance(func, OpOverload | OpOverloadPacket):
            func = ops.public(func)
        if func is torch.einsum and self._lineage is not None and ops.is_einsum_product(args):
            with self:  # its operations are seen, one by one
                return ops.einsum_product(args)
        handler = self._handlers.get(func)
        for before_op in self._before:
            before_op(func, args, kwargs)
        out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        if self._attending:
            _follow(self._attending, args, out)
        if self._products:
            _follow(self._products, args, out)
        if self._activated is not None and args and args[0] is self._activated and plain_name(func) in VIEWS:
            self._activated = out
        if self._lineage is not None:
            self._lineage.follow(func, args, kwargs, out)
            product = self._linear_products.get(args[0]) if args and func in ops.REARRANGEMENTS else None
            if product is not None and isinstance(out, Tensor):  # a view, behind which its bias may be added
                self._linear_products.set(out, product.followed_by(func, args[1:], kwargs))
        if self._on_any or self._on_kind:
            self._show(func, args, kwargs, out)
        return out

    def _show(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        kind = ops.kind_of(func)
        interested = self._on_any if kind is None else (*self._on_any, *self._on_kind.get(kind, ()))
        if interested:
            assert self._lineage is not None
            op = Op(
                *(func, args, kwargs, out, kind, self._block, self.calls, _multi_head_depth.get() > 0),
                *(self._after_blocks, self.attended, self._lineage.get(out), self._lineage.held),
                self._lineage.holds_spread,
            )
            for on_op in interested:
                on_op(op)

    # One handler per kind of operation

    def _fused_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = ops.attention_arguments(args, kwargs)
        q, k, v = call.pop("query"), call.pop("key"), call.pop("value")
        mask = ops.causal_mask(q, k) if call.get("is_causal") else call.get("attn_mask")
        wide_k, wide_v = repeated(k, q), repeated(v, q)
        record = AttentionCall(
            q=self._common(q),
            k=self._common(wide_k),
            v=self._common(wide_v),
            scale=ops.attention_scale(q, call.get("scale")),
            mask=mask if mask is None or q.ndim == 4 else self._common(mask.expand(*q.shape[:-1], k.shape[-2])),
            outputs=(),  # replaced below, once it exists
            forms=(self._common,),
            block=self._block,
        )
        if self._switch is None:
            out = func(q, k, v, **call)
        else:
            # A grouped k or v is widened first so that one rule serves all; the sum over its copies is autograd's.
            inputs: tuple[Tensor, ...] = (q, wide_k, wide_v)
            call.pop("enable_gqa", None)
            if isinstance(mask, Tensor) and mask.requires_grad:  # positions that depend on the queries (SAM)
                inputs = (*inputs, call.pop("attn_mask"))
            arguments = {"scale": record.scale, "mask": mask, "batch": self._batch}
            out = with_custom_backward("attention", self._switch, lambda *qkv: func(*qkv, **call), inputs, arguments)
        record.outputs = (out,)
        self._add_call(record)
        return out

    def _multi_head(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run torch's own multi-head attention with the mode on: it is off inside a handler, which would hide it."""
        entered = _multi_head_depth.set(_multi_head_depth.get() + 1)
        try:
            with self:
                return ops.without_dispatch(func)(*args, **kwargs)
        finally:
            _multi_head_depth.reset(entered)
            if len(self.calls) == self._final_call:
                self._end_after_final_call()

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not ops.is_over_last_axis(args, kwargs):
            return func(*args, **kwargs)  # class probabilities, or a mixture that is no attention
        out = self._with_rule("softmax", func, args, kwargs)
        scores = ops.first_argument(args, kwargs)
        softmax = _Softmax(scores, out, self._product_of(scores))
        self._attending = _pending_like(self._attending, out, softmax)
        return out

    def _product_of(self, scores: Tensor) -> _Product | None:
        """Return the q kᵀ that a softmax is of: the one that its input was derived from, or the only candidate."""
        followed = self._products.pop(id(scores), None)
        if followed is not None:
            product = followed[1]
            self._products = {key: held for key, held in self._products.items() if held[1] is not product}
            return product
        alike = {id(held[1]): held[1] for held in self._products.values() if held[1].out.numel() == scores.numel()}
        return next(iter(alike.values())) if len(alike) == 1 else None

    def _matmul(self, func: Any, args: Any, kwargs: Any) -> Any:
        left, right = ops.first_argument(args, kwargs), ops.second_factor(args, kwargs)
        if id(left) not in self._attending:
            out = self._weighted(func, args, kwargs)
            if isinstance(right, Tensor) and left.ndim >= 3 and right.ndim >= 3:
                self._add_product(left, right, out)
            return out
        out = self._weighted_values(func, left, right)
        self._add_explicit_call(left, right, out, self._common)
        return out

    def _biased_matmul(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._weighted(func, args, kwargs)
        if len(args) >= 3:
            self._add_product(args[1], args[2], out)
        return out

    def _add_product(self, q: Tensor, k_transposed: Tensor, out: Tensor) -> None:
        self._products = _pending_like(self._products, out, _Product(q, k_transposed, out))

    def _einsum(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = ops.einsum_operands(args)
        axes = ops.einsum_axes(args[0], operands)
        if axes is None:
            return self._weighted(func, args, kwargs)
        (left, right), (a, b, result) = operands, axes
        if id(right) in self._attending:  # the values were written first
            left, right, a, b = right, left, b, a
        sizes = dict(zip(a + b, (*left.shape, *right.shape), strict=True))
        if id(left) not in self._attending:
            out = self._weighted(func, args, kwargs)
            shared = [c for c in a if c in b and c not in result]
            if len(shared) == 1 and len(result) >= 3:
                if result[-2] not in a:
                    left, right, a, b = right, left, b, a
                q = ops.permute_axes(left, a, result[:-1] + shared[0], sizes)
                k = ops.permute_axes(right, b, result[:-2] + shared[0] + result[-1], sizes)
                if q is None or k is None:
                    self._products.clear()
                else:
                    self._add_product(q, k, out)
            return out
        keys, width = a[-1], next((c for c in b if c not in a), None)
        if keys not in b or width is None or a[:-1] + width != "".join(sorted(result, key=(a[:-1] + width).find)):
            return func(*args, **kwargs)  # not a weighted sum of values over the last axis
        out = self._weighted_values(functools.partial(func, f"{a},{b}->{result}"), left, right)
        v, common = ops.permute_axes(right, b, a[:-2] + keys + width, sizes), self._common
        if v is None:
            return out

        def heads(o: Tensor) -> Tensor:
            return common(torch.einsum(f"{result}->{a[:-1]}{width}", o))

        self._add_explicit_call(left, v, out, heads)
        return out

    def _weighted_values(self, product: Callable[..., Tensor], A: Tensor, v: Tensor) -> Tensor:
        """Return A v with the backward of the role "mix"."""
        return product(A, v) if self._switch is None else with_custom_backward("mix", self._switch, product, (A, v), {})

    def _add_explicit_call(self, weights: Tensor, v: Tensor, out: Tensor, heads: Callable[[Tensor], Tensor]) -> None:
        softmax = self._attending[id(weights)][1]
        q = k = None
        if softmax.product is not None:
            left, right, _ = softmax.product
            if right.ndim == left.ndim:
                q, k = self._common(left), self._common(right.transpose(-2, -1))
        call = AttentionCall(
            v=self._common(v),
            outputs=(out,),
            forms=(heads,),
            q=q,
            k=k,
            weights=self._common(weights),
            scores=self._common(softmax.scores),
            block=self._block,
        )
        self._add_call(call)
        self._attending = {key: held for key, held in self._attending.items() if held[1] is not softmax}

    def _add_call(self, call: AttentionCall) -> None:
        if not self.keeps_calls:
            return
        number = len(self.calls)
        if number in self._differentiated and torch.is_grad_enabled() and not call.requires_grad:
            for output in call.outputs:
                output.requires_grad_()
        self.attended += 1
        self._parts.append(call)
        heads_apart = self._heads_apart[number] if number < len(self._heads_apart) else 1
        if len(self._parts) < heads_apart:
            return
        self.calls.append(call if heads_apart == 1 else joined(self._parts))
        self._parts = []
        if len(self.calls) == self._final_call:
            self._end_after_final_call()

    def _end_after_final_call(self) -> None:
        if _multi_head_depth.get() == 0 and not self._after_blocks:
            self.end_blocks(None)

    def _weighted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a matrix product; that of an activation and a weight is a linear layer, whatever it is called."""
        switch = self._switch
        if switch is None or "linear" not in switch.roles or kwargs or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        operands = ops.einsum_operands(args) if func is torch.einsum else args
        traced = [i for i, a in enumerate(operands) if isinstance(a, Tensor) and a.requires_grad]
        weights = [i for i, a in enumerate(operands) if is_weight(a)]
        bias = operands[0] if len(operands) == 3 else None
        if bias is not None and isinstance(bias, Tensor) and not bias.requires_grad:
            weights = [i for i in weights if i]
        elif len(operands) != 2:
            return func(*args, **kwargs)
        if len(traced) != 1 or len(weights) != 1:
            return func(*args, **kwargs)
        x, weight = operands[traced[0]], operands[weights[0]]
        without_bias = {torch.addmm: torch.mm, torch.baddbmm: torch.bmm}.get(func, func)
        x_first = traced[0] < weights[0]

        def product(x: Tensor, weight: Tensor) -> Tensor:
            pair = (x, weight) if x_first else (weight, x)
            return without_bias(args[0], *pair) if func is torch.einsum else without_bias(*pair)  # type: ignore[no-any-return]

        return self._linear_product(LinearProduct(x, weight, product), bias)

    def _linear_product(self, of: LinearProduct, bias: Tensor | None) -> Tensor:
        """Return a matrix product with a weight, plus a bias, with the backward of the role "linear"."""
        assert self._switch is not None
        product, weight = of.product, of.weight

        def run(x: Tensor) -> Tensor:
            return product(x, weight) if bias is None else product(x, weight) + bias

        arguments = {"weight": weight, "bias": bias, "product": product}
        out = with_custom_backward("linear", self._switch, run, (of.x,), arguments)
        if bias is None:
            self._linear_products.set(out, of)
        return out

    def _product_before_bias(self, a: Any, b: Any) -> tuple[LinearProduct, Tensor] | None:
        """Return the product and the bias where a + b adds a vector of weights to a product with a weight."""
        for z, bias in ((a, b), (b, a)):
            of = self._linear_products.get(z)
            if of is not None and is_weight(bias) and bias.numel() == max(bias.shape, default=0):
                return of, bias
        return None

    def _linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = ops.linear_arguments(args, kwargs)
        arguments = {"weight": call["weight"], "bias": call.get("bias"), "inside": _multi_head_depth.get() > 0}
        out = self._with_rule("linear", func, args, kwargs, **arguments)
        if call.get("bias") is None:
            self._linear_products.set(out, LinearProduct(call["input"], call["weight"], F.linear))
        return out

    def _conv(self, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = ops.conv_arguments(args, kwargs)
        del arguments["input"]
        return self._with_rule("linear" if ops.is_pointwise(arguments) else "conv", func, args, kwargs, **arguments)

    def _add(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Add two activations of one shape: a residual, a position embedding. A bias is broadcast and has no rule."""
        switch = self._switch
        if kwargs.get("alpha") == 1:
            kwargs = {name: value for name, value in kwargs.items() if name != "alpha"}
        if switch is None or len(args) != 2 or kwargs:
            return func(*args, **kwargs)
        assert self._lineage is not None
        norm = norm_before_bias(self._lineage, *args) if torch.is_grad_enabled() else None
        if norm is not None:
            y, bias, x = norm
            if not ops.is_in_place(func, kwargs):
                return with_custom_backward("norm_bias", switch, lambda y, _: y + bias, (y, x), {})
            total = with_custom_backward("norm_bias", switch, lambda y, _: y + bias, (y.clone(), x), {})
            return y.copy_(total)
        affine = self._product_before_bias(*args) if "linear" in switch.roles else None
        if affine is not None:
            total = self._linear_product(*affine)
            return args[0].copy_(total) if ops.is_in_place(func, kwargs) else total
        if "add" not in switch.roles or is_formula(self._lineage, *args):
            return func(*args, **kwargs)
        if not _are_activations_of_one_shape(*args):
            total = func(*args, **kwargs)
            if any(isinstance(a, int | float) and a == 0 for a in args):  # the first step of sum([x, branch])
                self._stream.add_alias(total, args[isinstance(args[0], int | float)])
            return total
        return self._sum(func, *args)

    def _sum(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        """Return a + b with the backward of the role "add"."""
        assert self._switch is not None
        residual = self._stream.match(a, b)
        axis = self._batch_axis(a if a.ndim >= b.ndim else b)
        arguments = {"batch": self._batch, "axis": axis, "residual": residual is not None}
        if ops.is_in_place(func, {}):  # written into the first term, whose gradient is then that of the sum
            total = a.copy_(with_custom_backward("add", self._switch, torch.add, (a.clone(), b), arguments))
        else:
            total = with_custom_backward("add", self._switch, torch.add, (a, b), arguments)
        if residual is not None:
            self._stream.add(total, residual)
        return total

    def _subtract(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute x − b as x + (−b) where that is a residual sum: b is what layers make of the stream x."""
        if self._switch is None or len(args) != 2 or kwargs or not _are_activations_of_one_shape(*args):
            return func(*args, **kwargs)
        a, b = args
        if self._stream.match_layers(a, b) != 0:
            return func(*args, **kwargs)
        return self._sum(torch.add, a, -b)

    def _batch_axis(self, tensor: Tensor) -> int:
        """Return the axis of the images: 0, or 1 of [N, B, d]; a decoder after the blocks may differ from these."""
        if tensor.ndim != 3:
            return 0
        if self._after_blocks and self._batch in tensor.shape[:2] and tensor.shape[0] != tensor.shape[1]:
            return int(tensor.shape[0] != self._batch)
        return int(self._sequence_first and self._block >= 0)

    def _norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        norm = ops.NormArguments.of(func, args, kwargs)
        arguments = {"weight": norm.weight, "bias": norm.bias, "shape": norm.shape, "eps": norm.eps}
        return self._with_rule("norm", func, args, kwargs, **arguments, centred=norm.centred)

    def _batch_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make the gradient contiguous: torch (2.15, CPU) misreads that of one image that goes on as tokens.

        Its batch axis of length 1 then has a stride that the kernel of an evaluated BatchNorm does not expect.
        """
        out = func(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(_contiguous)
        return out

    def _activation(self, func: Any, args: Any, kwargs: Any) -> Any:
        slope = _SLOPES[plain_name(func)]
        if func is F.gelu:
            slope = functools.partial(gelu_slope, approximate=kwargs.get("approximate", "none"))
        out = self._with_rule("activation", func, args, kwargs, slope=slope)
        self._activated = out
        return out

    def _gate(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = ops.first_argument(args, kwargs)
        boxes = self._after_blocks and x.ndim == 3 and x.shape[-1] == 4
        if x.ndim < 3 or boxes:  # a probability or a detector's boxes [B, queries, 4] at the output are no gates
            return func(*args, **kwargs)
        return self._with_rule("gate", func, args, kwargs)

    def _length(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute a length or its inverse, which rules of a norm hold fixed: ||x||, rsqrt(mean(x²) + eps)."""
        return self._with_rule("gate", func, args, kwargs)

    def _normalize(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute x / ||x||; of x - mean(x) it is a LayerNorm that is written out."""
        call = ops.NormalizeArguments.of(args, kwargs)
        inverse_length, centred = call.inverse_length, call.x
        assert self._lineage is not None
        trait = self._lineage.get(centred)
        x = None if trait is None else trait.centred
        if self._switch is not None and torch.is_grad_enabled() and x is not None and x.shape == centred.shape:

            def quotient(centred: Tensor, length: Tensor, *_: Tensor) -> Tensor:
                return centred * length

            inputs = (centred, inverse_length(centred), x)
            return with_custom_backward("centred_norm", self._switch, quotient, inputs, {})
        return self._with_rule("length", func, args, kwargs, inverse_length=inverse_length)

    def _multiply(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Multiply or divide two activations: gate · x of a gated MLP, a norm or an activation that is written out."""
        switch = self._switch
        if switch is None or len(args) != 2 or kwargs or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        a, b = args
        if "product" in switch.roles and self._activated is not None and ops.kind_of(func) in ops.PRODUCTS:
            gate, x = (b, a) if b is self._activated else (a, b)
            if gate is self._activated and isinstance(x, Tensor) and x.shape == gate.shape and x.requires_grad:
                if not ops.is_in_place(func, kwargs):
                    return with_custom_backward("product", switch, torch.mul, (gate, x), {})
                old = a.clone()  # whose place the product takes
                factors = (gate, old) if gate is b else (old, x)
                return a.copy_(with_custom_backward("product", switch, torch.mul, factors, {}))
        assert self._lineage is not None
        held = held_factor(self._lineage, plain_name(func), a, b)
        if held is None:
            return func(*args, **kwargs)
        out = self._with_held_factor(func, a, b, held, switch)
        if not held.held.statistic:
            self._activated = out
        return out

    def _multiply_add(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute c + a b as the sum of a product."""
        if kwargs or len(args) != 3 or self._switch is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        c, a, b = args
        assert self._lineage is not None
        weighted = self._multiply(torch.mul, (a, b), {})
        self._lineage.follow(torch.mul, (a, b), {}, weighted)
        return self._add(torch.add, (c, weighted), {})

    def _with_held_factor(self, func: Any, a: Tensor, b: Tensor, held: Held, switch: ActiveRuleTable) -> Tensor:
        """Return a · b or a / b, one factor held: the spread of a norm, or the gate of an activation."""
        in_place = ops.is_in_place(func, {})
        plain, first = ops.out_of_place(func), a.clone() if in_place else a
        carried, factor = (first, b) if held.place == 1 else (b, first)

        in_order = held.place == 1

        def product(carried: Tensor, factor: Tensor, *_: Tensor) -> Tensor:
            return plain(carried, factor) if in_order else plain(factor, carried)  # type: ignore[no-any-return]

        x = held.carried.centred
        if held.is_norm and x is not None and carried.shape == x.shape:
            out = with_custom_backward("centred_norm", switch, product, (carried, factor, x), {})
        else:
            role = "uncentred" if held.is_norm and held.held.about_mean else "factor"
            out = with_custom_backward(role, switch, product, (carried, factor), {})
        return a.copy_(out) if in_place else out

    def _with_rule(self, role: str, func: Any, args: Any, kwargs: Any, **arguments: Any) -> Tensor:
        """Run `func` on its first argument, with a backward that follows the switch if there is one."""
        x = args[0] if args else kwargs["input"]
        switch = self._switch
        if switch is None or role not in switch.roles or not (torch.is_grad_enabled() and x.requires_grad):
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        options = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
        if func in ops.INPLACE_SECOND:  # never in place inside a trace
            return with_custom_backward(role, switch, func, (x,), arguments)
        return with_custom_backward(role, switch, lambda first: func(first, *args[1:], **options), (x,), arguments)


_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu_slope,
    "silu": torch.sigmoid,
    "mish": lambda z: F.softplus(z).tanh(),
    "hardswish": lambda z: F.relu6(z + 3) / 6,
}
_HANDLER_OF_KIND: dict[str, Callable[[Capture, Any, Any, Any], Any]] = {
    ops.ATTENTION: Capture._fused_attention,
    ops.MULTI_HEAD: Capture._multi_head,
    ops.SOFTMAX: Capture._softmax,
    ops.MATMUL: Capture._matmul,
    ops.BIASED_MATMUL: Capture._biased_matmul,
    ops.EINSUM: Capture._einsum,
    ops.BATCH_NORM: Capture._batch_norm,
}
# Those that only give an operation another backward: needed if a rule table in use names one of the roles.
_HANDLER_OF_ROLES: dict[str, tuple[tuple[str, ...], Callable[[Capture, Any, Any, Any], Any]]] = {
    ops.LINEAR: (("linear",), Capture._linear),
    ops.CONV: (("conv", "linear"), Capture._conv),
    ops.CONV1D: (("conv", "linear"), Capture._conv),
    ops.PRODUCT: (("linear",), Capture._weighted),
    ops.BIASED_PRODUCT: (("linear",), Capture._weighted),
    ops.NORM: (("norm",), Capture._norm),
    ops.NORMALIZE: (("length",), Capture._normalize),
    ops.VECTOR_NORM: (("gate",), Capture._length),
    ops.INVERSE_ROOT: (("gate",), Capture._length),
    ops.ACTIVATION: (("activation", "product"), Capture._activation),
    ops.GATE: (("gate",), Capture._gate),
    ops.MULTIPLY: (("product", "factor"), Capture._multiply),
    ops.MULTIPLY_IN_PLACE: (("factor",), Capture._multiply),
    ops.MULTIPLY_ADD: (("factor",), Capture._multiply_add),
    ops.DIVIDE: (("factor",), Capture._multiply),
    ops.DIVIDE_IN_PLACE: (("factor",), Capture._multiply),
    ops.ADD: (("add", "norm_bias", "linear"), Capture._add),
    ops.ADD_IN_PLACE: (("add", "norm_bias", "linear"), Capture._add),
    ops.SUBTRACT: (("add",), Capture._subtract),
}


@functools.cache
def _handlers(roles: frozenset[str]) -> dict[Any, Callable[[Capture, Any, Any, Any], Any]]:
    """Return torch function -> handler, for rule tables with these roles."""
    by_kind = _HANDLER_OF_KIND | {
        kind: handler for kind, (needed, handler) in _HANDLER_OF_ROLES.items() if not roles.isdisjoint(needed)
    }
    return {function: handler for kind, handler in by_kind.items() for function in ops.functions_of(kind)}


def _are_activations_of_one_shape(a: Any, b: Any) -> bool:
    """Return whether two terms have one shape per image; a position embedding may come without the images' axis."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    small, large = sorted((a, b), key=lambda term: term.ndim)
    if small.ndim == large.ndim:
        return small.shape[1:] == large.shape[1:]
    is_vector = small.numel() == max(small.shape, default=1)
    return small.shape == large.shape[1:] and not is_vector


def stream_hooks(module: nn.Module, capture: Capture) -> list[RemovableHandle]:
    """Return hooks that let a capture keep attention calls inside the module's token stream alone, if it names one.

    What comes before, a vision tower, may attend as often as it likes: image by image, or window by window.
    """
    stream = token_stream(module)
    if stream is None:
        return []
    capture.keeps_calls = False

    def enter(*_: Any) -> None:
        capture.keeps_calls = True

    def leave(*_: Any) -> None:
        capture.keeps_calls = False

    return [
        stream.register_forward_pre_hook(this_thread_only(enter)),
        stream.register_forward_hook(this_thread_only(leave)),
    ]


class _Product(NamedTuple):
    """q kᵀ, before the softmax."""

    q: Tensor
    k_transposed: Tensor
    out: Tensor


class _Softmax(NamedTuple):
    """A softmax over scores, which becomes an attention call where it is multiplied by values."""

    scores: Tensor
    out: Tensor
    product: _Product | None


_Held = TypeVar("_Held", _Product, _Softmax)


def _pending_like(
    pending: dict[int, tuple[Tensor, _Held]], out: Tensor, held: _Held
) -> dict[int, tuple[Tensor, _Held]]:
    """Return what is followed from now on: a new result, and earlier ones of its shape (other heads of a layer)."""
    return {key: pair for key, pair in pending.items() if pair[1].out.shape == out.shape} | {id(out): (out, held)}


def _follow(pending: dict[int, tuple[Tensor, _Held]], args: tuple[Any, ...], out: Any) -> None:
    """Follow results through dropout, casts, masks and head mixing, as long as nothing is summed away."""
    for arg in args:
        held = pending.get(id(arg))
        if held is not None and isinstance(out, Tensor) and out.numel() == arg.numel():
            pending[id(out)] = (out, held[1])


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()
