"""Rule tables: swap the backward of an operation, keep its forward value.

A table is a frozen value: for a role that an operation plays ("norm", "activation", …) a small function from the call
and the incoming gradient to the gradients of its inputs. A role that a table does not name keeps its ordinary gradient,
so the table `plain` is empty. One forward graph serves all tables: the backward reads the `ActiveRuleTable`.

A backward always carries c = R / a, relevance over activation, so that gradient × input is relevance. Then views, sums,
means and scalings need no rule: their ordinary gradient is the proportional one.

Roles: norm, length, activation, gate, softmax, attention (fused), mix (explicit A v), product (gated), linear, conv,
add (two activations of one shape; the argument `residual` says whether it is a residual sum).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

# How the heads of a layer meet that are calls of their own: side by side, before one output projection; each by an
# output projection of its own; or added to the stream by turns.
HeadsJoin = Literal["concatenated", "projected", "added"]
Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False)
class Call:
    """One operation of the model: its inputs (detached), where its own graph ends, and its arguments."""

    inputs: tuple[Tensor, ...]
    end: GradientEdge  # a place in the graph, not the output itself: that would be 6 N d per block
    arguments: dict[str, Any]  # what the rules need: eps, weight, slope, scale, …
    function: Callable[..., Tensor]  # the operation itself, for rules that run it on other inputs
    kept: tuple[Tensor, int] | None = None  # of a linear layer: its output and the version of that

    @property
    def output(self) -> Tensor | None:
        """The output, if it was kept and the model has not written into it since; else None."""
        return None if self.kept is None or self.kept[0]._version != self.kept[1] else self.kept[0]

    def vjp(self, gradient: Tensor) -> Gradients:
        """Return the ordinary gradients of the inputs."""
        traced = [x for x in self.inputs if x.requires_grad]
        gradients = iter(torch.autograd.grad(self.end, traced, gradient, retain_graph=True, allow_unused=True))
        return tuple(next(gradients) if x.requires_grad else None for x in self.inputs)


Rule = Callable[[Call, Tensor], Gradients]
# Rule -> the places of the inputs to which it passes relevance, of rules that pass nothing on to some of them.
INPUTS_FOLLOWED: dict[Rule, tuple[int, ...]] = {}


def follows(*inputs: int) -> Callable[[Rule], Rule]:
    """Declare to which inputs of an operation a rule passes relevance; without it to all."""

    def declared(rule: Rule) -> Rule:
        INPUTS_FOLLOWED[rule] = inputs
        return rule

    return declared


@dataclass(frozen=True)
class RuleTable:
    """Role -> rule, under a name: a value, built by a function such as `attnlrp(gamma_lin=0.05)`; `str` is its text.

    Args:
        name: The name of the table, or of the function that built it.
        rules: Role of an operation -> the rule that takes the place of its gradient.
        unit: Relevance starts as 1 at the target, not as its score.
        parameters: Those that the function was called with.

    Example:
        >>> from clairvit.rules import attnlrp
        >>> str(attnlrp(gamma_lin=0.05)), attnlrp(gamma_lin=0.05) == attnlrp(gamma_lin=0.05)
        ('attnlrp(gamma_lin=0.05,gamma_conv=0.0,eps=0.0,inside=True)', True)
    """

    name: str
    rules: Mapping[str, Rule] = field(default_factory=dict, compare=False, repr=False)
    unit: bool = False
    parameters: tuple[tuple[str, float | bool], ...] = ()

    def __str__(self) -> str:
        inside = ",".join(f"{name}={value}" for name, value in self.parameters)
        return self.name + (f"({inside})" if inside else "")

    def __reduce__(self) -> Any:
        """Pickle a table of this package by its name and parameters: its rules are functions."""
        from clairvit.tracing.rules import BUILDERS, TABLES, named_table

        if (self.name in BUILDERS and self.parameters) or TABLES.get(self.name) is self:
            return named_table, (self.name, dict(self.parameters))
        return super().__reduce__()

    def is_the_same_in_parts(self, joined_by: HeadsJoin) -> bool:
        """Return whether heads that meet in this way get the relevance that they have behind one output projection.

        A rule for linear layers shares out relevance among the inputs of each layer, one for sums among their terms.
        """
        if joined_by == "concatenated":
            return True
        return "linear" not in self.rules and (joined_by == "projected" or "add" not in self.rules)


PLAIN = RuleTable("plain")


@dataclass(eq=False)
class ActiveRuleTable:
    """Which table the next backward follows: set by the recording before each backward, read by every call."""

    roles: frozenset[str]  # those that some table of the recording names: no other operation is wrapped
    table: RuleTable = PLAIN

    @staticmethod
    def among(tables: Iterable[RuleTable]) -> ActiveRuleTable | None:
        """Return a switch between tables; None where no table names a role, so that nothing need be wrapped."""
        roles = frozenset(role for table in tables for role in table.rules)
        if "factor" in roles:
            roles |= {"uncentred"}  # seen also where no table has a rule, so that it can be reported
        return ActiveRuleTable(roles) if roles else None


class _CustomBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, role: str, switch: ActiveRuleTable, call: Call, output: list[Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.role, ctx.switch, ctx.call = role, switch, call
        return output.pop()  # in a list: a tensor argument that is returned would be a view, and x.add_(…) forbidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rule = ctx.switch.table.rules.get(ctx.role)
        gradients = ctx.call.vjp(gradient) if rule is None else rule(ctx.call, gradient)
        return (None, None, None, None, *gradients)


def with_custom_backward(
    role: str,
    switch: ActiveRuleTable,
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    arguments: dict[str, Any],
) -> Tensor:
    """Return function(*inputs) with a backward that follows the switch; the inner graph is the operation's own."""
    if role not in switch.roles or not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return function(*inputs)
    with torch.enable_grad():
        detached = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        output = function(*detached)
        call = Call(detached, get_gradient_edge(output), arguments, function)
    if role == "linear":  # most of these are kept by the next operation anyway, so rules need not compute them again
        kept = (
            output.detach()
        )  # not the tensor that is returned: that one refers to the graph, which refers to the call
        call.kept = (kept, kept._version)
    return _CustomBackward.apply(role, switch, call, [output.detach()], *inputs)  # type: ignore[no-any-return]


def gelu_slope(z: Tensor, approximate: str = "none") -> Tensor:
    """Return Phi(z) as gelu(z) / z: half the time of erf, and as exact but at 0, where it is 1/2."""
    return F.gelu(z, approximate=approximate).div_(z).nan_to_num_(nan=0.5)
