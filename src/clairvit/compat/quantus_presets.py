"""Quantus: presets of metrics."""

from __future__ import annotations

from typing import Any

from clairvit.metrics.registry import add_presets

_CHANNEL_VALUES: dict[str, Any] = {"features": "channel", "removal": "minimum"}
_SENSITIVITY: dict[str, Any] = {"samples": 200, "draws": "quantus"}
_MPRT: dict[str, Any] = {"layers": None, "by": "quantus", "original": True}

# Faithfulness
add_presets(
    "deletion",
    quantus={"granularity": "channel", "removal": "minimum", "at_once": 1, "whole": False, "auc": "steps"},
)
add_presets("aopc", quantus={"region": 8, "removal": "minimum", "area": "trapezoid", "draws": "quantus"})
add_presets("faithfulness-correlation", quantus={**_CHANNEL_VALUES, "subset": 224.0, "draws": "quantus"})
add_presets("faithfulness-estimate", quantus=_CHANNEL_VALUES)
add_presets("completeness", quantus={"exact": True, "removal": "minimum"})
add_presets("infidelity", quantus={"region": 4, "removal": "minimum", "scaled": False})
# Robustness
add_presets("max-sensitivity", quantus=_SENSITIVITY)
add_presets("avg-sensitivity", quantus=_SENSITIVITY)
add_presets("local-lipschitz", quantus={**_SENSITIVITY, "resolution": "pixel"})
add_presets(
    "relative-stability",
    quantus={**_SENSITIVITY, "radius": 0.2, "near_zero": "exact", "changed": "nan", "resolution": "pixel"},
)
# Complexity
add_presets("sparseness", quantus={"offset": 1e-7, "resolution": "pixel"})
add_presets("complexity", quantus={"resolution": "pixel", "offset": 1e-12})
add_presets("effective-complexity", quantus={"resolution": "pixel"})
# Randomisation
add_presets("mprt", quantus=_MPRT)
add_presets("smooth-mprt", quantus={**_MPRT, "samples": 50, "clean": True, "order": "bottom-up", "draws": "quantus"})
add_presets("efficient-mprt", quantus={"by": "quantus"})
add_presets("random-logit", quantus={"other": "quantus", "similarity": "ssim-flat", "resolution": "pixel"})
# Localisation
add_presets("pointing-game", quantus={"tolerance": 0, "ties": "any", "empty": "hit"})
add_presets(
    "relevance-mass",
    **{"quantus": {"negative": "keep"}, "quantus-attribution-localisation": {"negative": "size"}},
)
for _name in ("relevance-rank", "top-k", "roc-auc"):
    add_presets(_name, quantus={})
