"""Gradient × attention: a head's look counts where looking there raises the score. Also token-level gradients."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.aggregation import Product, Single, Total
from clairvit.methods.attention import Fusion, Protect, discarded, fused
from clairvit.methods.layer_view import LayerView, mean_of_heads, weighted_heads
from clairvit.methods.registry import Caveats, OptionOverrides, Place, Requires, method, register
from clairvit.tracing.recorders.head_replay import HeadReplay, LastLinear
from clairvit.tracing.rules import PLAIN, RESIDUAL, rule_table
from clairvit.tracing.trace import Trace


def positive_gradient_attention(layer: LayerView, fusion: Fusion = "mean") -> Tensor:
    """mean_h relu(A * G): where a head looks, counted only where looking there raises the score."""
    return layer.AG_positive_mean if fusion == "mean" else fused(layer.AG_positive, fusion)  # [B, rows, N]


register(
    "genatt",
    positive_gradient_attention,
    family="gradient × attention",
    paper="Chefer et al., ICCV 2021",
    output="matrix",
    aggregation=Product(residual=1.0),
)
register(
    "gradsam",
    positive_gradient_attention,
    family="gradient × attention",
    paper="Barkan et al., CIKM 2021",
    output="matrix",
    aggregation=Total(rows="all", mean=True),
    presets={"skipplus": {"rows": "read", "mean": False}},
)


@method(
    "grad-rollout",
    family="gradient × attention",
    paper="Gildenblat, vit-explain 2020; CMI report",
    output="matrix",
    aggregation=Product(residual=1.0, normalise="rows"),
    requires=lambda reversed_gradients, **_: Requires(
        all_rows=True,
        first_layer=0 if reversed_gradients else None,  # the last layer's partner is the first
    ),
    presets={
        "jacobgil": {
            "head_stage": "mean-first",
            "discard_ratio": 0.9,
            "normalise": "columns",
            "reversed_gradients": True,
            "gradient": "scores",
        },
        "cmi": {"head_stage": "fuse-first", "residual": 0.0, "normalise": "none", "order": "forward"},
    },
)
def gradient_rollout(
    layer: LayerView,
    head_stage: Literal["post", "mean-first", "fuse-first"] = "post",
    fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    protect: Protect = "none",
    reversed_gradients: bool = False,
    gradient: Literal["attention", "scores"] = "attention",
) -> Tensor:
    """prod_l (mean_h relu(A * G) + I), row-normalised: rollout over the attention that raises the score.

    `head_stage` says when heads are fused: after the ReLU (post), before it (mean-first, jacobgil), or A and G each on
    their own before they are multiplied (fuse-first, CMI report). `reversed_gradients` pairs layer l with the gradient
    of layer L-1-l, as vit-explain does by mistake. `gradient=scores` takes it before the softmax: vit-explain means
    dy/dA, but its backward hook sits on an idle dropout and so sees what comes out of the softmax's own way back.
    """
    A, G = layer.mirrored() if reversed_gradients else (layer.A, layer.G)
    if gradient == "scores":
        G = A * (G - (A * G).sum(-1, keepdim=True))
    if head_stage == "fuse-first":
        matrix = (fused(layer.A, fusion) * fused(G, fusion)).clamp(min=0)
    elif head_stage == "mean-first":
        matrix = fused(layer.A * G, fusion).clamp(min=0)
    elif reversed_gradients or fusion != "mean" or gradient == "scores":
        matrix = fused((layer.A * G).clamp(min=0), fusion)
    else:
        matrix = layer.AG_positive_mean
    return discarded(matrix, discard_ratio, protect)


@method(
    "attcam",
    family="gradient × attention",
    paper="Chefer et al., CVPR 2021 (their GradCAM); named AttCAM in SkipPLUS",
    output="matrix",
    aggregation=Single(-1),
    signed=True,
    relu=True,
)
def attention_cam(layer: LayerView, keys: Literal["patches", "no-cls"] = "patches") -> Tensor:
    """relu(mean_h w_h A_h), w_h the mean gradient of a head's row over the patches: Grad-CAM with heads as channels."""
    first = layer.layout.prefix if keys == "patches" else min(1, layer.layout.prefix)
    weight = layer.G[..., first:].mean(-1, keepdim=True)  # [B, H, rows, 1]
    return mean_of_heads(weight * layer.A)


def head_shares(layer: LayerView, p: int) -> Tensor:
    """Each head's share of the layer's gradient norm, [B, H]; all zero where there is no gradient at all."""
    norm = layer.G_norm(p)
    total = norm.sum(1, keepdim=True)
    return norm / torch.where(total == 0, torch.ones_like(total), total)


