"""One tiny seeded ViT that this project and the authors' own code are both run on, made of plain torch.

Names are timm's, which ViT classes in research repositories share. Nothing here needs a peer's package.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEPTH, WIDTH, HEADS, CLASSES, PATCH, SIDE = 6, 24, 3, 5, 4, 16  # a 4 × 4 grid: most authors' code knows squares only
TARGET = 3


def seeded(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Weights for these names, none at a trivial value; float64."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in sorted(shapes.items()):
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "token" in name or "pos" in name or "class_embedding" in name:
            result[name] = 0.5 * value
        elif len(shape) > 1:
            result[name] = value * 1.3 / (value[0].numel() ** 0.5)
        else:
            result[name] = 0.8 + 0.3 * value if name.endswith("weight") else 0.3 * value
    return result


def weights(module: torch.nn.Module, seed: int = 0) -> dict[str, Tensor]:
    return seeded({name: tuple(p.shape) for name, p in module.named_parameters()}, seed)


def image(seed: int = 1) -> Tensor:
    """[1, 3, 16, 16], float64."""
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
