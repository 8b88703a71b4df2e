"""Numerics: small functions on tensors that every package may use."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def average_ranks(values: Tensor) -> Tensor:
    """Return the rank of each value along the last axis, 1 for the smallest; equal values share their mean rank.

    rank(x_i) = #{j: x_j < x_i} + (#{j: x_j = x_i} + 1) / 2, counted in the sorted values: O(n log n) time, O(n) memory.
    NaN has no rank: it stays NaN, and the other values are ranked among themselves
    (`scipy.stats.rankdata(values, axis=-1, nan_policy="omit")`).

    Args:
        values: […, n], of any real dtype; leading axes are independent of each other.

    Returns:
        […, n] in float64.

    Example:
        >>> average_ranks(torch.tensor([20.0, 10.0, 20.0]))
        tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    missing = values.isnan()
    filled = values.double().masked_fill(missing, math.inf).contiguous()  # […, n]: NaN is sorted to the end
    ordered = filled.sort(-1).values
    below = torch.searchsorted(ordered, filled, right=False)  # how many are smaller
    up_to = torch.searchsorted(ordered, filled, right=True)  # how many are smaller or equal
    up_to = up_to.minimum((~missing).sum(-1, keepdim=True))  # a true infinity does not tie with NaN
    return ((below + up_to + 1).double() / 2).masked_fill(missing, math.nan)


def widened(tensor: Tensor) -> Tensor:
    """Return half precision as float32, before any arithmetic; float32 and float64 stay as they are."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor
