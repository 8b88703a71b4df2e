"""Removal: what replaces a patch. Either its token is dropped, or its pixels are painted over.

token           the patch's token is dropped after the position embedding: the model sees a shorter sequence
mean            zero in normalised space: the mean colour of the data the model was trained on
image-mean      the mean colour of the image itself
black           zero in pixel space
minimum         the smallest value of the image itself, in every channel: what Quantus calls black
blur            RISE's 11 × 11 kernel (nearly a box; its zero padding fades the border into the mean colour)
gaussian-blur   a true Gaussian, sigma 5 pixels
noise           normal noise with the mean and spread of the training data, fixed by seed and image
road            noisy linear imputation: each pixel the weighted mean of its neighbours (`impute`)
"""

from __future__ import annotations

import functools
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._rng import image_seeds, make_generator
from clairvit.errors import UnknownName, did_you_mean
from clairvit.models.preprocess import Preprocess
from clairvit.numerics import widened
from clairvit.option_types import Doc

Removal = Annotated[
    Literal["token", "mean", "image-mean", "black", "minimum", "blur", "gaussian-blur", "noise", "road"],
    Doc("what takes the place of removed patches; token drops them from the sequence, road imputes them"),
]
REMOVALS: tuple[str, ...] = get_args(get_args(Removal)[0])
SIGMA = 5.0  # pixels, of both blurs
ROAD_NOISE = 0.01  # standard deviation, in normalised space
# Neighbours with their weights: adjacent pixels twice as much as diagonal ones; together 1.
_NEIGHBOURS = [
    (dy, dx, 1 / 6 if dy == 0 or dx == 0 else 1 / 12) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if (dy, dx) != (0, 0)
]


def check_removal(name: str) -> None:
    """Raise UnknownName unless this is a removal."""
    if name not in REMOVALS:
        raise UnknownName(
            f"There is no removal '{name}'; expected one of {', '.join(REMOVALS)}.{did_you_mean(name, REMOVALS)}"
        )


