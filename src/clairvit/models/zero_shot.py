"""Zero-shot classification: an image tower and the fixed features of some prompts make an ordinary classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from clairvit.models.model import first_scores


class ZeroShot(nn.Module):
    """logits = scale · cos(image, prompt) + bias, one column for each prompt (the bias is SigLIP's)."""

    text: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, tower: nn.Module, text: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.tower = tower
        self.register_buffer("text", normalize(text.detach(), dim=-1).clone())  # [C, d]
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("bias", torch.zeros_like(scale) if bias is None else bias.detach().clone())

    def forward(self, pixels: Tensor) -> Tensor:
        image = normalize(first_scores(self.tower(pixels)), dim=-1)  # [B, d]
        return self.scale * image @ self.text.T + self.bias
