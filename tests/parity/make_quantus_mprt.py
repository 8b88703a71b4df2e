"""Write tests/fixtures/quantus_mprt.npz with Quantus 0.6.0 itself: MPRT of input × gradient on a tiny ViT.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install quantus==0.6.0 timm
    PYTHONPATH=src:tests:tests/parity /tmp/peer/bin/python tests/parity/make_quantus_mprt.py

The map is made here with plain autograd: the sum over channels, averaged over each patch, and every pixel of a patch
gets that value. Repeating each value as often leaves Spearman's correlation as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import quantus
import torch
import torch.nn.functional as F
from peers_models import TARGETS, vit

FIXTURE = Path(__file__).parent.parent / "fixtures" / "quantus_mprt.npz"
ORDERS = ("top_down", "bottom_up", "independent")


def their_maps(model: Any, inputs: Any, targets: Any, **_: Any) -> np.ndarray:
    x = torch.as_tensor(np.asarray(inputs)).double().requires_grad_()
    scores = model(x)
    scores[torch.arange(len(x)), torch.as_tensor(np.asarray(targets)).long()].sum().backward()
    assert x.grad is not None
    pixels = (x * x.grad).detach().sum(1, keepdim=True)
    patches = F.avg_pool2d(pixels, PATCH)
    return F.interpolate(patches, scale_factor=PATCH, mode="nearest").numpy()


module, images = vit()
PATCH = module.patch_embed.patch_size[0]
arrays: dict[str, np.ndarray] = {}
for order in ORDERS:
    for average in (False, True):
        metric = quantus.MPRT(
            layer_order=order, return_average_correlation=average, disable_warnings=True, display_progressbar=False
        )
        scores = metric(
            model=module,
            x_batch=images.numpy(),
            y_batch=np.array(TARGETS),
            a_batch=None,
            explain_func=their_maps,
            device="cpu",
        )
        if average:
            arrays[f"{order} average"] = np.array(scores)
        else:
            arrays[order] = np.array(list(scores.values())).T  # [B, steps], the original first
            arrays[f"{order} names"] = np.array(list(scores))
np.savez_compressed(FIXTURE, **arrays)
print({name: value.shape for name, value in arrays.items()}, FIXTURE.stat().st_size, "bytes")
