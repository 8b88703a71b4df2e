"""The linearised model: vectors propagated forwards through the operations of an `OpLog`.

Attention, the std of norms, gates and the slope f(z)/z of activations are held at the values they had; all the rest of
a ViT is linear in the tokens. It is the rule table `linear`, run forwards: a sum of vectors stays a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from clairvit.errors import NotApplicable
from clairvit.numerics import widened
from clairvit.tracing import ops
from clairvit.tracing.attention_call import repeated, scaled_scores
from clairvit.tracing.recorders.op_log import Step, map_leaves


@dataclass(frozen=True, eq=False)
class PathStep:
    """A step on the linear path from one tensor to another, and those of its inputs that the path goes through."""

    step: Step
    carriers: tuple[Tensor, ...]


_SUMS = ops.SUMS | ops.DIFFERENCES
_IN_PLACE_DIFFERENCES = (Tensor.__isub__, Tensor.sub_)


def is_sum(step: Step) -> bool:
    """Return whether a step is a sum or difference."""
    return step.kind in _SUMS or step.function in _IN_PLACE_DIFFERENCES


def is_join(step: Step) -> bool:
    """Return whether a step concatenates or stacks tensors."""
    return step.kind in ops.JOINS


def linear_path(steps: Sequence[Step], start: Tensor | Sequence[Tensor], end: Tensor) -> list[PathStep]:
    """Return the steps that carry one `start`, or several, to `end`; nothing that is held fixed (scores, gates)."""
    starts = (start,) if isinstance(start, Tensor) else start
    reached, activations, path = set(map(id, starts)), set[int](), []
    for step in steps:
        if step.kind == ops.ACTIVATION or (step.held is not None and not step.holds_spread):
            activations.update(id(t) for t in step.outputs)
        carriers = _carriers(step, reached, activations)
        if carriers:
            path.append(PathStep(step, carriers))
            reached.update(id(t) for t in step.outputs)
    needed, links = {id(end)}, []
    for link in reversed(path):
        if any(id(t) in needed for t in link.step.outputs):
            needed.update(id(t) for t in link.carriers)
            links.append(link)
    return links[::-1]


def _carriers(step: Step, reached: set[int], activations: set[int]) -> tuple[Tensor, ...]:
    kind = step.kind
    if kind == ops.ATTENTION:
        inputs = [ops.attention_arguments(step.args, step.kwargs)["value"]]
    elif kind in (ops.LINEAR, ops.NORM, ops.ACTIVATION, ops.NORMALIZE, ops.CAST):
        inputs = [ops.first_argument(step.args, step.kwargs)]
    elif kind in (ops.VECTOR_NORM, ops.INVERSE_ROOT) or (kind in (ops.GATE, ops.SOFTMAX) and step.outputs[0].ndim >= 3):
        inputs = []
    else:
        inputs = list({id(t): t for t in step.inputs}.values())
    carriers = [t for t in inputs if id(t) in reached and t is not step.held]
    if kind == ops.MULTIPLY and len(carriers) == 2 and any(id(t) in activations for t in carriers):
        carriers = [t for t in carriers if id(t) not in activations]  # without the gate of a gated MLP
    return tuple(carriers)


def propagate(
    links: Sequence[PathStep],
    start: Tensor | Sequence[Tensor],
    vectors: Tensor | Sequence[Tensor],
    end: Tensor,
    *,
    spread: bool = True,
    stacked: bool = True,
) -> Tensor:
    """Return what `vectors` [S, *start] (one of them, [*start], if not `stacked`) become, without any bias.

    Where a path has several starts, there are vectors for each.
    """
    starts = (start,) if isinstance(start, Tensor) else start
    held = dict(zip(map(id, starts), (vectors,) if isinstance(vectors, Tensor) else vectors, strict=True))
    last = last_uses(links)
    for number, link in enumerate(links):
        inputs = tuple(held[id(t)] for t in link.carriers)
        outputs = applied(link, inputs, stacked=stacked, spread=spread)
        held.update({id(t): value for t, value in zip(link.step.outputs, outputs, strict=True)})
        for unused in [key for key in held if last.get(key, number) <= number and key != id(end)]:
            del held[unused]
    return held[id(end)]


def last_uses(links: Sequence[PathStep]) -> dict[int, int]:
    """Return the number of the last link that reads each tensor."""
    return {id(t): number for number, link in enumerate(links) for t in link.carriers}


def applied(link: PathStep, vectors: tuple[Tensor, ...], *, stacked: bool, spread: bool = True) -> tuple[Tensor, ...]:
    """Return the linear part of one step, on vectors in the place of its carriers."""
    _check(link)
    if not stacked:
        return _frozen(link, vectors, constant=False, spread=spread)
    if link.step.kind == ops.LINEAR:
        weight = ops.linear_arguments(link.step.args, link.step.kwargs)["weight"]
        return (_few_columns(vectors[0], weight),)
    return torch.func.vmap(lambda *vector: _frozen(link, vector, constant=False, spread=spread))(*vectors)


def _few_columns(vectors: Tensor, weight: Tensor) -> Tensor:
    """Return vectors [S, …, d] times weight [out, d]ᵀ; each with few nonzero columns (one head) by those alone."""
    alive = vectors.flatten(1, -2).any(1)  # [S, d]
    most = int(alive.sum(1).max())
    if most > weight.shape[1] // 2:
        return F.linear(vectors, weight)
    columns = alive.to(torch.uint8).topk(max(most, 1), dim=1).indices  # [S, most]; zero columns do no harm
    narrow = vectors.flatten(1, -2).gather(2, columns[:, None].expand(-1, vectors[0, ..., 0].numel(), -1))
    return (narrow @ weight.T[columns]).view(*vectors.shape[:-1], -1)


def shifted(link: PathStep, constants: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the step itself on other carriers, biases included, with what makes it nonlinear held fixed."""
    _check(link)
    return _frozen(link, constants, constant=True, spread=True)


