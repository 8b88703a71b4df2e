"""Class activation maps on tokens: channels weighted by what their gradient says.

a are activations [B, N, d], g their gradient, p a position, k a channel. Every formula ends with a ReLU, as the papers'
do; under a combinator it follows SkipPLUS instead: block inputs, sums over all tokens, no ReLU.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from clairvit.methods.aggregate import Single
from clairvit.methods.method import method
from clairvit.methods.view import View

At = Literal["norm", "input"]
Tokens = Literal["patch", "all"]

# What the whole family shares.
ON_TOKENS: dict[str, Any] = {
    "family": "cam",
    "gives": "tokens",
    "over": Single(-1),
    "signed": True,
    "relu": True,
    "recombined": {"at": "input", "tokens": "all"},
}
EACH_ALONE = ON_TOKENS | {"recombined": {"at": "input"}}  # every position by itself: nothing is summed over tokens


def features(layer: View, at: At, tokens: Tokens) -> tuple[Tensor, Tensor, slice]:
    """Activations, their gradient, and the positions that channel weights are summed over."""
    a, g = layer.cam_features(at)  # [B, N, d]
    prefix = layer.layout.prefix if a.shape[1] == layer.layout.tokens else 0
    return a, g, slice(prefix if tokens == "patch" else 0, None)


def weighted_channels(a: Tensor, weight: Tensor) -> Tensor:
    """sum_k w_k a_k(p) for weights [B, d]: [B, N]."""
    return (a @ weight[:, :, None])[..., 0]


@method("gradcam", paper="Selvaraju et al., ICCV 2017", **ON_TOKENS)
def grad_cam(layer: View, at: At = "norm", tokens: Tokens = "patch") -> Tensor:
    """relu(sum_k w_k a_k), w_k = mean_p g_k(p): channels weighted by their mean gradient.

    at=norm is that input for a model that reads CLS: its patches have no gradient after the last attention. A model
    that reads the patches themselves is looked at where it does.
    """
    a, g, where = features(layer, at, tokens)
    return weighted_channels(a, g[:, where].mean(1))


@method("gradcam-pp", paper="Chattopadhay et al., WACV 2018", **ON_TOKENS)
def grad_cam_plus_plus(layer: View, at: At = "norm", tokens: Tokens = "patch") -> Tensor:
    """relu(sum_k w_k a_k), w_k = sum_p alpha relu(g), alpha = g²/(2g² + g³ sum_p a): several objects count alike.

    The closed form of alpha assumes exp(y) and ReLU features; on a ViT it is a heuristic.
    """
    a, g, where = features(layer, at, tokens)
    a_there, g_there = a[:, where], g[:, where]
    share = g_there**2 / (2 * g_there**2 + a_there.sum(1, keepdim=True) * g_there**3 + 1e-6)
    share = torch.where(g_there == 0, torch.zeros_like(share), share)
    return weighted_channels(a, (share * g_there.clamp(min=0)).sum(1))


@method("gradcam-elementwise", paper="Gildenblat, pytorch-grad-cam", **EACH_ALONE | {"signed": False, "relu": False})
def elementwise_cam(layer: View, at: At = "norm") -> Tensor:
    """sum_k relu(g_k(p) a_k(p)): gradient × activation, what speaks against the class dropped channel by channel."""
    a, g = layer.cam_features(at)
    return (g * a).clamp(min=0).sum(-1)


@method("layercam", paper="Jiang et al., TIP 2021", **EACH_ALONE)
def layer_cam(layer: View, at: At = "norm") -> Tensor:
    """relu(sum_k relu(g_k(p)) a_k(p)): each position weighted by its own positive gradient."""
    a, g = layer.cam_features(at)
    return (g.clamp(min=0) * a).sum(-1)


@method("xgradcam-plus", paper="SkipPLUS", **ON_TOKENS)
def x_grad_cam_plus(layer: View, at: At = "norm", tokens: Tokens = "patch") -> Tensor:
    """relu(sum_k w_k a_k), w_k = sum_p g |a| / sum_p |a|: gradient averaged by the size of the activation."""
    a, g, where = features(layer, at, tokens)
    size = a[:, where].abs()
    return weighted_channels(a, (g[:, where] * size).sum(1) / (size.sum(1) + 1e-7))
