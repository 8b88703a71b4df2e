"""AttnLRP and CP-LRP with numbers in them: gamma and eps on linear layers, convolutions and attention's products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clairvit.tracing.attention import scaled_scores
from clairvit.tracing.rules.lrp import Affine, ratio
from clairvit.tracing.rules.table import TABLES, Call, Gradients, Rule, RuleTable, uniform_half


def epsilon_stabilise(c: Tensor, Z: Tensor, eps: float) -> Tensor:
    """c · Z / (Z + eps · sign Z): what eps takes away from relevance that is divided by Z."""
    return c if not eps else c * torch.where(Z.isinf(), torch.ones_like(Z), Z / stabilise(Z, eps))


def stabilise(Z: Tensor, eps: float) -> Tensor:
    return torch.where(Z < 0, Z - eps, Z + eps)


def gamma_rule(gamma: float, eps: float, inside: bool = True) -> Rule:
    """R_j = sum_i x_j ŵ_ij / Z_i · R_i with what agrees in sign with z_i counted 1 + gamma times, bias included.

    `inside=False` leaves alone what torch's own multi-head attention projects.
    """

    def rule(call: Call, c: Tensor) -> Gradients:
        if not inside and call.arguments.get("inside"):
            return call.vjp(c)
        layer = Affine.of(call)
        z = layer.z
        if not gamma:
            return (layer.back(epsilon_stabilise(c, z, eps), layer.weight),)
        up, down = layer.signs
        b = torch.zeros_like(z[:1]) if layer.bias is None else _on_channels(layer.bias, layer.weight)
        x_up, x_down = layer.x.clamp(min=0), layer.x.clamp(max=0)
        for_z = layer(x_up, up) + layer(x_down, down) + b.clamp(min=0)
        against_z = layer(x_up, down) + layer(x_down, up) + b.clamp(max=0)
        added = torch.where(z > 0, for_z, against_z)
        s = ratio(z * c, stabilise(z + gamma * added, eps))
        s_for, s_against = torch.where(z > 0, s, 0), torch.where(z < 0, s, 0)
        more = torch.where(
            layer.x > 0,
            layer.back(s_for, up) + layer.back(s_against, down),
            layer.back(s_for, down) + layer.back(s_against, up),
        )
        return (layer.back(s, layer.weight) + gamma * more,)

    return rule


def _on_channels(bias: Tensor, weight: Tensor) -> Tensor:
    return bias if weight.ndim == 2 else bias[:, None, None]


def stabilised_attention(eps: float) -> Rule:
    """AttnLRP's fused attention with R / (2 Z + eps) at both products."""

    def rule(call: Call, c: Tensor) -> Gradients:
        q, k, v, *mask = call.inputs
        scale = call.arguments["scale"]
        S = scaled_scores(q, k, scale, call.arguments["mask"])
        A = S.softmax(-1)
        c_O = epsilon_stabilise(c.to(S.dtype), A @ v.to(S.dtype), eps / 2) / 2
        c_A = c_O @ v.to(S.dtype).transpose(-2, -1)
        c_S = epsilon_stabilise(A * (c_A - (A * c_A).sum(-1, keepdim=True)), S, eps / 2) / 2
        c_q, c_k = c_S @ k.to(S.dtype) * scale, c_S.transpose(-2, -1) @ q.to(S.dtype) * scale
        found = (c_q, c_k, A.transpose(-2, -1) @ c_O, *(c_S.sum_to_size(m.shape) for m in mask))
        return tuple(g.to(x.dtype) for g, x in zip(found, call.inputs, strict=True))

    return rule


def stabilised_linear_mix(eps: float) -> Rule:
    return lambda call, c: uniform_half(call, epsilon_stabilise(c, call.function(*call.inputs), eps / 2))


def stabilised_softmax(eps: float) -> Rule:
    return lambda call, c: tuple(
        None if g is None else epsilon_stabilise(g, x, eps / 2)
        for g, x in zip(uniform_half(call, c), call.inputs, strict=True)
    )


def cp_lrp(gamma_lin: float = 0.0, gamma_conv: float = 0.0, eps: float = 0.0, inside: float = 1.0) -> RuleTable:
    """`linear` with gamma and eps on linear layers and convolutions."""
    return RuleTable({**TABLES["linear"].rules, **_layers(gamma_lin, gamma_conv, eps, inside)})


def attnlrp(gamma_lin: float = 0.0, gamma_conv: float = 0.0, eps: float = 0.0, inside: float = 1.0) -> RuleTable:
    """`attnlrp` with gamma and eps on linear layers and convolutions, and eps at the products of the attention."""
    found = {**TABLES["attnlrp"].rules, **_layers(gamma_lin, gamma_conv, eps, inside)}
    if eps:
        found |= {
            "attention": stabilised_attention(eps),
            "mix": stabilised_linear_mix(eps),
            "softmax": stabilised_softmax(eps),
        }
    return RuleTable(found)


def _layers(gamma_lin: float, gamma_conv: float, eps: float, inside: float) -> dict[str, Rule]:
    numbers = {"linear": gamma_lin, "conv": gamma_conv}
    return {role: gamma_rule(gamma, eps, bool(inside)) for role, gamma in numbers.items() if gamma or eps}


# Names with numbers: "cp-lrp(gamma_lin=0.05,gamma_conv=0.25,eps=0.0,inside=1.0)"
GAMMA_MADE: dict[str, Callable[..., RuleTable]] = {"cp-lrp": cp_lrp, "attnlrp": attnlrp}
GAMMA_TABLES: dict[str, RuleTable] = {
    # A gate and what it multiplies share: the one place where LibraGrad is not DecompX without bias.
    "libra": RuleTable({**TABLES["linear"].rules, "product": uniform_half}),
}
