"""A tiny post-norm ViT, built like BERT's encoder, with weights from a seed: the same network for us and for peers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helpers.custom_vits import HEADS, WIDTH, HomeMade, merge_heads, split_heads

EPS = 1e-12  # BERT's


class BertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=EPS), nn.LayerNorm(WIDTH, eps=EPS)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part(x)) for part in (self.query, self.key, self.value))
        A = (q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5).softmax(dim=-1)
        x = self.norm1(self.dense(merge_heads(A @ v)) + x)
        return self.norm2(self.down(nn.functional.gelu(self.up(x))) + x)


class PostNorm(HomeMade):
    """No norm at the end: the head reads the class token as the last block leaves it."""

    def __init__(self) -> None:
        super().__init__(BertBlock)
        self.norm = nn.Identity()


def post_norm(first_value_bias: bool = True) -> PostNorm:
    """float64, every weight from the seed. DecompX treats the first layer's value bias apart; it can be left out."""
    module, generator = PostNorm().double().eval(), torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            is_gain = "norm" in name and name.endswith("weight")
            p.copy_(0.8 + 0.3 * noise if is_gain else noise * (0.3 if p.ndim == 1 else 0.9 * p.shape[-1] ** -0.5))
        if not first_value_bias:
            module.blocks[0].value.bias.zero_()
    return module


def picture() -> Tensor:
    """One image, [1, 3, 32, 32]."""
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(12), dtype=torch.float64)
