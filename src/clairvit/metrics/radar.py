"""Radar: several metrics of several methods as one area (FocusViT's "area under radar").

r = radar(values, ["higher", "lower", "lower", "lower"])   # [methods, axes] in 0…1, the best of each axis is 1
area_under_radar(r)                                        # [methods]

The area depends on which methods are in the table (each axis is scaled by the best and the worst of them), on the order
of the axes, and on outliers, which flatten the rest of their axis. Never show it without the metrics themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput


def radar(values: Tensor, better: Sequence[Literal["higher", "lower"]], flat: float = 0.0) -> Tensor:
    """(v − min) / (max − min) over the methods, 1 − that where lower is better: [methods, axes] -> [methods, axes].

    An axis on which all methods are equal is `flat` for all of them: 0 leaves it out of the area, 1 counts all as best.
    """
    _check_table(values, "values")
    if len(better) != values.shape[1] or not set(better) <= {"higher", "lower"}:
        raise BadInput(
            f"better={list(better)} was given for {values.shape[1]} axes; expected 'higher' or 'lower' for each."
        )
    if len(values) < 2:
        raise BadInput(
            f"{len(values)} method was given; expected 2 or more, as each axis goes from the worst to the best of them."
        )
    values = values.double()
    low, high = values.amin(0), values.amax(0)
    same = low == high
    scaled = (values - low) / torch.where(same, torch.ones_like(high), high - low)
    falls = torch.tensor([word == "lower" for word in better], device=values.device)
    found = torch.where(falls, 1 - scaled, scaled)
    return torch.where(same, torch.full_like(found, flat), found)


def area_under_radar(r: Tensor) -> Tensor:
    """½ Σ_i r_i r_{i+1} sin(2π/axes), the last axis beside the first: the polygon's area, [methods]."""
    _check_table(r, "r")
    axes = r.shape[1]
    if axes < 3:
        raise BadInput(f"{axes} axes were given; expected 3 or more: fewer have no area.")
    r = r.double()
    return (r * r.roll(-1, dims=1)).sum(1) * math.sin(2 * math.pi / axes) / 2


def _check_table(table: Tensor, name: str) -> None:
    if table.ndim != 2:
        raise BadInput(f"{name} has shape {list(table.shape)}; expected a table, [methods, axes].")
