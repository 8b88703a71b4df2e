"""Numbers of two authors' code on the tiny ViT of tiny_vit.py: TAM, and GenAtt (the ViT notebook's own function).

python tests/parity/make_tam_genatt.py TAM_CLONE GENATT_NOTEBOOK tests/fixtures/tam_genatt.npz

TAM_CLONE: XianrenYty/Transition_Attention_Maps. GENATT_NOTEBOOK: Transformer_MM_explainability_ViT.ipynb of
hila-chefer/Transformer-MM-Explainability, which runs on the ViT class that both repositories carry.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from tiny_vit import CLASSES, DEPTH, HEADS, PATCH, SIDE, TARGET, WIDTH, image, weights
from torch import nn

if __name__ == "__main__":
    clone, notebook, out = sys.argv[1:]
    sys.path.insert(0, clone)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.cuda = lambda self, *_, **__: self  # the code is written for a GPU
    from baselines.ViT.interpret_methods import InterpretTransformer
    from baselines.ViT.ViT_new import VisionTransformer

    module = VisionTransformer(
        img_size=SIDE,
        patch_size=PATCH,
        num_classes=CLASSES,
        embed_dim=WIDTH,
        depth=DEPTH,
        num_heads=HEADS,
        mlp_ratio=2.0,
        qkv_bias=True,
        norm_layer=lambda width: nn.LayerNorm(width, eps=1e-6),
    )
    module.eval().load_state_dict(weights(module))
    tam = InterpretTransformer(module).transition_attention_maps
    arrays = {
        "tam": tam(image(), TARGET),
        "tam-from-0": tam(image(), TARGET, start_layer=0, steps=5),
        "tam-no-integral": tam(image(), TARGET, with_integral=False),
        "tam-first-state": tam(image(), TARGET, first_state=True),
    }
    cells = ("".join(cell["source"]) for cell in json.loads(Path(notebook).read_text())["cells"])
    scope = {"torch": torch, "np": np}
    exec(next(cell for cell in cells if "def generate_relevance" in cell), scope)
    arrays["genatt"] = scope["generate_relevance"](module, image(), TARGET)
    arrays["logits"] = module(image())
    np.savez_compressed(Path(out), **{name: value.detach().numpy() for name, value in arrays.items()})
