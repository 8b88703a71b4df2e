"""Rule tables: swap the backward of an operation, keep its forward value.

A table is data: for a role an operation plays ("norm", "activation", …) a small function from the call and the incoming
gradient to the gradients of its inputs. A role that a table does not name keeps its ordinary gradient, so the table
`plain` is empty. One forward graph serves all tables: the backward asks the `Switch` which one is on.

What a backward carries is always c = R / a, relevance over activation, so that gradient × input reads relevance. Then
views, sums, means and scalings need no rule: their ordinary gradient is the proportional one.

`residual` is the plain gradient without the ways through attention: what reaches a layer came down the residual stream.
With gradient × input, `linear` is DecompX without bias (= CP-LRP at eps 0) and `attnlrp` is AttnLRP at eps 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from clairvit.tracing.attention import scaled_scores

Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False)
class Call:
    """One operation the model made: its inputs (cut from the graph), where its own graph ends, and its arguments."""

    inputs: tuple[Tensor, ...]
    end: GradientEdge  # a place in the graph, not the output itself: that would be 6 N d a block, kept for nothing
    arguments: dict[str, Any]  # what the rules need: eps, weight, slope, scale, …
    function: Callable[..., Tensor]  # the operation itself, for rules that run it on other inputs

    def vjp(self, gradient: Tensor) -> Gradients:
        """The ordinary gradient of the inputs."""
        wanted = [x for x in self.inputs if x.requires_grad]
        found = iter(torch.autograd.grad(self.end, wanted, gradient, retain_graph=True, allow_unused=True))
        return tuple(next(found) if x.requires_grad else None for x in self.inputs)


Rule = Callable[[Call, Tensor], Gradients]


def layernorm_detach_std(call: Call, gradient: Tensor) -> Gradients:
    """LayerNorm or RMSNorm with its 1/std held fixed: only centring and the affine part pass the gradient on."""
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
    """x / ||x|| with the length held fixed."""
    return (gradient * call.arguments["inverse_length"](call.inputs[0]),)


def activation_secant(call: Call, gradient: Tensor) -> Gradients:
    """f(z) = z · r(z) with r held fixed."""
    return (gradient * call.arguments["slope"](call.inputs[0]),)


def zero_gradient(call: Call, gradient: Tensor) -> Gradients:
    """A gate, a softmax, a length: its value counts, how it came about does not."""
    return (None,) * len(call.inputs)


def detach_attention(call: Call, gradient: Tensor) -> Gradients:
    """Attention held fixed: O = A v passes the gradient to v alone."""
    q, k, _, *mask = call.inputs
    A = scaled_scores(q, k, call.arguments["scale"], call.arguments["mask"]).softmax(-1)
    return (None, None, A.transpose(-2, -1).to(gradient.dtype) @ gradient, *(None for _ in mask))


def uniform_half_attention(call: Call, gradient: Tensor) -> Gradients:
    """Each of the two matmuls gives each factor half: v once (1/2), q and k twice (1/4), and a mask as they."""
    q, k, v, *mask = call.vjp(gradient)
    return (_times(q, 0.25), _times(k, 0.25), _times(v, 0.5), *(_times(g, 0.25) for g in mask))


def uniform_half(call: Call, gradient: Tensor) -> Gradients:
    """A product of two activations gives each factor half; for a softmax, the half of the q kᵀ that fed it."""
    return tuple(_times(g, 0.5) for g in call.vjp(gradient))


def detach_gate(call: Call, gradient: Tensor) -> Gradients:
    """gate * x with the gate held fixed (the gate is the first input)."""
    return (None, call.vjp(gradient)[1])


def _times(gradient: Tensor | None, factor: float) -> Tensor | None:
    return None if gradient is None else gradient * factor


# Roles: norm, length, activation, gate, softmax, attention (fused), mix (explicit A v), product (gated), linear, conv,
# add (two activations of one shape)
_FROZEN: dict[str, Rule] = {
    "norm": layernorm_detach_std,
    "length": l2_normalize_detach_norm,
    "activation": activation_secant,
    "gate": zero_gradient,
}


@dataclass(frozen=True)
class RuleTable:
    """role -> rule. `unit`: relevance starts as 1 at the target, not as its score."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    unit: bool = False


TABLES: dict[str, RuleTable] = {
    "plain": RuleTable(),
    "linear": RuleTable({**_FROZEN, "softmax": zero_gradient, "attention": detach_attention, "product": detach_gate}),
    "residual": RuleTable({"attention": zero_gradient, "mix": zero_gradient}),
    "attnlrp": RuleTable(
        {
            **_FROZEN,
            "softmax": uniform_half,
            "attention": uniform_half_attention,
            "mix": uniform_half,
            "product": uniform_half,
        }
    ),
}


# Tables with numbers in them: name -> a function of these. "attnlrp(eps=0.01)" is the table that it makes.
PARAMETRIC_TABLES: dict[str, Callable[..., RuleTable]] = {}


def rule_table(name: str) -> RuleTable:
    """The table of a name: one of TABLES, or one of MADE with its numbers."""
    base, _, inside = name.removesuffix(")").partition("(")
    if not inside:
        return TABLES[base]
    pairs = (item.split("=") for item in inside.split(","))
    return PARAMETRIC_TABLES[base](**{key: float(value) for key, value in pairs})


@dataclass(eq=False)
class Switch:
    """Which table the next backward uses. Set by the recording around each backward, read by every swapped call."""

    roles: frozenset[str]  # those that some table of the recording names: no other operation is swapped
    table: RuleTable = field(default_factory=RuleTable)

    @staticmethod
    def among(tables: Sequence[str]) -> Switch | None:
        """None where no table names a role, so that nothing need be swapped."""
        roles = frozenset(role for name in tables for role in rule_table(name).rules)
        return Switch(roles) if roles else None


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, role: str, switch: Switch, call: Call, output: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.role, ctx.switch, ctx.call = role, switch, call
        return output.pop()  # in a list: a tensor argument that is returned would be a view, and x.add_(…) forbidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rule = ctx.switch.table.rules.get(ctx.role)
        gradients = ctx.call.vjp(gradient) if rule is None else rule(ctx.call, gradient)
        return (None, None, None, None, *gradients)


def with_custom_backward(
    role: str, switch: Switch, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], arguments: dict[str, Any]
) -> Tensor:
    """function(*inputs) with a backward that follows the switch. The inner graph is the operation's own."""
    if role not in switch.roles or not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return function(*inputs)
    with torch.enable_grad():
        cut = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        output = function(*cut)
        call = Call(cut, get_gradient_edge(output), arguments, function)
    return _Swapped.apply(role, switch, call, [output.detach()], *inputs)  # type: ignore[no-any-return]


def gelu_slope(z: Tensor, approximate: str = "none") -> Tensor:
    """Phi(z) as gelu(z) / z: half the time of erf, and as exact but at 0, where it is 1/2."""
    return F.gelu(z, approximate=approximate).div_(z).nan_to_num_(nan=0.5)
