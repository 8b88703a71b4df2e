"""Removal curves: the score while the most relevant patches (or pixels, regions) are removed or shown step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rng import make_generator
from clairvit.errors import BadInput
from clairvit.metrics.confidence_intervals import EVERYWHERE
from clairvit.metrics.context import (
    EvalContext,
    ScoreKind,
    Upsampling,
    fraction_counts,
    inverse_permutation,
    sort_with_ties,
)
from clairvit.metrics.pixel_ranking import pixel_ranks, score_without_ranks, square_ranks, squares, value_ranks
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.option_types import Doc, Range, check_fields
from clairvit.perturbation.removal import Removal
from clairvit.perturbation.segments import segments_on_patches, superpixels_of
from clairvit.targets.base import no_probability

Steps = Annotated[int, Range(ge=1, example=9), Doc("how many points of the curve: 9 are 10 %, …, 90 %")]
AtOnce = Annotated[
    int, Range(ge=1, example=224), Doc("how many are removed (or shown) per step, in place of a number of steps")
]
Regions = Annotated[int, Range(ge=1, example=100), Doc("how many patches or squares are removed, one after the other")]
Region = Annotated[
    int | None,
    Range(ge=1, unit="pixels", example=8),
    Doc("remove squares with so many pixels per side; None: patches"),
]
Ends = Annotated[bool, Doc("add the point where everything is removed (or nothing is shown)")]
Reverse = Annotated[bool, Doc("start with the least relevant; higher is then better")]
Width = Literal["width", "none", "steps"]  # an area over the width of the curve, as it is, or with steps 1 wide
CurveScore = Annotated[
    Literal["prob", "logit", "logprob", "accuracy", "drop", "log-odds"],
    Doc("the y axis: probability, logit, log-probability, accuracy, or a drop from the whole image"),
]
Granularity = Annotated[Literal["patch", "pixel"], Doc("what is ordered: patches, or pixels of the enlarged map")]
Unit = Literal["patch", "pixel", "channel"]  # what a schedule removes; single channel values for compat
Counting = Literal["round", "down", "equal"]  # how a fraction of the patches becomes a whole number
RegionOrder = Annotated[
    Literal["morf", "lerf", "random"], Doc("which patches go first: most relevant, least relevant, or any")
]
RoadOrder = Annotated[
    Literal["combined", "morf", "lerf"],
    Doc("which patches go first: most relevant, least relevant, or half the difference of the two"),
]
SMALLEST_PROBABILITY = 1e-12  # under a logarithm
FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)  # of the patches, as in ERASER
_PIXELS: dict[str, Any] = {"granularity": "pixel"}
DROP_SCORES = (("score", "drop"), ("score", "log-odds"))
_SCORES_READ = {"drop": "prob", "log-odds": "prob"}  # of the passes, where the curve's own is computed from another


def passes(
    patches: int, granularity: str = "patch", at_once: int | None = None, steps: int = 9, ends: bool = False, **_: Any
) -> Cost:
    """Return the passes of a curve, for patches of 16 × 16 pixels."""
    if at_once is None:
        return Cost(steps + ends)
    return Cost(math.ceil(patches * {"patch": 1, "pixel": 16**2, "channel": 3 * 16**2}[granularity] / at_once))


@dataclass(frozen=True)
class RemovalSchedule:
    """The steps of a removal curve: of which parts the image consists, and how many of them go in each step."""

    steps: Steps = 9
    at_once: AtOnce | None = None  # parts per step, instead of a number of steps
    granularity: Unit = "patch"
    counting: Counting = "round"
    ends: Ends = False
    upsampling: Upsampling = "bilinear"

    def __post_init__(self) -> None:
        check_fields(self)

    def fractions_and_counts(self, count: int) -> tuple[list[float], list[int]]:
        """Return fractions on the x axis from 0 to 1, and how many of `count` parts are removed (or shown) there."""
        if self.at_once is None:
            fractions = [k / (self.steps + 1) for k in range(self.steps + 2)]
            if self.counting == "equal":
                return fractions, [k * (count // (self.steps + 1)) for k in range(len(fractions))]
            if self.counting == "down":
                return fractions, [int(fraction * count) for fraction in fractions]
            inner = [min(max(1, round(fraction * count)), count - 1) for fraction in fractions[1:-1]]
            return fractions, [0, *inner, count]  # between the ends, neither none nor all
        last = math.ceil(count / self.at_once)
        return [k / last for k in range(last + 1)], [min(k * self.at_once, count) for k in range(last + 1)]

    @property
    def includes_empty_image(self) -> bool:
        return self.ends or self.at_once is not None


@metric(
    "deletion",
    family="faithfulness",
    better="lower",
    span=(0, 1),
    paper="Petsiuk et al., BMVC 2018 (RISE)",
    in_score=True,
    rank_only=True,
    flipped_by=(("reverse", True), *DROP_SCORES),
    cost=passes,
    presets={
        "rise": {**_PIXELS, "removal": "mean", "at_once": 1792},
        "rise-demo": {**_PIXELS, "removal": "mean", "at_once": 224},
    },
)
def deletion(
    context: EvalContext,
    steps: Steps = 9,
    at_once: AtOnce | None = None,
    removal: Removal = "token",
    score: CurveScore = "prob",
    granularity: Granularity = "patch",
    ends: Ends = False,
    reverse: Reverse = False,
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return the area under p(target) while patches are removed, most relevant first: low if the map is faithful.

    `steps=9` removes 10 %, …, 90 %, after the point with nothing removed; `ends` adds the one with everything removed.
    `at_once=224` removes so many per step instead, until nothing is left. `reverse` starts with the least relevant:
    higher is better then. `granularity=pixel` orders the pixels of the upsampled map. `score=accuracy` is 1 while the
    target is the predicted class; `drop` is p(x) − p(x̃), `log-odds` ln p(x) − ln p(x̃) with p at least 1e-12: higher is
    better for these two. The area is over the width of the curve, so that a constant 1 gives 1. Raw scores (of a
    regression, a cosine) are taken as (f − f(nothing left)) / |f(x) − f(nothing left)|, undefined where this divides by
    0.
    """
    schedule = RemovalSchedule(steps, at_once, granularity, ends=ends, upsampling=upsampling)
    x, y = deletion_curve(context, schedule, removal, score, "deletion", reverse=reverse)
    return MetricOutput(area_under_curve(x, y), x, y, context.meaning(score))


