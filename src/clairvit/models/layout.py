"""Layout: how the tokens of a ViT lie on the image and which of them the head reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from clairvit.errors import BadInput

Pooling = Literal["token", "distilled", "avg", "map", "mixed"]


@dataclass(frozen=True)
class Layout:
    """Token order is `prefix` tokens first (CLS, distillation, registers), then the grid row by row.

    `read` holds the query rows that the head reads, with weights that sum to 1; left out, they follow from `pooling`.
    Under `map` pooling they are rows of the attention pool (its latent queries) instead of tokens.

    Args:
        grid: Rows and columns of patches.
        prefix: The number of tokens before the patches.
        pooling: What the head reads: "token", "distilled", "avg", "map" or "mixed".
        read: (row, weight) of the query rows that the head reads; left out, they follow from `pooling`.

    Example:
        >>> import clairvit as cv
        >>> cv.Layout(grid=(14, 14), prefix=1, pooling="token").tokens
        197
    """

    grid: tuple[int, int]  # rows, columns of patches
    prefix: int  # tokens before the patches
    pooling: Pooling
    read: tuple[tuple[int, float], ...] = ()  # (row, weight)

    def __post_init__(self) -> None:
        sides = tuple(self.grid) if isinstance(self.grid, tuple | list) else ()
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise BadInput(f"grid={self.grid!r} was given; expected (rows, columns) of patches, such as (14, 14).")
        if not isinstance(self.prefix, int) or self.prefix < 0:
            raise BadInput(f"prefix={self.prefix!r} was given; expected the number of tokens before the patches.")
        if self.pooling not in get_args(Pooling):
            raise BadInput(f"pooling={self.pooling!r} was given; expected one of {', '.join(get_args(Pooling))}.")
        object.__setattr__(self, "grid", sides)
        if not self.read:
            object.__setattr__(self, "read", self._usual_read())
        tokens = self.prefix + sides[0] * sides[1]
        if self.pooling != "map" and any(not 0 <= row < tokens for row, _ in self.read):
            raise BadInput(f"read={self.read!r} names a row outside the {tokens} tokens; expected 0…{tokens - 1}.")

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
