"""Make tests/fixtures/lxt.npz with lxt and zennit: CP-LRP with and without gamma on a torchvision ViT.

    pip install lxt zennit
    PYTHONPATH=tests python tests/parity/make_lxt.py

Two images, their target's logit; input × gradient at the pixels, summed over channels and over each patch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import zennit.rules as rules
from zennit.composites import LayerMapComposite

from helpers.exact_models import TARGETS, build, images_for

GAMMAS = {"gamma_lin=0,gamma_conv=0": (0.0, 0.0), "gamma_lin=0.05,gamma_conv=0.25": (0.05, 0.25)}
PATCH = 4


def main() -> None:
    from lxt.efficient import monkey_patch, monkey_patch_zennit
    from torchvision.models import vision_transformer

    module = build("torchvision")
    pixels = images_for(module)
    logits = module(pixels)
    monkey_patch(vision_transformer)
    monkey_patch_zennit()
    arrays: dict[str, np.ndarray] = {}
    for name, (linear, conv) in GAMMAS.items():
        rows = []
        for image, target in zip(pixels, TARGETS, strict=True):
            composite = LayerMapComposite(
                [(torch.nn.Conv2d, rules.Gamma(conv)), (torch.nn.Linear, rules.Gamma(linear))]
            )
            composite.register(module)
            x = image[None].clone().requires_grad_()
            module(x)[0, target].backward()
            composite.remove()
            rows.append(F.avg_pool2d((x * x.grad).sum(1), PATCH, divisor_override=1)[0].detach().numpy())
        arrays[name] = np.stack(rows)
    arrays["logits"] = logits.detach().numpy()
    np.savez_compressed(Path(__file__).parent.parent / "fixtures" / "lxt.npz", **arrays)


if __name__ == "__main__":
    main()
