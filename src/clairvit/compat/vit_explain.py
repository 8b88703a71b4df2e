"""vit-explain and pytorch-grad-cam (Gildenblat): what their code computes where it differs from the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# method -> preset -> options
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # Columns are divided instead of rows: a sum without keepdim.
    "rollout": {"jacobgil": {"discard_ratio": 0.9, "protect": "cls_cell", "normalise": "columns"}},
    "grad-rollout": {
        "jacobgil": {
            "head_stage": "mean-first",
            "discard_ratio": 0.9,
            "normalise": "columns",
            "reversed_gradients": True,
            "gradient": "scores",
        }
    },
    # Feature maps are stretched from corner to corner (align_corners=True).
    "scorecam": {"jacobgil": {"corners": True}},
}


def gradient_before_softmax(A: Tensor, G: Tensor) -> Tensor:
    """Return dy/dS = A * (G − sum_j A_ij G_ij), [B, H, rows, N]: the gradient that vit-explain takes for G = dy/dA.

    Its backward hooks sit on a dropout that is idle in eval mode, so they see what comes out of the softmax's backward.
    They collect gradients from the last layer to the first and are read in the order of the forward, so layer l gets
    the gradient of layer L−1−l: the option `reversed_gradients`.
    """
    return A * (G - (A * G).sum(-1, keepdim=True))
