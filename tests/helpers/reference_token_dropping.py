"""A timm ViT without some of its patches, by hand: embed, add positions, keep some rows, run what is left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def logits_left(module: Any, image: Tensor, kept: Tensor) -> Tensor:
    """Logits [V, C] of one image [1, 3, H, W] when the patches kept [V, K] are left, for plain and rotary timm ViTs."""
    prefix = module.num_prefix_tokens
    x = module._pos_embed(module.patch_embed(image))
    x, angles = x if isinstance(x, tuple) else (x, None)  # rotary models have angles [patches, d] beside the tokens
    x = module.norm_pre(x)
    lead = x[:, :prefix].expand(len(kept), -1, -1)
    x = torch.cat([lead, x[0, prefix:][kept]], 1)  # [V, prefix + K, d]
    for block in module.blocks:
        x = block(x) if angles is None else block(x, rope=angles[kept][:, None])  # [V, 1 for all heads, K, d]
    x = module.norm(x)
    x = x[:, 0] if module.global_pool == "token" else x[:, prefix:].mean(1)
    return module.head(module.fc_norm(x))


def logits_without(module: Any, image: Tensor, gone: list[int], patches: int) -> Tensor:
    """Logits [C] of one image without these patches."""
    return logits_left(module, image, torch.tensor([[i for i in range(patches) if i not in gone]]))[0]
