"""Capture functions, not modules: a torch function mode that sees every attention, whoever wrote the model.

Nothing is patched. Inside `with Capture(…)` each torch function the model calls passes through `__torch_function__`:
fused attention is noted with its q, k, v; the explicit path (product, softmax, product) is recognised by following the
softmax output until it meets the values; and, if a `Switch` is given, operations get a backward that follows a table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clairvit.tracing.attention import AttentionCall, common_form, repeated
from clairvit.tracing.einsum import arranged, spelled_out
from clairvit.tracing.recorders.head_replay import HeadReplay
from clairvit.tracing.recorders.op_log import OpLog
from clairvit.tracing.recorders.residual import PostAttentionResidual
from clairvit.tracing.rules import table as rules
from clairvit.tracing.rules.table import Switch, with_custom_backward
from clairvit.tracing.undispatched import undispatched

Observer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], None]
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_NORMS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
_GATES = (torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.tanh, Tensor.tanh, torch.erf, Tensor.erf)
_LENGTHS = (Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm)
_MULTIPLY = (torch.mul, Tensor.mul, Tensor.__mul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


class Capture(TorchFunctionMode):
    """Notes the attention calls of one forward pass over `batch` images."""

    def __init__(self, batch: int, switch: Switch | None = None, observer: Observer | None = None) -> None:
        super().__init__()
        # A plain function, not a method: a call that held on to the capture that holds it would outlive both.
        self._common = functools.partial(common_form, batch=batch)
        self.batch = batch
        self.switch = switch
        self.observer = observer
        self.calls: list[AttentionCall] = []
        self.block = -1  # the block the model is in, kept by the recording
        self.block_input: Tensor | None = None  # set where the output of the block's first norm is wanted
        self.normed: Tensor | None = None
        self.last_linear: tuple[Tensor, Tensor, Tensor] | None = None  # input, weight, output; since the block began
        self.first_conv: tuple[dict[str, Any], Tensor] | None = None  # its arguments and output
        self.sequence_first = False  # blocks work on [N, B, d]
        self.tape: HeadReplay | None = None  # set while the head is being taped
        self.tape_after = -1  # start a tape after this many attention calls
        self.film: OpLog | None = None  # set where all operations are wanted
        self.middles: PostAttentionResidual | None = None  # set where the stream after attention is wanted
        self._depth = 0  # > 0 inside a function that is taped as a whole
        self._attending: dict[int, Tensor] = {}  # the softmax output and what was made of it, until it meets v
        self._scores: Tensor | None = None
        self._product: tuple[Tensor, Tensor, Tensor] | None = None  # the last q and kᵀ candidates, and q kᵀ
        self._activated: Tensor | None = None  # the last activation output: a gate, if it is multiplied next

    def enter_block(self, block: int, tokens: Tensor, *, watch_norm: bool) -> None:
        self.block, self.block_input = block, tokens if watch_norm else None
        self._attending.clear()
        self._product = self._scores = self._activated = self.last_linear = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        given = args if self.film is None else self.film.before(func, args, kwargs)
        out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        if self._attending:
            self._follow(args, out)
        if self.film is not None and handler is not Capture.multi_head:  # its inside is filmed, step by step
            self.film.add(func, given, kwargs, out)
        if self.tape is not None and self._depth == 0:
            self.tape.add(func, args, kwargs, out)
        elif self.tape_after == len(self.calls) and self._depth == 0:
            self.tape = HeadReplay(start=self.calls[-1].out)
        if self.middles is not None:
            self.middles.see(func, args, out, len(self.calls))
        if self.observer is not None:
            self.observer(func, args, kwargs, out)
        return out

    def _follow(self, args: tuple[Any, ...], out: Any) -> None:
        """Dropout, casts, head mixing: still attention as long as nothing is summed away."""
        for arg in args:
            if id(arg) in self._attending and isinstance(out, Tensor) and out.numel() == arg.numel():
                self._attending[id(out)] = out

    # One handler for each way a model can say it.

    def fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        q, k, v = call.pop("query"), call.pop("key"), call.pop("value")
        mask, scale = call.get("attn_mask"), call.get("scale")
        if call.get("is_causal"):
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        note = AttentionCall(
            q=self._common(q),
            k=self._common(repeated(k, q)),
            v=self._common(repeated(v, q)),
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            mask=mask if mask is None or q.ndim == 4 else self._common(mask.expand(*q.shape[:-1], k.shape[-2])),
            out=q,  # replaced below, once it exists
            heads=self._common,
            block=self.block,
        )
        if self.switch is None:
            note.out = func(q, k, v, **call)
        else:
            # A grouped k or v is widened first so that one rule serves all; the sum over its copies is autograd's.
            widened: tuple[Tensor, ...] = (q, repeated(k, q), repeated(v, q))
            call.pop("enable_gqa", None)
            if isinstance(mask, Tensor) and mask.requires_grad:  # positions that depend on the queries (SAM)
                widened = (*widened, call.pop("attn_mask"))
            arguments = {"scale": note.scale, "mask": mask, "batch": self.batch}
            note.out = with_custom_backward(
                "attention", self.switch, lambda *qkv: func(*qkv, **call), widened, arguments
            )
        self._note(note)
        return note.out

    def multi_head(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The mode is off inside a handler, so torch's own multi-head attention would stay hidden: switch it on."""
        self._depth += 1
        try:
            with self:
                return undispatched(func)(*args, **kwargs)
        finally:
            self._depth -= 1

    def softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = _first(args, kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if x.ndim < 3 or dim not in (-1, x.ndim - 1):
            return func(*args, **kwargs)  # class probabilities, or a mixture that is no attention
        out = self._swap("softmax", func, args, kwargs)
        self._attending = {id(out): out}
        self._scores = x
        return out

    def product(self, func: Any, args: Any, kwargs: Any) -> Any:
        left = _first(args, kwargs)
        right = args[1] if len(args) > 1 else kwargs.get("mat2", kwargs.get("other"))
        if id(left) not in self._attending:
            out = func(*args, **kwargs)
            if isinstance(right, Tensor) and left.ndim >= 3 and right.ndim >= 3:
                self._product = (left, right, out)
            return out
        out = (
            func(left, right)
            if self.switch is None
            else with_custom_backward("mix", self.switch, func, (left, right), {})
        )
        self._note_explicit(left, right, out, self._common)
        return out

    def einsum(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        axes = spelled_out(args[0], operands)
        if axes is None:
            return func(*args, **kwargs)
        (left, right), (a, b, result) = operands, axes
        if id(right) in self._attending:  # the values were written first
            left, right, a, b = right, left, b, a
        sizes = dict(zip(a + b, (*left.shape, *right.shape), strict=True))
        if id(left) not in self._attending:
            out = func(*args, **kwargs)
            shared = [c for c in a if c in b and c not in result]
            if len(shared) == 1 and len(result) >= 3:
                if result[-2] not in a:
                    left, right, a, b = right, left, b, a
                q = arranged(left, a, result[:-1] + shared[0], sizes)
                k = arranged(right, b, result[:-2] + shared[0] + result[-1], sizes)
                self._product = None if q is None or k is None else (q, k, out)
            return out
        keys, width = a[-1], next((c for c in b if c not in a), None)
        if keys not in b or width is None or a[:-1] + width != "".join(sorted(result, key=(a[:-1] + width).find)):
            return func(*args, **kwargs)  # not a weighted sum of values over the last axis
        call = functools.partial(func, f"{a},{b}->{result}")
        out = (
            call(left, right)
            if self.switch is None
            else with_custom_backward("mix", self.switch, call, (left, right), {})
        )
        v, common = arranged(right, b, a[:-2] + keys + width, sizes), self._common
        if v is None:
            return out

        def heads(o: Tensor) -> Tensor:
            return common(torch.einsum(f"{result}->{a[:-1]}{width}", o))

        self._note_explicit(left, v, out, heads)
        return out

    def _note_explicit(self, weights: Tensor, v: Tensor, out: Tensor, heads: Callable[[Tensor], Tensor]) -> None:
        q = k = None
        if self._product is not None and self._scores is not None:
            left, right, product = self._product
            if product.numel() == self._scores.numel() and right.ndim == left.ndim:
                q, k = self._common(left), self._common(right.transpose(-2, -1))
        self._note(
            AttentionCall(
                v=self._common(v),
                out=out,
                heads=heads,
                q=q,
                k=k,
                weights=self._common(weights),
                scores=None if self._scores is None else self._common(self._scores),
                block=self.block,
            )
        )
        self._attending.clear()

    def _note(self, call: AttentionCall) -> None:
        self.calls.append(call)
        self.block_input = None  # a norm from here on is not the one before the attention

    def linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        own = {"weight": call["weight"], "bias": call.get("bias"), "inside": self._depth > 0}
        out = self._swap("linear", func, args, kwargs, **own)
        self.last_linear = (call["input"], call["weight"], out)
        return out

    def conv(self, func: Any, args: Any, kwargs: Any) -> Any:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        call = dict(zip(names, args, strict=False)) | kwargs
        out = self._swap("conv", func, args, kwargs, **{name: call[name] for name in names[1:] if name in call})
        self.first_conv = self.first_conv or (call, out)
        return out

    def add(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A sum of two activations of one shape: a residual, a position embedding. A bias is none: it is broadcast."""
        wanted = self.switch is not None and "add" in self.switch.roles and len(args) == 2 and not kwargs
        if not wanted or not all(isinstance(a, Tensor) and a.shape[1:] == args[0].shape[1:] for a in args):
            return func(*args, **kwargs)
        assert self.switch is not None
        tokens_first = self.sequence_first and self.block >= 0 and args[0].ndim == 3
        return with_custom_backward(
            "add", self.switch, torch.add, args, {"batch": self.batch, "axis": int(tokens_first)}
        )

    def norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
        centred = func in (F.layer_norm, torch.layer_norm)
        if not centred and len(args) > 3:  # rms_norm has no bias: its fourth argument is eps
            call["eps"] = call.pop("bias")
        x, shape = call["input"], call["normalized_shape"]
        eps = call.get("eps")
        eps = eps if eps is not None else (1e-5 if centred else torch.finfo(x.dtype).eps)
        own = {name: call.get(name) for name in ("weight", "bias")}
        out = self._swap("norm", func, args, kwargs, **own, shape=shape, eps=eps, centred=centred)
        if x is self.block_input and self.normed is None:
            self.normed = out
        return out

    def batch_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Torch (2.15, CPU) misreads the gradient of an evaluated BatchNorm for one image that goes on as tokens.

        Its batch axis of length 1 then has a stride that the kernel does not expect; a fresh copy has the usual one.
        """
        out = func(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(_in_usual_memory)
        return out

    def activation(self, func: Any, args: Any, kwargs: Any) -> Any:
        slope = _SLOPES[func]
        if func is F.gelu:
            slope = functools.partial(rules.gelu_slope, approximate=kwargs.get("approximate", "none"))
        out = self._swap("activation", func, args, kwargs, slope=slope)
        self._activated = out
        return out

    def gate(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _first(args, kwargs).ndim < 3:  # a probability at the output is not a gate
            return func(*args, **kwargs)
        return self._swap("gate", func, args, kwargs)

    def length(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._swap("gate", func, args, kwargs)

    def normalise(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = dict(zip(("input", "p", "dim", "eps"), args, strict=False)) | kwargs
        p, dim, eps = call.get("p", 2.0), call.get("dim", 1), call.get("eps", 1e-12)
        return self._swap(
            "length",
            func,
            args,
            kwargs,
            inverse_length=lambda x: 1 / x.norm(p, dim, keepdim=True).clamp_min(eps),
        )

    def multiply(self, func: Any, args: Any, kwargs: Any) -> Any:
        """gate * x of a gated MLP: one factor has just come out of an activation, the other is as wide and traced."""
        if self.switch is not None and self._activated is not None and len(args) == 2:
            a, b = args
            if b is self._activated:
                a, b = b, a
            if a is self._activated and isinstance(b, Tensor) and b.shape == a.shape and b.requires_grad:
                return with_custom_backward("product", self.switch, torch.mul, (a, b), {})
        return func(*args, **kwargs)

    def _swap(self, role: str, func: Any, args: Any, kwargs: Any, **arguments: Any) -> Tensor:
        """Run `func` on its first argument, with a swapped backward if a switch is there."""
        x = _first(args, kwargs)
        if self.switch is None or role not in self.switch.roles or not (torch.is_grad_enabled() and x.requires_grad):
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        rest = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
        if func in _INPLACE_FLAG:
            return with_custom_backward(role, self.switch, func, (x,), arguments)
        return with_custom_backward(role, self.switch, lambda first: func(first, *args[1:], **rest), (x,), arguments)


_SLOPES: dict[Any, Callable[[Tensor], Tensor]] = {
    F.gelu: rules.gelu_slope,
    F.silu: torch.sigmoid,
    F.mish: lambda z: F.softplus(z).tanh(),
    F.hardswish: lambda z: F.relu6(z + 3) / 6,
}
_INPLACE_FLAG = (F.silu, F.mish, F.hardswish)  # (input, inplace): never in place inside a trace

_HANDLERS: dict[Any, Callable[[Capture, Any, Any, Any], Any]] = {
    F.scaled_dot_product_attention: Capture.fused,
    F.multi_head_attention_forward: Capture.multi_head,
    F.linear: Capture.linear,
    F.conv2d: Capture.conv,
    torch.conv2d: Capture.conv,
    torch.einsum: Capture.einsum,
    F.normalize: Capture.normalise,
    F.batch_norm: Capture.batch_norm,
    torch.batch_norm: Capture.batch_norm,
    **dict.fromkeys(_SOFTMAX, Capture.softmax),
    **dict.fromkeys(_PRODUCTS, Capture.product),
    **dict.fromkeys(_NORMS, Capture.norm),
    **dict.fromkeys(_SLOPES, Capture.activation),
    **dict.fromkeys(_GATES, Capture.gate),
    **dict.fromkeys(_LENGTHS, Capture.length),
    **dict.fromkeys(_MULTIPLY, Capture.multiply),
    **dict.fromkeys(_SUMS, Capture.add),
}


def role(function: Any) -> str | None:
    """The name of the handler of a function."""
    return None if function not in _HANDLERS else _HANDLERS[function].__name__


def _in_usual_memory(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["input"]  # type: ignore[no-any-return]
