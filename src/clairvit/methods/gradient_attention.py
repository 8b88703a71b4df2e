"""Gradient × attention: attention counts where more of it would raise the score, G = dy/dA."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit.methods.aggregation import Product, Single, Total
from clairvit.methods.attention import DiscardRatio, Fusion, discard_smallest, fuse_heads
from clairvit.methods.gradient import Rules, requires_rules
from clairvit.methods.layer_view import LayerView, mean_of_heads
from clairvit.methods.registry import OptionOverrides, Requires, WeightedHeads, method
from clairvit.option_types import Doc
from clairvit.tracing.recorders.head_replay import HeadReplay, LastLinear
from clairvit.tracing.rules import PLAIN, RESIDUAL, rule_table


def _rules_at_attention(rules: str, fusion: str | int, **_: object) -> Requires:
    """Return what a method needs that reads relu(A * G) under the rule table that its options name."""
    return Requires(rules=rule_table(rules), heads=WeightedHeads("AG+") if fusion == "mean" else None)


def positive_gradient_attention(layer: LayerView, fusion: Fusion = "mean", rules: Rules = "plain") -> Tensor:
    """mean_h relu(A * G): where a head looks, counted only where looking there raises the score.

    rules=libra takes LibraGrad's balanced gradient (see ixg). As in rollout, a product leaves out what the identities
    give to every patch alike under mean pooling.
    """
    return layer.AG_positive_mean if fusion == "mean" else fuse_heads(layer.AG_positive, fusion)  # [B, rows, N]


method(
    "genatt",
    family="gradient × attention",
    paper="Chefer et al., ICCV 2021",
    output="matrix",
    aggregation=Product(residual=1.0),
    requires=_rules_at_attention,
)(positive_gradient_attention)
method(
    "gradsam",
    family="gradient × attention",
    paper="Barkan et al., CIKM 2021",
    output="matrix",
    aggregation=Total(rows="all", mean=True),
    requires=_rules_at_attention,
    presets={"skipplus": {"rows": "read", "mean": False}},
)(positive_gradient_attention)


@method(
    "attention-gradient",
    family="gradient × attention",
    paper="Mehri et al., CVPR Workshops 2024 (SkipPLUS, Figure 8)",
    output="matrix",
    aggregation=Single(-1),
    signed=True,
)
def vanilla_attention_gradient(layer: LayerView) -> Tensor:
    """mean_h G, G = dy/dA, of the last layer: how much more attention to a token would raise the score.

    The vanilla gradient of attention weights, read as the head reads; the attention itself does not count. Alone it is
    the last layer, as raw-attention is; SkipPLUS draws its sums over layers, +plus and +skipplus.
    """
    return mean_of_heads(layer.G)  # [B, rows, N]


@method(
    "grad-rollout",
    family="gradient × attention",
    paper="Gildenblat, vit-explain 2020; CMI report",
    output="matrix",
    aggregation=Product(residual=1.0, normalise="rows"),
    requires=lambda fusion, discard_ratio, **_: Requires(
        all_rows=discard_ratio > 0,
        heads=WeightedHeads("AG+") if fusion == "mean" and discard_ratio == 0 else None,
    ),
)
def gradient_rollout(layer: LayerView, fusion: Fusion = "mean", discard_ratio: DiscardRatio = 0.0) -> Tensor:
    """prod_l (mean_h relu(A * G) + I), row-normalised: rollout over the attention that raises the score.

    Under mean pooling, what the identities give to every patch alike is left out, as in rollout.
    """
    return discard_smallest(positive_gradient_attention(layer, fusion), discard_ratio)  # [B, rows, N]


@method(
    "attcam",
    family="gradient × attention",
    paper="Chefer et al., CVPR 2021 (their GradCAM); named AttCAM in SkipPLUS",
    output="matrix",
    aggregation=Single(-1),
    signed=True,
    relu=True,
)
def attention_cam(
    layer: LayerView,
    keys: Annotated[
        Literal["patches", "no-cls"], Doc("which keys weigh the heads: all patches, or all but the class token's")
    ] = "patches",
) -> Tensor:
    """relu(mean_h w_h A_h), w_h the mean gradient of a head's row over the patches: Grad-CAM with heads as channels."""
    layout, G = layer.layout, layer.G
    positions = layout.patches_among(G.shape[-1]) if keys == "patches" else slice(min(1, layout.prefix), None)
    w = G[..., positions].mean(-1, keepdim=True)  # [B, H, rows, 1]
    return mean_of_heads(w * layer.A)  # [B, rows, N]


_GMAR_ALPHA = (
    "GMAR's α weighs the residual, Π(Â + αI), which is `residual` here; for α = 0.3 type residual=0.3, and "
    "normalise=none for the product without row normalisation."
)


