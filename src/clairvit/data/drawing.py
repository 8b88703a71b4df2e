"""Drawing in integer arithmetic: the same pixels on every machine, and exact masks, because edges are not smoothed.

Coordinates are in eighths of a pixel; distances are compared as squares, so that no root or sine is rounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.int32]
Region = NDArray[np.bool_]
Colour = tuple[int, int, int]
UNITS_PER_PIXEL = 8


class IntRng:
    """Random integers, seeded by a hash of `words`. Only PCG64's raw output is used: it never changes."""

    def __init__(self, *words: object) -> None:
        content = " ".join(map(str, words)).encode()
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "little")
        self._generator = np.random.PCG64(seed)

    def integer(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return low + int(self._generator.random_raw()) % (high - low + 1)

    def bytes(self, rows: int, columns: int) -> Grid:
        """Return [rows, columns] of 0..255."""
        words = self._generator.random_raw(-(-rows * columns // 8)).astype("<u8")  # the same order on every machine
        return words.view(np.uint8)[: rows * columns].reshape(rows, columns).astype(np.int32)

    def colour(self, low: int, high: int) -> Colour:
        """Return three integers from low to high."""
        return self.integer(low, high), self.integer(low, high), self.integer(low, high)

    def permutation(self, count: int) -> list[int]:
        """Return 0 … count − 1, shuffled (Fisher-Yates)."""
        values = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.integer(0, last)
            values[last], values[other] = values[other], values[last]
        return values


def noise(rng: IntRng, size: int, cell: int) -> Grid:
    """Return value noise 0..255 [size, size]: random bytes every `cell` pixels, interpolated linearly."""
    corners = rng.bytes(size // cell + 2, size // cell + 2)
    positions = np.arange(size, dtype=np.int32)
    index, offset = positions // cell, positions % cell
    rows = corners[index] * (cell - offset)[:, None] + corners[index + 1] * offset[:, None]  # [size, corners]
    values = rows[:, index] * (cell - offset) + rows[:, index + 1] * offset
    return np.asarray(values // (cell * cell), np.int32)


def textured_background(rng: IntRng, size: int) -> Grid:
    """Return a background [size, size, 3]: two colours blended by coarse and fine noise, plus grain."""
    first, second = rng.colour(30, 225), rng.colour(30, 225)
    coarse, fine = noise(rng, size, size // 4), noise(rng, size, size // rng.integer(8, 24))
    blend = (coarse * 2 + fine) // 3  # 0..255
    grain = rng.bytes(size, size) * rng.integer(10, 60) // 255
    canvas: Grid = np.empty((size, size, 3), np.int32)
    for channel in range(3):
        canvas[..., channel] = (first[channel] * (255 - blend) + second[channel] * blend) // 255 + grain
    return canvas


def offsets(size: int, x: int, y: int) -> tuple[Grid, Grid]:
    """Return how far right of and below (x, y) each pixel's centre is, in units: [1, size] and [size, 1]."""
    centres = np.arange(size, dtype=np.int32) * UNITS_PER_PIXEL + UNITS_PER_PIXEL // 2
    return (centres - x)[None, :], (centres - y)[:, None]


Shape = Callable[[Grid, Grid, int], Region]  # right, below, radius in units -> region [size, size]


def disc(right: Grid, below: Grid, radius: int) -> Region:
    return right * right + below * below <= radius * radius


def square(right: Grid, below: Grid, radius: int) -> Region:
    side = radius * 7 // 8
    return (abs(right) <= side) & (abs(below) <= side)


def octagon(right: Grid, below: Grid, radius: int) -> Region:
    side = radius * 15 // 16
    return (abs(right) <= side) & (abs(below) <= side) & (abs(right) + abs(below) <= radius * 21 // 16)


def hexagon(right: Grid, below: Grid, radius: int) -> Region:
    """Return a hexagon with corners left and right."""
    return (abs(below) <= radius * 7 // 8) & (abs(right) * 7 + abs(below) * 4 <= radius * 7)


def triangle(right: Grid, below: Grid, radius: int) -> Region:
    """Return a triangle with a corner at the top."""
    return (below <= radius // 2) & (abs(right) * 7 <= (below + radius) * 4)


def ring_shape(right: Grid, below: Grid, radius: int) -> Region:
    squared = right * right + below * below
    return (squared <= radius * radius) & (squared * 4 >= radius * radius)


def horizontal_bar(right: Grid, below: Grid, radius: int) -> Region:
    return (abs(right) <= radius) & (abs(below) * 3 <= radius)


def vertical_bar(right: Grid, below: Grid, radius: int) -> Region:
    return horizontal_bar(below, right, radius).astype(np.bool_)


def slab(right: Grid, below: Grid, radius: int) -> Region:
    """Return a rectangle twice as wide as high."""
    return (abs(right) <= radius) & (abs(below) * 2 <= radius)


BODY_SHAPES: dict[str, Shape] = {"disc": disc, "square": square, "octagon": octagon, "hexagon": hexagon}
DISTRACTOR_SHAPES: dict[str, Shape] = {
    **BODY_SHAPES,
    "triangle": triangle,
    "ring": ring_shape,
    "bar": horizontal_bar,
    "column": vertical_bar,
}

# Patterns of class markers. Each is its own mirror image: a flipped picture keeps its class.


def _bars(right: Grid, below: Grid, radius: int) -> Region:
    stripe = (abs(below) * 5 + radius) // (2 * radius)  # counted from the centre
    return np.asarray((stripe % 2 == 0) & (abs(right) <= radius), bool)


def _posts(right: Grid, below: Grid, radius: int) -> Region:
    return _bars(below, right, radius)


def _checks(right: Grid, below: Grid, radius: int) -> Region:
    step = radius * 5 // 8
    column, row = (abs(right) + step // 2) // step, (abs(below) + step // 2) // step
    return np.asarray((column + row) % 2 == 0, bool)


def _ring(right: Grid, below: Grid, radius: int) -> Region:
    squared = right * right + below * below
    return (squared * 16 <= radius * radius * 10) & (squared * 16 >= radius * radius * 3)


def _dot(right: Grid, below: Grid, radius: int) -> Region:
    return (right * right + below * below) * 16 <= radius * radius * 5


def _plus(right: Grid, below: Grid, radius: int) -> Region:
    arm = radius * 7 // 32
    return (abs(right) <= arm) | (abs(below) <= arm)


def _cross(right: Grid, below: Grid, radius: int) -> Region:
    arm = radius * 5 // 16
    return (abs(right - below) <= arm) | (abs(right + below) <= arm)


def _roof(right: Grid, below: Grid, radius: int) -> Region:
    return (below <= radius * 3 // 8) & (abs(right) * 3 <= (below + radius * 3 // 4) * 2)


# Pattern and base colour of its ink: two signs of the class, both in the marker and nowhere else. (With one dark ink
# for all, a ViT of 4 blocks was still at chance level after 8,000 scenes; with these it had 25 %, and then 70 %.)
CLASS_PATTERNS: dict[str, tuple[Shape, Colour]] = {
    "bars": (_bars, (170, 0, 0)),
    "checks": (_checks, (0, 0, 0)),
    "cross": (_cross, (0, 0, 170)),
    "dot": (_dot, (0, 110, 0)),
    "plus": (_plus, (200, 100, 0)),
    "posts": (_posts, (0, 120, 140)),
    "ring": (_ring, (120, 0, 140)),
    "roof": (_roof, (90, 60, 10)),
}
