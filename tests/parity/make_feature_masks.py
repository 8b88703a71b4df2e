"""Write tests/fixtures/feature_masks.npz: Score-CAM and ViT-CX by the code of others, on two small models.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install grad-cam scikit-learn scikit-image timm torchvision
    PYTHONPATH=src:tests:tests/parity /tmp/peer/bin/python tests/parity/make_feature_masks.py CAUSALX SCORECAM

CAUSALX and SCORECAM: clones of vaynexie/CausalX-ViT and haofanwang/Score-CAM, run as they are. Both are written for a
GPU, so .cuda() is made to do nothing, and the first for an older scikit-learn. Its noise is
replaced by `noise_of`, a tensor for each cluster's first channel, or by none at all.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_grad_cam as peer
import sklearn.cluster
import torch
from peers_models import TARGETS, vit
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from small_cnn import small_cnn
from torch import Tensor, nn

FIXTURE = Path(__file__).parent.parent / "fixtures" / "feature_masks.npz"
real_randn = torch.randn


def noise_of(channel: int, shape: list[int]) -> Tensor:
    """The standard normal noise of the mask whose first channel this is; the test draws it again."""
    return real_randn(*shape, generator=torch.Generator().manual_seed(100 + channel), dtype=torch.float64)


def on_grid(tokens: Tensor) -> Tensor:
    return tokens[:, 1:].reshape(len(tokens), 3, 5, -1).permute(0, 3, 1, 2)


def jacobgil(module: nn.Module, layer: nn.Module, pixels: Tensor, reshape: Any = None) -> dict[str, np.ndarray]:
    """The weights and the map before its ReLU, min-max and resizing."""
    cam = peer.ScoreCAM(model=module, target_layers=[layer], reshape_transform=reshape)
    cam.activations_and_grads(pixels)
    activations = cam.activations_and_grads.activations[0].detach().numpy()
    cam.activations_and_grads.release()  # its hooks would collect every masked image's maps too
    targets = [ClassifierOutputTarget(c) for c in TARGETS]
    weights = cam.get_cam_weights(pixels, layer, targets, activations, None)
    return {"weights": weights, "map": cam.get_cam_image(pixels, layer, targets, activations, None)}


def haofanwang(clone: str) -> np.ndarray:
    """[2, 24, 40], scaled to 0…1 as its code does in the end."""
    sys.path.insert(0, clone)
    sys.modules["importlib_resources"] = importlib.import_module("importlib.resources")  # its name since Python 3.7
    ScoreCAM = importlib.import_module("cam.scorecam").ScoreCAM
    module, photos = small_cnn()
    module.features = module[:4]  # its own search for a layer by any name fails, that of an AlexNet works
    module.forward = lambda x: module[4:7](module.features(x))
    explainer = ScoreCAM({"type": "alexnet", "arch": module, "layer_name": "features_3", "input_size": (24, 40)})
    maps = [explainer(photos[i : i + 1], class_idx=c)[0, 0] for i, c in enumerate(TARGETS)]
    sys.path.remove(clone)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cam", "utils")]:
        del sys.modules[name]  # ViT-CX's helpers have the same name
    return torch.stack(maps).numpy()


class Renamed(sklearn.cluster.AgglomerativeClustering):
    """`affinity` is called `metric` since scikit-learn 1.4; the last labels are kept."""

    last: np.ndarray

    def __init__(self, affinity: str, **options: Any) -> None:
        super().__init__(metric=affinity, **options)
        self.affinity = affinity

    def fit(self, distance: Any, y: None = None) -> Any:
        fitted = super().fit(np.asarray(distance))
        Renamed.last = fitted.labels_
        return fitted


def vaynexie(clone: str, with_noise: bool) -> dict[str, np.ndarray]:
    sklearn.cluster.AgglomerativeClustering = Renamed
    sys.path.insert(0, f"{clone}/ViT_CX")
    ViT_CX = importlib.import_module("ViT_CX")
    scoring = importlib.import_module("causal_score").causal_score
    seen: dict[str, Any] = {}
    real_forward, real_matmul = scoring.forward, torch.matmul

    def forward(self: Any, x: Tensor, masks: Tensor, class_p: Any) -> Any:
        seen["masks"] = masks
        return real_forward(self, x, masks, class_p)

    def randn(shape: list[int]) -> Tensor:
        labels = Renamed.last.tolist()
        noise = torch.stack([noise_of(labels.index(label), shape[1:]) for label in range(shape[0])])
        return noise if with_noise else torch.zeros_like(noise)

    def matmul(p: Tensor, shares: Tensor) -> Tensor:
        seen["p"] = p
        return real_matmul(p, shares)

    arrays, (module, pixels) = {}, vit()
    scoring.forward, torch.randn, torch.matmul = forward, randn, matmul
    for i, c in enumerate(TARGETS):
        arrays[f"map {i}"] = ViT_CX.ViT_CX(
            module, pixels[i : i + 1], module.blocks[-1].norm1, c, reshape_function=on_grid
        )
        arrays |= {f"labels {i}": Renamed.last, f"masks {i}": seen["masks"].numpy(), f"p {i}": seen["p"][c].numpy()}
    scoring.forward, torch.randn, torch.matmul = real_forward, real_randn, real_matmul
    return arrays


def main() -> None:
    causalx, scorecam = sys.argv[1:]
    torch.Tensor.cuda = lambda self, *_: self
    nn.Module.cuda = lambda self, *_: self
    torch.set_default_dtype(torch.float64)  # both allocate in the default
    module, pixels = vit()
    network, photos = small_cnn()
    arrays = {f"vit {k}": v for k, v in jacobgil(module, module.blocks[-1].norm1, pixels, on_grid).items()}
    arrays |= {f"cnn {k}": v for k, v in jacobgil(network, network[3], photos).items()}
    arrays["cnn official"] = haofanwang(scorecam)
    for noise in (False, True):
        arrays |= {f"vit-cx {'noise' if noise else 'still'} {k}": v for k, v in vaynexie(causalx, noise).items()}
    np.savez_compressed(FIXTURE, **{k: v if v.dtype.kind == "i" else v.astype(np.float32) for k, v in arrays.items()})


if __name__ == "__main__":
    main()
