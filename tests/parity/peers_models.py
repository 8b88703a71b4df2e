"""The seeded models and images of the parity fixtures: plain torch, timm and torchvision, so anyone can rebuild."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from helpers.exact_models import build, images_for, randomised

TARGETS = [1, 3]
CAMS = ["gradcam", "gradcam-pp", "hirescam", "gradcam-elementwise", "layercam", "xgradcam"]
STAGES = {"layer1": 0, "layer4": 3}  # where the ResNet is looked at, and which layer that is to us
STEPS = 7  # of integrated gradients


def vit() -> tuple[nn.Module, Tensor]:
    module = build("plain", fused=True, depth=3)
    return module, images_for(module)


def resnet() -> tuple[nn.Module, Tensor]:
    """Random weights and random BatchNorm statistics."""
    module = randomised(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5).double().eval(), seed=4)
    generator = torch.Generator().manual_seed(5)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean = torch.randn(part.num_features, generator=generator, dtype=torch.float64) * 0.3
            part.running_var = torch.rand(part.num_features, generator=generator, dtype=torch.float64) + 0.5
    return module, torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