def _gmar(p: int) -> None:
    def gmar(layer: LayerView, heads: Literal["sum", "mean"] = "sum") -> Tensor:
        matrix = weighted_heads(layer.A, head_shares(layer, p))
        return matrix if heads == "sum" else matrix / layer.A.shape[1]

    gmar.__doc__ = (
        f"prod_l (sum_h w_h A_h + I), w_h a head's share of the gradient's L{p} norm: rollout by weighed heads."
    )
    register(
        f"gmar-l{p}",
        gmar,
        family="gradient × attention",
        paper="Jo et al., 2025 (arXiv 2504.19414)",
        output="matrix",
        aggregation=Product(residual=1.0, normalise="rows"),
        presets={"joita": {"heads": "mean", "order": "forward"}, "paper_raw": {"normalise": "none"}},
    )


_gmar(1)
_gmar(2)


@method(
    "focusvit",
    family="gradient × attention",
    paper="FocusViT, AISTATS 2026",
    output="matrix",
    aggregation=Total(start="half"),
    option_overrides=OptionOverrides(aliases={"m": "start"}),
)
def focused_attention(layer: LayerView, head_weights: Literal["gradient", "uniform"] = "gradient") -> Tensor:
    """sum_{l ≥ m} sum_h w_h relu(A * G), w_h a head's share of the gradient: the deep layers, head by head."""
    if head_weights == "uniform":
        return layer.AG_positive_mean
    return weighted_heads(layer.AG_positive, head_shares(layer, 1))


@method(
    "legrad",
    family="gradient × attention",
    paper="Bousselham et al., ICCV 2025",
    output="tokens",
    aggregation=Total(mean=True),
    requires=lambda formula, **_: (
        Requires(gradients=("attention", "tokens"))
        if formula == "joita"
        else Requires(passes="local", recorders=(HeadReplay, LastLinear))
    ),
    presets={"official": {"start": -2, "mean": False}, "joita": {"formula": "joita"}},
)
def layer_gradient(
    layer: LayerView, pool: Literal["mean", "model"] = "mean", formula: Literal["legrad", "joita"] = "legrad"
) -> Tensor:
    """mean_{h,i} relu(d s^l / dA): how each layer's own score, read by the head, wants more attention on a patch.

    s^l is the head on the pooled output of layer l, and the gradient stays inside that layer. `pool="model"` reads the
    layer as the model does. `formula="joita"` is what that report's code computes: relu(G * A) of the final score,
    patch rows and columns only, averaged over keys, so it scores queries.
    """
    if formula == "joita":
        first = layer.layout.prefix
        queries = (layer.G * layer.A).clamp(min=0)[..., first:, first:].mean((1, 3))  # [B, n]
        return F.pad(queries, (first, 0))
    return layer.local_G(pool).clamp_(min=0).mean((1, 2))  # [B, N]


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
    norm: Literal["sigmoid", "softmax", "none"] = "sigmoid",
    head_fusion: Literal["sum", "mean"] = "sum",
    through: Literal["network", "residual"] = "network",
) -> Tensor:
    """sum_{l,h} relu(G) * sigmoid(S): positive gradients, guided by the scores before the softmax.

    The authors' code cuts the gradient at the input of every attention, so G comes down the residual stream and the
    MLPs alone: `through=residual`, the preset `official`. The paper's formula has the gradient of the whole network.
    """
    guide = layer.A if norm == "softmax" else layer.S.sigmoid() if norm == "sigmoid" else layer.S
    guided = layer.G.clamp(min=0) * guide  # [B, H, rows, N]
    return guided.sum(1) if head_fusion == "sum" else mean_of_heads(guided)


def input_x_gradient(layer: LayerView, level: Literal["token", "pixel"] = "token") -> Tensor:
    """sum_d x_d dy/dx_d at a block's input: what each token adds to the score, to first order."""
    if level == "pixel":
        return pixel_x_gradient(layer)
    return (layer.x * layer.dx).sum(-1)  # [B, N]


Rules = Literal["plain", "libra"]


def requires_rules(rules: str = "plain", level: str = "token", **_: object) -> Requires:
    """Return what a token method needs whose options may name a rule table (`rules`) and pixels (`level`)."""
    return Requires(rules=rule_table(rules), gradients=token_gradients(level))


def token_gradients(level: str) -> tuple[Place, ...]:
    """Return where a token method reads gradients: at the tokens, and with level=pixel at the pixels."""
    return ("tokens", "pixels") if level == "pixel" else ("tokens",)


def token_x_gradient(layer: LayerView, level: Literal["token", "pixel"] = "token", rules: Rules = "plain") -> Tensor:
    """sum_d x_d dy/dx_d at a block's input: what each token adds to the score, to first order.

    rules=libra balances the gradient (LibraGrad, Mehri et al., CVPR 2025): what is not linear is pruned from the
    backward (attention and LayerNorm's spread held fixed), scaled (an activation's slope is f(z)/z) or halved (a gate
    and what it multiplies), so that tokens and biases add up to the score. Without gated MLPs it is decompx. The
    authors explain the probability: score=prob.
    """
    return input_x_gradient(layer, level)


