"""The linearised backward: attention, norms, gates and slopes held at the values they had.

With gradient × input, `linear` is DecompX without bias (= CP-LRP at eps 0). `libra` lets a gate and what it multiplies
share: the one place where LibraGrad is not DecompX without bias. `residual` is the plain gradient without the paths
through attention: what reaches a layer came down the residual stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clairvit.tracing.attention_call import scaled_scores
from clairvit.tracing.rules.table import Call, Gradients, Rule, RuleTable, follows


def layernorm_detach_std(call: Call, gradient: Tensor) -> Gradients:
    """Hold the 1/std of a LayerNorm or RMSNorm fixed: only centring and the affine part pass the gradient on."""
    x, weight, shape, eps = call.inputs[0], *(call.arguments[name] for name in ("weight", "shape", "eps"))
    axes = tuple(range(-len(shape), 0))
    if weight is not None:
        gradient = gradient * weight
    if not call.arguments["centred"]:
        return (gradient * (x.square().mean(axes, keepdim=True) + eps).rsqrt(),)
    spread = torch.native_layer_norm(x, shape, None, None, eps)[2]  # 1/std, many times faster than x.var()
    gradient = gradient * spread.to(gradient.dtype)
    return (gradient - gradient.mean(axes, keepdim=True),)


def l2_normalize_detach_norm(call: Call, gradient: Tensor) -> Gradients:
    """Hold the length of x / ||x|| fixed."""
    return (gradient * call.arguments["inverse_length"](call.inputs[0]),)


def activation_secant(call: Call, gradient: Tensor) -> Gradients:
    """Hold r of f(z) = z · r(z) fixed."""
    return (gradient * call.arguments["slope"](call.inputs[0]),)


@follows()
def zero_gradient(call: Call, gradient: Tensor) -> Gradients:
    """Pass nothing on: a gate, a softmax or a length held fixed."""
    return (None,) * len(call.inputs)


@follows(2)
def detach_attention(call: Call, gradient: Tensor) -> Gradients:
    """Hold attention fixed: O = A v passes the gradient to v alone."""
    q, k, _, *mask = call.inputs
    A = scaled_scores(q, k, call.arguments["scale"], call.arguments["mask"]).softmax(-1)
    return (None, None, A.transpose(-2, -1).to(gradient.dtype) @ gradient, *(None for _ in mask))


@follows(1)
def detach_gate(call: Call, gradient: Tensor) -> Gradients:
    """Hold the gate of gate * x fixed (it is the first input)."""
    return (None, call.vjp(gradient)[1])


def uniform_half(call: Call, gradient: Tensor) -> Gradients:
    """Give each factor of a product of two activations half; for a softmax, the half of the q kᵀ that fed it."""
    return tuple(None if g is None else g * 0.5 for g in call.vjp(gradient))


@follows(0)
def detach_factor(call: Call, gradient: Tensor) -> Gradients:
    """Hold fixed all but the first input: the spread of a norm, the gate of an activation that are written out."""
    return (call.vjp(gradient)[0], *(None for _ in call.inputs[1:]))


# Norms, lengths, activations and gates, whatever happens to attention
DETACHED: dict[str, Rule] = {
    "norm": layernorm_detach_std,
    "length": l2_normalize_detach_norm,
    "activation": activation_secant,
    "gate": zero_gradient,
    "factor": detach_factor,
    "centred_norm": detach_factor,
    "uncentred": detach_factor,
    "norm_bias": detach_factor,
}
_LINEAR: dict[str, Rule] = {
    **DETACHED,
    "softmax": zero_gradient,
    "attention": detach_attention,
    "product": detach_gate,
}
LINEAR = RuleTable("linear", _LINEAR)
LIBRA = RuleTable("libra", {**_LINEAR, "product": uniform_half})
RESIDUAL = RuleTable("residual", {"attention": zero_gradient, "mix": zero_gradient})
