"""Layout: how the tokens of a ViT lie on the image and which of them the head reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pooling = Literal["token", "distilled", "avg", "map", "mixed"]


@dataclass(frozen=True)
class Layout:
    """Token order is `prefix` tokens first (CLS, distillation, registers), then the grid row by row.

    `read` holds the query rows that the head reads, with weights that sum to 1; left out, they follow from `pooling`.
    Under `map` pooling they are rows of the attention pool (its latent queries) instead of tokens.
    """

    grid: tuple[int, int]  # rows, columns of patches
    prefix: int  # tokens before the patches
    pooling: Pooling
    read: tuple[tuple[int, float], ...] = ()  # (row, weight)

    def __post_init__(self) -> None:
        if not self.read:
            object.__setattr__(self, "read", self._usual_read())

    def _usual_read(self) -> tuple[tuple[int, float], ...]:
        patches = range(self.prefix, self.tokens)
        if self.pooling == "mixed":
            return ((0, 0.5), *((row, 0.5 / len(patches)) for row in patches))
        rows = {"distilled": range(2), "avg": patches}.get(self.pooling, range(1))
        return tuple((row, 1 / len(rows)) for row in rows)

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches
