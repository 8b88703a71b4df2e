"""Explanations made by hand, so that drawing and writing are tested without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from clairvit._cost import Cost
from clairvit.methods.explanation import Explanation
from clairvit.models.preprocess import Preprocess

LABELS = ("Abyssinian", "Bengal", "Egyptian Mau", "Staffordshire Bull Terrier")


def fake(
    maps: int = 1,
    *,
    method: str = "legrad",
    signed: bool = False,
    grid: tuple[int, int] = (4, 4),
    size: tuple[int, int] = (64, 64),
    layers: int = 0,
    targets: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
) -> Explanation:
    """Hot in the upper left corner, cold (or, signed, against the class) in the lower right one."""
    rows, cols = grid
    ramp = torch.arange(rows).flip(0)[:, None] + torch.arange(cols).flip(0) - (rows + cols - 2) / 2
    heatmap = ramp if signed else ramp - ramp.min()
    logits = torch.tensor([[1.0, 3.0, 5.5, 0.2]]).repeat(maps, 1)
    targets = tuple(targets or ["Egyptian Mau"] * maps)
    classes = tuple(LABELS.index(target) if target in LABELS else None for target in targets)
    chances = logits.softmax(-1)
    return Explanation(
        maps=heatmap.repeat(maps, 1, 1),
        method=method,
        signed=signed,
        targets=targets,
        classes=classes,
        score="logit",
        logits=logits,
        probabilities=tuple(None if c is None else float(chances[i, c]) for i, c in enumerate(classes)),
        pixels=torch.zeros(maps, 3, *size),  # mean grey
        names=tuple(names or ["cat.jpg"] * maps),
        model="pets",
        labels=LABELS,
        preprocess=Preprocess(size=size),
        seed=0,
        cost=Cost(1, 1, 0.03),
        layers=heatmap.repeat(layers, maps, 1, 1) if layers else None,
        versions={"clairvit": "0"},
    )
