"""Scores with chosen values."""

from __future__ import annotations

from typing import Any

import torch

from clairvit.metrics.score import Score


def fixed_score(
    method: str, values: list[float], metric: str = "deletion", better: str = "lower", **more: Any
) -> Score:
    return Score(
        metric=metric,
        method=method,
        values=torch.tensor(values, dtype=torch.float64),
        better=better,
        span=(0, 1),
        degenerate=torch.zeros(len(values), dtype=torch.bool),
        names=tuple(f"{i}.jpg" for i in range(len(values))),
        model="tiny",
        **more,
    )