@metric(
    "insertion",
    family="faithfulness",
    better="higher",
    span=(0, 1),
    paper="Petsiuk et al., BMVC 2018 (RISE)",
    in_score=True,
    rank_only=True,
    flipped_by=DROP_SCORES,
    cost=passes,
    presets={
        "rise": {**_PIXELS, "removal": "blur", "at_once": 1792},
        "rise-demo": {**_PIXELS, "removal": "blur", "at_once": 224},
    },
)
def insertion(
    context: EvalContext,
    steps: Steps = 9,
    at_once: AtOnce | None = None,
    removal: Removal = "token",
    score: CurveScore = "prob",
    granularity: Granularity = "patch",
    ends: Ends = False,
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return the area under p(target) while patches are shown, most relevant first: high if few of them suffice.

    `steps=9` shows 10 %, …, 90 %; the whole image is always included, and `ends` adds the point with nothing shown.
    `at_once=224` starts with nothing and shows so many more per step. Other options are those of `deletion`; with
    `score=drop` and `log-odds` lower is better. Raw scores are normalised as there.
    """
    schedule = RemovalSchedule(steps, at_once, granularity, ends=ends, upsampling=upsampling)
    x, y = insertion_curve(context, schedule, removal, score, "insertion")
    return MetricOutput(area_under_curve(x, y), x, y, context.meaning(score))


@metric(
    "insertion-deletion",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="RISE's two curves, one number",
    in_score=True,
    rank_only=True,
    cost=lambda steps, **_: Cost(2 * steps),
)
def insertion_deletion(
    context: EvalContext, steps: Steps = 9, removal: Removal = "token", score: ScoreKind = "prob"
) -> Tensor:
    """Return insertion − deletion: high if the most relevant patches are sufficient and necessary.

    Raw scores are normalised as there.
    """
    insertions, deletions = (
        curve(context, RemovalSchedule(steps), removal, score, "insertion-deletion")
        for curve in (insertion_curve, deletion_curve)
    )
    return area_under_curve(*insertions) - area_under_curve(*deletions)


@metric(
    "srg",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Blücher et al., TMLR 2024",
    in_score=True,
    rank_only=True,
    cost=lambda patches, **options: Cost(2 * passes(patches, **options).forwards),
    presets={"blucher": {"removal": "mean", "score": "logit"}},
)
def srg(
    context: EvalContext,
    steps: Steps = 9,
    at_once: AtOnce | None = None,
    removal: Removal = "token",
    score: ScoreKind = "prob",
    granularity: Granularity = "patch",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return ∫ f(x without the last q) − f(x without the top q) dq over q = 0 … 1: the symmetric relevance gain.

    The area under the curve of deletion that removes the least relevant patches first minus that of the most relevant
    first. Both curves begin at the whole image and end where nothing is left, so that their difference is 0 at both
    ends and only `steps` points of each are computed. A random order has the expectation 0 whatever the removal, which
    moves both curves alike. Other options are those of `deletion`; raw scores are normalised as there.
    """
    schedule = RemovalSchedule(steps, at_once, granularity, upsampling=upsampling)
    (x, least_first), (_, most_first) = (
        deletion_curve(context, schedule, removal, score, "srg", reverse=reverse) for reverse in (True, False)
    )
    gain = least_first - most_first  # [M, B, S]
    if not schedule.includes_empty_image:
        x = torch.cat([x, torch.ones_like(x[:1])])
        gain = torch.cat([gain, torch.zeros_like(gain[..., :1])], -1)
    return MetricOutput(area_under_curve(x, gain, "none"), x, gain, f"difference of {context.meaning(score)}")


def deletion_curve(
    context: EvalContext,
    schedule: RemovalSchedule,
    removal: str,
    score: str,
    name: str,
    whole: bool = True,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return fractions removed [S] and scores [M, B, S], with the whole image first if `whole`."""
    rank, count = _ranks(context, schedule)
    x, counts = schedule.fractions_and_counts(count)
    read = _SCORES_READ.get(score, score)
    last = len(x) if schedule.includes_empty_image else -1
    rank = count - 1 - rank if reverse else rank
    removed = torch.tensor(counts[1:last], device=rank.device)
    if schedule.granularity == "patch":
        y = context.score_kept(rank[:, :, None, :] >= removed[:, None], removal, read, name)
    else:
        zero = torch.zeros_like(removed)
        y = score_without_ranks(context, rank, zero, removed, removal, read, name)
    if whole:
        y = torch.cat([context.original(read).expand(len(y), -1)[..., None], y], -1)
    fractions = torch.tensor(x[0 if whole else 1 : last], dtype=torch.float64)
    return fractions, _curve_values(context, y, score, removal, name)


def insertion_curve(
    context: EvalContext, schedule: RemovalSchedule, removal: str, score: str, name: str
) -> tuple[Tensor, Tensor]:
    """Return fractions shown [S] and scores [M, B, S], with the whole image last."""
    rank, count = _ranks(context, schedule)
    x, counts = schedule.fractions_and_counts(count)
    read = _SCORES_READ.get(score, score)
    first = 0 if schedule.includes_empty_image else 1
    shown = torch.tensor(counts[first:-1], device=rank.device)
    if schedule.granularity == "patch":
        y = context.score_kept(rank[:, :, None, :] < shown[:, None], removal, read, name)
    else:
        end = torch.full_like(shown, count)
        y = score_without_ranks(context, rank, shown, end, removal, read, name)
    y = torch.cat([y, context.original(read).expand(len(y), -1)[..., None]], -1)
    return torch.tensor(x[first:], dtype=torch.float64), _curve_values(context, y, score, removal, name)


def _ranks(context: EvalContext, schedule: RemovalSchedule) -> tuple[Tensor, int]:
    """Return the ranks [M, B, n] of patches, pixels or channel values, and n."""
    if schedule.granularity == "patch":
        return context.rank, context.patches
    rank = (pixel_ranks if schedule.granularity == "pixel" else value_ranks)(context, schedule.upsampling)
    return rank, rank.shape[-1]


def _curve_values(context: EvalContext, y: Tensor, score: str, removal: str, name: str) -> Tensor:
    """Return scores of passes [M, B, S] as the curve's score: drops, log-odds, or normalised raw scores."""
    if score == "drop":
        return context.normalise_raw_drop(context.original("prob")[:, None] - y, "prob", removal, name)
    if score == "log-odds":
        if context.uses_raw_score("prob"):
            raise no_probability(score)
        original = context.original("prob").clamp(min=SMALLEST_PROBABILITY)
        return original.log()[:, None] - y.clamp(min=SMALLEST_PROBABILITY).log()
    return context.normalise_raw(y, score, removal, name)


def area_under_curve(x: Tensor, y: Tensor, auc: Width = "width") -> Tensor:
    """Return the area […] under y […, S] by the trapezoid rule: over the width of x, as it is, or with steps of 1."""
    if auc == "steps":
        return torch.trapezoid(y.double(), dim=-1)
    area = torch.trapezoid(y.double(), x.to(y.device, torch.float64), dim=-1)
    return area / float(x[-1] - x[0]) if auc == "width" else area


# Regions removed one by one, and fractions of the patches


@metric(
    "aopc",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Samek et al., 2017",
    in_score=True,
    rank_only=True,
    flipped_by=("order", "lerf"),
    cost=lambda regions, **_: Cost(regions),
)
def aopc(
    context: EvalContext,
    regions: Regions = 100,
    order: RegionOrder = "morf",
    removal: Removal = "token",
    score: ScoreKind = "prob",
    region: Region = None,
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return 1/(K+1) Σ_k f(x) − f(x_k), the mean drop while patches are removed one by one, most relevant first.

    `order=lerf` removes the least relevant first (lower is better then), `random` any. `region=8` removes squares of
    8 × 8 pixels of the upsampled map instead of patches. Drops of raw scores are divided by |f(x) − f(nothing left)|,
    undefined where that is 0.
    """
    x, drop = region_drops(context, regions, order, removal, score, region, upsampling)
    drop = torch.cat([torch.zeros_like(drop[..., :1]), drop], -1)
    return MetricOutput(drop.mean(-1), x, drop, f"drop of {context.meaning(score)}")


def region_drops(
    context: EvalContext,
    regions: int,
    order: RegionOrder,
    removal: str,
    score: str,
    region: int | None,
    upsampling: Upsampling,
    random_order: Callable[[int], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the parts removed after 0, 1, …, K steps [K + 1], and the drops f(x) − f(x_k) of k = 1, …, K, [M, B, K].

    `random_order` returns the ranks [1 or B, n] in which n regions are removed with `order=random`.
    """
    rank, total = (context.rank, context.patches) if region is None else square_ranks(context, region, upsampling)
    count = min(regions, total - (region is None))  # one patch is left, as models need
    if count < 1:
        raise BadInput("aopc removes patches until one is left, and the image has one; expected more. Use region=8.")
    if order == "random":
        draw = random_order or (lambda count: context.tie_order(count, "aopc/random order"))
        rank = draw(rank.shape[-1]).to(rank.device).expand_as(rank)
    elif order == "lerf":
        rank = rank.shape[-1] - 1 - rank
    removed = torch.arange(1, count + 1, device=rank.device)
    if region is None:
        y = context.score_kept(rank[:, :, None, :] >= removed[:, None], removal, score, "aopc")
    else:
        square, _ = squares(context, region)
        zero = torch.zeros_like(removed)
        y = score_without_ranks(context, rank[:, :, square], zero, removed, removal, score, "aopc")
    drop = context.normalise_raw_drop(context.original(score)[:, None] - y, score, removal, "aopc")  # [M, B, K]
    x = torch.arange(count + 1, dtype=torch.float64) / total
    return x, drop


@metric(
    "comprehensiveness",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="DeYoung et al., ACL 2020",
    in_score=True,
    rank_only=True,
    cost=lambda **_: Cost(len(FRACTIONS)),
)
def comprehensiveness(context: EvalContext, removal: Removal = "token", score: ScoreKind = "prob") -> Tensor:
    """Return mean_q f(x) − f(x without the top q), q = 1, 5, 10, 20, 50 %: high if they are necessary.

    Drops of raw scores are divided by |f(x) − f(nothing left)|, undefined where that is 0.
    """
    removed = torch.tensor(fraction_counts(context.patches, FRACTIONS), device=context.rank.device)
    y = context.score_kept(context.rank[:, :, None, :] >= removed[:, None], removal, score, "comprehensiveness")
    drop = context.original(score)[:, None] - y
    return context.normalise_raw_drop(drop, score, removal, "comprehensiveness").mean(-1)


@metric(
    "sufficiency",
    family="faithfulness",
    better="lower",
    span=(-1, 1),
    paper="DeYoung et al., ACL 2020",
    in_score=True,
    rank_only=True,
    cost=lambda **_: Cost(len(FRACTIONS)),
)
def sufficiency(context: EvalContext, removal: Removal = "token", score: ScoreKind = "prob") -> Tensor:
    """Return mean_q f(x) − f(the top q alone), q = 1, 5, 10, 20, 50 %: low if they are sufficient.

    Drops of raw scores are divided by |f(x) − f(nothing left)|, undefined where that is 0.
    """
    shown = torch.tensor(fraction_counts(context.patches, FRACTIONS), device=context.rank.device)
    y = context.score_kept(context.rank[:, :, None, :] < shown[:, None], removal, score, "sufficiency")
    drop = context.original(score)[:, None] - y
    return context.normalise_raw_drop(drop, score, removal, "sufficiency").mean(-1)


# Imputed patches and superpixels


@metric(
    "road",
    family="faithfulness",
    better="higher",
    span=(-1, 1),
    paper="Rong et al., ICML 2022",
    in_score=True,
    rank_only=True,
    cost=lambda steps, order, **_: Cost(steps * (2 if order == "combined" else 1)),
    flipped_by=("order", "morf"),
    presets={"morf": {"order": "morf"}, "lerf": {"order": "lerf"}},
)
def road(
    context: EvalContext,
    steps: Steps = 9,
    order: RoadOrder = "combined",
    removal: Removal = "road",
    score: ScoreKind = "prob",
) -> MetricOutput:
    """Return mean_q (f(x without the last q) − f(x without the top q)) / 2, with removed patches imputed.

    q = 10 %, …, 90 % with `steps=9`. `order=morf` is the mean of f(x without the top q) alone, where lower is better.
    `order=lerf` is the mean of f(x without the last q): higher is better. Raw scores are taken as
    (f − f(nothing left)) / |f(x) − f(nothing left)|, undefined where this divides by 0.
    """
    fractions, counts = RemovalSchedule(steps).fractions_and_counts(context.patches)
    removed = torch.tensor(counts[1:-1], device=context.rank.device)[:, None]
    without_top = context.rank[:, :, None, :] >= removed  # bool [M, B, S, patches]
    without_last = context.rank[:, :, None, :] < context.patches - removed
    x = torch.tensor(fractions[1:-1], dtype=torch.float64)
    if order != "combined":
        y = context.score_kept(without_top if order == "morf" else without_last, removal, score, "road")
        y = context.normalise_raw(y, score, removal, "road")
        return MetricOutput(y.mean(-1), x, y, context.meaning(score))
    both = context.score_kept(torch.cat([without_top, without_last], 2), removal, score, "road")
    both = context.normalise_raw(both, score, removal, "road")
    morf, lerf = both[..., :steps], both[..., steps:]
    y = (lerf - morf) / 2
    return MetricOutput(y.mean(-1), x, y, f"half the difference of {context.meaning(score)}")


@metric(
    "irof",
    family="faithfulness",
    better="higher",
    span=(-math.inf, 1),
    span_with=lambda score, **_: None if score == "prob" else EVERYWHERE,
    paper="Rieger & Hansen, 2020",
    undefined="an image of one superpixel has no order of superpixels, and a score of 0 no shares",
    rank_only=True,
    cost=lambda patches, **_: Cost(patches),
)
def irof(context: EvalContext, removal: Removal = "mean", score: ScoreKind = "prob") -> Tensor:
    """Return 1 − the area under f(x_k)/f(x) while superpixels are removed, those of the highest mean relevance first.

    x_k lacks the first k of L superpixels, the area is over k/L. Costs at most as many passes as there are patches.
    Undefined for an image of one superpixel, which has no order; meant for scores that are positive, as `prob` is. Of
    raw scores the share is (f(x_k) − f(nothing left)) / |f(x) − f(nothing left)|; undefined where a share divides by 0.
    """
    superpixels = superpixels_of(context.trace.pixels, context.model.preprocess)
    labels = [segments_on_patches(segments, context.trace.layout.plane) for segments in superpixels]
    keep = [_kept_by_segment(context, image, segments).flatten(0, 1) for image, segments in enumerate(labels)]
    lengths = [len(variants) for variants in keep]  # M·L of each image
    images = torch.tensor([k for k, length in enumerate(lengths) for _ in range(length)], device=context.maps.device)
    with context.probe(removal, "irof", math.ceil(len(images) / len(labels))) as probe:
        y = probe.score_pairs(images, torch.cat(keep), context.score_function(score)).double()
    original = context.original(score)
    empty, unit = torch.zeros_like(original), original.masked_fill(original == 0, math.nan)
    if context.uses_raw_score(score):
        empty, unit = context.empty_image_scores(removal, "irof")
    start, shares = (original - empty) / unit, (y - empty[images]) / unit[images]
    areas = [
        _area_over_curve(part.reshape(len(context.maps), -1), start[image])
        for image, part in enumerate(torch.split(shares, lengths))
    ]
    return torch.stack(areas, 1)


def _kept_by_segment(context: EvalContext, image: int, segments: Tensor) -> Tensor:
    """Return the patches of an image that are left after 1, …, L of its segments are removed, bool [M, L, patches]."""
    segment = segments.flatten().to(context.maps.device)
    count = int(segment.max()) + 1
    member = (segment == torch.arange(count, device=segment.device)[:, None]).to(context.maps)  # [L, patches]
    means = context.maps[:, image].flatten(1) @ (member / member.sum(1, keepdim=True)).T  # [M, L]
    tie_order = torch.randperm(count, generator=make_generator(context.image_seeds[image], "irof/ties"), device="cpu")
    order = sort_with_ties(means[:, None], tie_order.to(segment.device)[None])[:, 0]
    removed = torch.arange(1, count + 1, device=segment.device)
    return inverse_permutation(order)[:, segment][:, None, :] >= removed[:, None]


def _area_over_curve(shares: Tensor, start: Tensor) -> Tensor:
    """Return the area [M] over the curve of `start` and shares [M, L] of the score after 1, …, L steps."""
    if shares.shape[1] < 2:
        return shares.new_full((len(shares),), math.nan)
    curve = torch.cat([start.expand(len(shares), 1), shares], 1)
    return 1 - torch.trapezoid(curve, dx=1 / shares.shape[1], dim=1)
