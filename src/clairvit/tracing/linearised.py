"""The linear part of what a model did: vectors carried through a film of its operations, forwards.

Attention, the spread of norms, gates and the slope f(z)/z of activations are held at the values they had; all the rest
of a ViT is linear in the tokens. It is the rule table `linear`, run forwards: what came in as a sum comes out as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from clairvit.errors import NotApplicable
from clairvit.tracing.attention import repeated, scaled_scores
from clairvit.tracing.capture import role
from clairvit.tracing.recorders.op_log import Step, renew

# Written over their input by the model; the vectors that are carried need a fresh one. A view may be of another layout.
_FRESH: dict[Any, Any] = {
    Tensor.__iadd__: torch.add,
    Tensor.add_: torch.add,
    Tensor.__isub__: torch.sub,
    Tensor.sub_: torch.sub,
    Tensor.__imul__: torch.mul,
    Tensor.mul_: torch.mul,
    Tensor.__itruediv__: torch.div,
    Tensor.div_: torch.div,
    Tensor.view: Tensor.reshape,
    F.relu_: F.relu,
    torch.relu_: torch.relu,
}
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__)
_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.stack)
_HOMOGENEOUS = (F.relu, torch.relu, Tensor.relu, F.leaky_relu, F.relu6)  # activations without a rule of their own


@dataclass(frozen=True, eq=False)
class PathStep:
    """A step on the way from one tensor to another, and those of its inputs that the way goes through."""

    step: Step
    carriers: tuple[Tensor, ...]


def is_sum(step: Step) -> bool:
    return _FRESH.get(step.function, step.function) in _SUMS


def is_join(step: Step) -> bool:
    return step.function in _JOINS


def linear_path(steps: Sequence[Step], start: Tensor, end: Tensor) -> list[PathStep]:
    """The steps that carry `start` to `end`; nothing that is held fixed (scores, gates) is among them."""
    reached, active, links = {id(start)}, set[int](), []
    for step in steps:
        found = role(step.function)
        if found == "activation":
            active.update(id(t) for t in step.made)
        carriers = _carriers(step, found, reached, active)
        if carriers:
            links.append(PathStep(step, carriers))
            reached.update(id(t) for t in step.made)
    wanted, own = {id(end)}, []
    for link in reversed(links):
        if any(id(t) in wanted for t in link.step.made):
            wanted.update(id(t) for t in link.carriers)
            own.append(link)
    return own[::-1]


def _carriers(step: Step, found: str | None, reached: set[int], active: set[int]) -> tuple[Tensor, ...]:
    if found == "fused":
        own = [step.argument(2, "value")]
    elif found in ("linear", "norm", "activation", "normalise"):
        own = [step.argument(0, "input")]
    elif found == "length" or (found in ("gate", "softmax") and step.made[0].ndim >= 3):
        own = []
    else:
        own = list({id(t): t for t in step.given}.values())
    own = [t for t in own if id(t) in reached]
    if found == "multiply" and len(own) == 2 and any(id(t) in active for t in own):
        own = [t for t in own if id(t) not in active]  # the gate of a gated MLP
    return tuple(own)


def propagate(
    links: Sequence[PathStep], start: Tensor, vectors: Tensor, end: Tensor, *, spread: bool = True, stacked: bool = True
) -> Tensor:
    """What `vectors` [S, *start] (one of them, [*start], if not `stacked`) become on the way, without any bias."""
    held = {id(start): vectors}
    last = last_uses(links)
    for number, link in enumerate(links):
        given = tuple(held[id(t)] for t in link.carriers)
        made = applied(link, given, stacked=stacked, spread=spread)
        held.update({id(t): value for t, value in zip(link.step.made, made, strict=True)})
        for gone in [key for key in held if last.get(key, number) <= number and key != id(end)]:
            del held[gone]
    return held[id(end)]


def last_uses(links: Sequence[PathStep]) -> dict[int, int]:
    """The last link that reads each tensor."""
    return {id(t): number for number, link in enumerate(links) for t in link.carriers}


def applied(link: PathStep, vectors: tuple[Tensor, ...], *, stacked: bool, spread: bool = True) -> tuple[Tensor, ...]:
    """The linear part of one step, on vectors in the place of its carriers."""
    _check(link)
    if not stacked:
        return _frozen(link, vectors, constant=False, spread=spread)
    if role(link.step.function) == "linear":
        return (_few_columns(vectors[0], link.step.argument(1, "weight")),)
    return torch.func.vmap(lambda *one: _frozen(link, one, constant=False, spread=spread))(*vectors)


def _few_columns(vectors: Tensor, weight: Tensor) -> Tensor:
    """vectors [S, …, d] times weight [out, d]ᵀ; where each has few columns that are not zero (one head), only those."""
    alive = vectors.flatten(1, -2).any(1)  # [S, d]
    most = int(alive.sum(1).max())
    if most > weight.shape[1] // 2:
        return F.linear(vectors, weight)
    columns = alive.to(torch.uint8).topk(max(most, 1), dim=1).indices  # [S, few]; a zero column more does no harm
    few = vectors.flatten(1, -2).gather(2, columns[:, None].expand(-1, vectors[0, ..., 0].numel(), -1))
    return (few @ weight.T[columns]).view(*vectors.shape[:-1], -1)


def shifted(link: PathStep, constants: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The step itself, biases and all, with what it makes nonlinear held fixed."""
    _check(link)
    return _frozen(link, constants, constant=True, spread=True)


