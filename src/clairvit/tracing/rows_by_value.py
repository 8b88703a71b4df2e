"""Which rows of an attention the scores read, by changing them: for scores that leave torch, where no gradient says it.

A row is changed in the output of the attention while the forward goes on. The scores that follow move if they read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clairvit.models.model import Layout, Model
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.capture import Capture
from clairvit.tracing.module_state import frozen_eval

MOST_ROWS = 8  # tokens other than patches that are changed one by one; with more, nothing is told
PATCHES_TRIED = 3


class _ChangedRows(Capture):
    """Add a tensor to the output of one attention call of a forward pass."""

    def __init__(self, index: int, change: Tensor) -> None:
        super().__init__(1)
        self.index, self.change = index, change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.calls)
        out = super().__torch_function__(func, types, args, kwargs)
        is_new = before == self.index and len(self.calls) == self.index + 1
        return out + self.change if is_new and out is self.calls[self.index].outputs[0] else out


def rows_by_value(model: Model, pixels: Tensor, layout: Layout, call: AttentionCall, index: int) -> Tensor | None:
    """Return how far the scores move with each row of attention call `index`, [N]; None if it cannot be told.

    Other tokens are changed one by one. Of the patches three are, and all others get their mean: either the head reads
    all patches alike or none, and what it does otherwise (a maximum) is not told.
    """
    others, patches = layout.other_rows, list(layout.patch_rows)
    if len(others) > MOST_ROWS:
        return None
    tried = [patches[i * (len(patches) - 1) // max(1, PATCHES_TRIED - 1)] for i in range(PATCHES_TRIED)]
    with frozen_eval(model.module), torch.no_grad():
        plain = model.logits(pixels.detach())

        def moved(rows: Sequence[int]) -> float:
            with _ChangedRows(index, _change(call, rows)):
                return float((model.logits(pixels.detach()) - plain).abs().max())

        weights = torch.zeros(layout.tokens, dtype=torch.float64)
        for row in others:
            weights[row] = moved([row])
        each = [moved([row]) for row in tried]
        if moved(patches) == 0:
            return weights if bool(weights.any()) else None
    if min(each) == 0:
        return None
    weights[patches] = sum(each) / len(each)
    return weights


def _change(call: AttentionCall, rows: Sequence[int]) -> Tensor:
    """Return noise as large as the values in some rows of a call's output, in the shape that the model gives it."""
    noise = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        out = torch.zeros_like(call.outputs[0], requires_grad=True)
        heads = call.heads([out])  # [1, H, N, dh]: linear, so its transpose brings the noise into the model's shape
        direction = torch.zeros_like(heads)
        direction[:, :, list(rows)] = torch.randn(
            heads[:, :, list(rows)].shape, generator=noise, dtype=torch.float32, device="cpu"
        ).to(heads)
        (change,) = torch.autograd.grad(heads, out, direction * call.v.detach().std())
    return change
