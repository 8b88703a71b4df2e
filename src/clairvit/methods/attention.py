"""Attention-only methods: where the model attends. They use no gradient, so every class gets the same map."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.aggregation import Product, Single
from clairvit.methods.flow import Flow
from clairvit.methods.layer_view import LayerView, mean_of_heads
from clairvit.methods.registry import FORWARD, ExtraCost, Requires, WeightedHeads, method
from clairvit.option_types import Doc, Range

Fusion = Annotated[
    Literal["mean", "max", "min"] | int, Doc("how heads become one: their mean, max or min, or a head by its number")
]
Protect = Annotated[
    Literal["none", "cls_cell", "cls_column"],
    Doc("what is never discarded: nothing, the cell from the class token to itself, or its column"),
]
DiscardRatio = Annotated[
    float,
    Range(ge=0, lt=1, unit="of the entries", example=0.9),
    Doc("the share of the smallest entries of a layer that is set to 0"),
]


def _requires_attention(fusion: str | int, discard_ratio: float = 0.0, **_: object) -> Requires:
    """Return what a method needs that reads A, its heads fused; discarding entries compares all rows."""
    fuses_by_mean = fusion == "mean" and discard_ratio == 0
    heads = WeightedHeads("A") if fuses_by_mean else None
    return Requires(passes="forward", all_rows=discard_ratio > 0, heads=heads)


@method(
    "raw-attention",
    family="attention",
    paper="common baseline, as in Chefer et al., CVPR 2021",
    output="matrix",
    aggregation=Single(-1),
    requires=_requires_attention,
    class_specific=False,
)
def raw_attention(layer: LayerView, fusion: Fusion = "mean") -> Tensor:
    """mean_h A of the last layer: where its heads look."""
    return fused_attention(layer, fusion)  # [B, rows, N]


@method(
    "rollout",
    family="attention",
    paper="Abnar & Zuidema, ACL 2020",
    output="matrix",
    aggregation=Product(residual=1.0, normalise="rows"),
    requires=_requires_attention,
    class_specific=False,
    presets={"chefer": {"start_layer": 1}, "skipplus": {"normalise": "first"}},
)
def rollout(layer: LayerView, fusion: Fusion = "mean", discard_ratio: DiscardRatio = 0.0) -> Tensor:
    """prod_l (mean_h A + I), row-normalised: attention followed from the output back through all layers.

    `normalise=first`, preset `skipplus`, is SkipPLUS's equation 2: rows add up to 1 before the identity is added. The
    mean over heads has such rows, so that only other fusions change; `NAME(normalise=first)+rollout` is the same for
    every matrix method.

    Under mean pooling, what the identities give to every patch alike is left out of the map. The order of the patches
    stays; scores that a constant changes (faf, relevance-mass, sparseness, complexity, completeness) are of the rest.
    """
    return discard_smallest(fused_attention(layer, fusion), discard_ratio)  # [B, rows, N]


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
def attention_flow(layer: LayerView, fusion: Fusion = "mean") -> Tensor:
    """maxflow(read-out -> token), capacities mean_h A + I, row-normalised: what can flow to each token.

    One maximum flow per token, exact to `1/precision`. In deep models most flows are as large as what can enter the
    token, min(1, its column sum in the first layer), so the map says little about the layers above.
    """
    return fused_attention(layer, fusion)  # [B, N, N]


def fused_attention(layer: LayerView, fusion: Fusion) -> Tensor:
    """Return a layer's attention with its heads fused, [B, rows, N]; the mean is shared between methods."""
    return layer.A_mean if fusion == "mean" else fuse_heads(layer.A, fusion)


def fuse_heads(heads: Tensor, fusion: Fusion) -> Tensor:
    """Return the mean, maximum or minimum over heads [B, H, rows, N], or one head: [B, rows, N]."""
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


def discard_smallest(matrix: Tensor, ratio: float, protect: Protect = "none") -> Tensor:
    """Set the smallest `ratio` of all N² entries of each image's matrix [B, N, N] to zero, but for protected ones."""
    if ratio == 0:
        return matrix
    flat = matrix.flatten(1)  # [B, N²]
    smallest = flat.topk(int(flat.shape[1] * ratio), largest=False).indices
    discard = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, smallest, True).view_as(matrix)
    if protect == "cls_cell":
        discard[:, 0, 0] = False
    elif protect == "cls_column":
        discard[:, :, 0] = False
    return matrix.masked_fill(discard, 0)
