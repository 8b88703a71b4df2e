"""Quantus: `explain_func` for its metrics. ClairViT's own metrics have Quantus' numbers as `compat=quantus`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from clairvit.methods.explain import explain
from clairvit.methods.spec import MethodSpec
from clairvit.models.coerce import ModelLike


def explain_func(
    model: ModelLike | nn.Module,
    inputs: NDArray[Any],
    targets: NDArray[Any] | None = None,
    *,
    method: str | MethodSpec | None = None,
    device: str | None = None,
    **options: Any,
) -> NDArray[np.float32]:
    """Return maps at image size, as Quantus asks its `explain_func` for them.

    Args:
        model: The module that Quantus evaluates.
        inputs: Preprocessed images [B, C, H, W].
        targets: Class indices [B]; None for the predicted ones.
        method: A method string or spec (`explain_func_kwargs={"method": "genatt+skipplus"}`); None is the default.
        device: Where the images are put; None: where the module is.
        **options: Further arguments of `cv.explain`.

    Returns:
        [B, 1, H, W], bilinearly enlarged.

    Example:
        >>> import numpy as np
        >>> import clairvit as cv
        >>> from clairvit.integrations.quantus import explain_func
        >>> images = np.zeros((2, 3, 224, 224), np.float32)
        >>> explain_func(cv.load("pets").module, images, np.array([3, 5]), method="genatt").shape
        (2, 1, 224, 224)
    """
    options.pop("normalise", None)  # Quantus passes its own settings on
    pixels = torch.as_tensor(np.asarray(inputs))
    if isinstance(model, nn.Module):
        parameter = next(model.parameters(), None)
        pixels = pixels if parameter is None else pixels.to(device or parameter.device, parameter.dtype)
    classes = None if targets is None else [int(index) for index in np.asarray(targets).reshape(-1)]
    maps = explain(model, pixels, method, classes, **options).maps
    enlarged = F.interpolate(maps[:, None].float(), pixels.shape[-2:], mode="bilinear", align_corners=False)
    return np.asarray(enlarged.cpu().numpy(), np.float32)
