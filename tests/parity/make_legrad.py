"""Numbers of the LeGrad authors' package (WalBouss/LeGrad) on a tiny seeded open_clip tower.

python tests/parity/make_legrad.py CLONE tests/fixtures/legrad.npz

Needs what its requirements name: open_clip_torch <= 2.23, einops.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import open_clip
import torch
from tiny_vit import DEPTH, HEADS, PATCH, SIDE, WIDTH, image, seeded, weights

if __name__ == "__main__":
    clone, out = sys.argv[1:]
    sys.path.insert(0, clone)
    sys.modules.setdefault("cv2", types.ModuleType("cv2"))  # imported there, used for display only
    from legrad.wrapper import LeWrapper

    def model() -> open_clip.CLIP:
        vision = {"image_size": SIDE, "patch_size": PATCH, "width": WIDTH, "layers": DEPTH}
        vision |= {"head_width": WIDTH // HEADS, "mlp_ratio": 2.0}
        text = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1}
        clip = open_clip.CLIP(10, vision, text).double().eval()
        clip.visual.load_state_dict(weights(clip.visual))
        return clip

    prompt = torch.nn.functional.normalize(seeded({"prompt": (1, 10)}, seed=2)["prompt"], dim=-1)
    arrays = {
        f"legrad{start}": LeWrapper(model(), layer_index=start).compute_legrad_clip(prompt, image()).detach().numpy()
        for start in (-2, 0)
    }
    np.savez_compressed(Path(out), **{name: value[0, 0].astype(np.float32) for name, value in arrays.items()})
