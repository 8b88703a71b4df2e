"""Grid: which axes of the tokens are rows and columns, and whether the tokens lie there row by row."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from clairvit.models.model import Layout
from clairvit.numerics import index_tensor
from clairvit.tracing.image_region import Cell, ImageRegion, quarter_cells, region_of_patches
from clairvit.tracing.module_state import translate_autograd_errors

MOST_PREFIX_TOKENS = 64  # CLS, distillation, registers: no model has more
MOST_OTHER_TOKENS = 128  # detection tokens included, of which YOLOS has 100
CELLS = 14  # along the shorter side of an image whose model shows no tokens: a ViT's on 224 pixels


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


def cells_of_image(image: tuple[int, int]) -> tuple[int, int]:
    """Return (rows, cols) of nearly square cells, 14 along the shorter side, for a model that shows no tokens."""
    cell = max(1.0, min(image) / CELLS)
    rows, cols = (round(side / cell) for side in image)
    return rows, cols


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


class PixelWeights:
    """How strongly each of the tokens [N, d] depends on each pixel, [H, W] or [T, H, W]; one backward for each."""

    def __init__(self, tokens: Tensor, pixels: Tensor) -> None:
        self.tokens, self.pixels = tokens, pixels
        self._weights: dict[int | tuple[int, ...], Tensor | None] = {}

    def __getitem__(self, row: int | tuple[int, ...]) -> Tensor | None:
        """Return the weights of one token, or of several together; None if they depend on no pixel."""
        if row not in self._weights:
            with translate_autograd_errors():
                (gradient,) = torch.autograd.grad(
                    self.tokens[list(row) if isinstance(row, tuple) else row].square().sum(),
                    self.pixels,
                    retain_graph=True,
                    allow_unused=True,
                )
            weight = None if gradient is None else gradient[0].float().abs().sum(0)
            self._weights[row] = None if weight is None or not weight.any() else weight
        return self._weights[row]


def locate_patches(tokens: Tensor, layout: Layout, pixels: Tensor) -> tuple[Layout | None, ImageRegion | None]:
    """Return the layout with the patches where tokens [N, d] depend on the pixels of their cells, row by row.

    The offset of `layout` is tried first, then that of the first token that depends on the pixels: tokens that follow
    the patches (a class token at the end, detection tokens) are its suffix. None: the patches are in another order,
    which cannot be told either of tokens without a gradient, or on a part of the image, which comes second.
    """
    if not tokens.requires_grad:
        return None, None
    weights = PixelWeights(tokens, pixels)
    located = _in_order(weights, layout)
    ordered, region = _region(weights, located or layout)
    return (located, None) if ordered and region is None else (None, region)


def _in_order(weights: PixelWeights, layout: Layout) -> Layout | None:
    """Return the layout of tokens that lie row by row; None if they are in another order."""
    corners = _corner_weights(weights, layout)
    if _lie_row_by_row(corners, layout):
        return layout
    if len(layout.grid) == 3:
        time_last = replace(layout, time_last=True)
        return time_last if _lie_row_by_row(_corner_weights(weights, time_last), time_last) else None
    others = layout.tokens - layout.patches
    prefix = next((row for row in range(others) if weights[row] is not None), others)
    if prefix == layout.prefix:
        return layout if weights[tuple(layout.patch_rows)] is None else None
    located = replace(layout, prefix=prefix, suffix=others - prefix, read=())
    return located if _lie_row_by_row(_corner_weights(weights, located), located) else None


def _region(weights: PixelWeights, layout: Layout) -> tuple[bool, ImageRegion | None]:
    """Return whether the patches of a layout lie in order, and on which part of the image: `region_of_patches`."""
    rows, cols = layout.grid[-2:]
    inner = zip(quarter_cells(rows), quarter_cells(cols), strict=True)
    rows_of_cells = torch.tensor(layout.patch_rows).reshape(-1, rows, cols)[0]  # of a clip's first frame
    cells = {cell: weights[int(rows_of_cells[cell])] for cell in (*_corners(rows, cols), *inner)}
    planes = {cell: w.sum(0) if w is not None and w.ndim == 3 else w for cell, w in cells.items()}
    return region_of_patches(planes, (rows, cols))


def _corners(rows: int, cols: int) -> tuple[Cell, ...]:
    return (0, cols - 1), (rows // 2, cols - 1), (rows - 1, 0), (rows - 1, cols - 1)


def _corner_weights(weights: PixelWeights, layout: Layout) -> dict[tuple[int, ...], Tensor | None]:
    """Return how the patch tokens of four cells (row, column) at the border depend on the pixels; of two frames."""
    *frames, rows, cols = layout.grid
    corners = _corners(rows, cols)
    cells = [(frame, *corner) for frame in {0, frames[0] - 1} for corner in corners] if frames else list(corners)
    rows_of_cells = torch.tensor(layout.patch_rows).reshape(layout.grid)
    return {cell: weights[int(rows_of_cells[cell])] for cell in cells}


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
