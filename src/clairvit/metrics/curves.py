"""Deletion and insertion: how the score falls as the best patches (or pixels) go, and rises as they come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.pixel_ranking import pixel_ranks, value_ranks, without
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.perturbation.removal import Removal
from clairvit.targets.base import no_probability

Width = Literal["width", "none", "steps"]
CurveScore = Literal["prob", "logit", "logprob", "accuracy", "drop", "log-odds"]
Granularity = Literal["patch", "pixel", "channel"]
Counting = Literal["round", "down", "equal"]
LEAST = 1e-12  # a probability whose logarithm is taken is at least this
_PIXELS: dict[str, Any] = {"granularity": "pixel"}
_CHEFER: dict[str, Any] = {**_PIXELS, "removal": "black", "score": "accuracy", "counting": "down", "whole": False}
_SKIPPLUS: dict[str, dict[str, Any]] = {
    "skipplus": {"score": "accuracy", "auc": "none"},
    "skipplus-aopc": {"score": "drop", "auc": "none"},
    "skipplus-log-odds": {"score": "log-odds", "auc": "none"},
}
_TURNS = (("score", "drop"), ("score", "log-odds"))
_DIFFER = (
    "What is removed, how (three different zeros: mean colour, black, image minimum), in which steps, and which score "
    "differ from paper to paper; the presets are theirs. SkipPLUS's code divides by nothing, so that a constant 1 "
    "gives 0.9 (`auc=none`), and prints percent: 100 times the values here. "
)


def passes(
    patches: int, granularity: str = "patch", at_once: int | None = None, steps: int = 9, ends: bool = False, **_: Any
) -> Cost:
    """For patches of 16 × 16 pixels."""
    if at_once is None:
        return Cost(steps + ends)
    return Cost(math.ceil(patches * {"patch": 1, "pixel": 16**2, "channel": 3 * 16**2}[granularity] / at_once))


@dataclass(frozen=True)
class Walk:
    """How an image is taken apart: into what, and in which steps."""

    steps: int = 9
    at_once: int | None = None
    granularity: Granularity = "patch"
    counting: Counting = "round"
    ends: bool = False
    upsampling: Upsampling = "bilinear"

    def stops(self, count: int) -> tuple[list[float], list[int]]:
        """Places on the x axis from 0 to 1, and how many of `count` have gone (or come) there."""
        if self.at_once is None:
            if self.steps < 1:
                raise BadInput(f"steps={self.steps} was given; expected 1 or more, such as steps=9.")
            parts = [k / (self.steps + 1) for k in range(self.steps + 2)]
            return parts, [self._number(part, k, count) for k, part in enumerate(parts)]
        if self.at_once < 1:
            raise BadInput(f"at_once={self.at_once} was given; expected 1 or more, such as at_once=224.")
        last = math.ceil(count / self.at_once)
        return [k / last for k in range(last + 1)], [min(k * self.at_once, count) for k in range(last + 1)]

    def _number(self, part: float, k: int, count: int) -> int:
        if self.counting == "equal":
            return k * (count // (self.steps + 1))
        return int(part * count) if self.counting == "down" else _some(part, count)

    @property
    def to_the_end(self) -> bool:
        return self.ends or self.at_once is not None


@metric(
    "deletion",
    family="faithfulness",
    better="lower",
    span=(0, 1),
    paper="Petsiuk et al., BMVC 2018 (RISE)",
    in_score=True,
    orders=True,
    turned_by=(("reverse", True), *_TURNS),
    cost=passes,
    presets={
        "rise": {**_PIXELS, "removal": "mean", "at_once": 1792},
        "rise-demo": {**_PIXELS, "removal": "mean", "at_once": 224},
        "coporan": {**_PIXELS, "removal": "black", "steps": 99, "ends": True, "counting": "equal"},
        "chefer": _CHEFER,
        "chefer-negative": {**_CHEFER, "reverse": True},
        **_SKIPPLUS,
        "quantus": {"granularity": "channel", "removal": "minimum", "at_once": 1, "whole": False, "auc": "steps"},
    },
    discrepancies=_DIFFER + "Chefer's area is said to be over 10 to 90 %, its code prints the nine accuracies only; "
    "here it is divided by that width. Quantus' PixelFlipping takes the probability by default, one pass for each of "
    "the 150 528 channel values (`at_once` makes it less), and orders the three values of a pixel by an unstable sort.",
)
def deletion(
    case: EvalContext,
    steps: int = 9,
    at_once: int | None = None,
    removal: Removal = "token",
    score: CurveScore = "prob",
    granularity: Granularity = "patch",
    counting: Counting = "round",
    ends: bool = False,
    whole: bool = True,
    reverse: bool = False,
    auc: Width = "width",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Area under p(target) while the patches go, best first: low if the map found what matters.

    `steps=9` takes away 10 %, …, 90 %; the point with nothing taken away is there unless `whole=False`, and `ends` adds
    the one with everything. `at_once=224` takes away so many at a time instead, until nothing is left. `counting` says
    what 10 % of 1024 are: 102 (`round`), int(102.4) (`down`), or k times a tenth rounded down, so that a few never go
    (`equal`). `reverse` begins with the worst (Chefer's negative perturbation; higher is better then). `auc=width`
    divides the area by the width of the curve, so that a constant 1 gives 1; `none` does not, and `steps` counts each
    step as 1 wide. `granularity=pixel` orders the pixels of the enlarged map, `channel` their single values.
    `score=accuracy` asks whether the target is still the answer; `drop` is p(x) − p(x̃), `log-odds` ln p(x) − ln p(x̃)
    with p at least 1e-12: higher is better for these two. Of a model whose scores are raw (a regression, a cosine) the
    curve is of (f − f(nothing left)) / |f(x) − f(nothing left)|, undefined where this divides by 0.
    """
    walk = Walk(steps, at_once, granularity, counting, ends, upsampling)
    x, y = falling(case, walk, removal, score, "deletion", whole, reverse)
    return MetricOutput(area(x, y, auc), x, y, case.meaning(score))


