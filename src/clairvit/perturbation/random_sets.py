"""Random sets of patches that are kept, in blocks of one size, and the contrasts that take out what the size does.

`refine` and `check` spend the same sets: those of a smaller number of passes are the first of a larger one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._rng import make_generator

BLOCK = 8  # sets of one size, whose mean drops out
GOLDEN = 0.618034  # blocks of successive sizes spread evenly: the fractional parts of its multiples
FEWEST, MOST = 0.05, 0.95  # shares of the patches that a set keeps


def keep_sets(patches: int, passes: int, seed: int) -> Tensor:
    """Return bool [passes, patches]: blocks of 8 random sets of one size; a larger `passes` adds sets at the end.

    Block j keeps round(P · (0.05 + 0.9 · frac(0.618034 · j))) of P patches, at least one and never all.
    """
    blocks = []
    for block in range(math.ceil(passes / BLOCK)):
        size = min(max(round(patches * (FEWEST + (MOST - FEWEST) * (GOLDEN * block % 1.0))), 1), max(patches - 1, 1))
        generator = make_generator(seed, "refine/sets", block)
        ranks = torch.rand(BLOCK, patches, generator=generator, dtype=torch.float64, device="cpu").argsort(1).argsort(1)
        blocks.append(ranks < size)
    return torch.cat(blocks)[:passes] if blocks else torch.zeros(0, patches, dtype=torch.bool)


def contrasts(count: int) -> Tensor:
    """Return [n, count] whose rows are orthonormal and add up to 0 within each block of 8: the block's mean drops out.

    A block of m sets gives m − 1 equations whose errors stay independent.
    """
    mixing = torch.zeros(count - math.ceil(count / BLOCK), count, dtype=torch.float64)
    for start in range(0, count, BLOCK):
        block, row = _helmert(min(BLOCK, count - start)), start - start // BLOCK
        mixing[row : row + len(block), start : start + block.shape[1]] = block
    return mixing


def _helmert(size: int) -> Tensor:
    """Return Helmert's orthonormal contrasts, [size − 1, size]: each row compares one entry with those before it."""
    rows = torch.zeros(size - 1, size, dtype=torch.float64)
    for row in range(size - 1):
        rows[row, : row + 1], rows[row, row + 1] = 1.0, -(row + 1.0)
    return F.normalize(rows, dim=1)
