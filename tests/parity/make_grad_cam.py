"""Write tests/fixtures/grad_cam.npz and captum.npz with the peers' own packages (grad-cam 1.5.7, captum 0.9.0).

    python -m venv /tmp/peer && /tmp/peer/bin/pip install grad-cam captum timm torchvision
    PYTHONPATH=tests:tests/parity /tmp/peer/bin/python tests/parity/make_grad_cam.py

pytorch-grad-cam's maps are taken from its `get_cam_image`, before its own ReLU, min-max and resizing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytorch_grad_cam as peer
import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from peers_models import CAMS, STAGES, STEPS, TARGETS, resnet, vit
from torch import Tensor, nn

FIXTURES = Path(__file__).parent.parent / "fixtures"
PEERS = dict(
    zip(
        CAMS,
        (
            peer.GradCAM,
            peer.GradCAMPlusPlus,
            peer.HiResCAM,
            peer.GradCAMElementWise,
            peer.LayerCAM,
            peer.XGradCAM,
        ),
        strict=True,
    )
)


def their_map(name: str, module: nn.Module, layer: nn.Module, pixels: Tensor, reshape: object = None) -> np.ndarray:
    cam = PEERS[name](model=module, target_layers=[layer], reshape_transform=reshape)
    scores = cam.activations_and_grads(pixels.clone().requires_grad_())
    sum(scores[b, c] for b, c in enumerate(TARGETS)).backward()
    activations = cam.activations_and_grads.activations[0].numpy()
    gradients = cam.activations_and_grads.gradients[0].numpy()
    return cam.get_cam_image(pixels, layer, None, activations, gradients, eigen_smooth=False).astype(np.float32)


def main() -> None:
    maps = {}
    module, pixels = vit()

    def on_grid(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].reshape(len(tokens), 3, 5, -1).permute(0, 3, 1, 2)

    for name in CAMS:
        maps[f"vit {name}"] = their_map(name, module, module.blocks[-1].norm1, pixels, on_grid)
    network, photos = resnet()
    for name in CAMS:
        for stage in STAGES:
            maps[f"{stage} {name}"] = their_map(name, network, getattr(network, stage), photos)
    np.savez_compressed(FIXTURES / "grad_cam.npz", **maps)

    arrays = {}
    target = torch.tensor(TARGETS)
    for kind, (net, images) in {"vit": vit(), "resnet": resnet()}.items():
        images = images.requires_grad_()
        path = IntegratedGradients(net)
        explanations = {
            "saliency": Saliency(net).attribute(images, target=target).amax(1),
            "ixg": InputXGradient(net).attribute(images, target=target).sum(1),
            "gauss": path.attribute(images, target=target, n_steps=STEPS, method="gausslegendre").sum(1),
            "right": path.attribute(images, target=target, n_steps=STEPS, method="riemann_right").sum(1),
        }
        if kind == "resnet":
            explanations = {
                name: explanation[:, ::3, ::3] for name, explanation in explanations.items()
            }  # every third pixel: a small file
        arrays |= {
            f"{kind} {name}": explanation.detach().numpy().astype(np.float32)
            for name, explanation in explanations.items()
        }
    np.savez_compressed(FIXTURES / "captum.npz", **arrays)


if __name__ == "__main__":
    main()
