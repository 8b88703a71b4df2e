"""Zero-shot classification: an image tower and the fixed features of some prompts make an ordinary classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from clairvit.models.activation import Stated
from clairvit.models.model import first_scores


class ZeroShot(nn.Module):
    """logits = scale · cos(image, prompt) + bias, one column for each prompt (the bias is SigLIP's).

    With a bias the model was trained with a sigmoid for each pair of image and text, so that every prompt has a
    probability of its own, also a single one. Without, a softmax compares two prompts or more; a single prompt has
    nothing to be compared with, and its score is the cosine.
    """

    text: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, tower: nn.Module, text: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.tower = tower
        self.num_classes = len(text)
        self.sigmoid = bias is not None
        self.register_buffer("text", normalize(text.detach(), dim=-1).clone())  # [C, d]
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("bias", torch.zeros_like(scale) if bias is None else bias.detach().clone())

    @property
    def stated_activation(self) -> Stated:
        if self.sigmoid:
            return Stated("sigmoid", "zero-shot with a bias (SigLIP): every prompt has a probability of its own")
        if self.num_classes == 1:
            return Stated("raw", "a single prompt has nothing to be compared with: its score is the cosine")
        return Stated("softmax", "zero-shot: the prompts are compared with each other")

    def use_cosine(self) -> None:
        """Score by the cosine itself, in -1…1: a raw score needs neither the trained scale nor the bias."""
        self.scale = torch.ones_like(self.scale)
        self.bias = torch.zeros_like(self.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        image = normalize(first_scores(self.tower(pixels)), dim=-1)  # [B, d]
        return self.scale * image @ self.text.T + self.bias
