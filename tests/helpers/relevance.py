"""How much of a map lies on a region of the image."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d


def mean_on(map_: Tensor, region: NDArray[np.bool_]) -> float:
    """Return the mean of a map [rows, cols] over a region of pixels."""
    weights = adaptive_avg_pool2d(torch.from_numpy(region)[None].float(), tuple(map_.shape))[0]
    return float((map_ * weights).sum() / weights.sum())