def _register_gmar(p: int) -> None:
    def head_weights(layer: LayerView) -> Tensor:
        return layer.head_weights(p)  # [B, H]

    def gmar(layer: LayerView) -> Tensor:
        return layer.weighted("A", head_weights(layer))  # [B, rows, N]

    gmar.__doc__ = (
        f"prod_l (sum_h w_h A_h + I), w_h a head's share of the gradient's L{p} norm: rollout by weighted heads.\n\n"
        "`residual` is the paper's α. Under mean pooling, what the identities give to every patch alike is left out, "
        "as in rollout."
    )
    method(
        f"gmar-l{p}",
        family="gradient × attention",
        paper="Jo et al., 2025 (arXiv 2504.19414)",
        output="matrix",
        aggregation=Product(residual=1.0, normalise="rows"),
        requires=Requires(heads=WeightedHeads("A", head_weights, ("|G|",) if p == 1 else ())),
        presets={"paper_raw": {"normalise": "none"}},
        option_overrides=OptionOverrides(refused={"alpha": _GMAR_ALPHA}),
    )(gmar)


_register_gmar(1)
_register_gmar(2)


@method(
    "focusvit",
    family="gradient × attention",
    paper="FocusViT, AISTATS 2026",
    output="matrix",
    aggregation=Total(start="half"),
    requires=lambda head_weights, **_: Requires(
        heads=WeightedHeads("AG+")
        if head_weights == "uniform"
        else WeightedHeads("AG+", lambda layer: layer.head_weights(1), ("|G|",))
    ),
    option_overrides=OptionOverrides(aliases={"m": "start"}),
)
def focused_attention(
    layer: LayerView,
    head_weights: Annotated[
        Literal["gradient", "uniform"], Doc("whether heads count by their share of the gradient, or alike")
    ] = "gradient",
) -> Tensor:
    """sum_{l ≥ m} sum_h w_h relu(A * G), w_h a head's share of the gradient: the deep layers, head by head."""
    if head_weights == "uniform":
        return layer.AG_positive_mean
    return layer.weighted("AG+", layer.head_weights(1))  # [B, rows, N]


@method(
    "legrad",
    family="gradient × attention",
    paper="Bousselham et al., ICCV 2025",
    output="tokens",
    aggregation=Total(mean=True),
    requires=Requires(passes="local", recorders=(HeadReplay, LastLinear)),
    presets={"official": {"start": -2, "mean": False}},
)
def layer_gradient(
    layer: LayerView,
    pool: Annotated[
        Literal["mean", "model"], Doc("how a layer's tokens are pooled: by their mean, or as the model does")
    ] = "mean",
) -> Tensor:
    """mean_{h,i} relu(d s^l / dA): where more attention would raise each layer's own score, s^l read by the head.

    s^l is the head on the pooled output of layer l, and the gradient stays inside that layer. `pool="model"` reads the
    layer as the model does.
    """
    return layer.local_column_means(pool)  # [B, N]


@method(
    "ag-cam",
    family="gradient × attention",
    paper="Leem & Seo, AAAI 2024",
    output="matrix",
    aggregation=Total(),
    requires=lambda through, **_: Requires(rules=PLAIN if through == "network" else RESIDUAL),
    presets={"official": {"through": "residual"}},
)
def attention_guided_cam(
    layer: LayerView,
    norm: Annotated[
        Literal["sigmoid", "softmax", "none"], Doc("what is done to the scores before the softmax")
    ] = "sigmoid",
    head_fusion: Annotated[Literal["sum", "mean"], Doc("whether heads are added up or averaged")] = "sum",
    through: Annotated[
        Literal["network", "residual"],
        Doc("through what the gradient comes: the whole network, or the residual stream and MLPs alone"),
    ] = "network",
) -> Tensor:
    """sum_{l,h} relu(G) * sigmoid(S): positive gradients, guided by the scores before the softmax.

    The authors' code cuts the gradient at the input of every attention, so G comes down the residual stream and the
    MLPs alone: `through=residual`, the preset `official`. The paper's formula has the gradient of the whole network.
    """
    guide = layer.A if norm == "softmax" else layer.S.sigmoid() if norm == "sigmoid" else unmasked_scores(layer.S)
    guided = layer.G.clamp(min=0) * guide  # [B, H, rows, N]
    return guided.sum(1) if head_fusion == "sum" else mean_of_heads(guided)


def unmasked_scores(S: Tensor) -> Tensor:
    """Return the scores with 0 where the model's mask forbids attention (-inf, or the lowest number)."""
    masked = S.le(torch.finfo(S.dtype).min / 2)
    return S.masked_fill(masked, 0)


@method(
    "attcat",
    family="gradient × attention",
    paper="Qiang et al., NeurIPS 2022",
    output="tokens",
    aggregation=Total(),
    signed=True,
    requires=requires_rules,
)
def attended_input_x_gradient(
    layer: LayerView,
    pair: Annotated[
        Literal["input", "output"], Doc("whether x and its gradient are read at the block's input or output")
    ] = "input",
    rules: Rules = "plain",
) -> Tensor:
    """mean_{h,i} A_ij · x_j·dy/dx_j: gradient × input, weighted by how much the layer attends to the token.

    `pair=output` takes x and dy/dx at the block's output, as SkipPLUS's code does, which leaves out the last block.
    rules=libra takes LibraGrad's balanced gradient (see ixg).
    """
    attended = layer.column_means("A")  # [B, N]: mean over heads and queries
    if pair == "input":
        return attended * layer.x_dx
    output = layer.next_tokens()
    return attended * (torch.zeros_like(attended) if output is None else (output[0] * output[1]).sum(-1))
