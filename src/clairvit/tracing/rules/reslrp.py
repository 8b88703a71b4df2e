"""ResLRP: AttnLRP with a rule for residual sums that bounds how much relevance cancellation amplifies.

z_out = z_in + z_up elementwise. In proportion, R_in = z_in / z_out · R_out and R_up = z_up / z_out · R_out are large
with opposite signs wherever z_in and z_up cancel. ResLRP counts a term that has the sign of the sum 1 + gamma times:

    w = 1 + gamma · [z · z_out > 0],   R_in = w_in z_in / (w_in z_in + w_up z_up) · R_out,   R_up likewise.

R_in + R_up = R_out, and |R_in| + |R_up| ≤ (1 + 2 / gamma) |R_out|. For c = R / a: c_in = w_in · z_out / (w_in z_in +
w_up z_up) · c_out, a factor between 0 and 1, so that nothing grows. gamma = 0 is AttnLRP.

Only residual sums have the rule (`clairvit.tracing.residual_sums`): a position embedding or a bias is a constant added
to the stream, no branch of it, and keeps AttnLRP's proportional share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clairvit.numerics import widened
from clairvit.tracing.rules.attnlrp import ATTNLRP, affine_parameters, attnlrp, attnlrp_rules
from clairvit.tracing.rules.table import Call, Gradients, Rule, RuleTable


def residual_factors(terms: tuple[Tensor, Tensor], gamma: float) -> tuple[Tensor, Tensor]:
    """Return w_in · z_out / (w_in z_in + w_up z_up), and the same for z_up: what c_out is multiplied by.

    The denominator is 0 only where z_out is, and R_out = z_out c_out is 0 there. If the terms cancel, the limit of both
    factors is 0 (for gamma > 0); if both are 0, the factor is 1, as for two equal terms of any size.
    """
    z_out = terms[0] + terms[1]
    first, second = (1 + gamma * (z.sign() * z_out.sign() > 0).to(z) for z in terms)
    scale = torch.where(z_out == 0, (terms[0] == 0).to(z_out), z_out / (first * terms[0] + second * terms[1]))
    return first * scale, second * scale


def residual_rule(gamma: float) -> Rule:
    """Return the rule of a residual sum; other sums of activations keep their ordinary gradient."""

    def rule(call: Call, c: Tensor) -> Gradients:
        if not call.arguments["residual"]:
            return call.vjp(c)
        factors = residual_factors((widened(call.inputs[0]), widened(call.inputs[1])), gamma)
        return tuple((c * factor).to(x.dtype) for x, factor in zip(call.inputs, factors, strict=True))

    return rule


RESLRP = RuleTable("reslrp", {**ATTNLRP.rules, "add": residual_rule(1.0)})


def reslrp(
    gamma: float = 1.0, gamma_lin: float = 0.0, gamma_conv: float = 0.0, eps: float = 0.0, inside: bool = True
) -> RuleTable:
    """Return AttnLRP's table with the residual rule at residual sums.

    Args:
        gamma: How much more counts, in a residual sum, the term that has the sign of the sum; 0 is AttnLRP.
        gamma_lin: As for `attnlrp`, like the rest.
        gamma_conv: The same for convolutions.
        eps: Takes relevance from outputs near zero.
        inside: Whether the rules hold for the projections of torch's own multi-head attention too.

    Returns:
        The table; one without parameters where nothing would differ from it.

    Example:
        >>> from clairvit.rules import reslrp
        >>> str(reslrp()), str(reslrp(gamma=0)), reslrp(gamma=2).name
        ('reslrp', 'attnlrp', 'reslrp')
    """
    if not gamma:
        return attnlrp(gamma_lin, gamma_conv, eps, inside)
    if gamma == 1 and not (gamma_lin or gamma_conv or eps):
        return RESLRP
    rules = {**attnlrp_rules(gamma_lin, gamma_conv, eps, inside), "add": residual_rule(gamma)}
    parameters = (("gamma", float(gamma)), *affine_parameters(gamma_lin, gamma_conv, eps, inside))
    return RuleTable("reslrp", rules, parameters=parameters)