@metric(
    "insertion",
    family="faithfulness",
    better="higher",
    span=(0, 1),
    paper="Petsiuk et al., BMVC 2018 (RISE)",
    in_score=True,
    orders=True,
    turned_by=_TURNS,
    cost=passes,
    presets={
        "rise": {**_PIXELS, "removal": "blur", "at_once": 1792},
        "rise-demo": {**_PIXELS, "removal": "blur", "at_once": 224},
        **_SKIPPLUS,
    },
    discrepancies=_DIFFER,
)
def insertion(
    case: EvalContext,
    steps: int = 9,
    at_once: int | None = None,
    removal: Removal = "token",
    score: CurveScore = "prob",
    granularity: Granularity = "patch",
    ends: bool = False,
    auc: Width = "width",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Area under p(target) while the patches come, best first: high if few of them are enough.

    `steps=9` shows 10 %, …, 90 %; the whole image is there already, and `ends` adds the point with nothing shown.
    `at_once=224` begins with nothing and shows so many more at a time. Other options are those of `deletion`; with
    `score=drop` and `log-odds` lower is better. Raw scores are normalised as there.
    """
    walk = Walk(steps, at_once, granularity, "round", ends, upsampling)
    x, y = rising(case, walk, removal, score, "insertion")
    return MetricOutput(area(x, y, auc), x, y, case.meaning(score))


def falling(
    case: EvalContext, walk: Walk, removal: str, score: str, what: str, whole: bool = True, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Parts taken away [S] and scores [M, B, S], nothing taken away (`whole`) first."""
    rank, count = _ranks(case, walk)
    x, counts = walk.stops(count)
    last = len(x) if walk.to_the_end else -1
    rank = count - 1 - rank if reverse else rank
    gone = torch.tensor(counts[1:last], device=rank.device)
    if walk.granularity == "patch":
        y = case.left(rank[:, :, None, :] >= gone[:, None], removal, _asked(score), what)
    else:
        y = without(case, rank, torch.zeros_like(gone), gone, removal, _asked(score), what)
    if whole:
        y = torch.cat([_unchanged(case, score, len(y)), y], -1)
    return torch.tensor(x[0 if whole else 1 : last], dtype=torch.float64), _told(case, y, score, removal, what)


def rising(case: EvalContext, walk: Walk, removal: str, score: str, what: str) -> tuple[Tensor, Tensor]:
    """Parts shown [S] and scores [M, B, S], the whole image last."""
    rank, count = _ranks(case, walk)
    x, counts = walk.stops(count)
    first = 0 if walk.to_the_end else 1
    shown = torch.tensor(counts[first:-1], device=rank.device)
    if walk.granularity == "patch":
        y = case.left(rank[:, :, None, :] < shown[:, None], removal, _asked(score), what)
    else:
        y = without(case, rank, shown, torch.full_like(shown, count), removal, _asked(score), what)
    y = torch.cat([y, _unchanged(case, score, len(y))], -1)
    return torch.tensor(x[first:], dtype=torch.float64), _told(case, y, score, removal, what)


def _ranks(case: EvalContext, walk: Walk) -> tuple[Tensor, int]:
    """[M, B, n] the places of patches, pixels or channel values, and n."""
    if walk.granularity == "patch":
        return case.rank, case.patches
    rank = (pixel_ranks if walk.granularity == "pixel" else value_ranks)(case, walk.upsampling)
    return rank, rank.shape[-1]


def _unchanged(case: EvalContext, score: str, methods: int) -> Tensor:
    """[M, B, 1]"""
    return case.original(_asked(score)).expand(methods, -1)[..., None]


def _asked(score: str) -> str:
    """What the model is asked for: a fall of the probability is told from the probability."""
    return "prob" if score in ("drop", "log-odds") else score


def _told(case: EvalContext, y: Tensor, score: str, removal: str, what: str) -> Tensor:
    """[M, B, S] probabilities, or normalised raw scores, as their fall where that was wanted."""
    if score == "drop":
        return case.normalised_drop(case.original("prob")[:, None] - y, "prob", removal, what)
    if score == "log-odds":
        if case.falls_back("prob"):
            raise no_probability(score)
        return case.original("prob").clamp(min=LEAST).log()[:, None] - y.clamp(min=LEAST).log()
    return case.normalised(y, score, removal, what)


def kept_after(case: EvalContext, steps: int) -> tuple[list[float], Tensor]:
    """Parts 1/(S+1) … S/(S+1), and what is left when each of them is taken away: bool [M, B, S, patches]."""
    parts, counts = Walk(steps).stops(case.patches)
    gone = torch.tensor(counts[1:-1], device=case.rank.device)
    return parts[1:-1], case.rank[:, :, None, :] >= gone[:, None]


def _some(part: float, count: int) -> int:
    """Rounded; a part that is not none is one at least, and all but all."""
    return round(part * count) if part in (0.0, 1.0) else min(max(1, round(part * count)), count - 1)


def area(x: Tensor, y: Tensor, auc: Width) -> Tensor:
    """[…, S] -> […], by the trapezoid rule."""
    if auc == "steps":
        return torch.trapezoid(y.double(), dim=-1)
    whole = torch.trapezoid(y.double(), x.to(y.device, torch.float64), dim=-1)
    return whole / float(x[-1] - x[0]) if auc == "width" else whole
