"""Gradients of the score at pixels and at tokens, x the input of a block, dx = dy/dx."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.aggregation import Single, Total
from clairvit.methods.layer_view import LayerView
from clairvit.methods.registry import Caveats, Place, Requires, method
from clairvit.numerics import pool_to_grid
from clairvit.option_types import Doc
from clairvit.tracing.rules import rule_table
from clairvit.tracing.trace import Trace

Level = Annotated[Literal["patch", "pixel"], Doc("where the map ends: patches, or single pixels")]
TokenLevel = Annotated[
    Literal["token", "pixel"], Doc("where it is read: at the tokens of a block's input, or at the pixels")
]
Rules = Annotated[
    Literal["plain", "libra"], Doc("the backward pass: autograd's own (plain), or LibraGrad's balanced one (libra)")
]


def requires_rules(rules: str = "plain", level: str = "token", **_: object) -> Requires:
    """Return what a token method needs whose options may name a rule table (`rules`) and pixels (`level`)."""
    return Requires(rules=rule_table(rules), gradients=token_gradients(level))


def token_gradients(level: str) -> tuple[Place, ...]:
    """Return where a token method reads gradients: at the tokens, and with level=pixel at the pixels."""
    return ("tokens", "pixels") if level == "pixel" else ("tokens",)


def input_x_gradient(layer: LayerView, level: TokenLevel = "token") -> Tensor:
    """Return sum_d x_d dy/dx_d at a block's input, [B, N], or at the pixels, summed over each patch."""
    return pixel_x_gradient(layer) if level == "pixel" else layer.x_dx


def pixel_x_gradient(layer: LayerView) -> Tensor:
    """Return pixel × gradient summed over each patch, [B, N]; other tokens have no pixels and get 0."""
    if layer.index:
        raise BadInput(f"level=pixel looks before the first layer; layer {layer.index} was asked for. Use level=token.")
    trace, layout = layer.trace, layer.layout
    product = (trace.pixels * trace.dpixels).sum(1)  # [B, H, W]
    return layout.pad_patches(pool_to_grid(product, layout.grid, "sum").flatten(1))


def at_level(pixels: Tensor, trace: Trace, level: Level, reduction: Literal["sum", "mean"]) -> Tensor:
    """Return [B, H, W] itself, or pooled to the patches; a model without patches (a CNN) has pixels only."""
    layout = trace.recording.structure.layout
    return pixels if level == "pixel" or layout is None else pool_to_grid(pixels, layout.grid, reduction)


def token_x_gradient(layer: LayerView, level: TokenLevel = "token", rules: Rules = "plain") -> Tensor:
    """sum_d x_d dy/dx_d at a block's input: what each token adds to the score, to first order.

    rules=libra balances the gradient (LibraGrad, Mehri et al., CVPR 2025): what is not linear is pruned from the
    backward (attention and LayerNorm's spread held fixed), scaled (an activation's slope is f(z)/z) or halved (a gate
    and what it multiplies), so that tokens and biases add up to the score. Without gated MLPs it is decompx. The
    authors explain the probability: score=prob.
    """
    return input_x_gradient(layer, level)


method(
    "ixg",
    family="gradient",
    paper="Shrikumar et al., 2016",
    output="tokens",
    aggregation=Single(0),
    signed=True,
    requires=requires_rules,
)(token_x_gradient)
method(
    "cat",
    family="gradient",
    paper="Qiang et al., NeurIPS 2022 (= ixg+plus)",
    output="tokens",
    aggregation=Total(),
    signed=True,
    requires=requires_rules,
)(token_x_gradient)


@method(
    "vanilla-l2",
    family="gradient",
    paper="Simonyan et al., 2014, on tokens as in SkipPLUS",
    output="tokens",
    aggregation=Single(0),
)
def token_gradient_norm(layer: LayerView) -> Tensor:
    """||dy/dx||_2 at a block's input: how sensitive the score is to a token."""
    return layer.dx.square().sum(-1).sqrt()  # [B, N]


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
    total, absolute = layer.dx.sum(-1), layer.dx.abs().sum(-1)  # [B, N]
    rounding = torch.finfo(layer.dtype).eps * layer.dx.shape[-1]
    is_noise = total.abs().amax(1) <= rounding * absolute.amax(1)  # [B]
    return total.masked_fill(is_noise[:, None], 0)


@method("saliency", family="gradient", paper="Simonyan et al., 2014", output="image")
def saliency(trace: Trace, level: Level = "patch") -> Tensor:
    """max_channel |dy/dpixel|, averaged over each patch: where a small change would move the score most."""
    return at_level(trace.dpixels.abs().amax(1), trace, level, "mean")
