"""Gradient cuts: where a forward switches gradients off, detaches a tensor or leaves torch.

A frozen backbone under torch.no_grad is the usual linear probe. Nothing of it is in the graph, so that the graph says
neither which attention sees the image nor which tokens the head reads. Whoever looks for these runs the forward again
with `ThroughNoGrad`, which changes no value; what the model's own forward then lacks of the graph is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clairvit.models.through_no_grad import DETACHING, LEAVING_TORCH
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.gradient_barriers import Barrier, Cause
from clairvit.tracing.recorders.base import Op, Recorder

ROUNDING = 1e-3  # of the largest gradient: by how much two backward passes through the same operations may differ


class GradientCuts(Recorder):
    """Note the first operation of each kind through which a dependence on the image leaves the graph."""

    kinds = None

    def __init__(self, place: Callable[[], tuple[str, str]]) -> None:
        """Prepare a pass; `place` returns the name and the type of the module that is running."""
        self.place = place
        self.cuts: dict[Cause, Barrier] = {}

    def on_op(self, op: Op) -> None:
        cause = self._cause(op)
        if cause is not None and cause not in self.cuts:
            self.cuts[cause] = Barrier(*self.place(), cause)

    @staticmethod
    def _cause(op: Op) -> Cause | None:
        tensors = [x for x in (*op.args, *op.kwargs.values()) if isinstance(x, Tensor)]
        tensors += [x for arg in op.args if isinstance(arg, list | tuple) for x in arg if isinstance(x, Tensor)]
        if op.function in LEAVING_TORCH:
            return "outside torch" if any(x.is_floating_point() and x.ndim > 1 for x in tensors) else None
        if not any(x.requires_grad for x in tensors):
            return None
        if op.function in DETACHING:
            return "detach"
        if torch.is_grad_enabled() or not isinstance(op.output, Tensor) or not op.output.is_floating_point():
            return None
        return "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"


def pixel_gradient(scores: Tensor, pixels: Tensor) -> Tensor | None:
    """Return the gradient of the scores in some direction at the pixels; None if there is none, or it is zero."""
    if not scores.requires_grad:
        return None
    noise = torch.Generator().manual_seed(0)  # any direction will do, as long as it is not a special one
    direction = torch.randn(scores.shape, generator=noise, dtype=torch.float32, device="cpu").to(scores)
    try:
        (gradient,) = torch.autograd.grad(scores, pixels, direction, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # checkpoints, tensors that were overwritten: the trace's own backward reports these
        return None
    return None if gradient is None or not gradient.any() else gradient


def lacks(calls: Sequence[AttentionCall], others: Sequence[AttentionCall]) -> bool:
    """Return whether some attention is not in the graph, and in that of another run of the same forward."""
    return any(other.requires_grad and not call.requires_grad for call, other in zip(calls, others, strict=True))


def differ(gradient: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two gradients at the pixels differ by more than rounding; where one is missing, they do."""
    if gradient is None or other is None:
        return gradient is not other
    return bool((gradient - other).abs().max() > ROUNDING * other.abs().max())
