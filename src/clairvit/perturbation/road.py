"""ROAD (Rong et al., 2022): removed pixels are the weighted mean of their eight neighbours, plus a little noise.

All removed pixels of a mask form one sparse linear system. It depends on the mask alone, so that one factorisation
serves all channels, and all images that share the mask.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clairvit.perturbation.rng import make_generator

NOISE = 0.01  # standard deviation, in normalised space
# Neighbours with their weights: next to each other twice as much as across a corner; together 1.
_NEIGHBOURS = [
    (dy, dx, 1 / 6 if dy == 0 or dx == 0 else 1 / 12) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if (dy, dx) != (0, 0)
]


def imputed(images: Tensor, removed: Tensor, marks: list[int]) -> Tensor:
    """Images [n, 3, H, W] without the pixels of `removed`, bool [n, H, W]; the noise is of each image's fingerprint."""
    filled = images.clone()
    groups: dict[bytes, list[int]] = {}
    masks = removed.cpu().numpy()
    for row, mask in enumerate(masks):
        groups.setdefault(np.packbits(mask).tobytes(), []).append(row)
    for key, rows in groups.items():
        gone = masks[rows[0]]
        known = images[rows].double().cpu().numpy()  # [k, 3, H, W]
        places = torch.from_numpy(gone).to(images.device)
        values = torch.from_numpy(_solved(known, gone)).to(images)  # [k, 3, gaps]
        for row, value in zip(rows, values, strict=True):
            noise = torch.randn(value.shape, generator=make_generator(zlib.crc32(key, marks[row]))).to(value)
            filled[row, :, places] = value + NOISE * noise
    return filled


def _solved(known: np.ndarray[Any, Any], gone: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values [k, 3, gaps] at the gaps, in reading order; the mean colour (0) where there is nothing to go by."""
    from scipy.sparse import csc_matrix, identity
    from scipy.sparse.linalg import splu

    k, channels, height, width = known.shape
    gaps = int(gone.sum())
    if gaps in (0, gone.size):
        return np.zeros((k, channels, gaps))
    number = np.full(gone.shape, -1)
    number[gone] = np.arange(gaps)
    y, x = np.nonzero(gone)
    weight_sum, right = np.zeros(gaps), np.zeros((gaps, k * channels))
    flat = known.reshape(k * channels, height, width)
    rows, cols, weights = [], [], []
    for dy, dx, weight in _NEIGHBOURS:
        ny, nx = y + dy, x + dx
        inside = (ny >= 0) & (ny < height) & (nx >= 0) & (nx < width)
        own = np.nonzero(inside)[0]
        other = number[ny[own], nx[own]]
        weight_sum[own] += weight
        among = other >= 0
        rows.append(own[among])
        cols.append(other[among])
        weights.append(np.full(int(among.sum()), -weight))
        seen = own[~among]
        right[seen] += weight * flat[:, ny[seen], nx[seen]].T
    entries = (np.concatenate(weights), (np.concatenate(rows), np.concatenate(cols)))
    system = csc_matrix(entries, shape=(gaps, gaps)) + identity(gaps, format="csc").multiply(weight_sum).tocsc()
    how = {"SymmetricMode": True}
    found = splu(system, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=how).solve(right)
    return np.ascontiguousarray(found.T).reshape(k, channels, gaps)