def _check(link: PathStep) -> None:
    step = link.step
    name = getattr(step.function, "__name__", str(step.function))
    if step.stale:
        raise NotApplicable(
            f"The model overwrites a tensor that '{name}' has read, so what happens inside its blocks cannot be "
            "followed; expected x = x + … and no writing into slices.",
            alternative="a gradient method",
        )
    several = len(link.carriers) > 1 and not is_sum(step) and not is_join(step)
    if several or step.kind in (ops.GATE, ops.SOFTMAX):
        raise NotApplicable(
            f"The model goes through '{name}', which is not linear in the tokens and has no rule here; expected "
            "sums, linear layers, norms, activations and attention.",
            alternative="a gradient method",
        )


def _frozen(link: PathStep, new: tuple[Tensor, ...], *, constant: bool, spread: bool) -> tuple[Tensor, ...]:
    step, kind = link.step, link.step.kind
    if kind == ops.LINEAR:
        call = ops.linear_arguments(step.args, step.kwargs)
        return (F.linear(new[0], call["weight"], call.get("bias") if constant else None),)
    if kind == ops.NORM:
        return (Norm.of(step).linear(new[0], spread=spread, shift=constant),)
    if kind == ops.ACTIVATION or step.function in ops.HOMOGENEOUS:
        return (new[0] * (step.outputs[0] / link.carriers[0]).nan_to_num(nan=0.5),)  # at 0 GELU and SiLU: 1/2
    if kind == ops.NORMALIZE:
        norm = ops.NormalizeArguments.of(step.args, step.kwargs)
        return (new[0] / link.carriers[0].norm(norm.p, norm.dim, keepdim=True).clamp_min(norm.eps),)
    if kind == ops.ATTENTION:
        A = attention_of(step)
        v = repeated(new[0], A)
        return (A.to(v.dtype) @ v,)
    if constant:
        return rerun(step, dict(zip(map(id, link.carriers), new, strict=True)))
    return _without_constants(link, new)


