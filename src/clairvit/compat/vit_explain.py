"""vit-explain and pytorch-grad-cam (Gildenblat): what their code computes where it differs from the formulas."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.methods.aggregation import Product
from clairvit.methods.attention import DiscardRatio, Fusion, Protect, discard_smallest, fuse_heads, fused_attention
from clairvit.methods.layer_view import DecoderView, LayerView
from clairvit.methods.registry import Requires, preset
from clairvit.methods.result import MapResult
from clairvit.methods.scorecam import Background, Channels, Weights, map_of_channels
from clairvit.option_types import Doc
from clairvit.tracing.trace import Trace

COLUMNS = Product(residual=1.0, normalise="columns")  # column j is divided by the sum of row j: no keepdim


@preset(
    "rollout",
    "jacobgil",
    moved=("protect", "normalise=columns"),
    aggregation=COLUMNS,
    requires=lambda discard_ratio, **_: Requires(passes="forward", all_rows=discard_ratio > 0),
)
def rollout_of_largest(
    layer: LayerView, fusion: Fusion = "mean", discard_ratio: DiscardRatio = 0.9, protect: Protect = "cls_cell"
) -> Tensor:
    """prod_l (mean_h A + I), the smallest entries discarded but for CLS → CLS, columns divided by the sums of rows."""
    return discard_smallest(fused_attention(layer, fusion), discard_ratio, protect)  # [B, rows, N]


def gradient_before_softmax(A: Tensor, G: Tensor) -> Tensor:
    """Return dy/dS = A * (G − sum_j A_ij G_ij), [B, H, rows, N]: the gradient that vit-explain takes for G = dy/dA.

    Its backward hooks sit on a dropout that is idle in eval mode, so they see what comes out of the softmax's backward.
    They collect gradients from the last layer to the first and are read in the order of the forward, so layer l gets
    the gradient of layer L−1−l.
    """
    return A * (G - (A * G).sum(-1, keepdim=True))


@preset(
    "grad-rollout",
    "jacobgil",
    moved=("head_stage", "reversed_gradients", "gradient", "protect", "normalise=columns"),
    aggregation=COLUMNS,
    requires=lambda discard_ratio, reversed_gradients, **_: Requires(
        all_rows=discard_ratio > 0,
        first_layer=0 if reversed_gradients else None,  # the last layer's partner is the first
    ),
)
def reversed_gradient_rollout(
    layer: LayerView,
    fusion: Fusion = "mean",
    discard_ratio: DiscardRatio = 0.9,
    protect: Protect = "none",
    reversed_gradients: Annotated[bool, Doc("pair each layer with the gradient of the layer at the other end")] = True,
    gradient: Annotated[
        Literal["attention", "scores"], Doc("take the gradient at the attention, or before the softmax")
    ] = "scores",
) -> Tensor:
    """prod_l (relu(mean_h A^l * dy/dS^(L−1−l)) + I): layer l with the gradient of layer L−1−l, before the softmax.

    Columns are divided by the sums of rows. `reversed_gradients=False` and `gradient=attention` undo one mistake each.
    """
    if isinstance(layer, DecoderView) and reversed_gradients:
        raise NotApplicable(
            "grad-rollout(preset=jacobgil) pairs layer l with layer L−1−l, and the layers of an encoder and a decoder "
            "have no such partners. Use grad-rollout."
        )
    A, G = layer.attention_at(layer.count - 1 - layer.index) if reversed_gradients else (layer.A, layer.G)
    if gradient == "scores":
        G = gradient_before_softmax(A, G)
    return discard_smallest(fuse_heads(layer.A * G, fusion).clamp(min=0), discard_ratio, protect)  # [B, rows, N]


@preset("scorecam", "jacobgil", moved=("corners",))
def score_cam_by_corners(
    trace: Trace,
    *,
    top_k: Channels | None = None,
    weights: Weights = "softmax",
    removal: Background = "mean",
    seed: int = 0,
) -> MapResult:
    """relu(sum_k w_k a_k), a_k stretched from corner to corner (align_corners=True): shifted by up to half a patch."""
    return map_of_channels(trace, top_k, weights, removal, seed, corners=True)
