"""Numbers of jacobgil/vit-explain (vit_rollout.py, vit_grad_rollout.py) on the tiny ViT of tiny_vit.py.

python tests/parity/make_vit_explain.py CLONE tests/fixtures/vit_explain.npz
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from tiny_vit import CLASSES, DEPTH, HEADS, PATCH, SIDE, TARGET, WIDTH, image, weights

if __name__ == "__main__":
    clone, out = sys.argv[1:]
    torch.set_default_dtype(torch.float64)  # the code makes identity matrices of its own
    sys.path.insert(0, clone)
    sys.modules.setdefault("cv2", types.ModuleType("cv2"))  # imported there, used for display only
    from vit_grad_rollout import VITAttentionGradRollout
    from vit_rollout import VITAttentionRollout

    def tiny() -> VisionTransformer:
        module = VisionTransformer(SIDE, PATCH, 3, CLASSES, "token", WIDTH, DEPTH, HEADS, 2.0).double().eval()
        module.load_state_dict(weights(module))
        for block in module.blocks:
            block.attn.fused_attn = False
        return module

    arrays = {}
    for fusion in ("mean", "max", "min"):
        for ratio in (0.0, 0.9):
            arrays[f"rollout-{fusion}-{ratio}"] = VITAttentionRollout(tiny(), "attn_drop", fusion, ratio)(image())
    for ratio in (0.0, 0.9):
        arrays[f"grad-rollout-{ratio}"] = VITAttentionGradRollout(tiny(), "attn_drop", ratio)(image(), TARGET)
    np.savez_compressed(Path(out), **arrays)
