"""Deletion and insertion: how the score falls as the best patches go, and rises as they come."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from clairvit.methods.explanation import Cost
from clairvit.metrics.case import Case, ScoreKind, steps_of
from clairvit.metrics.metric import Measured, metric
from clairvit.perturb.removal import Removal

Width = Literal["width", "none"]


@metric(
    "deletion",
    family="faithfulness",
    better="lower",
    span=(0, 1),
    paper="Petsiuk et al., BMVC 2018 (RISE)",
    orders=True,
    cost=lambda steps, **_: Cost(steps),
)
def deletion(
    case: Case, steps: int = 9, removal: Removal = "token", score: ScoreKind = "prob", auc: Width = "width"
) -> Measured:
    """Area under p(target) while the patches go, best first: low if the map found what matters.

    `steps=9` takes away 10 %, …, 90 % (the point with nothing taken away is there already). `auc=width` divides the
    area by the width of the curve, so that a constant 1 gives 1; `none` does not (SkipPLUS's code).
    """
    x, y = falling(case, steps, removal, score, "deletion")
    return Measured(area(x, y, auc), x, y, score)


@metric(
    "insertion",
    family="faithfulness",
    better="higher",
    span=(0, 1),
    paper="Petsiuk et al., BMVC 2018 (RISE)",
    orders=True,
    cost=lambda steps, **_: Cost(steps),
)
def insertion(
    case: Case, steps: int = 9, removal: Removal = "token", score: ScoreKind = "prob", auc: Width = "width"
) -> Measured:
    """Area under p(target) while the patches come, best first: high if few of them are enough.

    `steps=9` shows 10 %, …, 90 %, and the whole image is there already.
    """
    x, y = rising(case, steps, removal, score, "insertion")
    return Measured(area(x, y, auc), x, y, score)


def falling(case: Case, steps: int, removal: str, score: str, what: str) -> tuple[Tensor, Tensor]:
    """Parts taken away [S + 1] and scores [M, B, S + 1], nothing taken away first."""
    parts, keep = kept_after(case, steps)
    y = case.left(keep, removal, score, what)
    whole = case.original(score).expand(len(y), -1)[..., None]
    return torch.tensor([0.0, *parts], dtype=torch.float64), torch.cat([whole, y], -1)


def rising(case: Case, steps: int, removal: str, score: str, what: str) -> tuple[Tensor, Tensor]:
    """Parts shown [S + 1] and scores [M, B, S + 1], the whole image last."""
    parts, gone = kept_after(case, steps)
    y = case.left(~gone, removal, score, what)
    whole = case.original(score).expand(len(y), -1)[..., None]
    return torch.tensor([*parts, 1.0], dtype=torch.float64), torch.cat([y, whole], -1)


def kept_after(case: Case, steps: int) -> tuple[list[float], Tensor]:
    """Parts 1/(S+1) … S/(S+1), and what is left when each of them is taken away: bool [M, B, S, patches]."""
    parts = [k / (steps + 1) for k in range(1, steps + 1)]
    counts = torch.tensor(steps_of(case.patches, parts), device=case.rank.device)
    return parts, case.rank[:, :, None, :] >= counts[:, None]


def area(x: Tensor, y: Tensor, auc: Width) -> Tensor:
    """[…, S] -> […], by the trapezoid rule."""
    whole = torch.trapezoid(y.double(), x.to(y.device, torch.float64), dim=-1)
    return whole / float(x[-1] - x[0]) if auc == "width" else whole