def pixel_x_gradient(layer: LayerView) -> Tensor:
    """The same at the pixels, added up over each patch; prefix tokens own no pixels."""
    if layer.index:
        raise BadInput(f"level=pixel looks before the first layer; layer {layer.index} was asked for. Use level=token.")
    trace, layout = layer.trace, layer.layout
    product = (trace.pixels * trace.dpixels).sum(1)  # [B, H, W]
    return F.pad(per_patch(product, layout.grid, "sum").flatten(1), (layout.prefix, 0))


def per_patch(image: Tensor, grid: tuple[int, int], how: Literal["sum", "mean"]) -> Tensor:
    """[B, H, W] -> [B, rows, cols]."""
    wide = image.float() if image.dtype.itemsize < 4 else image
    mean = F.adaptive_avg_pool2d(wide[:, None], grid)[:, 0]
    return mean * (image.shape[-2] * image.shape[-1] / (grid[0] * grid[1])) if how == "sum" else mean


def attended_input_x_gradient(
    layer: LayerView, pair: Literal["input", "output"] = "input", rules: Rules = "plain"
) -> Tensor:
    """mean_{h,i} A_ij · x_j·dy/dx_j: gradient × input, weighted by how much the layer attends to the token.

    rules=libra takes LibraGrad's balanced gradient (see ixg).
    """
    looked_at = layer.A.mean((1, 2))  # [B, N], heads and queries
    if pair == "output":
        following = layer.next_tokens()  # SkipPLUS's code pairs a block's attention with its output and drops the last
        return looked_at * (torch.zeros_like(looked_at) if following is None else (following[0] * following[1]).sum(-1))
    return looked_at * (layer.x * layer.dx).sum(-1)


register(
    "ixg",
    token_x_gradient,
    family="gradient",
    paper="Shrikumar et al., 2016",
    output="tokens",
    aggregation=Single(0),
    signed=True,
    requires=requires_rules,
)
register(
    "cat",
    token_x_gradient,
    family="gradient",
    paper="Qiang et al., NeurIPS 2022 (= ixg+plus)",
    output="tokens",
    aggregation=Total(),
    signed=True,
    requires=requires_rules,
)
register(
    "attcat",
    attended_input_x_gradient,
    family="gradient × attention",
    paper="Qiang et al., NeurIPS 2022",
    output="tokens",
    aggregation=Total(),
    signed=True,
    requires=requires_rules,
)


def token_gradient_length(layer: LayerView) -> Tensor:
    """||dy/dx||_2 at a block's input: how much the score listens to a token."""
    return layer.dx.square().sum(-1).sqrt()  # [B, N]


register(
    "vanilla-l2",
    token_gradient_length,
    family="gradient",
    paper="Simonyan et al., 2014, on tokens as in SkipPLUS",
    output="tokens",
    aggregation=Single(0),
)


@method(
    "vanilla",
    family="gradient",
    paper="Simonyan et al., 2014, on tokens as in SkipPLUS",
    output="tokens",
    aggregation=Single(0),
    signed=True,
    caveats=Caveats(
        zero_reason="every way from a token goes through a LayerNorm, whose gradient adds up to zero over the channels"
        "; use vanilla-l2"
    ),
)
def token_gradient_sum(layer: LayerView) -> Tensor:
    """sum_d dy/dx_d at a block's input: the gradient of a token, its channels added up.

    LayerNorm takes the mean out of its input, so what comes back through it adds up to zero. In a pre-norm ViT blocks
    read x through LayerNorm, the residual carries x on to the final LayerNorm, and the sum is zero at every layer. It
    is not where something else reads the stream: RMSNorm, post-norm blocks, no final norm, a CNN. A map that rounding
    alone explains is given as zeros; use vanilla-l2.
    """
    total, size = layer.dx.sum(-1), layer.dx.abs().sum(-1)  # [B, N]
    rounding = torch.finfo(layer.layer.dx.dtype).eps * layer.dx.shape[-1]
    noise = total.abs().amax(1) <= rounding * size.amax(1)  # [B]
    return total.masked_fill(noise[:, None], 0)


@method("saliency", family="gradient", paper="Simonyan et al., 2014", output="image")
def saliency(trace: Trace, level: Literal["patch", "pixel"] = "patch") -> Tensor:
    """max_channel |dy/dpixel|, averaged over each patch: where a small change would move the score most."""
    image = trace.dpixels.abs().amax(1)  # [B, H, W]
    layout = trace.recording.structure.layout
    if level == "pixel" or layout is None:
        return image
    return per_patch(image, layout.grid, "mean")
