"""Decomposition of a block: the residual stream after attention, and what each token's value adds to it.

x_mid = x + g(O), O = A v. From the `OpLog` of the block: x_mid is the first sum after the attention that the block's
input is a term of; what one head's values add is the linear part of the path from O to x_mid; and the values without
bias are the linear part of the path from x to v. No library is known by name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.numerics import equal_along, widened
from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall, equally_wide
from clairvit.tracing.capture import Capture
from clairvit.tracing.linearised import Norm, PathStep, is_sum, linear_path, propagate, rerun
from clairvit.tracing.recorders.op_log import OpLog, Step
from clairvit.tracing.recorders.residual import no_residual
from clairvit.tracing.recording import Recording

Norms = Literal["none", "next", "attention", "block"]
_SAME = ("view", "reshape", "flatten", "unflatten", "contiguous", "clone", "dropout", "to", "float")  # same tokens


@dataclass(frozen=True, eq=False)
class Vectors:
    """T_ij = scale_i · (sum_h A_ij^h f_j^h / sigma_i + delta_ij x_i): what token j adds to token i.

    `spread` is 1/sigma of norms between the attention and the residual (1 where there is none), `scale` that of norms
    that the sum goes through.
    """

    f: Tensor  # [B, H, N, d], in half precision where the model is and no norm follows
    x: Tensor  # [B, N, d]
    spread: Tensor  # [B, N, 1]
    scale: Tensor  # [B, N, 1]


@dataclass(frozen=True, eq=False)
class BlockDecomposition:
    """One block with attention between all tokens and a residual around it."""

    recording: Recording
    call: AttentionCall
    steps: tuple[Step, ...]  # from the block's input to the next block's
    start: Tensor  # the block's input, as the model shapes it
    attended: tuple[Tensor, ...]  # O; several tensors where heads are calls of their own
    to_values: tuple[tuple[PathStep, ...], ...]  # for each of these tensors; the last step is the attention
    to_sum: tuple[PathStep, ...]  # the last of them is the sum with the block's input
    after: tuple[Step, ...]  # the steps after that sum
    _cache: dict[bool, Tensor] = field(default_factory=dict)  # what heads add, without and with the bias of values

    @staticmethod
    def of(recording: Recording, index: int) -> BlockDecomposition:
        """Return the decomposition of a layer's block; raise NotApplicable if it has no such residual."""
        log = recording[OpLog]
        block, attended = log.attention_outputs[index]
        if recording.inputs[index] is None:
            raise no_residual(index)
        start, first = log.block_inputs[block]
        following = min((i for b, (_, i) in enumerate(log.block_inputs) if b > block and i > first), default=None)
        steps = log.steps[first:]
        places = [_place_of(steps, output) for output in attended]
        total = next((i for i, step in enumerate(steps) if i > max(places) and _is_residual(step, start)), None)
        if total is None or min(places) < 0:
            raise no_residual(index)
        to_values = [linear_path(steps[: at + 1], start, out) for at, out in zip(places, attended, strict=True)]
        if any(len(path) == 0 or len(path[-1].carriers) != 1 for path in to_values):
            raise no_residual(index)
        to_sum = linear_path(steps[min(places) + 1 : total + 1], attended, steps[total].outputs[0])
        if not to_sum or not _stands_alone(to_sum, dependent(log.steps[: first + total + 1], start), start):
            raise no_residual(index)
        end = None if following is None else following - first
        return BlockDecomposition(
            recording,
            recording.calls[index],
            tuple(steps[:end]),
            start,
            attended,
            tuple(map(tuple, to_values)),
            tuple(to_sum),
            tuple(steps[total + 1 : end]),
        )

    @property
    def total(self) -> Tensor:
        """x_mid as the model shapes it."""
        return self.to_sum[-1].step.outputs[0]

    @functools.cached_property
    def x_mid(self) -> Tensor:
        """The residual stream after attention, [B, N, d]."""
        return widened(self.recording.as_tokens(self.total))

    def values(self, *, bias: bool) -> Tensor:
        """Return v [B, H, N, dh]; without bias it is the linear part of the path from x: v minus W_v beta + b_v."""
        if bias:
            return self.call.v.detach()
        values = [self._values_without_bias(path) for path in self.to_values]
        return torch.cat(equally_wide(values), 1) if len(values) > 1 else values[0]

    def _values_without_bias(self, path: tuple[PathStep, ...]) -> Tensor:
        """Return v [B, h, N, dh] of the heads that one attention call computes."""
        *before, attention = path
        (value,) = attention.carriers
        plain = self.start if value is self.start else propagate(before, self.start, self.start, value, stacked=False)
        if plain.shape == self.call.v.shape and value.data_ptr() == self.call.v.data_ptr():
            return plain  # the model's v has the common form already
        capture = Capture(len(self.recording.pixels))
        with capture:  # how the model's v becomes [B, H, N, dh] is known to the capture
            weights = [t for t in attention.step.inputs if t is not value]
            stand_ins = (
                {}
                if attention.step.kind == ops.ATTENTION
                else {id(t): torch.zeros_like(t).softmax(-1) for t in weights}
            )
            rerun(attention.step, {**stand_ins, id(value): plain})
        return capture.calls[0].v

    @functools.cached_property
    def spread(self) -> Tensor:
        """1/sigma of the norms between O and x_mid, [B, N, 1]."""
        norms = [Norm.of(link.step) for link in self.to_sum if link.step.kind == ops.NORM]
        return self._scale(norms)

    def vectors(self, *, value_bias: bool = False, ln: Norms = "none") -> Vectors:
        """Return f and x of T, after the linear part of the norms `ln`."""
        f, x = self._added(value_bias), widened(self.recording.as_tokens(self.start))
        norms = self.norms(ln)
        for norm in norms:
            f, x = norm.linear(widened(f), spread=False), norm.linear(x, spread=False)
        return Vectors(f, x, self.spread, self._scale(norms))

    def _added(self, value_bias: bool) -> Tensor:
        """Return what each head's values add to x_mid, [B, H, N, d]; cached for all methods."""
        if value_bias not in self._cache:
            added = self._carried_heads(self.values(bias=value_bias))  # [H, as x_mid]
            self._cache[value_bias] = torch.func.vmap(self.recording.as_tokens)(added).transpose(0, 1)
        return self._cache[value_bias]

    def _carried_heads(self, v: Tensor) -> Tensor:
        """Return what each head adds, [B, H, N, dh] -> [H, as x_mid]: one head at a time on the path from O to x_mid.

        Where the path begins with a linear layer (the output projection), each head meets its own columns alone.
        """
        projected = self._projected_heads(v)
        if projected is not None:
            at, heads = projected
            output = self.to_sum[at].step.outputs[0]
            return propagate(self.to_sum[at + 1 :], output, heads, self.total, spread=False)
        alone = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)[:, None, :, None, None] * v  # [H, B, H, N, dh]
        placed = torch.func.vmap(self._as_attended)(alone)
        return propagate(self.to_sum, self.attended, placed, self.total, spread=False)

    def _as_attended(self, heads: Tensor) -> tuple[Tensor, ...]:
        """Return [B, H, N, dh] as the model shapes O: the heads' form is a rearrangement, so this is its transpose."""
        attended = tuple(output.to(heads.dtype) for output in self.attended)
        tensors: tuple[Tensor, ...] = torch.func.vjp(lambda *outputs: self.call.heads(outputs), *attended)[1](heads)
        return tensors

    def _projected_heads(self, v: Tensor) -> tuple[int, Tensor] | None:
        """Return the place of the linear layer at the beginning of the path to x_mid, and its output for each head.

        [H, …, d]. None where there is none, or where a head is not the same columns of its input for every token.
        """
        at = next((i for i, link in enumerate(self.to_sum) if link.step.function not in ops.REARRANGEMENTS), None)
        if at is None or self.to_sum[at].step.kind != ops.LINEAR:
            return None
        if not _is_chain(self.to_sum[at:]):
            return None  # O goes into several layers, the outputs of which are joined or summed
        before, (linear_input,), step = self.to_sum[:at], self.to_sum[at].carriers, self.to_sum[at].step
        heads, width = v.shape[1], v.shape[3]
        if linear_input.shape[-1] != heads * width or linear_input.numel() != v.numel():
            return None

        def as_input(values: Tensor) -> Tensor:
            """Return [B, H, N, dh] as rows of the layer's input, [rows, H·dh]."""
            start = self._as_attended(values)
            moved = propagate(before, self.attended, start, linear_input, stacked=False)
            return moved.flatten(0, -2)

        numbers = torch.arange(heads * width, dtype=torch.float32, device=v.device)  # of each head's each column
        numbers = as_input(numbers.view(1, heads, 1, width).expand(v.shape))  # [rows, H·dh]
        if not equal_along(numbers, dim=0):
            return None
        places = torch.arange(heads * width, device=v.device)
        columns = torch.empty_like(places).scatter_(0, numbers[0].long(), places).view(heads, width)
        weight = ops.linear_arguments(step.args, step.kwargs)["weight"]  # [d, H·dh]
        rows = as_input(v)[:, columns].transpose(0, 1)  # [H, rows, dh]
        projected = rows @ weight[:, columns].permute(1, 2, 0)  # [H, rows, d]
        return at, projected.view(heads, *linear_input.shape[:-1], -1)

    def norms(self, which: Norms) -> list[Norm]:
        """Return the norms that x_mid goes through.

        "next": the one that reads it, wherever it leads (norm2 of a pre-norm block). "attention" and "block": those
        that the residual stream itself goes through, before the MLP and to the end of the block (post-norm blocks).
        """
        if which == "none":
            return []
        last = self.recording[OpLog].last_block_output
        stream, norms = [self.total], list[Norm]()  # the stream and its views
        for number, step in enumerate(self.after):
            if any(t is last for t in stream):
                break  # what follows is the head
            if step.is_part or not any(_reads(step, t) for t in stream):
                continue
            if step.kind == ops.NORM:
                branch = any(is_sum(later) and any(_reads(later, t) for t in stream) for later in self.after[number:])
                if which == "next":
                    return [Norm.of(step)]
                if not branch:  # else it is the first step of the MLP
                    norms.append(Norm.of(step))
                    stream = step.outputs
            elif is_sum(step):
                if which in ("attention", "next"):
                    break
                stream = step.outputs
            elif getattr(step.function, "__name__", "") in _SAME:
                stream = [*stream, *step.outputs]
        if which == "next":
            raise NotApplicable(
                "No norm reads the residual stream after this block's attention, and ln=next asks for it. Use ln=none."
            )
        return norms

    def resultant(self, norms: list[Norm]) -> Tensor:
        """Return x_mid after these norms, [B, N, d]: the true vector that the T_ij add up to, but for biases."""
        y = self.x_mid
        for norm in norms:
            y = norm.linear(y, spread=False) * self._scale([norm])
            y = y if norm.bias is None else y + norm.bias
        return y

    def _scale(self, norms: list[Norm]) -> Tensor:
        """Return the product of 1/sigma, [B, N, 1]."""
        x = self.recording.as_tokens(self.start)
        scale = widened(x.new_ones(*x.shape[:2], 1))
        for norm in norms:
            spread = norm.inverse_spread
            if spread.ndim < 3 or spread.numel() != scale.numel():
                raise NotApplicable(
                    f"A norm between attention and residual is over {list(spread.shape)}, not over whole tokens; "
                    "expected one spread per token.",
                    alternative="a gradient method",
                )
            scale = scale * self.recording.as_tokens(spread)
        return scale


