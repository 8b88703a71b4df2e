"""Parts: images of objects that consist of parts, each of which can be removed, and classes that are sets of parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from clairvit.errors import BadInput

PartSet = tuple[int, ...]  # indices of parts, ascending


@dataclass(frozen=True)
class PartTable:
    """Classes as combinations of part variants: class c has variant `variants[c][p]` of part p."""

    kinds: tuple[str, ...]  # [P] names of the parts
    classes: tuple[str, ...]  # [C] names of the classes
    variants: tuple[tuple[int, ...], ...]  # [C][P]

    def shared(self, first: int, second: int) -> PartSet:
        """Return the parts of which two classes have the same variant."""
        pairs = zip(self.variants[first], self.variants[second], strict=True)
        return tuple(part for part, (one, other) in enumerate(pairs) if one == other)

    def separating(self, first: int, second: int) -> PartSet:
        """Return the parts in which two classes differ: each of them alone tells the two apart."""
        shared = self.shared(first, second)
        return tuple(part for part in range(len(self.kinds)) if part not in shared)

    def compatible(self, class_index: int, visible: Sequence[int]) -> tuple[int, ...]:
        """Return the classes that have the variants of `class_index` in all visible parts, itself among them."""
        return tuple(c for c in range(len(self.classes)) if set(visible) <= set(self.shared(class_index, c)))

    def sufficient_sets(self, class_index: int) -> tuple[PartSet, ...]:
        """Return the minimal sets of parts that no other class has in these variants, by size, then by part."""
        return _sufficient_sets(self, class_index)

    def necessary_parts(self, class_index: int) -> PartSet:
        """Return the parts that are in every sufficient set: without one of them the class is not determined."""
        sets = self.sufficient_sets(class_index)
        return tuple(part for part in range(len(self.kinds)) if all(part in members for members in sets))

    def contrast_classes(self, class_index: int, shared: int = 2) -> tuple[int, int] | None:
        """Return two classes that share `shared` parts each with this one, and none of them is the same part.

        The first such pair in the order of the classes (FunnyBirds' target sensitivity); None if there is none.
        """
        near = [c for c in range(len(self.classes)) if len(self.shared(class_index, c)) == shared]
        for first, second in itertools.combinations(near, 2):
            if set(self.shared(class_index, first)).isdisjoint(self.shared(class_index, second)):
                return first, second
        return None


@cache
def _sufficient_sets(table: PartTable, class_index: int) -> tuple[PartSet, ...]:
    sets: list[PartSet] = []
    for size in range(1, len(table.kinds) + 1):
        for members in itertools.combinations(range(len(table.kinds)), size):
            is_minimal = not any(set(smaller) <= set(members) for smaller in sets)
            if is_minimal and table.compatible(class_index, members) == (class_index,):
                sets.append(members)
    return tuple(sets)


@dataclass(frozen=True, eq=False)
class RemovableParts:
    """One image as the model takes it, of which K components can be removed: P parts of the object, then distractors.

    No two components overlap, so what is seen without one of them is what lies under it: the picture without any
    component.
    """

    full: Tensor  # [3, H, W]: with all components
    empty: Tensor  # [3, H, W]: with none of them
    masks: Tensor  # bool [K, H, W], disjoint
    table: PartTable

    @property
    def count(self) -> int:
        """Return K, the number of components."""
        return len(self.masks)

    @property
    def part_count(self) -> int:
        """Return P, the number of parts of the object."""
        return len(self.table.kinds)

    def render(self, keep: Tensor) -> Tensor:
        """Return the image with the components of `keep`, bool [V, K], alone: [V, 3, H, W]."""
        if keep.ndim != 2 or keep.shape[1] != self.count:
            raise BadInput(f"keep has shape {list(keep.shape)}; expected [variants, {self.count}], one per component.")
        masks = self.masks.to(self.full.device)
        removed = torch.einsum("vk,khw->vhw", (~keep).to(self.full.device, torch.float32), masks.float()) > 0
        return torch.where(removed[:, None], self.empty, self.full)
