"""Leftovers: what an operation adds on its own, b = out − J · in, for those that models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.tracing.attention import repeated, scaled_scores

_LAYER_NORMS = (F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm)
_CONVOLUTIONS = (F.conv1d, torch.conv1d, F.conv2d, torch.conv2d)
SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_)
_MINUS_SECOND = (torch.sub, Tensor.sub, Tensor.__sub__)
_DIFFERENCES = (*_MINUS_SECOND, Tensor.__rsub__, torch.rsub)
_MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum)
_PRODUCTS = (
    *_MATRIX_PRODUCTS,
    *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
)
# Bent operations that look at one token at a time.
_BENT = (
    *(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.normalize, F.group_norm, torch.group_norm),
    *(F.softmax, torch.softmax, Tensor.softmax, F.gelu, F.silu, F.mish, F.hardswish, F.elu, F.softplus),
    *(torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.tanh, Tensor.tanh, torch.erf, Tensor.erf, torch.exp, Tensor.exp),
    *(Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm, Tensor.pow, Tensor.__pow__, torch.pow),
    *(torch.sqrt, Tensor.sqrt, torch.rsqrt, Tensor.rsqrt, Tensor.square, torch.square),
    *(torch.div, Tensor.div, Tensor.__truediv__, Tensor.__rtruediv__),
)
CHANNELS_SECOND = (F.batch_norm, *_CONVOLUTIONS, F.group_norm, torch.group_norm)


def bias_term(kind: str, func: Any, args: Any, kwargs: Any, out: Tensor) -> Tensor | float | None:
    """b as wide as `out` or its channels; None where nothing is left.

    "learned": what is added as it stands, a bias. "implicit": also what a bent operation's slope does not explain.
    """
    if kind == "implicit":
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in _BENT or func in _PRODUCTS:
            return _bent(func, args, kwargs, out)
    if func in SUMS or func in _DIFFERENCES:
        return _added(func, args)
    if func is torch.cat:
        return _joined(args, kwargs)
    make = _TRUE.get(func)
    return None if make is None else make(args, kwargs)


def _bent(func: Any, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
    """out − J · in, in being every tensor that depends on the image."""
    if func in _PRODUCTS:  # ab − (ab + ab); a constant factor leaves nothing
        return -out.detach() if sum(_traced(a) for a in (*_operands(func, args), *kwargs.values())) > 1 else None
    args = (*args[:1], *args[2:]) if func in (F.silu, F.mish, F.hardswish) else args  # inplace is their second
    rest = {name: value for name, value in kwargs.items() if name != "inplace"}
    if "input" in rest:
        args = (rest.pop("input"), *args)
    with torch.enable_grad():
        at = tuple(a.detach().requires_grad_(True) for a in args if _traced(a))
        new = iter(at)
        made = func(*(next(new) if _traced(a) else a for a in args), **rest)
        # J · in by two ways back: Jᵀ u is linear in u, and its slope along u is J.
        u = torch.zeros_like(made, requires_grad=True)
        back = torch.autograd.grad(made, at, u, create_graph=True)
        (slope,) = torch.autograd.grad(back, u, at)
    return out.detach() - slope


def is_matrix_product(func: Any, args: Any) -> bool:
    """Of two activations: q kᵀ, or A v."""
    return func in _MATRIX_PRODUCTS and sum(_traced(a) for a in _operands(func, args)) == 2


def _operands(func: Any, args: Any) -> Any:
    return args[1] if func is torch.einsum and len(args) == 2 and isinstance(args[1], list | tuple) else args


def _traced(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ) v is linear in v; along q, and along k, it changes by (A ∘ (S − sum A S)) v."""
    if enable_gqa:
        key, value = repeated(key, query), repeated(value, query)
    length = query.shape[-1] ** -0.5 if scale is None else scale
    products = scaled_scores(query, key, length)
    if is_causal:
        attn_mask = torch.ones(products.shape[-2:], dtype=torch.bool, device=query.device).tril()
    A = scaled_scores(query, key, length, attn_mask).softmax(-1)
    along = products * (int(query.requires_grad) + int(key.requires_grad))  # a pool's latent query is a constant
    if attn_mask is not None and attn_mask.requires_grad:  # positions that depend on the queries
        along = along + attn_mask.detach()
    return -(A * (along - (A * along).sum(-1, keepdim=True))) @ value.detach().to(A.dtype)


def _added(func: Any, args: Any) -> Tensor | float | None:
    """x + b, x − b, b − x, where b does not depend on the image."""
    constants = [(place, a) for place, a in enumerate(args) if isinstance(a, Tensor | float | int) and not _traced(a)]
    if len(args) != 2 or len(constants) != 1:
        return None
    place, b = constants[0]
    return -b if place == 1 and func in _MINUS_SECOND else b


def _joined(args: Any, kwargs: Any) -> Tensor | None:
    """Tokens that are added to the sequence (a class token, late) are constants there."""
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if all(part.requires_grad for part in parts):
        return None
    return torch.cat([torch.zeros_like(p) if p.requires_grad else p.detach() for p in parts], dim)


def _third(args: Any, kwargs: Any) -> Tensor | None:
    return kwargs.get("bias", args[2] if len(args) > 2 else None)  # type: ignore[no-any-return]


def _fourth(args: Any, kwargs: Any) -> Tensor | None:
    return kwargs.get("bias", args[3] if len(args) > 3 else None)  # type: ignore[no-any-return]


def _batch_norm(args: Any, kwargs: Any) -> Tensor:
    """beta − gamma·mean / sqrt(var + eps): evaluated, a BatchNorm is a linear layer with this bias."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    call = dict(zip(names, args, strict=False)) | kwargs
    shift = -call["running_mean"] * (call["running_var"] + call.get("eps", 1e-5)).rsqrt()
    shift = shift if call.get("weight") is None else shift * call["weight"]
    return shift if call.get("bias") is None else shift + call["bias"]  # type: ignore[no-any-return]


_TRUE: dict[Any, Callable[[Any, Any], Tensor | None]] = {
    F.linear: _third,
    **dict.fromkeys(_CONVOLUTIONS, _third),
    **dict.fromkeys(_LAYER_NORMS, _fourth),
    F.batch_norm: _batch_norm,
    torch.addmm: lambda args, kwargs: args[0] if len(args) == 3 and not kwargs and not args[0].requires_grad else None,
}
