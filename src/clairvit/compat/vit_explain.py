"""vit-explain and pytorch-grad-cam (Gildenblat): what their code computes where it differs from the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from clairvit.methods.layer_view import LayerView

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


def hooked_gradient(layer: LayerView, *, reversed_gradients: bool, before_softmax: bool) -> Tensor:
    """Return the gradient that vit-explain multiplies with a layer's attention, [B, H, rows, N].

    Its backward hooks collect gradients from the last layer to the first and are read in the order of the forward, so
    layer l gets the gradient of layer L−1−l (`reversed_gradients`). They sit on a dropout that is idle in eval mode, so
    they see what comes out of the softmax's backward (`before_softmax`): dy/dS = A * (G − sum_j A_ij G_ij).
    """
    A, G = layer.mirrored() if reversed_gradients else (layer.A, layer.G)
    return A * (G - (A * G).sum(-1, keepdim=True)) if before_softmax else G
