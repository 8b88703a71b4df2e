"""Radar: combine several metrics of each method into one area (FocusViT's "area under radar").

r = radar(values, ["higher", "lower", "lower", "lower"])   # [methods, axes] in 0…1, the best of each axis is 1
area_under_radar(r)                                        # [methods]

The area depends on which methods are in the table (each axis is scaled by the best and the worst of them), on the order
of the axes, and on outliers, which compress the rest of their axis. Never show it without the metrics themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.numerics import is_constant, min_max


def radar(values: Tensor, better: Sequence[Literal["higher", "lower"]], flat: float = 0.0) -> Tensor:
    """Return (v − min) / (max − min) over the methods, or 1 − that where lower is better, [methods, axes].

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
    scaled = min_max(values, 0)
    lower_is_better = torch.tensor([direction == "lower" for direction in better], device=values.device)
    scaled = torch.where(lower_is_better, 1 - scaled, scaled)
    return torch.where(is_constant(values, 0), torch.full_like(scaled, flat), scaled)


def area_under_radar(r: Tensor) -> Tensor:
    """Return the polygon's area [methods], ½ Σ_i r_i r_{i+1} sin(2π/axes), the last axis next to the first."""
    _check_table(r, "r")
    axes = r.shape[1]
    if axes < 3:
        raise BadInput(f"{axes} axes were given; expected 3 or more: fewer have no area.")
    r = r.double()
    return (r * r.roll(-1, dims=1)).sum(1) * math.sin(2 * math.pi / axes) / 2


def _check_table(table: Tensor, name: str) -> None:
    if table.ndim != 2:
        raise BadInput(f"{name} has shape {list(table.shape)}; expected a table, [methods, axes].")
