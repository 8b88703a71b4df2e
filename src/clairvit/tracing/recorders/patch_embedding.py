"""PatchEmbedding: where the image becomes patches, and how relevance goes from there to the pixels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.tracing import ops
from clairvit.tracing.recorders.base import GradientOf, Op, Recorder
from clairvit.tracing.residual_sums import is_computed_from

if TYPE_CHECKING:
    from clairvit.tracing.recording import Recording
    from clairvit.tracing.trace import GradientScope


class PatchEmbedding(Recorder):
    """Record the convolution that reads the pixels; where patches are cut without one, the first block's input."""

    kinds = frozenset({ops.CONV})

    def __init__(self) -> None:
        self._first: Op | None = None  # the model's first convolution
        self._others: list[Op] = []  # later ones before the first block
        self.output: Tensor | None = None  # [B, d, h, w], or the tokens as the model shapes them; None: not seen
        self.gradient: Tensor | None = None  # of the same shape
        self.input: Tensor | None = None  # what the convolution read, [B, 3, H, W]
        self._weight: Tensor | None = None
        self._geometry: dict[str, Any] = {}  # stride, padding, …

    def on_op(self, op: Op) -> None:
        if self._first is None:
            self._first = op
        elif op.block < 0:
            self._others.append(op)

    def finish(self, recording: Recording) -> None:
        tokens = recording.first_block_input
        first = None if self._first is None else self._embedding(self._first, recording.pixels, tokens)
        if first is not None:
            call = ops.conv_arguments(first.args, first.kwargs)
            if call["input"].shape == recording.pixels.shape:
                self.output, self.input, self._weight = first.output, call["input"].detach(), call["weight"]
                self._geometry = {k: v for k, v in call.items() if k not in ("input", "weight", "bias")}
        if self.output is None:
            self.output = tokens
        self._first, self._others = None, []

    def _embedding(self, first: Op, pixels: Tensor, tokens: Tensor | None) -> Op:
        """Return the first convolution, or the one that the tokens come from where another network has that one."""
        others = [op for op in self._others if ops.first_argument(op.args, op.kwargs).shape == pixels.shape]
        if not others or tokens is None or tokens.grad_fn is None:
            return first
        return next((op for op in (first, *others) if is_computed_from(tokens.grad_fn, op.output.grad_fn)), first)

    def differentiated(self, scope: GradientScope) -> Sequence[Tensor]:
        output = self.output if scope.embedding else None
        return (output,) if output is not None and output.requires_grad else ()

    def after_backward(self, recording: Recording, gradient_of: GradientOf) -> Self:
        value = copy.copy(self)
        value.output = None if self.output is None else self.output.detach()
        value.gradient = gradient_of(self.output)
        return value

    def release(self) -> None:
        self.output = None if self.output is None else self.output.detach()

    def to_pixels(self, R: Tensor) -> Tensor:
        """Return the relevance [B, 3, H, W] of the pixels for R [B, d, h, w] of the output, by the z^B rule.

        R_p = sum_i (x_p w_pi - l w⁺_pi - h w⁻_pi) / Z_i · R_i, l and h the image's darkest and brightest value. Every
        term is positive, so each output's relevance is handed down whole.
        """
        if self.input is None or self._weight is None:
            raise NotApplicable(
                "This model cuts its patches by hand, so there is no convolution from which relevance could go down to "
                "single pixels; expected an nn.Conv2d."
            )
        x, w = self.input.to(R.dtype), self._weight.to(R.dtype)
        axes = tuple(range(1, x.ndim))
        low, high = (edge.expand_as(x) for edge in (x.amin(axes, True), x.amax(axes, True)))
        terms = [(x, w), (-low, w.clamp(min=0)), (-high, w.clamp(max=0))]
        with torch.enable_grad():
            inputs = [term.detach().requires_grad_(True) for term, _ in terms]
            conv = F.conv2d if w.ndim == 4 else F.conv3d
            outs = [conv(term, weight, **self._geometry) for term, (_, weight) in zip(inputs, terms, strict=True)]
            Z = outs[0] + outs[1] + outs[2]
        share = torch.where(Z == 0, torch.zeros_like(R), R / Z).detach()
        gradients = torch.autograd.grad(outs, inputs, [share] * 3)
        return sum((term * g for term, g in zip(inputs, gradients, strict=True)), torch.zeros_like(x)).detach()