def _is_chain(links: tuple[PathStep, ...]) -> bool:
    """Return whether each step carries on only what an earlier one of them gave, from the first one's outputs on."""
    carried = {id(t) for t in links[0].step.outputs}
    for link in links[1:]:
        if any(id(t) not in carried for t in link.carriers):
            return False
        carried.update(id(t) for t in link.step.outputs)
    return True


def _place_of(steps: Sequence[Step], tensor: Tensor) -> int:
    """Return the number of the step that made a tensor; -1 if none did."""
    return next((i for i, step in enumerate(steps) if any(t is tensor for t in step.outputs)), -1)


def _is_residual(step: Step, start: Tensor) -> bool:
    return is_sum(step) and step.outputs[0].shape == start.shape and _reads(step, start)


def _reads(step: Step, tensor: Tensor) -> bool:
    return any(t is tensor for t in step.inputs)


def dependent(steps: Sequence[Step], start: Tensor) -> set[int]:
    """Return the ids of all tensors that depend on the block's input."""
    dependent = {id(start)}
    for step in steps:
        if any(id(t) in dependent for t in step.inputs):
            dependent.update(id(t) for t in step.outputs)
    return dependent


def _stands_alone(links: list[PathStep], dependent: set[int], start: Tensor) -> bool:
    """Return whether nothing else of the tokens (a second attention, a parallel MLP, a gate) meets O before the sum."""
    for link in links:
        others = [t for t in link.step.inputs if all(t is not c for c in link.carriers)]
        if link is links[-1]:
            others = [t for t in others if t is not start]
        if any(id(t) in dependent for t in others):
            return False
    return True
