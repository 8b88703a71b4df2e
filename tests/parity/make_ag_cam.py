"""Numbers of the AG-CAM authors' code on the tiny ViT of tiny_vit.py.

python tests/parity/make_ag_cam.py CLONE tests/fixtures/ag_cam.npz

CLONE: LeemSaebom/Attention-Guided-CAM-Visual-Explanations-of-Vision-Transformer-Guided-by-Self-Attention. Its ViT is a
copy of timm 0.6 with an x.detach() at the start of each attention.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import numpy as np
from tiny_vit import CLASSES, DEPTH, HEADS, PATCH, SIDE, TARGET, WIDTH, image, weights

if __name__ == "__main__":
    clone, out = sys.argv[1:]
    sys.path.insert(0, clone)
    if "torch._six" not in sys.modules:  # gone from torch since; the copy of timm imports it
        six = types.ModuleType("torch._six")
        six.container_abcs = importlib.import_module("collections.abc")
        sys.modules["torch._six"] = six
    from Methods.AGCAM.AGCAM import AGCAM
    from Methods.AGCAM.ViT_for_AGCAM.models.vision_transformer import VisionTransformer

    module = VisionTransformer(
        SIDE, PATCH, num_classes=CLASSES, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, mlp_ratio=2.0
    )
    module = module.double().eval()
    module.load_state_dict(weights(module))
    arrays = {"ag-cam": AGCAM(module).generate(image(), TARGET)[1]}
    arrays["ag-cam-mean-heads"] = AGCAM(module, head_fusion="mean").generate(image(), TARGET)[1]
    np.savez_compressed(Path(out), **{name: value.detach().numpy() for name, value in arrays.items()})
