"""Rasterise polygons, boxes and run lengths to masks. A pixel belongs to a polygon if its centre does.

Libraries are no replacement: scikit-image fills polygons whose corners are whole numbers otherwise at the edge,
pycocotools fills other pixels at edges and reads damaged run lengths without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clairvit.errors import BadInput

Mask = NDArray[np.bool_]


def fill_polygon(polygon: NDArray[Any], size: tuple[int, int]) -> Mask:
    """Return a closed polygon [points, 2] of (x, y), where pixel (0, 0) covers 0..1, as bool [rows, columns].

    Scan-line algorithm with the even-odd rule: along a row of pixel centres every crossed edge toggles inside/outside.
    """
    rows, columns = size
    points = np.asarray(polygon, dtype=np.float64)
    crossings = np.zeros((rows, columns + 1), dtype=np.int64)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
        low, high = np.clip(np.ceil(np.sort([y0, y1]) - 0.5), 0, rows).astype(int)
        crossed = np.arange(low, high)  # rows whose centre lies in [lower end, upper end)
        if len(crossed):
            x = x0 + (crossed + 0.5 - y0) * (x1 - x0) / (y1 - y0)
            np.add.at(crossings, (crossed, np.clip(np.ceil(x - 0.5), 0, columns).astype(int)), 1)
    inside: Mask = crossings.cumsum(1)[:, :columns] % 2 == 1
    return inside


def fill_boxes(corners: Sequence[tuple[float, float, float, float]], size: tuple[int, int]) -> Mask:
    """Return the union of boxes (left, top, right, bottom), right and bottom excluded."""
    mask = np.zeros(size, dtype=bool)
    for left, top, right, bottom in corners:
        first, last = max(round(left), 0), max(round(right), 0)
        mask[max(round(top), 0) : max(round(bottom), 0), first:last] = True
    return mask


def decode_runs(counts: Sequence[int], size: tuple[int, int]) -> Mask:
    """Return the mask of COCO's run lengths: outside, inside, outside, …, in column-major order."""
    rows, columns = size
    total = sum(counts)
    if total != rows * columns or min(counts, default=0) < 0:
        raise BadInput(
            f"Run lengths of a mask add up to {total}; expected {rows} × {columns} = {rows * columns} pixels."
        )
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return flat.reshape(columns, rows).T


def parse_run_lengths(text: str) -> list[int]:
    """Return COCO's compressed run lengths as numbers.

    Each is written in characters of 5 bits, lowest first (bit 5: more follow; bit 4 of the last: negative), from the
    fourth on as the difference to the one two positions before.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise BadInput(f"Run lengths of a mask hold the character {character!r}; expected COCO's compressed ones.")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    if shift:
        raise BadInput("Compressed run lengths of a mask end in the middle of a number; expected whole ones.")
    return counts


def decode_segmentation(segmentation: Any, size: tuple[int, int]) -> Mask:
    """Return the mask of COCO's `segmentation`: polygons [[x, y, x, y, …], …] or run lengths, plain or compressed."""
    if isinstance(segmentation, dict):
        counts = segmentation["counts"]
        mask_size = tuple(int(side) for side in segmentation["size"])
        if mask_size != size:
            raise BadInput(
                f"Run lengths are of a mask of {mask_size} pixels in an image of {size}; expected the same size."
            )
        return decode_runs(parse_run_lengths(counts) if isinstance(counts, str) else counts, size)
    mask = np.zeros(size, dtype=bool)
    for polygon in segmentation:
        mask |= fill_polygon(np.asarray(polygon, dtype=np.float64).reshape(-1, 2), size)
    return mask