def background(removal: str, pixels: Tensor, preprocess: Preprocess, seed: int) -> Tensor:
    """Return what replaces removed patches, shaped and normalised as the images [B, C, H, W] or clips [B, C, T, H, W].

    Frames of a clip are blurred one by one.
    """
    axes = tuple(range(2, pixels.ndim))
    if removal == "black":
        black = [-mean / std for mean, std in zip(preprocess.mean, preprocess.std, strict=True)]
        return pixels.new_tensor(black).reshape(-1, *(1,) * len(axes)).expand_as(pixels)
    if removal == "image-mean":
        return pixels.mean(axes, keepdim=True).expand_as(pixels)
    if removal == "minimum":
        return pixels.amin((1, *axes), keepdim=True).expand_as(pixels)
    if removal in ("blur", "gaussian-blur") and pixels.ndim == 5:
        return _unfold_frames(background(removal, _fold_frames(pixels), preprocess, seed), len(pixels))
    if removal == "blur":
        kernel = rise_kernel().to(pixels).expand(pixels.shape[1], 1, -1, -1)
        return F.conv2d(pixels, kernel, padding=kernel.shape[-1] // 2, groups=pixels.shape[1])
    if removal == "gaussian-blur":
        return gaussian_blur(pixels)
    if removal == "noise":
        generators = [make_generator(image_seed, "removal/noise") for image_seed in image_seeds(pixels, seed)]
        return torch.stack(
            [
                torch.randn(pixels.shape[1:], generator=generator, dtype=torch.float32, device="cpu")
                for generator in generators
            ]
        ).to(pixels)
    return torch.zeros_like(pixels)  # mean; road where no pixel is left to impute from


@functools.cache
def rise_kernel() -> Tensor:
    """Return RISE's kernel [11, 11]: a point, smoothed with sigma 5 inside its own window, whose borders reflect."""
    from scipy.ndimage import gaussian_filter

    impulse = np.zeros((11, 11))
    impulse[5, 5] = 1
    return torch.from_numpy(gaussian_filter(impulse, SIGMA))


def gaussian_blur(pixels: Tensor) -> Tensor:
    """Return the images blurred with a Gaussian that is cut at four sigmas; borders are reflected."""
    for axis, size in ((-1, pixels.shape[-1]), (-2, pixels.shape[-2])):
        radius = min(int(4 * SIGMA), size - 1)
        distance = torch.arange(-radius, radius + 1, dtype=torch.float64)
        weights = torch.exp(-(distance**2) / (2 * SIGMA**2))
        row = (weights / weights.sum()).to(pixels).expand(pixels.shape[1], 1, 1, -1)  # [3, 1, 1, n]
        pad = (radius, radius, 0, 0) if axis == -1 else (0, 0, radius, radius)
        kernel = row if axis == -1 else row.transpose(-2, -1)
        pixels = F.conv2d(F.pad(pixels, pad, mode="reflect"), kernel, groups=pixels.shape[1])
    return pixels


def _fold_frames(clips: Tensor) -> Tensor:
    """Return the frames of clips [n, C, T, H, W] as images [n · T, C, H, W]."""
    return clips.transpose(1, 2).flatten(0, 1)


def _unfold_frames(frames: Tensor, count: int) -> Tensor:
    """Return images [n · T, C, H, W] as n clips [n, C, T, H, W]."""
    return frames.reshape(count, -1, *frames.shape[1:]).transpose(1, 2)


def patches_to_pixels(cells: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return [n, H, W] of [n, rows, cols], or [n, T, H, W] of [n, frames, rows, cols], in float32 at least.

    Every pixel has its patch's value.
    """
    wide = cells.to(torch.promote_types(cells.dtype, torch.float32))
    return F.interpolate(wide[:, None], size=size, mode="nearest-exact")[:, 0]


# ROAD (Rong et al., ICML 2022)


def impute(images: Tensor, removed: Tensor, seeds: list[int]) -> Tensor:
    """Return images [n, C, H, W] with the pixels of `removed`, bool [n, H, W], imputed as in ROAD; clips by frame.

    A removed pixel is the weighted mean of its eight neighbours plus noise, which is drawn from the image's seed. All
    removed pixels of a mask form one sparse linear system. It depends on the mask alone, so that one factorisation
    serves all channels, and all images with the same mask.
    """
    if images.ndim == 5:  # clips [n, C, T, H, W]: a pixel has neighbours in its own frame
        frame_seeds = [seed for seed in seeds for _ in range(images.shape[2])]
        return _unfold_frames(impute(_fold_frames(images), removed.flatten(0, 1), frame_seeds), len(images))
    filled = images.clone()
    rows_of_mask: dict[bytes, list[int]] = {}
    masks = removed.cpu().numpy()
    for row, mask in enumerate(masks):
        rows_of_mask.setdefault(np.packbits(mask).tobytes(), []).append(row)
    pixels = widened(images).cpu().numpy()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # parts of the factorisation run outside Python's lock
        solutions = list(pool.map(lambda rows: _solve(pixels[rows], masks[rows[0]]), rows_of_mask.values()))
    for (key, rows), solution in zip(rows_of_mask.items(), solutions, strict=True):
        values = torch.from_numpy(solution).to(images)  # [k, 3, gaps]
        gaps = torch.from_numpy(masks[rows[0]]).to(images.device)
        for row, value in zip(rows, values, strict=True):
            noise = torch.randn(
                value.shape,
                generator=make_generator(zlib.crc32(key, seeds[row]), "road/noise"),
                dtype=torch.float32,
                device="cpu",
            ).to(value)
            filled[row, :, gaps] = value + ROAD_NOISE * noise
    return filled


def _solve(images: np.ndarray[Any, Any], removed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the values [k, 3, gaps] of removed pixels, in reading order; 0, the mean colour, if all are removed.

    For each gap i: sum_j w_ij v_i − sum_{j removed} w_ij v_j = sum_{j kept} w_ij x_j over its neighbours j.
    """
    from scipy.sparse import csc_matrix, identity
    from scipy.sparse.linalg import splu

    k, channels, height, width = images.shape
    gaps = int(removed.sum())
    if gaps in (0, removed.size):
        return np.zeros((k, channels, gaps))
    number = np.full(removed.shape, -1)
    number[removed] = np.arange(gaps)
    y, x = np.nonzero(removed)
    diagonal, right_side = np.zeros(gaps), np.zeros((gaps, k * channels))
    flat = images.astype(np.float64).reshape(k * channels, height, width)
    rows, cols, weights = [], [], []
    for dy, dx, weight in _NEIGHBOURS:
        ny, nx = y + dy, x + dx
        inside = (ny >= 0) & (ny < height) & (nx >= 0) & (nx < width)
        gap = np.nonzero(inside)[0]
        neighbour = number[ny[gap], nx[gap]]
        diagonal[gap] += weight
        is_gap = neighbour >= 0
        rows.append(gap[is_gap])
        cols.append(neighbour[is_gap])
        weights.append(np.full(int(is_gap.sum()), -weight))
        at_edge = gap[~is_gap]
        right_side[at_edge] += weight * flat[:, ny[at_edge], nx[at_edge]].T
    entries = (np.concatenate(weights), (np.concatenate(rows), np.concatenate(cols)))
    system = csc_matrix(entries, shape=(gaps, gaps)) + identity(gaps, format="csc").multiply(diagonal).tocsc()
    options = {"SymmetricMode": True}
    values = splu(system, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options).solve(right_side)
    return np.ascontiguousarray(values.T).reshape(k, channels, gaps)
