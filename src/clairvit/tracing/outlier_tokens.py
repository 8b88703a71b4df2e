"""Outlier tokens: patch tokens of many times the median norm, which hold global information and attract attention."""

from __future__ import annotations

import torch
from torch import Tensor

from clairvit.numerics import widened
from clairvit.tracing.structure import ModelStructure
from clairvit.tracing.trace import Trace

# Darcet et al. (ICLR 2024) find artefact tokens with about ten times the norm of others; half of that is the limit.
OUTLIER_RATIO = 5.0
FEWEST_PATCHES = 4  # of which a median says something


def has_comparable_tokens(structure: ModelStructure) -> bool:
    """Return whether norms can be compared: the patch tokens of a plain ViT, without windows or stages."""
    layout, layers = structure.layout, structure.layers
    return layout is not None and bool(layers) and all(site.kind == "tokens" for site in layers)


def norm_ratios(patches: Tensor) -> Tensor:
    """Return |x_p| / median_q |x_q| of patch tokens [B, patches, d], [B, patches]."""
    norms = widened(patches).norm(dim=-1)
    ratios: Tensor = norms / norms.median(1, keepdim=True).values.clamp(min=torch.finfo(norms.dtype).tiny)
    return ratios


def outlier_patches(trace: Trace) -> Tensor | None:
    """Return which patches are outliers, bool [B, patches]: |x| > 5 medians at the input of a block or at the end.

    Inputs of the first block are embeddings and are left out. None where norms cannot be compared.
    """
    layout = trace.recording.structure.layout
    if layout is None or layout.patches < FEWEST_PATCHES or not has_comparable_tokens(trace.recording.structure):
        return None
    tensors = [layer.tokens for layer in trace.layers[1:]] + [trace.final_tokens]
    fitting = [tokens for tokens in tensors if tokens is not None and tokens.shape[1] == layout.tokens]
    if not fitting:
        return None
    return torch.stack([norm_ratios(tokens[:, layout.patch_slice]) > OUTLIER_RATIO for tokens in fitting]).any(0)
