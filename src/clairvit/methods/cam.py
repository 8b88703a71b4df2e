"""Class activation maps on tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from clairvit.methods.aggregate import Single
from clairvit.methods.method import method
from clairvit.methods.view import View


@method(
    "gradcam",
    family="cam",
    paper="Selvaraju et al., ICCV 2017",
    gives="tokens",
    over=Single(-1),
    signed=True,
    relu=True,
    recombined={"at": "input", "tokens": "all"},
)
def grad_cam(layer: View, at: Literal["norm", "input"] = "norm", tokens: Literal["patch", "all"] = "patch") -> Tensor:
    """relu(sum_k w_k a_k), w_k the channel's mean gradient over the patches, at the last block's normalised input.

    Under `+plus` and the like it follows SkipPLUS: block inputs (at=input), the mean over all tokens, no ReLU.
    """
    a, g = layer.cam_features(at)  # [B, N, d]
    prefix = layer.layout.prefix if a.shape[1] == layer.layout.tokens else 0
    weight = g[:, prefix if tokens == "patch" else 0 :].mean(1, keepdim=True)  # [B, 1, d]
    return (weight * a).sum(-1)