def _check(link: PathStep) -> None:
    step, found = link.step, role(link.step.function)
    name = getattr(step.function, "__name__", str(step.function))
    if step.stale:
        raise NotApplicable(
            f"The model overwrites a tensor that '{name}' has read, so what happens inside its blocks cannot be "
            "followed; expected x = x + … and no writing into slices. Use a gradient method: ixg or decompx."
        )
    several = len(link.carriers) > 1 and not is_sum(step) and not is_join(step)
    if several or found in ("gate", "softmax"):
        raise NotApplicable(
            f"The model goes through '{name}', which is not linear in the tokens and has no rule here; expected "
            "sums, linear layers, norms, activations and attention. Use a gradient method: ixg or decompx."
        )


def _frozen(link: PathStep, new: tuple[Tensor, ...], *, constant: bool, spread: bool) -> tuple[Tensor, ...]:
    step, found = link.step, role(link.step.function)
    if found == "linear":
        bias = step.argument(2, "bias") if constant else None
        return (F.linear(new[0], step.argument(1, "weight"), bias),)
    if found == "norm":
        return (Norm.of(step).linear(new[0], spread=spread, shift=constant),)
    if found == "activation" or step.function in _HOMOGENEOUS:
        return (new[0] * (step.made[0] / link.carriers[0]).nan_to_num(nan=0.5),)  # at 0 GELU and SiLU have slope 1/2
    if found == "normalise":
        p, dim, eps = step.argument(1, "p", 2.0), step.argument(2, "dim", 1), step.argument(3, "eps", 1e-12)
        return (new[0] / link.carriers[0].norm(p, dim, keepdim=True).clamp_min(eps),)
    if found == "fused":
        A = attention_of(step)
        v = repeated(new[0], A)
        return (A.to(v.dtype) @ v,)
    if constant:
        return rerun(step, dict(zip(map(id, link.carriers), new, strict=True)))
    return _without_constants(link, new)


def _without_constants(link: PathStep, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    step = link.step
    fresh = dict(zip(map(id, link.carriers), new, strict=True))
    if is_sum(step) or is_join(step):  # the other terms are constants: nothing is left of them
        others = {id(t): torch.zeros_like(t) for t in step.given if id(t) not in fresh}
        return rerun(step, others | fresh, number=0 if is_sum(step) else None)
    made = rerun(step, fresh)
    nothing = rerun(step, {id(t): torch.zeros_like(t) for t in link.carriers})
    return tuple(a - b if bool(b.any()) else a for a, b in zip(made, nothing, strict=True))


def rerun(step: Step, fresh: dict[int, Tensor], number: float | None = None) -> tuple[Tensor, ...]:
    """The step again, with other tensors in the place of some, and another number where it adds one."""

    def renewed(leaf: Any) -> Any:
        return fresh.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

    args = renew(renewed, step.args)
    if number is not None:
        args = tuple(number if isinstance(a, int | float) else a for a in args)
    kwargs = {name: renew(renewed, value) for name, value in step.kwargs.items() if name != "inplace"}
    function: Callable[..., Any] = _FRESH.get(step.function, step.function)
    return tuple(leaf for leaf in tree_flatten(function(*args, **kwargs))[0] if isinstance(leaf, Tensor))


def attention_of(step: Step) -> Tensor:
    """A of a fused call, [..., queries, keys]."""
    q, k, mask = step.argument(0, "query"), step.argument(1, "key"), step.argument(3, "attn_mask")
    if step.argument(5, "is_causal", False):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scale = step.kwargs.get("scale")
    return scaled_scores(q, repeated(k, q), q.shape[-1] ** -0.5 if scale is None else scale, mask).softmax(-1)


@dataclass(frozen=True, eq=False)
class Norm:
    """weight · (x - mean) / sigma + bias, sigma held at what it was; RMSNorm does not centre."""

    x: Tensor  # what it was given
    axes: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    @staticmethod
    def of(step: Step) -> Norm:
        centred = step.function in (F.layer_norm, torch.layer_norm)
        x, shape = step.argument(0, "input"), step.argument(1, "normalized_shape")
        eps = step.argument(4 if centred else 3, "eps")
        usual = 1e-5 if centred else torch.finfo(x.dtype).eps
        return Norm(
            x=x,
            axes=tuple(range(-len(shape), 0)),
            weight=step.argument(2, "weight"),
            bias=step.argument(3, "bias") if centred else None,
            eps=usual if eps is None else eps,
            centred=centred,
        )

    @property
    def inverse_spread(self) -> Tensor:
        """1/sigma, one number for each token."""
        x = self.x if self.x.dtype.itemsize >= 4 else self.x.float()
        own = x - x.mean(self.axes, keepdim=True) if self.centred else x
        return (own.square().mean(self.axes, keepdim=True) + self.eps).rsqrt()

    def linear(self, x: Tensor, *, spread: bool = True, shift: bool = False) -> Tensor:
        """The norm as a linear map of x; without `spread` as if sigma were 1, with `shift` its bias too."""
        if self.centred:
            x = x - x.mean(self.axes, keepdim=True)
        if spread:
            x = x * self.inverse_spread.to(x.dtype)
        if self.weight is not None:
            x = x * self.weight.to(x.dtype)
        return x + self.bias if shift and self.bias is not None else x
