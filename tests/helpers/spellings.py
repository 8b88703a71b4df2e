"""The same norm, activation and linear layer in other torch operations: what a model may write instead of torch.nn.

    from helpers.spellings import NORMS, RMS_NORMS, ACTIVATIONS, LINEARS

Each value computes, up to rounding, what the library function does. `UNKNOWN_…` are forms for which no rule is known:
they must be reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, EPS)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True) + EPS


def by_sqrt(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m = x.mean(-1, keepdim=True)
    v = (x - m).pow(2).mean(-1, keepdim=True)
    return (x - m) / torch.sqrt(v + EPS) * w + b


def by_rsqrt(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return (x - m) * torch.rsqrt(v) * w + b


def by_negative_power(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return w * ((x - m) * v**-0.5) + b


def by_power(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return b + w * ((x - m) / v.pow(0.5))


def by_reciprocal(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return v.sqrt().reciprocal() * (x - m) * w + b


def by_inverse(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return (x - m) * (1 / v.sqrt()) * w + b


def by_exponential(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return (x - m) * torch.exp(-0.5 * torch.log(v)) * w + b


def by_second_moment(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m = x.mean(-1, keepdim=True)
    return (x - m) / ((x * x).mean(-1, keepdim=True) - m * m + EPS).sqrt() * w + b


def by_squares(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m = x.mean(-1, keepdim=True)
    return (x - m) / ((x**2).mean(-1, keepdim=True) - m**2 + EPS).sqrt() * w + b


def by_var_mean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    v, m = torch.var_mean(x, -1, unbiased=False, keepdim=True)
    return (x - m) / torch.sqrt(v + EPS) * w + b


def by_addcmul(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return torch.addcmul(b, (x - m) / v.sqrt(), w)


def in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x.clone()
    y -= x.mean(-1, keepdim=True)
    y = y / y.pow(2).mean(-1, keepdim=True).add_(EPS).sqrt_()
    y *= w
    y += b
    return y


def divided_in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x - x.mean(-1, keepdim=True)
    y /= x.var(-1, unbiased=False, keepdim=True).add_(EPS).sqrt_()
    return y.mul_(w).add_(b)


def without_axes(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = x.mean(-1), x.var(-1, unbiased=False)
    return (x - m[..., None]) / torch.sqrt(v + EPS).unsqueeze(-1) * w + b


def by_einsum(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x - torch.einsum("bnd->bn", x)[..., None] / x.shape[-1]
    return y / (torch.einsum("bnd,bnd->bn", y, y)[..., None] / x.shape[-1] + EPS).sqrt() * w + b


def by_weights(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    even = torch.full((x.shape[-1],), 1 / x.shape[-1], dtype=x.dtype)
    y = x - torch.einsum("bnd,d->bn", x, even)[..., None]
    return y / ((y * y) @ even[:, None] + EPS).sqrt() * w + b


def channels_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = x.transpose(1, 2)[..., None]
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + EPS)
    return (w[:, None, None] * x + b[:, None, None])[..., 0].transpose(1, 2)


def of_a_copy(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x.to(x.dtype, copy=True)
    m, v = _moments(y)
    return ((y - m) / torch.sqrt(v)).to(x.dtype) * w + b


def by_length(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x - x.mean(-1, keepdim=True)
    return y / torch.sqrt(y.norm(dim=-1, keepdim=True) ** 2 / x.shape[-1] + EPS) * w + b


def weight_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return w * (x - m) / torch.sqrt(v) + b


def weight_and_bias_apart(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=EPS) * w + b


def by_kernel(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.ops.aten.layer_norm(x, (x.shape[-1],), w, b, EPS)


def added_mean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    return (x + (-m)) / torch.sqrt(v) * w + b


def scale_and_shift(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    r = v.rsqrt()
    return x * (w * r) + (b - m * w * r)


def two_products(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    m, v = _moments(x)
    r = 1 / v.sqrt()
    return (x * r - m * r) * w + b


def native(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.native_layer_norm(x, (x.shape[-1],), w, b, EPS)[0]


def as_group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x.flatten(0, 1), 1, w, b, EPS).view_as(x)


class NormFunction(torch.autograd.Function):
    """LayerNorm with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, b)
        return layer_norm(x, w, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x, w, b = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            return (*torch.autograd.grad(layer_norm(x, w, b), x, gradient), None, None)


NORMS: dict[str, Norm] = {
    f.__name__: f
    for f in (
        *(by_sqrt, by_rsqrt, by_negative_power, by_power, by_reciprocal, by_inverse, by_exponential, by_second_moment),
        *(by_squares, by_var_mean, by_addcmul, in_place, divided_in_place, without_axes, by_einsum, by_weights),
        *(channels_first, of_a_copy, by_length, weight_first, weight_and_bias_apart, by_kernel),
    )
}
# Tables that hold the spread fixed have a rule for these; Chefer's, which pass relevance on entry by entry, have none.
UNCENTRED_NORMS: dict[str, Norm] = {f.__name__: f for f in (added_mean, scale_and_shift, two_products)}
UNKNOWN_NORMS: dict[str, Norm] = {
    "native": native,
    "as_group_norm": as_group_norm,
    "NormFunction": NormFunction.apply,
}


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


RMS_NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sqrt": lambda x, w: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w,
    "power": lambda x, w: w * (x * (x.square().mean(-1, keepdim=True) + EPS) ** -0.5),
    "products": lambda x, w: x * ((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS).pow(-0.5) * w,
    "weight in the spread": lambda x, w: x * (w * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()),
    "length": lambda x, w: x / ((x.norm(dim=-1, keepdim=True) ** 2) / x.shape[-1] + EPS).sqrt() * w,
    "kernel": lambda x, w: torch.ops.aten.rms_norm(x, (x.shape[-1],), w, EPS),
}


class GeluFunction(torch.autograd.Function):
    """GELU with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (torch.special.ndtr(x) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi))


ROOT = math.sqrt(2)
GELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "ndtr": lambda x: x * torch.special.ndtr(x),
    "packet": torch.ops.aten.gelu,
    "overload": torch.ops.aten.gelu.default,
    "_nn": torch._C._nn.gelu,
    "erf": lambda x: x * 0.5 * (1 + torch.erf(x / ROOT)),
    "method": lambda x: 0.5 * x * (1.0 + (x / ROOT).erf()),
    "special": lambda x: 0.5 * x * (1 + torch.special.erf(x / ROOT)),
    "erfc": lambda x: 0.5 * x * torch.erfc(-x / ROOT),
    "sum of two": lambda x: 0.5 * (x + x * torch.erf(x / ROOT)),
    "in place": lambda x: (x / ROOT).erf_().add_(1).mul_(0.5).mul_(x),
    "quotient": lambda x: x / (2 / torch.special.erfc(-x / ROOT)),
    "addcmul": lambda x: torch.addcmul(0.5 * x, 0.5 * x, torch.erf(x / ROOT)),
}
UNKNOWN_GELUS: dict[str, Callable[[Tensor], Tensor]] = {"GeluFunction": GeluFunction.apply}
SILUS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda x: x * torch.sigmoid(x),
    "method": lambda x: x.sigmoid() * x,
    "expit": lambda x: x * torch.special.expit(x),
    "exp": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: x * (0.5 * (1 + torch.tanh(x / 2))),
    "_nn": torch._C._nn.silu,
    "packet": torch.ops.aten.silu,
    "in place": lambda x: torch.sigmoid(x).clone().mul_(x),
    "rows": lambda x: (r := x.flatten(0, -2)).mul(torch.sigmoid(r)).view_as(x),
}
TANH_GELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))),
    "cube": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))),
}
Linear = Callable[[Tensor, Tensor, Tensor], Tensor]
LINEARS: dict[str, Linear] = {
    "@": lambda x, w, b: x @ w.T + b,
    "matmul": lambda x, w, b: torch.matmul(x, w.t()).add_(b),
    "left": lambda x, w, b: (w @ x.transpose(1, 2)).transpose(1, 2) + b,
    "einsum": lambda x, w, b: torch.einsum("bnd,ed->bne", x, w) + b,
    "weight first": lambda x, w, b: b + torch.einsum("ed,bnd->bne", w, x),
    "addmm": lambda x, w, b: torch.addmm(b, x.reshape(-1, x.shape[-1]), w.T).view(*x.shape[:-1], -1),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x, w.T.expand(len(x), -1, -1)),
    "bmm": lambda x, w, b: torch.bmm(x, w.T.expand(len(x), -1, -1)) + b,
    "conv1d": lambda x, w, b: F.conv1d(x.transpose(1, 2), w[..., None], b).transpose(1, 2),
    "conv2d": lambda x, w, b: F.conv2d(x.transpose(1, 2)[..., None], w[..., None, None], b)[..., 0].transpose(1, 2),
    "kernel": lambda x, w, b: torch.ops.aten.linear(x, w, b),
    "mm": lambda x, w, b: torch.mm(x.flatten(0, 1), w.T).view(*x.shape[:-1], -1) + b,
    "bias apart": lambda x, w, b: F.linear(x, w) + b,
}
UNKNOWN_LINEARS: dict[str, Linear] = {
    "sum": lambda x, w, b: (x[..., None, :] * w).sum(-1) + b,
    "tensordot": lambda x, w, b: torch.tensordot(x, w.T, 1) + b,
}
