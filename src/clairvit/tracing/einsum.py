"""Einsum: which axes of a product are queries, keys and width, however its author named and ordered them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def spelled_out(equation: Any, operands: Any) -> tuple[str, str, str] | None:
    """The axes of a product of two tensors: "...id, ...jd -> ...ij" gives ("BAid", "BAjd", "BAij")."""
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    sides, result = equation.replace(" ", "").split("->")
    terms = sides.split(",")
    dots = [x.ndim - len(term) + 3 if "..." in term else 0 for x, term in zip(operands, terms, strict=True)]
    spare = [c for c in "HGFEDCBA" if c not in equation]

    def named(term: str, count: int) -> str:
        return term.replace("...", "".join(spare[len(spare) - count :]))

    return named(terms[0], dots[0]), named(terms[1], dots[1]), named(result, max(dots))


def arranged(tensor: Tensor, have: str, want: str, sizes: dict[str, int]) -> Tensor | None:
    """Axes `have` in the order `want`, repeated along one it has not (shared keys); None if one is too many."""
    if set(have) - set(want):
        return None
    out = torch.einsum(f"{have}->{''.join(c for c in want if c in have)}", tensor)
    for place, axis in enumerate(want):
        out = out if axis in have else out.unsqueeze(place)
    return out.expand([sizes[axis] for axis in want])
