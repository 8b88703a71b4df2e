"""Coalitions: which features are kept. Random halves for LIME, the Shapley kernel's sizes for KernelSHAP.

Drawn from the seed alone, so that all images share them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clairvit.perturbation.rng import make_generator


def halves(count: int, features: int, seed: int) -> Tensor:
    """bool [count, features], each with probability 1/2."""
    return torch.rand(count, features, generator=make_generator(seed)) < 0.5


@dataclass(frozen=True, eq=False)
class Coalitions:
    """Sets of features; each stands for itself and its complement."""

    sets: Tensor  # bool [n, M]
    weights: Tensor  # [n] of the Shapley kernel
    unseen: Tensor  # [n] which part of all sets of its size was not taken; 0: all are there, and chance had no say


def coalitions(features: int, pairs: int, seed: int) -> Coalitions:
    """All pairs of the smallest sizes while each size's share of the samples covers it, then a draw of the others.

    A size k (with M − k) weighs W_k = (M − 1)/(k(M − k)), once for each side. Enumerated pairs carry their weight
    W_k/(their number). Of the sizes that are left, each gets as many as its share of W, none twice, and these carry
    equal weights: the kernel is already in how often they were drawn.
    """
    sizes = range(1, features // 2 + 1)
    weight = {k: (features - 1) / (k * (features - k)) * (1 if 2 * k == features else 2) for k in sizes}
    number = {k: math.comb(features, k) // (2 if 2 * k == features else 1) for k in sizes}
    sets: list[Tensor] = []
    weights: list[float] = []
    unseen: list[float] = []
    left = list(sizes)
    while left and (pairs - len(sets)) * weight[left[0]] >= number[left[0]] * sum(weight[k] for k in left) * (1 - 1e-9):
        k = left.pop(0)
        sets += all_of_size(features, k)
        weights += [weight[k] / number[k]] * number[k]
        unseen += [0.0] * number[k]
    drawn = pairs - len(sets) if left else 0
    if drawn:
        total = sum(weight[k] for k in left)
        chance = make_generator(seed)
        ends = torch.tensor([weight[k] for k in left], dtype=torch.float64).cumsum(0) * (drawn / total)
        ends[-1] = drawn
        places = torch.arange(drawn) + torch.rand((), generator=chance, dtype=torch.float64)
        counts = torch.bincount(torch.searchsorted(ends, places, right=True), minlength=len(left))
        for k, count in zip(left, counts.tolist(), strict=True):
            sets += some_of_size(features, k, count, chance)
            unseen += [1 - count / number[k]] * count
        weights += [total / drawn] * drawn
    found = torch.stack(sets) if sets else torch.zeros(0, features, dtype=torch.bool)
    return Coalitions(found, *(torch.tensor(one, dtype=torch.float64) for one in (weights, unseen)))


def all_of_size(features: int, size: int) -> list[Tensor]:
    """Every set of this size, bool [M]; of two that are each other's complement only the one with the first feature."""
    every = torch.combinations(torch.arange(features), size)
    if 2 * size == features:
        every = every[every[:, 0] == 0]
    return list(torch.zeros(len(every), features, dtype=torch.bool).scatter_(1, every, True))


def some_of_size(features: int, size: int, count: int, chance: torch.Generator) -> list[Tensor]:
    """So many different sets of this size, bool [M]."""
    found: dict[bytes, Tensor] = {}
    while len(found) < count:
        own = torch.zeros(features, dtype=torch.bool)
        own[torch.randperm(features, generator=chance)[:size]] = True
        if 2 * size == features and not own[0]:
            own = ~own
        found.setdefault(own.numpy().tobytes(), own)
    return list(found.values())
