"""Numerics: small functions on tensors that every package may use."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_BMM_WIDENS = "out_dtype" in (torch.bmm.__doc__ or "")  # torch 2.8 and later, on CUDA


def positive_over_largest(values: Tensor) -> Tensor:
    """Return relu(x) / max x along the last axis, […, n]; rows without a positive value become 0."""
    largest = values.amax(-1, keepdim=True)
    return values.clamp(min=0) / torch.where(largest > 0, largest, torch.ones_like(largest))


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


def on_tensor_cores(tensor: Tensor) -> bool:
    """Return whether `wide_product` multiplies such a tensor as it is: half precision on CUDA."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _BMM_WIDENS


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 at least, without a graph.

    Products of two half-precision numbers are exact in float32, so tensor cores may compute and add them.

    Args:
        a: […, n, m]; on tensor cores with the leading axes and the dtype of `b`.
        b: […, m, p].

    Returns:
        […, n, p].
    """
    a, b = a.detach(), b.detach()
    if not (on_tensor_cores(a) and a.dtype == b.dtype and a.shape[:-2] == b.shape[:-2]):
        return widened(a) @ widened(b)
    left, right = (t.reshape(-1, *t.shape[-2:]) for t in (a, b))
    product = torch.bmm(left, right, out_dtype=torch.float32)
    return product.view(*a.shape[:-1], b.shape[-1])


@functools.lru_cache(maxsize=256)
def index_tensor(indices: tuple[int, ...], device: torch.device) -> Tensor:
    """Return indices as a tensor on a device, which is copied there once; never to be written to.

    Indexing with a Python list copies it to the device each time, and waits for that.
    """
    with torch.inference_mode(False):
        return torch.tensor(indices, dtype=torch.long, device=device)


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers in (nested) lists as a tensor on a device, without waiting for what a GPU has been given to do.

    An ordinary copy to a GPU waits for all kernels that were started before; one from page-locked memory does not.
    """
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def equal_along(tensor: Tensor, dim: int) -> bool:
    """Return whether all entries along an axis are equal; taken for granted while CUDA captures, when none can be read.

    The results of a captured graph are compared with those of an ordinary run, in which this was checked.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor))


def min_max(values: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return (x − min) / (max − min) over the axes `dim`; 0 where all values are equal.

    Example:
        >>> min_max(torch.tensor([[2.0, 4.0, 6.0], [3.0, 3.0, 3.0]]), dim=1)
        tensor([[0.0000, 0.5000, 1.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
    return (values - low) / torch.where(high == low, torch.ones_like(high), high - low)


def over_largest(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return x / max |x| over the axes `dim`; zeros where all values are 0.

    Example:
        >>> over_largest(torch.tensor([1.0, -4.0, 2.0]), dim=0)
        tensor([ 0.2500, -1.0000,  0.5000])
    """
    largest = values.abs().amax(dim, keepdim=True)
    return values / torch.where(largest == 0, torch.ones_like(largest), largest)


def is_constant(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return whether all values are equal over the axes `dim`, bool; False with NaN among them."""
    return values.amax(dim) == values.amin(dim)


def pool_to_grid(pixels: Tensor, grid: tuple[int, ...], reduction: Literal["sum", "mean"] = "mean") -> Tensor:
    """Return the mean or sum over each cell of a grid, in float32 at least.

    Args:
        pixels: [B, H, W], or [B, T, H, W] of clips.
        grid: (rows, cols), or (frames, rows, cols).
        reduction: What is computed over the pixels of a cell.

    Returns:
        [B, rows, cols] or [B, frames, rows, cols].
    """
    if tuple(pixels.shape[1:]) == tuple(grid):
        return widened(pixels)
    pool: Any = F.adaptive_avg_pool2d if len(grid) == 2 else F.adaptive_avg_pool3d
    mean: Tensor = pool(widened(pixels)[:, None], grid)[:, 0]
    per_cell = math.prod(pixels.shape[1:]) / math.prod(grid)  # pixels per cell
    return mean * per_cell if reduction == "sum" else mean


def percent(probability: float | None) -> str:
    """Return 0.923 as '92%', 0.0042 as '0.4%', and '' where there is no probability."""
    if probability is None or not math.isfinite(probability):
        return ""
    if probability < 0.0005:
        return "<0.1%"
    if probability < 0.0995:
        return f"{100 * probability:.1f}%"
    return f"{100 * probability:.0f}%" if probability < 0.995 else f"{math.floor(1000 * probability) / 10:g}%"


def spread_evenly(cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return [B, rows, cols] on another grid with the same total: a cell's value is spread over the area it covers."""
    rows, cols = cells.shape[-2:]
    along_rows = _covered_share(rows, grid[0]).to(cells)  # [grid rows, rows]
    along_cols = _covered_share(cols, grid[1]).to(cells)  # [grid cols, cols]
    return along_rows @ cells @ along_cols.T


def repeat_cells(cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return [..., rows, cols] on a finer grid: each of its cells has the value of the one that its corner lies in."""
    for axis, fine in zip((-2, -1), grid, strict=True):
        coarse = cells.shape[axis]
        places = index_tensor(tuple(place * coarse // fine for place in range(fine)), cells.device)
        cells = cells.index_select(axis, places)
    return cells


def pick_cells(cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the [..., rows, cols] that `repeat_cells` made these cells of."""
    for axis, coarse in zip((-2, -1), grid, strict=True):
        fine = cells.shape[axis]
        places = index_tensor(tuple(-(-place * fine // coarse) for place in range(coarse)), cells.device)
        cells = cells.index_select(axis, places)
    return cells


def _covered_share(coarse: int, fine: int) -> Tensor:
    """Return [fine, coarse]: the share of each of `coarse` equal intervals in each of `fine`; columns add up to 1."""
    bounds = torch.arange(fine + 1, dtype=torch.float64)[:, None] * coarse  # in units of 1 / (fine · coarse): exact
    borders = torch.arange(coarse + 1, dtype=torch.float64)[None] * fine
    overlap = torch.minimum(bounds[1:], borders[:, 1:]) - torch.maximum(bounds[:-1], borders[:, :-1])
    return overlap.clamp(min=0) / fine


def map_statistics(values: Tensor) -> dict[str, float | None]:
    """Return the lowest, mean and highest finite value of a map; None where there is none."""
    array = values.detach().to("cpu", torch.float64).numpy()
    finite = array[np.isfinite(array)]
    if finite.size == 0:
        return {"min": None, "mean": None, "max": None}
    return {"min": float(finite.min()), "mean": float(finite.mean()), "max": float(finite.max())}
