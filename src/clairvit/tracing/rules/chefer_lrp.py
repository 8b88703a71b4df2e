"""Relevance propagation as backward rules: Chefer's two rule files and Deep Taylor.

The papers send relevance R down; here a backward carries c = R / a, and R = a · c at every activation a. A rule that
hands relevance on unchanged from y to x is then c · y / x, and a rule that shares R_i out by x_j w_ij / Z_i is an
ordinary vector-Jacobian product of z_i c_i / Z_i: nothing is divided by an activation but where a rule is an identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.tracing.attention_call import scaled_scores
from clairvit.tracing.rules.linear import (
    activation_secant,
    detach_factor,
    detach_gate,
    l2_normalize_detach_norm,
    uniform_half,
    zero_gradient,
)
from clairvit.tracing.rules.table import INPUTS_FOLLOWED, Call, Gradients, Rule, RuleTable, follows

# The z+ rule takes Z⁺ from z + |W| |x| where no Z⁺ is a smaller share of |W| |x|: five bits are lost at most.
SMALLEST_SHARE = 1 / 32
_NOT_HALF = ({torch.float32}, {torch.float64})


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return numerator / denominator, and 0 where the denominator is 0."""
    quotient = numerator / denominator
    # As a rule no denominator is 0, and a CPU sees that ten times sooner than it compares and selects entries.
    if not denominator.is_cpu or not denominator.abs().amin() > 0:
        quotient = torch.where(denominator == 0, 0, quotient)
    return quotient.nan_to_num(nan=float("nan")) if quotient.dtype == torch.float16 else quotient  # no infinity


def where_positive(x: Tensor, values: Tensor) -> Tensor:
    """Return the values where x > 0, else 0. On a CPU `torch.where` mispredicts a branch per entry: 25 times slower."""
    return torch.ops.aten.threshold_backward(values, x, 0)  # type: ignore[no-any-return]


def by_sign(x: Tensor, where_up: Tensor, where_down: Tensor) -> Tensor:
    """Return the one tensor where x > 0, else the other."""
    return where_positive(x, where_up).add_(where_positive(0.5 - x.sign(), where_down))


def saturating(rule: Rule) -> Rule:
    """Clamp a rule's relevance in float16, where doubling from layer to layer would overflow."""

    def bounded(c: Tensor) -> Tensor:
        if c.dtype != torch.float16:
            return c
        edge = torch.finfo(c.dtype).max / 64  # a margin for the sums on the way to the next rule
        return c.clamp(-edge, edge)

    def saturated(call: Call, c: Tensor) -> Gradients:
        return tuple(None if g is None else bounded(g) for g in rule(call, bounded(c)))

    places = INPUTS_FOLLOWED.get(rule)
    return saturated if places is None else follows(*places)(saturated)


@dataclass(frozen=True, eq=False)
class Affine:
    """A linear layer or a convolution: z = W x + b, run on other inputs and weights, and back."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: dict[str, Any]  # stride, padding, … of a convolution
    output: Tensor | None = None  # z, where it was kept
    product: Callable[[Tensor, Tensor], Tensor] | None = None  # W x, where no linear layer or convolution computes it

    @staticmethod
    def of(call: Call) -> Affine:
        named = dict(call.arguments)
        weight, bias, product = named.pop("weight"), named.pop("bias", None), named.pop("product", None)
        named.pop("inside", None)
        return Affine(call.inputs[0], weight, bias, named, call.output, product)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.product is not None:
            return self.product(x, weight) if bias is None else self.product(x, weight) + bias
        if weight.ndim == 2:
            return F.linear(x, weight, bias)
        conv = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        return conv(x, weight, bias, **self.geometry)

    def back(self, s: Tensor, weight: Tensor) -> Tensor:
        """Return Wᵀ s."""
        if weight.ndim == 2 and self.product is None:
            return s @ weight
        with torch.enable_grad():
            x = self.x.detach().requires_grad_(True)
            return torch.autograd.grad(self(x, weight), x, s)[0]

    @property
    def z(self) -> Tensor:
        return self(self.x, self.weight, self.bias) if self.output is None else self.output

    @property
    def spread_bias(self) -> Tensor | None:
        """The bias in a shape that can be added to z."""
        if self.bias is None or self.product is not None or self.weight.ndim == 2:
            return self.bias
        return self.bias.view(-1, *(1,) * (self.weight.ndim - 2))

    @functools.cached_property
    def signs(self) -> tuple[Tensor, Tensor]:
        """W⁺ and W⁻."""
        return self.weight.clamp(min=0), self.weight.clamp(max=0)

    @property
    def supports(self) -> tuple[Tensor, Tensor]:
        """x⁺ W⁺ and x⁻ W⁻: the positive contributions to each output."""
        up, down = self.signs
        return self(self.x.clamp(min=0), up), self(self.x.clamp(max=0), down)


def z_plus(call: Call, c: Tensor) -> Gradients:
    """Return the z+ rule, R_j = sum_i (x_j w_ij)⁺ / sum_k (x_k w_ik)⁺ · R_i, the bias left out."""
    layer = Affine.of(call)
    by_sizes = _z_plus_by_sizes(layer, c)
    if by_sizes is not None:
        return (by_sizes,)
    up, down = layer.signs
    Z_up, Z_down = layer.supports
    s = ratio(layer.z * c, Z_up + Z_down)
    return (by_sign(layer.x, layer.back(s, up), layer.back(s, down)),)


def _z_plus_by_sizes(layer: Affine, c: Tensor) -> Tensor | None:
    """Return the z+ rule of a linear layer by three matrix products instead of four; None where that is not exact.

        Z⁺ = (W x + |W| |x|) / 2,    W x = z - b    known from the forward
        c_j = sum_i s_i w⁺_ij = (Wᵀs + |W|ᵀs)_j / 2  where x_j > 0, sum_i s_i w⁻_ij = (Wᵀs - |W|ᵀs)_j / 2  elsewhere

    Both terms of Z⁺ are sums of K terms whose sizes add up to T = |W| |x| + |b|, rounded by at most gamma_K T each, so
    that Z⁺ has a relative error of gamma_K T / Z⁺. Where Z⁺ < T / 32 anywhere (all contributions negative, no input, a
    bias that outweighs them) nothing is computed this way. Then |x_j w_ij s_i| < 32 |R_i| too, and what is lost of all
    relevance by rounding c_j is at most 32 gamma_K. A GPU would have to be waited for, and half precision rounds z.
    """
    x, weight, bias, z = layer.x, layer.weight, layer.bias, layer.output
    if (
        z is None
        or weight.ndim != 2
        or layer.product is not None
        or not x.is_cpu
        or {x.dtype, z.dtype, weight.dtype} not in _NOT_HALF
    ):
        return None
    sizes = weight.abs()
    T = layer(x.abs(), sizes)
    Z = z + T if bias is None else (z - bias).add_(T)  # twice Z⁺
    T = T if bias is None else T.add_(bias.abs())
    if not torch.sub(Z, T, alpha=2 * SMALLEST_SHARE, out=T).amin() > 0:
        return None
    s = (z * c).div_(Z)  # half of R / Z⁺
    # Slope -1 where x is not positive: the sign of x, but -1 at 0.
    signed = torch.ops.aten.leaky_relu_backward(layer.back(s, sizes), x, -1.0, False)
    return layer.back(s, weight) + signed  # type: ignore[no-any-return]


def z_plus_split_by_sign(call: Call, c: Tensor) -> Gradients:
    """Apply the z+ rule to x⁺ W⁺ and to x⁻ W⁻ separately: each gets all of R_i, so relevance can double."""
    layer = Affine.of(call)
    up, down = layer.signs
    R = layer.z * c
    s_up, s_down = (ratio(R, Z) for Z in layer.supports)
    return (by_sign(layer.x, layer.back(s_up, up), layer.back(s_down, down)),)


def identity_rule(call: Call, c: Tensor) -> Gradients:
    """Pass each entry's relevance through a norm unchanged: c · y / x."""
    x, shape, eps = call.inputs[0], call.arguments["shape"], call.arguments["eps"]
    weight, bias = call.arguments["weight"], call.arguments["bias"]
    centred = call.arguments["centred"]
    y = F.layer_norm(x, shape, weight, bias, eps) if centred else F.rms_norm(x, shape, weight, eps)
    return (c * ratio(y, x),)


