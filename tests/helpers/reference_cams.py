"""The CAM family, one image and one channel at a time, as the papers write it."""

from __future__ import annotations

import torch
from torch import Tensor


def cam_by_hand(name: str, a: Tensor, g: Tensor) -> Tensor:
    """One image, patches only: a, g [n, d] -> [n], before the ReLU."""
    n, d = a.shape
    out = torch.zeros(n, dtype=a.dtype)
    for k in range(d):
        ak, gk = a[:, k], g[:, k]
        if name == "gradcam":
            out += gk.mean() * ak
        elif name == "gradcam-pp":
            alpha = torch.tensor(
                [0.0 if x == 0 else float(x**2 / (2 * x**2 + ak.sum() * x**3 + 1e-6)) for x in gk], dtype=a.dtype
            )
            out += (alpha * gk.clamp(min=0)).sum() * ak
        elif name == "gradcam-elementwise":
            out += (gk * ak).clamp(min=0)
        elif name == "layercam":
            out += gk.clamp(min=0) * ak
        elif name == "hirescam":
            out += gk * ak
        elif name == "xgradcam":
            out += (gk * ak).sum() / (ak.sum() + 1e-7) * ak
        elif name == "xgradcam-plus":
            out += (gk * ak.abs()).sum() / (ak.abs().sum() + 1e-7) * ak
    return out
