"""The CMI and Joita reports: what their code computes where it differs from the papers that it cites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clairvit.models.model import Layout

_GMAR_JOITA = {"joita": {"heads": "mean", "order": "forward"}}  # a mean of weighted heads: 1/H of the attention

# method -> preset -> options
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "rollout": {"cmi": {"alpha": 1.0, "order": "forward"}, "joita": {"order": "forward"}},
    "grad-rollout": {
        "cmi": {"head_stage": "fuse-first", "residual": 0.0, "normalise": "none", "order": "forward"},
    },
    "gmar-l1": _GMAR_JOITA,
    "gmar-l2": _GMAR_JOITA,
    "legrad": {"joita": {"formula": "joita"}},
}


def joita_legrad(A: Tensor, G: Tensor, layout: Layout) -> Tensor:
    """Return mean_{h,j} relu(G * A) over patch rows and columns, [B, N]: Joita's LeGrad, which scores queries."""
    patches = layout.patch_slice
    return layout.pad_patches((G * A).clamp(min=0)[..., patches, patches].mean((1, 3)))