@follows(2)
def written_norm_identity(call: Call, c: Tensor) -> Gradients:
    """Apply `identity_rule` to (x - mean) · spread of a norm that is written out; its inputs are both factors and x."""
    return (None, None, c * ratio(call.function(*call.inputs), call.inputs[2]))


@follows(1)
def written_norm_bias_identity(call: Call, c: Tensor) -> Gradients:
    """Apply `identity_rule` to the sum with the bias of a norm that is written out; x is the second input."""
    return (None, c * ratio(call.function(*call.inputs), call.inputs[1]))


def softmax_identity_rule(call: Call, c: Tensor) -> Gradients:
    """Pass relevance through a softmax unchanged; the half is that of the q kᵀ that fed it."""
    S = call.inputs[0]
    A = S.softmax(-1, dtype=c.dtype)
    return ((c * ratio(A, S.to(c.dtype)) / 2).to(S.dtype),)


def shared_attention(call: Call, c: Tensor) -> Gradients:
    """Give each factor of A v and of q kᵀ half; pass relevance through the softmax between them unchanged."""
    return _shared_attention(call, c, rescaled=False)


def shared_rescaled_attention(call: Call, c: Tensor) -> Gradients:
    """Apply `shared_attention`, a position bias added to the scores rescaled as any other sum (`rescaled_sum`)."""
    return _shared_attention(call, c, rescaled=True)


def _shared_attention(call: Call, c: Tensor, *, rescaled: bool) -> Gradients:
    q, k, v, *traced_mask = call.inputs
    scale, mask = call.arguments["scale"], call.arguments["mask"]
    S = scaled_scores(q, k, scale, mask)  # [..., queries, keys], float32 at least
    A, c_O = S.softmax(-1), c.to(S.dtype)
    c_S = c_masked = (c_O @ v.to(S.dtype).transpose(-2, -1) / 2) * ratio(A, S) / 2
    if rescaled and mask is not None and mask.dtype != torch.bool:
        terms = (scaled_scores(q, k, scale), mask.detach().to(S.dtype))
        scales = branch_scales(terms, c_S, call.arguments["batch"])
        c_S, c_masked = c_S * scales[0], c_S * scales[1]
    c_q, c_k = c_S @ k.to(S.dtype) * scale, c_S.transpose(-2, -1) @ q.to(S.dtype) * scale
    c_v = A.transpose(-2, -1) @ c_O / 2
    gradients = (c_q, c_k, c_v, *(c_masked.sum_to_size(m.shape) for m in traced_mask))
    return tuple(g.to(x.dtype) for g, x in zip(gradients, call.inputs, strict=True))


def rescaled_sum(call: Call, c: Tensor) -> Gradients:
    """Split a + b in proportion, then scale each branch to |sum R_a| / (|sum R_a| + |sum R_b|) of the total.

    The sums are per image; the authors' code sums over the batch, which is the same for one image.
    """
    scales = branch_scales(call.inputs, c, call.arguments["batch"], call.arguments["axis"])
    return tuple(
        (c * scale).sum_to_size(x.shape) if x.requires_grad else None
        for x, scale in zip(call.inputs, scales, strict=True)
    )


def branch_scales(terms: tuple[Tensor, ...], c: Tensor, batch: int, axis: int = 0) -> list[Tensor]:
    """Return the factor of the relevance of each of two terms of a sum: one number per image, to be broadcast."""
    # The sum of both is taken of (a + b) · c: two large totals of opposite sign would leave round-off.
    *totals, total_of_sum = (
        (x * c).movedim(axis, 0).reshape(batch, -1).sum(1) for x in (*terms, terms[0] + terms[1])
    )  # [B] each
    # |sum R_a| / (|sum R_a| + |sum R_b|) · sum R / sum R_a, without its division by sum R_a
    share = ratio(total_of_sum, totals[0].abs() + totals[1].abs())
    shape = [-1 if i == axis else 1 for i in range(c.ndim)]
    windows = c.shape[axis] // batch  # per image
    return [(total.sign() * share).repeat_interleave(windows).reshape(shape) for total in totals]


