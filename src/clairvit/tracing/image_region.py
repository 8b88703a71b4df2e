"""Image region: the part of the image that the patch tokens lie on, which a crop or padding inside the model changes.

A map is drawn on the whole image, its cells next to each other. So the first cells must look at the first pixels, the
last ones at the last, and a cell in between at the pixels of its own place. How tokens depend on the pixels says where
they look. A stem of convolutions looks further than a cell, up to half a cell to one side (padding on the left alone);
a grid may leave a remainder of less than a cell at the end of a side. Nothing of that is a crop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from clairvit.errors import NotApplicable

Cell = tuple[int, int]  # row, column
MOST_UNSEEN = 0.25  # cells at the first border that no token sees: an image made smaller leaves out a pixel or two
FARTHEST_PATCH = 0.62  # cells from the border to the first patch; half a cell more for each that tokens look further
WIDEST_WHOLE = 1.5  # cells that tokens are taken to look at if they see all of the image: that is not told
LEAST_LOCAL = 0.5  # of a token's dependence on the pixels must be at its place, or that place cannot be told
WIDEST = 1.3  # cells that a token may look at in the main if it sees all of the image (a mean over the pixels)


@dataclass(frozen=True)
class ImageRegion:
    """The rows and columns of pixels that the patches lie on, ends excluded; with padding they exceed the image."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    image: tuple[int, int]

    def __str__(self) -> str:
        (top, bottom), (left, right), (height, width) = self.rows, self.columns, self.image
        return f"about rows {top} to {bottom} and columns {left} to {right} of an image of {height} × {width} pixels"

    def refusal(self) -> NotApplicable:
        """Return the error of what would draw the patches on the whole image."""
        return NotApplicable(
            f"The patches of this model lie on {self}, because it crops, pads or shifts the image inside its forward; "
            "a map would be drawn in the wrong place. Expected patches that cover the image: let cv.wrap(module, "
            "size=…, resize=…) crop and resize, and wrap the inner module.",
            alternative="a method of pixel gradients",
        )


@dataclass(frozen=True)
class _Place:
    """Where along one side the token of a cell looks."""

    cell: int
    centre: float  # in cells of the map
    pixels: tuple[int, int]  # from the first to the last that it depends on, the end excluded
    reach: float | None  # cells of the map that it looks at; None: it sees all of the image
    has_centre: bool  # else the centre cannot be told


def quarter_cells(cells: int) -> tuple[int, int]:
    """Return the cells a quarter of a side from its ends: what looks further than its cell is cut off there least."""
    return cells // 4, cells - 1 - cells // 4


def region_of_patches(weights: Mapping[Cell, Tensor | None], grid: tuple[int, int]) -> tuple[bool, ImageRegion | None]:
    """Return whether patches lie in the order of the grid, and on which part of the image; None: all, or not told.

    Args:
        weights: How strongly the tokens of some cells depend on each pixel, [H, W]; None: not at all. Cells at the
            border say which pixels the model sees, `quarter_cells` how far apart its patches lie.
        grid: Rows and columns of cells.
    """
    seen = {cell: weight for cell, weight in weights.items() if weight is not None}
    if not seen:
        return True, None
    height, width = (int(side) for side in next(iter(seen.values())).shape)
    rows, columns = (
        _pixels_of_side([_place(cell[axis], weight.sum(1 - axis), grid[axis]) for cell, weight in seen.items()], *sides)
        for axis, sides in enumerate(((grid[0], height), (grid[1], width)))
    )
    if rows is None or columns is None:
        return False, None
    is_whole = (rows, columns) == ((0, height), (0, width))
    return True, None if is_whole else ImageRegion(rows, columns, (height, width))


def region_of_pixels(weight: Tensor, grid: tuple[int, int]) -> ImageRegion | None:
    """Return the part of the image outside which no pixel of weights [H, W] counts; None: all of it, but for a rest."""
    size = (int(weight.shape[0]), int(weight.shape[1]))
    ends = [(int(seen[0]), int(seen[-1]) + 1) for seen in (weight.sum(1 - axis).nonzero().flatten() for axis in (0, 1))]
    cells = [side / count for side, count in zip(size, grid, strict=True)]
    is_whole = all(
        start <= MOST_UNSEEN * cell and side - end < cell
        for (start, end), cell, side in zip(ends, cells, size, strict=True)
    )
    return None if is_whole else ImageRegion(ends[0], ends[1], size)


def _place(cell: int, along: Tensor, cells: int) -> _Place:
    """Return where a token looks along one side, given how strongly it depends on each row (or column) of pixels.

    Its centre halves what exceeds the median: that is zero where a token sees less than half of the side, and what it
    sees of every pixel (a mean over the image) where it sees more.
    """
    along = along.double().cpu()
    pixels = along.nonzero().flatten()
    ends = int(pixels[0]), int(pixels[-1]) + 1
    excess = (along - along.median()).clamp(min=0)
    total = float(excess.sum())
    if total < LEAST_LOCAL * float(along.sum()):
        return _Place(cell, 0.0, ends, None, has_centre=False)
    scale = cells / len(along)
    halves = excess.cumsum(0)
    middle = int((halves < total / 2).sum())  # the pixel in which the half is reached
    centre = (middle + 1 - float(halves[middle] - total / 2) / float(excess[middle])) * scale
    width = total**2 / float(excess @ excess) * scale  # of a box: its width
    if ends == (0, len(along)):
        return _Place(cell, centre, ends, None, has_centre=width <= WIDEST)
    return _Place(cell, centre, ends, (ends[1] - ends[0]) * scale, has_centre=True)


def _pixels_of_side(places: Sequence[_Place], cells: int, size: int) -> tuple[int, int] | None:
    """Return the pixels of one side that the patches lie on: (0, size) if that is all, None if they are in disorder."""
    start = min((place.pixels[0] for place in places if place.cell == 0), default=0)
    end = max((place.pixels[1] for place in places if place.cell == cells - 1), default=size)
    starts, stops = start <= MOST_UNSEEN * size / cells, size - end < size / cells  # at the borders of the image
    centres = {place.cell: place.centre for place in places if place.has_centre}
    first, last = quarter_cells(cells)
    if first != last and {first, last} <= centres.keys():
        pitch = (centres[last] - centres[first]) / (last - first)
        line = {cell: centres[first] + (cell - first) * pitch for cell in centres}
        if pitch <= 0 or any(abs(line[cell] - centre) > 1 for cell, centre in centres.items()):
            return None
        before = centres[first] - (first + 0.5) * pitch  # cells from the border to the first patch
        after = cells - before - cells * pitch  # from the last patch to the border
        reach = max(WIDEST_WHOLE if p.reach is None else p.reach / pitch for p in places if p.has_centre)
        farthest = FARTHEST_PATCH + max(0.0, reach - 1) / 2
        starts = starts and abs(before) <= farthest
        stops = stops and abs(after) <= 1 + farthest  # a remainder of less than a cell
        # Pixels that no token sees are exact; with padding, or where tokens see a little of everything, there are none.
        if start == 0 and abs(before) > MOST_UNSEEN:
            start = round(before * size / cells)
        if end == size and abs(after) > MOST_UNSEEN:
            end = round((cells - after) * size / cells)
    return (0, size) if starts and stops else (start, end)
