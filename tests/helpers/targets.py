"""Targets of scores at hand, for a model of which nothing but its scores, its labels and its activation matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from clairvit.models.model import Model
from clairvit.targets.base import TargetBatch
from clairvit.targets.resolve import TargetLike, resolve_for


def resolve_targets(
    target: TargetLike,
    logits: Tensor,
    labels: Sequence[str] = (),
    *,
    score: str | None = None,
    single: bool = False,
    **fields: Any,
) -> tuple[TargetBatch, ...]:
    """Return targets of the scores [B, C]; `fields` are those of the model: activation, classifier."""
    model = Model(nn.Identity(), "scores", labels=tuple(labels), **fields)
    return resolve_for(model, target, logits, score=score, single=single)