# Deep Taylor: every split by the positive contributions alone


def positive_sum(call: Call, c: Tensor) -> Gradients:
    """Give all of a + b to its positive terms; where there is none, in proportion (both shares are positive then)."""
    Z = call.inputs[0].clamp(min=0) + call.inputs[1].clamp(min=0)
    s = ratio((call.inputs[0] + call.inputs[1]) * c, Z)
    in_proportion = c - where_positive(Z, c)
    return tuple(
        (where_positive(x.expand_as(s), s) + in_proportion).sum_to_size(x.shape) if x.requires_grad else None
        for x in call.inputs
    )


@follows(1)
def positive_mix(call: Call, c: Tensor) -> Gradients:
    """Split O = A v, A held fixed, by its positive terms alone; where there is none, in proportion."""
    A, v = call.inputs
    return (None, _positive_values(call.function, A, v, c))


@follows(2)
def positive_values(call: Call, c: Tensor) -> Gradients:
    """Apply `positive_mix` to fused attention."""
    q, k, v, *mask = call.inputs
    A = scaled_scores(q, k, call.arguments["scale"], call.arguments["mask"]).softmax(-1)
    values = v.to(A.dtype)
    s, c_in_proportion = _split_by_positive(A @ values.clamp(min=0), A @ values, c.to(A.dtype))
    back = A.transpose(-2, -1)  # no entry is negative: what is not positive of v supports nothing
    c_v = where_positive(values, (back @ s).sum_to_size(v.shape)) + (back @ c_in_proportion).sum_to_size(v.shape)
    return (None, None, c_v.to(v.dtype), *(None for _ in mask))


def _positive_values(mix: Callable[..., Tensor], A: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """Return c of the values v; `mix(A, v)` is the product as the model computes it."""

    def back(weights: Tensor, s: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = v.detach().requires_grad_(True)
            return torch.autograd.grad(mix(weights.detach(), probe), probe, s)[0]

    up, down = A.clamp(min=0), A.clamp(max=0)  # talking heads mix rows after the softmax, so A may be negative
    Z = mix(up, v.clamp(min=0)) + mix(down, v.clamp(max=0))
    s, c_in_proportion = _split_by_positive(Z, mix(A, v), c)
    return by_sign(v, back(up, s), back(down, s)) + back(A, c_in_proportion)


def _split_by_positive(Z: Tensor, O: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """Return R / Z for O = A v whose positive terms add up to Z, and c of those entries that have none."""
    none = torch.finfo(Z.dtype).eps * (2 * Z - O) >= Z  # of all terms' size; masks of -100 leave an A of 1e-44
    return torch.where(none, 0, ratio(O * c, Z)), torch.where(none, c, 0)


_CHEFER: dict[str, Rule] = {
    "norm": identity_rule,
    "length": l2_normalize_detach_norm,
    "activation": activation_secant,
    "gate": zero_gradient,
    "factor": detach_factor,
    "centred_norm": written_norm_identity,
    "norm_bias": written_norm_bias_identity,
    "softmax": softmax_identity_rule,
    "attention": shared_attention,
    "mix": uniform_half,
    "product": uniform_half,
    "conv": z_plus_split_by_sign,
}


def _from_one(name: str, rules: dict[str, Rule]) -> RuleTable:
    """Return a table whose relevance starts as 1 at the target."""
    return RuleTable(name, {role: saturating(rule) for role, rule in rules.items()}, unit=True)


CHEFER = _from_one("chefer", {**_CHEFER, "linear": z_plus, "add": rescaled_sum, "attention": shared_rescaled_attention})
LRP = _from_one("lrp", {**_CHEFER, "linear": z_plus_split_by_sign})
DEEP_TAYLOR = _from_one(
    "deep-taylor",
    {
        **_CHEFER,
        "linear": z_plus,
        "conv": z_plus,
        "softmax": zero_gradient,
        "attention": positive_values,
        "mix": positive_mix,
        "product": detach_gate,
        "add": positive_sum,
    },
)
