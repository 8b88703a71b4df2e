"""The functions f(A_hij, G_hij) of attention and its gradient, entry by entry, that methods add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

# A; A·G; relu(A·G); relu(G); |G|; G²
Entry = Literal["A", "AG", "AG+", "G+", "|G|", "G²"]
ENTRIES: tuple[Entry, ...] = get_args(Entry)
READS_A: tuple[Entry, ...] = ("A", "AG", "AG+")
READS_G: tuple[Entry, ...] = ("AG", "AG+", "G+", "|G|", "G²")
NORMS_OF_G: tuple[Entry, ...] = ("|G|", "G²")


@dataclass(frozen=True, eq=False)
class WeightedEntries:
    """w_hi f(A_hij, G_hij), to be summed over heads and queries."""

    entry: Entry
    weights: Tensor  # [B or 1, H or 1, queries or 1]


def entry_values(entry: Entry, A: Tensor | None, G: Tensor | None) -> Tensor:
    """Return f(A, G), entry by entry; None stands for a factor that f does not read."""
    if entry == "A":
        return _read(A)
    if entry == "G+":
        return _read(G).clamp(min=0)
    if entry == "|G|":
        return _read(G).abs()
    if entry == "G²":
        return _read(G).square()
    product = _read(A) * _read(G)
    return product.clamp_(min=0) if entry == "AG+" else product


def _read(matrix: Tensor | None) -> Tensor:
    assert matrix is not None
    return matrix
