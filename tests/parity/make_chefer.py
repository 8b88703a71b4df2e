"""Make tests/fixtures/chefer.npz with the authors' own code: TransAtt, partial and full LRP, LRP rollout.

    git clone https://github.com/hila-chefer/Transformer-Explainability /tmp/chefer     (needs einops)
    PYTHONPATH=tests:/tmp/chefer python tests/parity/make_chefer.py

Their model is filled with the weights that tests/exact_models.py gives timm's of the same shape; one image at a time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from baselines.ViT import ViT_LRP, ViT_orig_LRP

from helpers.exact_models import SMALL, TARGETS, build, images_for

MAPS = {
    "transatt": (ViT_LRP, {"method": "transformer_attribution"}),
    "transatt(preset=evaluation)": (ViT_LRP, {"method": "transformer_attribution", "start_layer": 1}),
    "partial-lrp": (ViT_orig_LRP, {"method": "last_layer"}),
    "partial-lrp(gradient=true)": (ViT_orig_LRP, {"method": "last_layer", "is_ablation": True}),
    "partial-lrp(rules=chefer)": (ViT_LRP, {"method": "last_layer"}),
    "lrp-rollout": (ViT_orig_LRP, {"method": "rollout"}),
    "lrp-rollout(rules=chefer)": (ViT_LRP, {"method": "rollout"}),
    "lrp-rollout(rules=chefer,preset=evaluation)": (ViT_LRP, {"method": "rollout", "start_layer": 1}),
    "lrp(level=pixel)": (ViT_orig_LRP, {"method": "full"}),
    "lrp(level=pixel,rules=chefer)": (ViT_LRP, {"method": "full"}),
}


def main() -> None:
    module = build("plain")
    module.norm.eps = 1e-5  # theirs is torch's default
    pixels = images_for(module)
    arrays: dict[str, np.ndarray] = {}
    for name, (code, options) in MAPS.items():
        model = code.VisionTransformer(depth=3, qkv_bias=True, **SMALL).double().eval()
        model.load_state_dict(module.state_dict())
        rows = []
        for image, target in zip(pixels, TARGETS, strict=True):
            logits = model(image[None])
            torch.testing.assert_close(logits, module(image[None]))
            one_hot = torch.nn.functional.one_hot(torch.tensor([target]), logits.shape[1]).double()
            model.zero_grad()
            (logits * one_hot).sum().backward(retain_graph=True)
            rows.append(model.relprop(one_hot, alpha=1, **options).detach().squeeze(0).numpy())
        arrays[name] = np.stack(rows)
    np.savez_compressed(Path(__file__).parent.parent / "fixtures" / "chefer.npz", **arrays)


if __name__ == "__main__":
    main()
