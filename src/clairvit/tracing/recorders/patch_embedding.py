"""Embedding: where the image becomes patches, and how relevance goes from there to the pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import NotApplicable


@dataclass(eq=False)
class Embedding:
    """What the convolution that reads the pixels made; where patches are cut by hand, the first block's input."""

    made: Tensor  # in the graph: [B, d, h, w], or the tokens as the model shapes them
    given: Tensor | None = None  # what the convolution read, [B, 3, H, W]
    weight: Tensor | None = None
    how: tuple[tuple[str, Any], ...] = ()  # its stride, padding, …

    @staticmethod
    def found(conv: tuple[dict[str, Any], Tensor] | None, pixels: Tensor, first: Tensor | None) -> Embedding | None:
        """From the model's first convolution, if that is the one; otherwise from the first block's input."""
        if conv is not None and conv[0]["input"].shape == pixels.shape:
            call, made = conv
            how = tuple((name, value) for name, value in call.items() if name not in ("input", "weight", "bias"))
            return Embedding(made, call["input"].detach(), call["weight"], how)
        return None if first is None else Embedding(first)

    def cut(self) -> None:
        """Keep the values, leave the graph."""
        self.made = self.made.detach()

    def to_pixels(self, R: Tensor) -> Tensor:
        """R [B, d, h, w] of what was made -> R of the pixels [B, 3, H, W], by the z^B rule.

        R_p = sum_i (x_p w_pi - l w⁺_pi - h w⁻_pi) / Z_i · R_i, l and h the image's darkest and brightest value. Every
        term is positive, so each output's relevance is handed down whole.
        """
        if self.given is None or self.weight is None:
            raise NotApplicable(
                "This model cuts its patches by hand, so there is no convolution from which relevance could go down to "
                "single pixels. Use level=patch."
            )
        x, w = self.given.to(R.dtype), self.weight.to(R.dtype)
        low, high = (edge.expand_as(x) for edge in (x.amin((1, 2, 3), True), x.amax((1, 2, 3), True)))
        parts = [(x, w), (-low, w.clamp(min=0)), (-high, w.clamp(max=0))]
        with torch.enable_grad():
            inputs = [part.detach().requires_grad_(True) for part, _ in parts]
            outs = [F.conv2d(part, weight, **dict(self.how)) for part, (_, weight) in zip(inputs, parts, strict=True)]
            Z = outs[0] + outs[1] + outs[2]
        share = torch.where(Z == 0, torch.zeros_like(R), R / Z).detach()
        back = torch.autograd.grad(outs, inputs, [share] * 3)
        return sum((part * g for part, g in zip(inputs, back, strict=True)), torch.zeros_like(x)).detach()
