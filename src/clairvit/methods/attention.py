"""Attention-only methods: they see where the model looked, not what for, so every class gets the same map."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.aggregation import Product, Single
from clairvit.methods.flow import Flow
from clairvit.methods.layer_view import LayerView, mean_of_heads
from clairvit.methods.registry import FORWARD, ExtraCost, Requires, method

Fusion = Literal["mean", "max", "min"] | int
Protect = Literal["none", "cls_cell", "cls_column"]


@method(
    "raw-attention",
    family="attention",
    paper="common baseline, as in Chefer et al., CVPR 2021",
    output="matrix",
    aggregation=Single(-1),
    requires=FORWARD,
    class_specific=False,
)
def attention(layer: LayerView, fusion: Fusion = "mean") -> Tensor:
    """mean_h A of the last layer: where its heads look."""
    return fused(layer.A, fusion)  # [B, rows, N]


@method(
    "rollout",
    family="attention",
    paper="Abnar & Zuidema, ACL 2020",
    output="matrix",
    aggregation=Product(residual=1.0, normalise="rows"),
    requires=Requires(passes="forward", all_rows=True),
    class_specific=False,
    presets={
        "jacobgil": {"discard_ratio": 0.9, "protect": "cls_cell", "normalise": "columns"},
        "cmi": {"alpha": 1.0, "order": "forward"},
        "joita": {"order": "forward"},
        "chefer": {"start_layer": 1},
    },
)
def rolled_attention(
    layer: LayerView, fusion: Fusion = "mean", discard_ratio: float = 0.0, protect: Protect = "none"
) -> Tensor:
    """prod_l (mean_h A + I), row-normalised: attention followed from the output back through all layers."""
    return discarded(fused(layer.A, fusion), discard_ratio, protect)  # [B, N, N]


@method(
    "attention-flow",
    family="attention",
    paper="Abnar & Zuidema, ACL 2020",
    output="matrix",
    aggregation=Flow(),
    requires=FORWARD,
    class_specific=False,
    extra_cost=ExtraCost(slow=True),
)
def flowing_attention(layer: LayerView, fusion: Fusion = "mean") -> Tensor:
    """maxflow(read-out -> token) where a layer passes on mean_h A + I, row-normalised: what can run to each token.

    One maximum flow for each token, exact to `1/precision`. In deep models most flows are as large as what can enter
    the token, min(1, its column sum in the first layer), so the map says little about the layers above.
    """
    return fused(layer.A, fusion)  # [B, N, N]


def fused(heads: Tensor, fusion: Fusion) -> Tensor:
    """[B, H, rows, N] -> [B, rows, N]."""
    if fusion == "mean":
        return mean_of_heads(heads)
    if fusion == "max":
        return heads.amax(1)
    if fusion == "min":
        return heads.amin(1)
    if not -heads.shape[1] <= int(fusion) < heads.shape[1]:
        raise BadInput(
            f"fusion={fusion} names a head of {heads.shape[1]}; expected mean, max, min or 0…{heads.shape[1] - 1}."
        )
    return heads[:, int(fusion)]


def discarded(matrix: Tensor, ratio: float, protect: Protect) -> Tensor:
    """Set the smallest `ratio` of all N² entries to zero, image by image; protected entries stay."""
    if not 0 <= ratio < 1:
        raise BadInput(f"discard_ratio={ratio} was given; expected 0 ≤ discard_ratio < 1.")
    if ratio == 0:
        return matrix
    flat = matrix.flatten(1)  # [B, N²]
    smallest = flat.topk(int(flat.shape[1] * ratio), largest=False).indices
    drop = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, smallest, True).view_as(matrix)
    if protect == "cls_cell":
        drop[:, 0, 0] = False
    elif protect == "cls_column":
        drop[:, :, 0] = False
    return matrix.masked_fill(drop, 0)
