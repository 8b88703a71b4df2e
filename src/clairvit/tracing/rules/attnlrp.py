"""AttnLRP and CP-LRP; with parameters: gamma and eps on linear layers, convolutions and attention's products.

At eps 0 and gamma 0, AttnLRP is gradient × input with halves at every product of two activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clairvit.tracing.attention_call import scaled_scores
from clairvit.tracing.rules.chefer_lrp import Affine, ratio
from clairvit.tracing.rules.linear import DETACHED, LINEAR, uniform_half
from clairvit.tracing.rules.table import Call, Gradients, Rule, RuleTable


def uniform_half_attention(call: Call, gradient: Tensor) -> Gradients:
    """Give each factor of the two matmuls half: v once (1/2), q and k twice (1/4), and a mask as they."""
    shares = (0.25, 0.25, 0.5, 0.25)  # of q, k, v and, where there is one, the mask
    return tuple(None if g is None else g * share for g, share in zip(call.vjp(gradient), shares, strict=False))


def epsilon_stabilise(c: Tensor, Z: Tensor, eps: float) -> Tensor:
    """Return c · Z / (Z + eps · sign Z): relevance that is divided by Z, less what eps absorbs."""
    return c if not eps else c * torch.where(Z.isinf(), torch.ones_like(Z), Z / stabilise(Z, eps))


def stabilise(Z: Tensor, eps: float) -> Tensor:
    """Return Z + eps · sign Z, with sign 0 = 1."""
    return torch.where(Z < 0, Z - eps, Z + eps)


def gamma_rule(gamma: float, eps: float, inside: bool = True) -> Rule:
    """Return R_j = sum_i x_j ŵ_ij / Z_i · R_i, what agrees in sign with z_i counted 1 + gamma times, bias included.

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
        b = torch.zeros_like(z[:1]) if layer.spread_bias is None else layer.spread_bias
        x_up, x_down = layer.x.clamp(min=0), layer.x.clamp(max=0)
        positive_part = layer(x_up, up) + layer(x_down, down) + b.clamp(min=0)
        negative_part = layer(x_up, down) + layer(x_down, up) + b.clamp(max=0)
        gamma_share = torch.where(z > 0, positive_part, negative_part)
        s = ratio(z * c, stabilise(z + gamma * gamma_share, eps))
        s_where_positive, s_where_negative = torch.where(z > 0, s, 0), torch.where(z < 0, s, 0)
        gamma_relevance = torch.where(
            layer.x > 0,
            layer.back(s_where_positive, up) + layer.back(s_where_negative, down),
            layer.back(s_where_positive, down) + layer.back(s_where_negative, up),
        )
        return (layer.back(s, layer.weight) + gamma * gamma_relevance,)

    return rule


def stabilised_attention(eps: float) -> Rule:
    """Return AttnLRP's rule of fused attention, with R / (2 Z + eps) at both products."""

    def rule(call: Call, c: Tensor) -> Gradients:
        q, k, v, *mask = call.inputs
        scale = call.arguments["scale"]
        S = scaled_scores(q, k, scale, call.arguments["mask"])
        A = S.softmax(-1)
        c_O = epsilon_stabilise(c.to(S.dtype), A @ v.to(S.dtype), eps / 2) / 2
        c_A = c_O @ v.to(S.dtype).transpose(-2, -1)
        c_S = epsilon_stabilise(A * (c_A - (A * c_A).sum(-1, keepdim=True)), S, eps / 2) / 2
        c_q, c_k = c_S @ k.to(S.dtype) * scale, c_S.transpose(-2, -1) @ q.to(S.dtype) * scale
        gradients = (c_q, c_k, A.transpose(-2, -1) @ c_O, *(c_S.sum_to_size(m.shape) for m in mask))
        return tuple(g.to(x.dtype) for g, x in zip(gradients, call.inputs, strict=True))

    return rule


def stabilised_weighted_values(eps: float) -> Rule:
    """Return AttnLRP's rule of an explicit A v, with R / (2 Z + eps)."""
    return lambda call, c: uniform_half(call, epsilon_stabilise(c, call.function(*call.inputs), eps / 2))


