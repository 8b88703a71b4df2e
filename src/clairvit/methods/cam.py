"""Class activation maps on tokens and feature maps: channels weighted by their gradients.

a are activations [B, N, d], g their gradient, p a position, k a channel. Formulas end with a ReLU where the papers' do;
under a combinator they follow SkipPLUS instead: block inputs, sums over all tokens, no ReLU.

On a CNN a layer is a stage (ResNet's layer1 … layer4 are 0 … 3), its cells are the tokens, and `at` is always that
feature map. The default is the last stage; gradcam(layer=0) and gradcam+layer:0 are another, with and without ReLU.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.methods.aggregation import Single
from clairvit.methods.gradient import Rules
from clairvit.methods.layer_view import LayerView
from clairvit.methods.registry import Caveats, OptionOverrides, Requires, method
from clairvit.numerics import widened
from clairvit.option_types import Doc
from clairvit.tracing.recorders.last_norm import LastNorm
from clairvit.tracing.rules import LINEAR, rule_table
from clairvit.tracing.trace import Trace

At = Annotated[
    Literal["norm", "input"], Doc("which activations: the last block's normalised input, or the block's own input")
]
Tokens = Annotated[
    Literal["patch", "all"],
    Doc("over which tokens channels are averaged: patches, or the class and register tokens too"),
]

WEIGHTED_CHANNELS: dict[str, Any] = {  # one weight per channel, from a sum over tokens
    "family": "cam",
    "output": "tokens",
    "aggregation": Single(-1),
    "signed": True,
    "relu": True,
    "requires": Requires(recorders=(LastNorm,)),
    "option_overrides": OptionOverrides(combined={"at": "input", "tokens": "all"}),
}
# nothing is summed over tokens
ELEMENTWISE = WEIGHTED_CHANNELS | {"option_overrides": OptionOverrides(combined={"at": "input"})}
WITH_RULES: dict[str, Any] = {  # an option names the rule table of the gradient
    "requires": lambda rules, **_: Requires(rules=rule_table(rules), recorders=(LastNorm,))
}

CLASSIFIER_ROW = ELEMENTWISE | {
    "relu": False,
    "requires": Requires(rules=LINEAR, poolings=("avg", "map", "mixed")),
}


def last_norm_features(trace: Trace) -> tuple[Tensor | None, Tensor | None]:
    """Return what class activation maps read of a ViT (see `cam_features`), [B, N, d], and its gradient."""
    normed = trace[LastNorm]
    if normed.is_unrecognised:
        raise NotApplicable(
            "Class activation maps read the norm before the last attention (where patches are averaged: before the "
            "mean), and this model computes it in a form that is not recognised, or of something else "
            "than the block's input (positions added to it, say); expected torch.nn.LayerNorm, or "
            "(x - mean) / sqrt(var + eps) · weight + bias, of the block's input. Use at=input.",
        )
    if normed.tokens is None and trace.layout.pooling == "avg":
        return trace.final_tokens, trace.final_gradient
    return normed.tokens, normed.gradient


def cam_features(layer: LayerView, at: At) -> tuple[Tensor, Tensor]:
    """Return activation and gradient, [B, N, d] each.

    at=norm is the last block's normalised input: after the last attention the patches of a CLS-pooled model have no
    gradient. A mean-pooled model reads the patches themselves, so there it is the last block's output, after the final
    norm if that comes before the mean.
    """
    if at == "input" or layer.layer.call is None:  # a CNN's stages are feature maps already
        return layer.x, layer.dx
    if layer.index != layer.count - 1:
        raise NotApplicable(
            f"at=norm looks at the last block only; layer {layer.index} of {layer.count} was asked for. Use at=input."
        )
    a, g = last_norm_features(layer.trace)
    if a is None or g is None:
        return layer.x, layer.dx  # no norm before the attention (post-norm blocks)
    return widened(a), widened(g)


def final_features(layer: LayerView) -> tuple[Tensor, Tensor]:
    """Return the last block's output (a CNN's feature map) and its gradient, [B, N, d] each."""
    trace, is_last = layer.trace, layer.index == layer.count - 1
    x, dx = layer.x, layer.dx  # raise where blocks are no modules
    if layer.layer.call is None:
        return x, dx
    if not is_last or trace.final_tokens is None or trace.final_gradient is None:
        problem = "the end of this model's last block was not seen"
        if not is_last:
            problem = f"layer {layer.index} of {layer.count} was asked for"
        raise NotApplicable(f"at=output looks at the last block only; {problem}. Use at=input.")
    return widened(trace.final_tokens), widened(trace.final_gradient)


def activations_and_gradients(layer: LayerView, at: At, tokens: Tokens) -> tuple[Tensor, Tensor, slice]:
    """Return activations, their gradient, and the positions that channel weights are summed over."""
    a, g = cam_features(layer, at)  # [B, N, d]
    layout = layer.layout
    return a, g, layout.patch_slice if tokens == "patch" and a.shape[1] == layout.tokens else slice(None)


def weighted_channels(a: Tensor, w: Tensor) -> Tensor:
    """Return sum_k w_k a_k(p) for weights [B, d]: [B, N]."""
    return (a @ w[:, :, None])[..., 0]


@method("gradcam", paper="Selvaraju et al., ICCV 2017", **WEIGHTED_CHANNELS)
def grad_cam(layer: LayerView, at: At = "norm", tokens: Tokens = "patch") -> Tensor:
    """relu(sum_k w_k a_k), w_k = mean_p g_k(p): channels weighted by their mean gradient.

    at=norm is the last block's normalised input for a model that reads CLS: its patches have no gradient after the
    last attention. For a model that reads the patches themselves it is where they are read.
    """
    a, g, positions = activations_and_gradients(layer, at, tokens)
    return weighted_channels(a, g[:, positions].mean(1))


@method("gradcam-pp", paper="Chattopadhay et al., WACV 2018", **WEIGHTED_CHANNELS)
def grad_cam_plus_plus(layer: LayerView, at: At = "norm", tokens: Tokens = "patch") -> Tensor:
    """relu(sum_k w_k a_k), w_k = sum_p alpha relu(g), alpha = g²/(2g² + g³ sum_p a): several objects count alike.

    The closed form of alpha assumes exp(y) and ReLU features; on a ViT it is a heuristic.
    """
    a, g, positions = activations_and_gradients(layer, at, tokens)
    a_p, g_p = a[:, positions], g[:, positions]
    alpha = g_p**2 / (2 * g_p**2 + a_p.sum(1, keepdim=True) * g_p**3 + 1e-6)
    alpha = torch.where(g_p == 0, torch.zeros_like(alpha), alpha)
    return weighted_channels(a, (alpha * g_p.clamp(min=0)).sum(1))


@method("cam", paper="Zhou et al., CVPR 2016", **CLASSIFIER_ROW)
def class_activation_map(
    layer: LayerView,
    at: Annotated[
        Literal["output", "input"], Doc("where it is read: at the last block's output, or at a block's input")
    ] = "output",
) -> Tensor:
    """sum_k w_k a_k(p), w the classifier's row: what each token adds to the score when the head alone is read linearly.

    It is a · dy/da at the last block's output under the `linear` rules: token i of n has (1/n) w·(gamma (a_i − mean)/
    sigma), sigma (the final norm's, of the token or of their mean) and an attention pool held fixed. On a CNN with mean
    pooling and a linear head it is the paper's; with a deeper head, its linear part. No ReLU, as in the paper: maps and
    biases add up to the score. A head that reads CLS reads no patch, so there it is not defined. at=input is decompx.
    """
    a, g = final_features(layer) if at == "output" else (layer.x, layer.dx)
    return (a * g).sum(-1)


@method(
    "hirescam",
    paper="Draelos & Carin, 2020",
    **ELEMENTWISE | WITH_RULES,
    caveats=Caveats(
        zero_reason="it was read directly before a normalisation that sees each position alone and forgets its length, "
        "so gradient × activation adds up to zero there; try at=input or gradcam",
        numerically_unstable="directly before such a normalisation it is a sum of terms that cancel",
    ),
)
def high_resolution_cam(layer: LayerView, at: At = "norm", rules: Rules = "plain") -> Tensor:
    """relu(sum_k g_k(p) a_k(p)): each position weighted by its own gradient, signs kept (= ixg there).

    Zero directly before a LayerNorm that nothing else reads (SAM's last blocks): x · dLN/dx = 0, but for its eps.
    rules=libra takes LibraGrad's balanced gradient (see ixg).
    """
    a, g = cam_features(layer, at)
    return (g * a).sum(-1)


@method("gradcam-elementwise", paper="Gildenblat, pytorch-grad-cam", **ELEMENTWISE | {"signed": False, "relu": False})
def elementwise_cam(layer: LayerView, at: At = "norm") -> Tensor:
    """sum_k relu(g_k(p) a_k(p)): gradient × activation, its negative channels dropped at each position."""
    a, g = cam_features(layer, at)
    return (g * a).clamp(min=0).sum(-1)


@method("layercam", paper="Jiang et al., TIP 2021", **ELEMENTWISE)
def layer_cam(layer: LayerView, at: At = "norm") -> Tensor:
    """relu(sum_k relu(g_k(p)) a_k(p)): each position weighted by its own positive gradient."""
    a, g = cam_features(layer, at)
    return (g.clamp(min=0) * a).sum(-1)


@method(
    "xgradcam",
    paper="Fu et al., BMVC 2020",
    **WEIGHTED_CHANNELS,
    caveats=Caveats(
        numerically_unstable="its weights are divided by sums of signed activations, which may be near zero"
    ),
)
def x_grad_cam(layer: LayerView, at: At = "norm", tokens: Tokens = "patch") -> Tensor:
    """relu(sum_k w_k a_k), w_k = sum_p g a / (sum_p a + 1e-7): gradient averaged by the activation.

    Made for activations after a ReLU. Those of a ViT have both signs, sum_p a comes near zero and single weights
    explode; xgradcam-plus divides by sum_p |a| instead.
    """
    a, g, positions = activations_and_gradients(layer, at, tokens)
    return weighted_channels(a, (g[:, positions] * a[:, positions]).sum(1) / (a[:, positions].sum(1) + 1e-7))


@method("xgradcam-plus", paper="SkipPLUS", **WEIGHTED_CHANNELS | WITH_RULES)
def x_grad_cam_plus(layer: LayerView, at: At = "norm", tokens: Tokens = "patch", rules: Rules = "plain") -> Tensor:
    """relu(sum_k w_k a_k), w_k = sum_p g |a| / sum_p |a|: gradient averaged by the size of the activation.

    rules=libra takes LibraGrad's balanced gradient (see ixg).
    """
    a, g, positions = activations_and_gradients(layer, at, tokens)
    size = a[:, positions].abs()
    return weighted_channels(a, (g[:, positions] * size).sum(1) / (size.sum(1) + 1e-7))
