"""Grid: which axes of the tokens are rows and columns, and whether the tokens lie there row by row."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from clairvit.models.model import Layout
from clairvit.numerics import index_tensor
from clairvit.tracing.autograd_errors import translate_autograd_errors

MOST_PREFIX_TOKENS = 64  # CLS, distillation, registers: no model has more
MOST_OTHER_TOKENS = 128  # detection tokens included, of which YOLOS has 100


def channels_first(tokens: Tensor, image: tuple[int, int], *, tie: bool = False) -> bool:
    """Return whether it is [B, d, h, w], not [B, h, w, d]: the grid has the image's proportions; `tie` if both have."""
    _, a, b, c = tokens.shape
    first, last = off_proportion(b, c, image), off_proportion(a, b, image)
    return tie if first == last else first < last


def off_proportion(rows: int, cols: int, image: tuple[int, int]) -> float:
    """Return how far a grid is from the image's proportions."""
    return abs(rows * image[1] - cols * image[0]) / (rows * image[1])


def fits_image(rows: int, cols: int, image: tuple[int, int]) -> bool:
    """Return whether rows × cols cells can cover the image with one stride, but for a cell on each side (padding).

    H / (rows ± 1) and W / (cols ± 1) are the strides that each side allows; the two ranges must overlap. So 7 × 7 and
    7 × 8 fit a square image, and 3137 × 19 (tokens × channels) does not.
    """
    sides = list(zip(image, (rows, cols), strict=True))
    smallest = max(side / (cells + 1) for side, cells in sides)
    largest = min(side / (cells - 1) if cells > 1 else math.inf for side, cells in sides)
    return smallest <= largest


def one_image(tokens: Tensor, image: tuple[int, int]) -> Tensor:
    """Return [N, d] from [1, N, d], [N, 1, d], [1, h, w, d] or [1, d, h, w]."""
    if tokens.ndim == 3:
        return tokens.flatten(0, 1)
    return tokens[0].flatten(1).transpose(0, 1) if channels_first(tokens, image) else tokens[0].flatten(0, 1)


def square_patches(count: int, image: tuple[int, int]) -> tuple[int, int] | None:
    """Return (rows, cols) with rows * cols = count that cut the image into equal squares."""
    for rows in range(1, count + 1):
        cols = count // rows
        if rows * cols == count and image[0] % rows == 0 and rows * image[1] == cols * image[0]:
            return rows, cols
    return None


def on_grid(tokens: Tensor, layout: Layout | None, grid: tuple[int, ...] | None, images: Tensor) -> Tensor | None:
    """Return the patch tokens of [n, N, …] on the image grid, [n, rows, cols, …]; None if they form no grid.

    Args:
        tokens: Of one layer, for each image or (n = 1) for all of them, row by row.
        layout: Of the model's patch tokens, if it has one.
        grid: Of the layer's tokens where it is another one, as in later stages of a hierarchical model.
        images: [B, C, H, W], or clips [B, C, T, H, W].
    """
    count, batch = tokens.shape[1], len(images)
    if layout is not None and count == layout.tokens and len(tokens) in (1, batch):
        rows = index_tensor(tuple(layout.patch_rows), tokens.device) if layout.time_last else layout.patch_slice
        patches = tokens[:, rows]
        return patches.reshape(len(tokens), *layout.grid, *tokens.shape[2:])
    squares = square_patches(count, (int(images.shape[-2]), int(images.shape[-1]))) if images.ndim == 4 else None
    for sides in (grid, squares):
        if sides is not None and math.prod(sides) == count > 1 and len(tokens) == batch:
            return tokens.reshape(batch, *sides, *tokens.shape[2:])
    return None


def locate_patches(tokens: Tensor, layout: Layout, pixels: Tensor) -> Layout | None:
    """Return the layout with the patches where tokens [N, d] depend on the pixels of their cells, row by row.

    The offset of `layout` is tried first, then that of the first token that depends on the pixels: tokens that follow
    the patches (a class token at the end, detection tokens) are its suffix. None: the patches are in another order.
    """
    if not tokens.requires_grad:
        return layout  # cannot be told
    weights = _corner_weights(tokens, layout, pixels)
    if _lie_row_by_row(weights, layout):
        return layout
    if len(layout.grid) == 3:
        time_last = replace(layout, time_last=True)
        return time_last if _lie_row_by_row(_corner_weights(tokens, time_last, pixels), time_last) else None
    others = layout.tokens - layout.patches
    prefix = next((row for row in range(others) if _pixel_weight(tokens[row], pixels) is not None), others)
    if prefix == layout.prefix:
        return layout if all(weight is None for weight in weights.values()) else None
    located = replace(layout, prefix=prefix, suffix=others - prefix, read=())
    return located if _lie_row_by_row(_corner_weights(tokens, located, pixels), located) else None


def _corner_weights(tokens: Tensor, layout: Layout, pixels: Tensor) -> dict[tuple[int, ...], Tensor | None]:
    """Return how the patch tokens of four cells (row, column) at the border depend on the pixels; of two frames."""
    *frames, rows, cols = layout.grid
    corners = ((0, cols - 1), (rows // 2, cols - 1), (rows - 1, 0), (rows - 1, cols - 1))
    cells = [(frame, *corner) for frame in {0, frames[0] - 1} for corner in corners] if frames else list(corners)
    rows_of_cells = torch.tensor(layout.patch_rows).reshape(layout.grid)
    return {cell: _pixel_weight(tokens[int(rows_of_cells[cell])], pixels) for cell in cells}


def _lie_row_by_row(weights: dict[tuple[int, ...], Tensor | None], layout: Layout) -> bool:
    """Return whether the tokens depend on the pixels of their own cells: some models sort them by windows."""
    for cell, weight in weights.items():
        if weight is None:  # a learned token (YOLOS puts its own last) where a patch should be
            return False
        for axis in range(weight.ndim):
            along = weight.movedim(axis, 0).flatten(1).sum(1)
            if along[0] > 0 and along[-1] > 0:  # from border to border (a deep CNN before the tokens): cannot be told
                continue
            centre = (along * (torch.arange(len(along), device=along.device) + 0.5)).sum() / along.sum() / len(along)
            if abs(float(centre) - (cell[axis] + 0.5) / layout.grid[axis]) > 0.3:
                return False
    return True


def _pixel_weight(token: Tensor, pixels: Tensor) -> Tensor | None:
    """Return how strongly a token [d] depends on each pixel, [H, W] or [T, H, W]; None if it depends on none."""
    with translate_autograd_errors():
        (gradient,) = torch.autograd.grad(token.square().sum(), pixels, retain_graph=True, allow_unused=True)
    weight = None if gradient is None else gradient[0].float().abs().sum(0)
    return None if weight is None or not weight.any() else weight
