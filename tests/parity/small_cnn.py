"""A small seeded CNN for the parity of Score-CAM, with two channels whose map is the same everywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helpers.exact_models import CLASSES, randomised

CHANNELS = 12
DEAD, CONSTANT = 3, 7  # zero, and one number other than zero, at every place


def small_cnn() -> tuple[nn.Module, Tensor]:
    """float64, and two images [2, 3, 24, 40]; its last feature map is [12, 6, 10]."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, CHANNELS, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, CLASSES),
    )
    randomised(module.double().eval(), seed=8)
    with torch.no_grad():
        module[6].weight.mul_(4)  # scores far apart, so that weights differ
        module[2].weight[[DEAD, CONSTANT]] = 0
        module[2].bias[DEAD], module[2].bias[CONSTANT] = -1.0, 0.3
    generator = torch.Generator().manual_seed(9)
    return module, torch.randn(2, 3, 24, 40, generator=generator, dtype=torch.float64)
