"""Aside: what a method has to say beside its map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class MapResult:
    """Handed to every method that asks for it by the parameter name `aside`."""

    notes: list[str] = field(default_factory=list)
    standard_error: Tensor | None = None  # [B, rows, cols], of the map, where it was drawn by lot
    chosen: Tensor | None = None  # bool [B, rows, cols]: the patches that a search settled on
    unmoved: Sequence[bool] = ()  # images whose score stayed the same whatever was removed

    def note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)
