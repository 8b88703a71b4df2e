"""Layout: how the tokens of a ViT lie on the image and which of them the head reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pooling = Literal["token", "distilled", "avg", "map", "mixed"]


@dataclass(frozen=True)
class Layout:
    """Token order is `prefix` tokens first (CLS, distillation, registers), then the grid row by row.

    `read` holds the query rows that the head reads, with weights that sum to 1. Under `map` pooling they are rows of
    the attention pool (its latent queries) instead of tokens.
    """

    grid: tuple[int, int]  # rows, columns of patches
    prefix: int  # tokens before the patches
    pooling: Pooling
    read: tuple[tuple[int, float], ...] = ()  # (row, weight)

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches
