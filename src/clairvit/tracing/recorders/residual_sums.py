"""ResidualSums: how much the terms of residual sums cancel, and how much relevance grows there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from clairvit.errors import NotApplicable
from clairvit.numerics import widened
from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.recorders.base import GradientOf, Op, Recorder
from clairvit.tracing.residual_sums import ResidualStream, ResidualSum
from clairvit.tracing.rules.table import Call

if TYPE_CHECKING:
    from clairvit.tracing.recording import Recording
    from clairvit.tracing.structure import ModelStructure


@dataclass(frozen=True, eq=False)
class RecordedSum:
    """One residual sum: its block, its terms outside the graph, and Σ|z_in| + Σ|z_up| and Σ|z_out| per image."""

    block: int
    terms: tuple[Tensor, Tensor]
    axis: int  # of the images
    terms_size: Tensor  # [B]
    sum_size: Tensor  # [B]


class ResidualSums(Recorder):
    """Record C and A of every layer's residual sums z_out = z_in + z_up (attention and MLP).

    C = Σ(|z_in| + |z_up|) / Σ|z_out| says how far the terms cancel. A = Σ(|R_in| + |R_up|) / Σ|R_out|, under the rule
    table of the backward pass, says how much relevance grows where it is shared out. Sums run over tokens, channels and
    the layer's residual sums. Residual sums are found in the graph, so that a forward pass alone has none.

    Attributes:
        cancellation: C, [L, B]; NaN where a layer has no residual sum.
        amplification: A, [L, B]; NaN also where the backward pass did not go.

    Example:
        >>> import clairvit as cv
        >>> tr = cv.trace("pets", "demo", rules="reslrp", recorders=(cv.recorders.ResidualSums,))
        >>> sums = tr[cv.recorders.ResidualSums]
        >>> sums.cancellation.shape, bool((sums.cancellation >= 1).all())
        (torch.Size([12, 1]), True)
        >>> bool((sums.amplification <= 3).all())  # 1 + 2 / gamma
        True
    """

    kinds = ops.SUMS

    def __init__(self) -> None:
        self.cancellation = torch.empty(0)
        self.amplification = torch.empty(0)
        self.by_sum: list[list[float]] = []  # C of each residual sum over all images, by layer
        self._sums: list[RecordedSum] = []
        self._gradients: dict[int, Tensor] = {}  # sum -> c_out of the backward pass that runs
        self._stream = ResidualStream()
        self._pending: tuple[ResidualSum, tuple[Tensor, Tensor]] | None = None  # the sum that is being computed
        self._batch, self._sequence_first, self._whole_blocks = 0, False, True

    def start(self, structure: ModelStructure, pixels: Tensor) -> None:
        self._batch, self._sequence_first = len(pixels), structure.sequence_first
        self._whole_blocks = structure.whole_blocks

    def before_op(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at the terms before the sum may overwrite one of them."""
        self._pending = None
        if ops.kind_of(function) not in ops.SUMS or len(args) != 2 or kwargs:
            return
        if all(isinstance(term, Tensor) for term in args):
            residual = self._stream.match(*args)
            if residual is not None:
                self._pending = residual, (args[0].detach().clone(), args[1].detach().clone())

    def on_op(self, op: Op) -> None:
        if self._pending is None:
            return
        (residual, terms), self._pending = self._pending, None
        self._stream.add(op.output, residual)
        # Behind whole blocks there are pools; where blocks are no modules, the last block's own sums come there too.
        if op.block < 0 or (op.after_blocks and self._whole_blocks):
            return
        axis = int(self._sequence_first and terms[0].ndim == 3 and terms[0].shape[1] == self._batch)
        if terms[0].shape[axis] % self._batch:
            return
        sizes = [self._size(z, axis) for z in (*terms, op.output)]
        index, gradients = len(self._sums), self._gradients
        self._sums.append(RecordedSum(op.block, terms, axis, sizes[0] + sizes[1], sizes[2]))

        def keep(gradient: Tensor | None) -> None:  # holds the dictionary alone, not this recorder
            if gradient is not None:
                gradients[index] = gradient.detach()

        op.output.register_hook(keep)

    def on_block(self, block: int, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        self._pending = None

    def finish(self, recording: Recording) -> None:
        self._stream, self._pending = ResidualStream(), None
        pairs = [(residual.terms_size, residual.sum_size) for residual in self._sums]
        self.cancellation = self._by_layer(recording, dict(enumerate(pairs)))
        self.by_sum = [
            [_ratio(float(self._sums[i].terms_size.sum()), float(self._sums[i].sum_size.sum())) for i in indices]
            for indices in self._layers(recording)
        ]

    def before_backward(self) -> None:
        self._gradients.clear()

    def after_backward(self, recording: Recording, gradient_of: GradientOf) -> Self:
        value = copy.copy(self)
        pairs = {index: self._relevance_sizes(recording, index, c) for index, c in self._gradients.items()}
        value.amplification = self._by_layer(recording, pairs)
        value._gradients = {}
        self._gradients.clear()
        return value

    def at_layer(self, index: int, recording: Recording) -> Tensor | None:
        """Return C of a layer, [B]."""
        C: Tensor = self.cancellation[index]
        return None if C.isnan().all() else C

    def missing(self, index: int) -> NotApplicable:
        return NotApplicable(
            f"No residual sum was seen in layer {index}: a block without one, a CNN, or a forward pass without "
            "gradients. Trace with a backward pass: cv.trace(model, images, recorders=(cv.recorders.ResidualSums,))."
        )

    def release(self) -> None:
        self._sums, self._gradients = [], {}

    def _relevance_sizes(self, recording: Recording, index: int, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ|R_in| + Σ|R_up| and Σ|R_out| per image, R = z · c by the rule of the active table."""
        residual = self._sums[index]
        rule = None if recording.switch is None else recording.switch.table.rules.get("add")
        coefficients: Sequence[Tensor | None] = (c, c)
        if rule is not None:
            inputs = tuple(z.clone().requires_grad_(True) for z in residual.terms)
            with torch.enable_grad():
                end = get_gradient_edge(inputs[0] + inputs[1])
            arguments = {"batch": self._batch, "axis": residual.axis, "residual": True}
            coefficients = rule(Call(inputs, end, arguments, torch.add), c)
        terms = [
            self._size(widened(z) * widened(c_term), residual.axis)
            for z, c_term in zip(residual.terms, coefficients, strict=True)
            if c_term is not None
        ]
        z_out = widened(residual.terms[0]) + widened(residual.terms[1])
        return torch.stack(terms).sum(0), self._size(z_out * widened(c), residual.axis)

    def _size(self, tensor: Tensor, axis: int) -> Tensor:
        """Return Σ|t| per image, [B], summed in float64 if the device has it."""
        dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
        return tensor.detach().abs().movedim(axis, 0).reshape(self._batch, -1).sum(1, dtype=dtype)

    def _layers(self, recording: Recording) -> list[list[int]]:
        """Return which sums belong to each layer: from its block on to the next layer's."""
        blocks = [call.block for call in recording.calls]
        stops = [*blocks[1:], math.inf][: len(blocks)]
        return [
            [index for index, residual in enumerate(self._sums) if start <= residual.block < stop]
            for start, stop in zip(blocks, stops, strict=True)
        ]

    def _by_layer(self, recording: Recording, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Return Σ over / Σ under of each layer's sums, [L, B]; NaN where there is none."""
        layers = self._layers(recording)
        ratios = recording.pixels.new_full((len(layers), self._batch), math.nan, dtype=torch.float32).detach()
        ratios = ratios if ratios.device.type == "mps" else ratios.double()
        for layer, indices in enumerate(layers):
            recorded = [pairs[index] for index in indices if index in pairs]
            if recorded:
                over, under = (torch.stack(sizes).sum(0) for sizes in zip(*recorded, strict=True))
                ratios[layer] = over / under
        return ratios


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
