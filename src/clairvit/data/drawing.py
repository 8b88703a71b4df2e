"""Drawing in whole numbers: the same pixels on every machine, and masks that are exact because nothing is smoothed.

Coordinates are in eighths of a pixel; distances are compared as squares, so no root or sine is ever rounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.int32]
Region = NDArray[np.bool_]
Colour = tuple[int, int, int]
FINE = 8  # units in a pixel


class IntRng:
    """Whole numbers drawn from a hash of the words given. Only PCG64's raw output is used: it never changes."""

    def __init__(self, *words: object) -> None:
        content = " ".join(map(str, words)).encode()
        mark = int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "little")
        self._source = np.random.PCG64(mark)

    def number(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return low + int(self._source.random_raw()) % (high - low + 1)

    def bytes(self, rows: int, columns: int) -> Grid:
        """[rows, columns] of 0..255"""
        words = self._source.random_raw(-(-rows * columns // 8)).astype("<u8")  # the same order on every machine
        return words.view(np.uint8)[: rows * columns].reshape(rows, columns).astype(np.int32)

    def colour(self, low: int, high: int) -> Colour:
        return self.number(low, high), self.number(low, high), self.number(low, high)

    def order(self, count: int) -> list[int]:
        """0 … count − 1, shuffled."""
        places = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.number(0, last)
            places[last], places[other] = places[other], places[last]
        return places


def noise(lots: IntRng, size: int, cell: int) -> Grid:
    """Smooth noise 0..255 [size, size]: random bytes every `cell` pixels, and straight lines between them."""
    corners = lots.bytes(size // cell + 2, size // cell + 2)
    places = np.arange(size, dtype=np.int32)
    before, along = places // cell, places % cell
    rows = corners[before] * (cell - along)[:, None] + corners[before + 1] * along[:, None]  # [size, corners]
    both = rows[:, before] * (cell - along) + rows[:, before + 1] * along
    return np.asarray(both // (cell * cell), np.int32)


def plane(size: int, x: int, y: int) -> tuple[Grid, Grid]:
    """How far right of and below (x, y) each pixel's middle is, in fine units: [1, size] and [size, 1]."""
    middles = np.arange(size, dtype=np.int32) * FINE + FINE // 2
    return (middles - x)[None, :], (middles - y)[:, None]


Shape = Callable[[Grid, Grid, int], Region]  # right, below, radius in fine units -> region [size, size]


def disc(right: Grid, below: Grid, radius: int) -> Region:
    return right * right + below * below <= radius * radius


def square(right: Grid, below: Grid, radius: int) -> Region:
    side = radius * 7 // 8
    return (abs(right) <= side) & (abs(below) <= side)


def octagon(right: Grid, below: Grid, radius: int) -> Region:
    side = radius * 15 // 16
    return (abs(right) <= side) & (abs(below) <= side) & (abs(right) + abs(below) <= radius * 21 // 16)


def hexagon(right: Grid, below: Grid, radius: int) -> Region:
    """Points left and right."""
    return (abs(below) <= radius * 7 // 8) & (abs(right) * 7 + abs(below) * 4 <= radius * 7)


def triangle(right: Grid, below: Grid, radius: int) -> Region:
    """Points up."""
    return (below <= radius // 2) & (abs(right) * 7 <= (below + radius) * 4)


def hoop(right: Grid, below: Grid, radius: int) -> Region:
    away = right * right + below * below
    return (away <= radius * radius) & (away * 4 >= radius * radius)


def slab(right: Grid, below: Grid, radius: int) -> Region:
    return (abs(right) <= radius) & (abs(below) * 3 <= radius)


def pillar(right: Grid, below: Grid, radius: int) -> Region:
    return slab(below, right, radius).astype(np.bool_)


BODIES: dict[str, Shape] = {"disc": disc, "square": square, "octagon": octagon, "hexagon": hexagon}
STRAYS: dict[str, Shape] = {**BODIES, "triangle": triangle, "hoop": hoop, "slab": slab, "pillar": pillar}

# What is inked on a badge, and so decides the class. Each is its own mirror image: a flipped picture keeps its class.


def _bars(right: Grid, below: Grid, radius: int) -> Region:
    stripe = (abs(below) * 5 + radius) // (2 * radius)  # counted from the middle
    return np.asarray((stripe % 2 == 0) & (abs(right) <= radius), bool)


def _posts(right: Grid, below: Grid, radius: int) -> Region:
    return _bars(below, right, radius)


def _checks(right: Grid, below: Grid, radius: int) -> Region:
    step = radius * 5 // 8
    across, along = (abs(right) + step // 2) // step, (abs(below) + step // 2) // step
    return np.asarray((across + along) % 2 == 0, bool)


def _ring(right: Grid, below: Grid, radius: int) -> Region:
    away = right * right + below * below
    return (away * 16 <= radius * radius * 10) & (away * 16 >= radius * radius * 3)


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


# Pattern, and the colour that its ink is near: two signs of the class, both in the badge and nowhere else. (With one
# dark ink for all, a ViT of 4 blocks was still at chance after 8,000 scenes; with these it had 25 %, and then 70 %.)
INKS: dict[str, tuple[Shape, Colour]] = {
    "bars": (_bars, (170, 0, 0)),
    "checks": (_checks, (0, 0, 0)),
    "cross": (_cross, (0, 0, 170)),
    "dot": (_dot, (0, 110, 0)),
    "plus": (_plus, (200, 100, 0)),
    "posts": (_posts, (0, 120, 140)),
    "ring": (_ring, (120, 0, 140)),
    "roof": (_roof, (90, 60, 10)),
}
