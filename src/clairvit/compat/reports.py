"""The CMI, Coporan and Joita reports: what their text or code has where it differs from the papers that it cites."""

from __future__ import annotations

import functools

from torch import Tensor

from clairvit.methods.aggregation import Product, Total
from clairvit.methods.attention import DiscardRatio, Fusion, Protect, discard_smallest, fuse_heads, rollout
from clairvit.methods.layer_view import LayerView
from clairvit.methods.registry import Requires, WeightedHeads, preset

_FORWARD = Product(residual=1.0, normalise="rows", order="forward")  # the first layer on the left


@preset("rollout", "cmi", moved=("order",), aggregation=Product(residual=0.0, order="forward"))
def forward_product_of_attention(
    layer: LayerView, fusion: Fusion = "mean", discard_ratio: DiscardRatio = 0.0
) -> Tensor:
    """prod_l (alpha A + (1 - alpha) I), A fused over heads, alpha = 1, the first layer on the left, no normalisation.

    Rows of mean-fused attention add up to 1 anyway; those of max and min fusion do not, and the report leaves them so.
    Such a product may be smaller or larger than float32 holds: the map is then a multiple of it.
    """
    return rollout(layer, fusion, discard_ratio)


@preset("rollout", "joita", moved=("order",), aggregation=_FORWARD)
def forward_rollout(layer: LayerView, fusion: Fusion = "mean", discard_ratio: DiscardRatio = 0.0) -> Tensor:
    """prod_l (mean_h A + I), row-normalised, the first layer on the left: the product reversed."""
    return rollout(layer, fusion, discard_ratio)


@preset(
    "grad-rollout",
    "cmi",
    moved=("head_stage", "order"),
    aggregation=Product(residual=0.0, order="forward"),
    requires=lambda discard_ratio, **_: Requires(all_rows=discard_ratio > 0),
)
def product_of_fused_heads(
    layer: LayerView, fusion: Fusion = "mean", discard_ratio: DiscardRatio = 0.0, protect: Protect = "none"
) -> Tensor:
    """prod_l relu(mean_h A * mean_h G), the first layer on the left: heads are fused before the product, no residual.

    Where a class token is read, only its row of the last layer has a gradient, so that the map is that row times a
    number. Such a product may be smaller than float32 holds, such as 1e-50: the map is then a multiple of it.
    """
    matrix = (fuse_heads(layer.A, fusion) * fuse_heads(layer.G, fusion)).clamp(min=0)
    return discard_smallest(matrix, discard_ratio, protect)  # [B, rows, N]


@preset("attcam", "coporan", requires=Requires(heads=WeightedHeads("AG")))
def product_of_gradient_and_attention(layer: LayerView) -> Tensor:
    """relu(mean_h A * G) of the last layer: the CAM of Coporan's text; its code weighs heads by their mean gradient."""
    return layer.weighted("AG")  # [B, rows, N]


@preset("ag-cam", "coporan", aggregation=Total(start=-1), requires=Requires(), signed=True)
def attention_times_features(layer: LayerView) -> Tensor:
    """sum_k alpha_k A_k(p) Att_k(p) of the last layer, Coporan's equation 5.3, k the channels of all heads.

    The text does not say what the k-th feature map is. Here it is a channel of the values v of the head whose attention
    is Att_k, and alpha_k the mean gradient of the score at that channel over the patches, as in Grad-CAM. No ReLU.
    """
    values, gradient = layer.values  # [B, H, N, dh] each
    patches = layer.layout.patches_among(values.shape[-2])
    alpha = gradient[..., patches, :].mean(-2, keepdim=True)  # [B, H, 1, dh]
    features = (alpha * values).sum(-1)  # [B, H, N]
    return (features[:, :, None] * layer.A).sum(1)  # [B, rows, N]


def _mean_head_weights(layer: LayerView, p: int) -> Tensor:
    """Return the weights of GMAR, [B, H], over the number of heads."""
    weights = layer.head_weights(p)
    return weights / weights.shape[1]


def _requires_mean_weights(p: int) -> Requires:
    return Requires(heads=WeightedHeads("A", functools.partial(_mean_head_weights, p=p), ("|G|",) if p == 1 else ()))


@preset("gmar-l1", "joita", moved=("heads", "order"), aggregation=_FORWARD, requires=_requires_mean_weights(1))
def mean_of_l1_weighted_heads(layer: LayerView) -> Tensor:
    """prod_l (1/H sum_h w_h A_h + I), w_h a head's share of the L1 norm of G: their mean, the first layer left."""
    return layer.weighted("A", _mean_head_weights(layer, 1))  # [B, rows, N]


@preset("gmar-l2", "joita", moved=("heads", "order"), aggregation=_FORWARD, requires=_requires_mean_weights(2))
def mean_of_l2_weighted_heads(layer: LayerView) -> Tensor:
    """prod_l (1/H sum_h w_h A_h + I), w_h a head's share of the L2 norm of G: their mean, the first layer left."""
    return layer.weighted("A", _mean_head_weights(layer, 2))  # [B, rows, N]


@preset("gmar-l1", "joita-equation", aggregation=_FORWARD)
def forward_l1_weighted_heads(layer: LayerView) -> Tensor:
    """prod_l (sum_h w_h A_h + I), w_h a head's share of the L1 norm of G: the report's equation, first layer left."""
    return layer.weighted("A", layer.head_weights(1))  # [B, rows, N]


@preset("gmar-l2", "joita-equation", aggregation=_FORWARD)
def forward_l2_weighted_heads(layer: LayerView) -> Tensor:
    """prod_l (sum_h w_h A_h + I), w_h a head's share of the L2 norm of G: the report's equation, first layer left."""
    return layer.weighted("A", layer.head_weights(2))  # [B, rows, N]


@preset("legrad", "joita", moved=("formula",), requires=Requires(gradients=("attention", "tokens")))
def query_gradient(layer: LayerView) -> Tensor:
    """mean_{h,j} relu(G * A) of the final score, patch rows and columns only: over keys, so that it scores queries."""
    patches = layer.layout.patch_slice
    return layer.layout.pad_patches((layer.G * layer.A).clamp(min=0)[..., patches, patches].mean((1, 3)))  # [B, N]