def _without_constants(link: PathStep, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    step = link.step
    fresh = dict(zip(map(id, link.carriers), new, strict=True))
    if _passes_on(link, new[0]):
        return (new[0],)
    if is_sum(step) or is_join(step):  # the other terms are constants: nothing is left of them
        others = {id(t): torch.zeros_like(t) for t in step.inputs if id(t) not in fresh}
        return rerun(step, others | fresh, number=0 if is_sum(step) else None)
    outputs = rerun(step, fresh)
    if step.function in ops.REARRANGEMENTS:
        return outputs
    if step.kind == ops.MULTIPLY:  # by a constant: LayerScale
        return outputs
    at_zero = rerun(step, {id(t): torch.zeros_like(t) for t in link.carriers})
    return tuple(a - b for a, b in zip(outputs, at_zero, strict=True))


def _passes_on(link: PathStep, new: Tensor) -> bool:
    """Return whether a step passes its carrier on: as a sum with constants of its shape, or dropout that is off."""
    step = link.step
    if step.function is F.dropout:
        return not (step.args[2] if len(step.args) > 2 else step.kwargs.get("training", True))
    is_plain = step.kind in ops.SUMS and len(link.carriers) == 1 and "alpha" not in step.kwargs
    out = step.outputs[0]
    return is_plain and out.shape == link.carriers[0].shape and out.dtype == new.dtype


def rerun(step: Step, fresh: dict[int, Tensor], number: float | None = None) -> tuple[Tensor, ...]:
    """Run the step on other tensors in the place of some, and another number where it adds one."""

    def replaced(leaf: Any) -> Any:
        return fresh.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

    args = map_leaves(replaced, step.args)
    if number is not None:
        args = tuple(number if isinstance(a, int | float) else a for a in args)
    kwargs = {name: map_leaves(replaced, value) for name, value in step.kwargs.items() if name != "inplace"}
    output = ops.out_of_place(step.function)(*args, **kwargs)
    return tuple(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor))


def attention_of(step: Step) -> Tensor:
    """Return A of a fused call, [..., queries, keys]."""
    call = ops.attention_arguments(step.args, step.kwargs)
    q, k = call["query"], call["key"]
    mask = ops.causal_mask(q, k) if call.get("is_causal") else call.get("attn_mask")
    return scaled_scores(q, repeated(k, q), ops.attention_scale(q, call.get("scale")), mask).softmax(-1)


@dataclass(frozen=True, eq=False)
class Norm:
    """weight · (x - mean) / sigma + bias, sigma held at what it was; RMSNorm does not centre."""

    x: Tensor  # its input
    axes: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool
    spread: Tensor | None = None  # 1/sigma, where it is known

    @staticmethod
    def of(step: Step) -> Norm:
        """Return the norm that a step computes."""
        if step.function is ops.written_norm:
            x, spread, weight, bias, axes = step.args
            over = axes or tuple(range(-x.ndim, 0))
            return Norm(x, over, weight, bias, 0.0, bool(axes), spread.value)
        call = ops.NormArguments.of(step.function, step.args, step.kwargs)
        axes = tuple(range(-len(call.shape), 0))
        return Norm(call.x, axes, call.weight, call.bias, call.eps, call.centred)

    @property
    def inverse_spread(self) -> Tensor:
        """1/sigma, one number per token."""
        if self.spread is not None:
            return widened(self.spread)
        x = widened(self.x)
        centred = x - x.mean(self.axes, keepdim=True) if self.centred else x
        return (centred.square().mean(self.axes, keepdim=True) + self.eps).rsqrt()

    def linear(self, x: Tensor, *, spread: bool = True, shift: bool = False) -> Tensor:
        """Return the norm as a linear map of x; without `spread` as if sigma were 1, with `shift` its bias too."""
        if self.centred:
            x = x - x.mean(self.axes, keepdim=True)
        if spread:
            x = x * self.inverse_spread.to(x.dtype)
        if self.weight is not None:
            x = x * self.weight.to(x.dtype)
        return x + self.bias if shift and self.bias is not None else x