def stabilised_softmax(eps: float) -> Rule:
    """Return AttnLRP's rule of an explicit softmax, with R / (2 Z + eps) at the q kᵀ that fed it."""
    return lambda call, c: tuple(
        None if g is None else epsilon_stabilise(g, x, eps / 2)
        for g, x in zip(uniform_half(call, c), call.inputs, strict=True)
    )


_ATTNLRP: dict[str, Rule] = {
    **DETACHED,
    "softmax": uniform_half,
    "attention": uniform_half_attention,
    "mix": uniform_half,
    "product": uniform_half,
}
ATTNLRP = RuleTable("attnlrp", _ATTNLRP)


def cp_lrp(gamma_lin: float = 0.0, gamma_conv: float = 0.0, eps: float = 0.0, inside: bool = True) -> RuleTable:
    """Return the table `linear` with gamma and eps on linear layers and convolutions.

    Args:
        gamma_lin: How much more counts, in linear layers, what agrees in sign with the output.
        gamma_conv: The same for convolutions.
        eps: Takes relevance from outputs near zero.
        inside: Whether the rules hold for the projections of torch's own multi-head attention too.

    Returns:
        The table; `linear` itself where nothing would differ from it.

    Example:
        >>> from clairvit.rules import cp_lrp
        >>> str(cp_lrp()), cp_lrp(eps=1e-6).name
        ('linear', 'cp-lrp')
    """
    if not (gamma_lin or gamma_conv or eps):
        return LINEAR
    rules = {**LINEAR.rules, **_affine_rules(gamma_lin, gamma_conv, eps, inside)}
    return RuleTable("cp-lrp", rules, parameters=affine_parameters(gamma_lin, gamma_conv, eps, inside))


def attnlrp(gamma_lin: float = 0.0, gamma_conv: float = 0.0, eps: float = 0.0, inside: bool = True) -> RuleTable:
    """Return AttnLRP's table with gamma and eps on affine layers, and eps at the products of the attention.

    Args:
        gamma_lin: How much more counts, in linear layers, what agrees in sign with the output.
        gamma_conv: The same for convolutions.
        eps: Takes relevance from outputs near zero.
        inside: Whether the rules hold for the projections of torch's own multi-head attention too.

    Returns:
        The table; `attnlrp` without parameters where nothing would differ from it.

    Example:
        >>> from clairvit.rules import attnlrp
        >>> str(attnlrp()), attnlrp(gamma_lin=0.05).name
        ('attnlrp', 'attnlrp')
    """
    if not (gamma_lin or gamma_conv or eps):
        return ATTNLRP
    rules = attnlrp_rules(gamma_lin, gamma_conv, eps, inside)
    return RuleTable("attnlrp", rules, parameters=affine_parameters(gamma_lin, gamma_conv, eps, inside))


def attnlrp_rules(gamma_lin: float, gamma_conv: float, eps: float, inside: bool) -> dict[str, Rule]:
    """Return the rules of `attnlrp` with these parameters."""
    rules = {**_ATTNLRP, **_affine_rules(gamma_lin, gamma_conv, eps, inside)}
    if eps:
        rules |= {
            "attention": stabilised_attention(eps),
            "mix": stabilised_weighted_values(eps),
            "softmax": stabilised_softmax(eps),
        }
    return rules


def affine_parameters(
    gamma_lin: float, gamma_conv: float, eps: float, inside: bool
) -> tuple[tuple[str, float | bool], ...]:
    """Return the parameters of rules for affine layers as a table holds them."""
    return (
        ("gamma_lin", float(gamma_lin)),
        ("gamma_conv", float(gamma_conv)),
        ("eps", float(eps)),
        ("inside", bool(inside)),
    )


def _affine_rules(gamma_lin: float, gamma_conv: float, eps: float, inside: bool) -> dict[str, Rule]:
    gammas = {"linear": gamma_lin, "conv": gamma_conv}
    return {role: gamma_rule(gamma, eps, inside) for role, gamma in gammas.items() if gamma or eps}
