"""Run studies: models × data × methods × metrics, split into units that are computed once, stored and resumed."""

from __future__ import annotations

METHODS, METRICS = ("attnlrp+plus", "rollout"), ("deletion", "insertion", "sparseness")  # where a study names none
