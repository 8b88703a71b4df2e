"""FunnyBirds' questions (Hesse et al., ICCV 2023): does a map name the parts of an object that decide its class?

They need images whose parts can be removed exactly (`data/part_scenes.py`). A map becomes one number per component of
the image, a part of the object or a distractor: its importance, the sum of the map on the component's pixels, which are
dilated by two pixels as in the authors' code. A component is important if that exceeds the share t of the whole map's
sum. Completeness (the first four checks) depends on t: the authors take, of 80 thresholds from 0.01 to 0.5, the one at
which the completeness of the whole set is highest, for each method.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit.data.parts import PartTable, RemovableParts
from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, ScoreKind, Upsampling
from clairvit.metrics.randomisation import target_of_classes
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.metrics.similarity import spearman
from clairvit.option_types import Doc, Range
from clairvit.perturbation.batching import BatchBudget, in_batches
from clairvit.targets.class_ import find_class

PAPER = "Hesse et al., ICCV 2023 (FunnyBirds)"
THRESHOLDS = torch.linspace(0.01, 0.5, 80, dtype=torch.float64)  # shares of the map's sum, as in the authors' code
DROP = 0.05  # a component is irrelevant if the score falls by less than this share of itself
DILATION = 2  # pixels around a component that count as its own
ACROSS = "share of the map's sum from which a part is important"
PIXELS_AT_ONCE = 2_000_000  # of rendered images in one pass
USUAL_PARTS, USUAL_COMPONENTS = 5, 11  # for declared costs

Threshold = Annotated[
    float,
    Range(ge=0, le=1, unit="of the map's sum", example=0.05),
    Doc("the share of the map above which a part is important; None: the best of 80 for the whole set"),
]
Drop = Annotated[
    float,
    Range(ge=0, lt=1, unit="of the score", example=DROP),
    Doc("how far, in parts of it, the logit must fall for a part to be relevant"),
]
Dilation = Annotated[
    int,
    Range(ge=0, unit="pixels", example=DILATION),
    Doc("by how many pixels parts are widened before the map is summed over them"),
]
Relevance = Annotated[
    Literal["signed", "positive"], Doc("how the map is summed over a part: signed, or its positive values alone")
]


@dataclass(frozen=True)
class PartOptions:
    """How a map becomes one importance per component."""

    relevance: Relevance = "signed"
    dilation: int = DILATION
    upsampling: Upsampling = "nearest"


@dataclass(frozen=True, eq=False)
class CheckCurves:
    """The four checks of completeness at each threshold, [M, B, S] each; NaN where one is undefined."""

    thresholds: Tensor  # [S]
    synthetic: Tensor
    preservation: Tensor
    deletion: Tensor
    distractibility: Tensor

    @property
    def completeness(self) -> Tensor:
        """Return ½ (mean of the first three, those that are defined + distractibility), [M, B, S]."""
        checks = torch.stack([self.synthetic, self.preservation, self.deletion])
        return (checks.nanmean(0) + self.distractibility) / 2


# Importance of components


def component_masks(parts: Sequence[RemovableParts], dilation: int) -> Tensor:
    """Return the dilated pixels of each component, bool [B, K, H, W]; K is that of the image with most of them."""
    most = max(image.count for image in parts)
    masks = torch.stack([F.pad(image.masks, (0, 0, 0, 0, 0, most - image.count)) for image in parts])
    side = 2 * dilation + 1
    return F.max_pool2d(masks.float(), side, stride=1, padding=dilation) > 0


def part_importance(maps: Tensor, masks: Tensor, relevance: Relevance) -> tuple[Tensor, Tensor]:
    """Return the sum of maps [B, H, W] on each component of masks [B, K, H, W], [B, K], and on the image, [B]."""
    values = (maps.clamp(min=0) if relevance == "positive" else maps).double()
    return torch.einsum("bhw,bkhw->bk", values, masks.double()), values.sum((1, 2))


def _importance(context: EvalContext, options: PartOptions) -> tuple[Tensor, Tensor]:
    """Return the importance of each component [M, B, K], and the sum of each map [M, B]."""
    masks = component_masks(context.require_parts(), options.dilation).to(context.trace.pixels.device)
    results = [part_importance(maps, masks, options.relevance) for maps in context.pixel_maps(options.upsampling)]
    importance, total = (torch.stack(values) for values in zip(*results, strict=True))
    return importance, total


# Scores of images without some components


def logits_of_variants(context: EvalContext, variants: Sequence[Tensor]) -> list[Tensor]:
    """Return logits [V, C] of each image with the components of its variants, bool [V, K], alone.

    A variant is rendered and run once per batch of images, whichever metric asks for it.
    """
    parts = context.require_parts()
    cache: dict[tuple[int, tuple[bool, ...]], Tensor] = context.shared.setdefault("part logits", {})
    wanted = [[(image, tuple(row)) for row in keep.tolist()] for image, keep in enumerate(variants)]
    missing = [list(dict.fromkeys(key for key in keys if key not in cache)) for keys in wanted]
    keys = list(itertools.chain.from_iterable(missing))

    def run(numbers: range) -> Tensor:
        images = [parts[keys[n][0]].render(torch.tensor([keys[n][1]])) for n in numbers]
        return context.compute_logits(torch.cat(images).to(context.trace.pixels.device))

    forwards = context.trace.recording.forwards
    budget = BatchBudget(PIXELS_AT_ONCE, context.trace.recording.options.batch_size)
    for numbers, logits in in_batches(len(keys), budget, math.prod(context.size), run):
        cache.update(zip((keys[n] for n in numbers), logits, strict=True))
    context.trace.recording.forwards = forwards + max(map(len, missing))  # per image, as other metrics count
    return [torch.stack([cache[key] for key in image_keys]) for image_keys in wanted]


def _single_drops(context: EvalContext, score: str) -> list[Tensor]:
    """Return f(x) − f(x without component k) of each image, [K]."""
    parts = context.require_parts()
    logits = logits_of_variants(context, [~torch.eye(image.count, dtype=torch.bool) for image in parts])
    function, original = context.score_function(score), context.original(score)
    return [original[image] - function(values, [image] * len(values)).double() for image, values in enumerate(logits)]


def _is_relevant(context: EvalContext, drop: float) -> list[Tensor]:
    """Return whether the logit falls by at least `drop` · |f(x)| without a component, bool [K] of each image."""
    drops, original = _single_drops(context, "logit"), context.original("logit").abs()
    return [(falls >= drop * full) & (falls > 0) for falls, full in zip(drops, original, strict=True)]


def _table_classes(context: EvalContext) -> tuple[PartTable, list[int]]:
    """Return the table of parts, and the model's class of each of its classes."""
    table, count = context.require_parts()[0].table, context.trace.logits.shape[-1]
    return table, [find_class(name, context.model.labels, count) for name in table.classes]


def _labels(context: EvalContext) -> list[int | None]:
    """Return the class of each image in the table of parts; None where it is not known."""
    _, classes = _table_classes(context)
    labels = context.labels or [None] * len(context.trace.pixels)
    return [classes.index(label) if label in classes else None for label in labels]


def _undefined_unless(context: EvalContext, values: Tensor, defined: Sequence[bool]) -> Tensor:
    """Return values [M, B, …] with NaN for images that are not defined, and for maps with NaN."""
    undefined = context.invalid | ~torch.tensor(list(defined), device=values.device)
    return values.masked_fill(undefined.reshape(*undefined.shape, *[1] * (values.ndim - 2)), math.nan)


# Completeness


def check_curves(context: EvalContext, threshold: float | None, drop: float, options: PartOptions) -> CheckCurves:
    """Return the four checks at one threshold, or at those of the paper; computed once for all metrics that ask."""
    key = ("part checks", threshold, drop, options)
    if key not in context.shared:
        context.shared[key] = _check_curves(context, threshold, drop, options)
    curves: CheckCurves = context.shared[key]
    return curves


def _check_curves(context: EvalContext, threshold: float | None, drop: float, options: PartOptions) -> CheckCurves:
    thresholds = THRESHOLDS if threshold is None else torch.tensor([threshold], dtype=torch.float64)
    importance, total = _importance(context, options)  # [M, B, K], [M, B]
    edges = total[..., None, None] * thresholds[:, None].to(total.device)  # [M, B, S, 1]
    important = (importance[:, :, None] > edges).cpu()  # [M, B, S, K]
    predicted = context.trace.logits.argmax(-1).tolist()
    is_predicted = [c == p for c, p in zip(context.target.classes, predicted, strict=True)]
    is_true = [c == p for c, p in zip(context.labels or (), predicted, strict=False)] or [False] * len(predicted)
    preservation, deletion = _answers_without(context, important, predicted)
    synthetic = _share_of_sufficient_set(context, important)
    both = [a and b for a, b in zip(is_predicted, is_true, strict=True)]
    return CheckCurves(
        thresholds,
        _undefined_unless(context, synthetic.to(total.device), both),
        _undefined_unless(context, preservation.to(total.device), is_predicted),
        _undefined_unless(context, deletion.to(total.device), is_predicted),
        _undefined_unless(context, _ignored_share(context, important, drop).to(total.device), [True] * len(predicted)),
    )


def _share_of_sufficient_set(context: EvalContext, important: Tensor) -> Tensor:
    """Return max over sufficient sets S of |S ∩ important| / |S|, [M, B, S]; 0 where the class is not known."""
    table, _ = _table_classes(context)
    shares = torch.zeros(important.shape[:3], dtype=torch.float64)
    for image, class_index in enumerate(_labels(context)):
        if class_index is None:
            continue
        for members in table.sufficient_sets(class_index):
            share = important[:, image, :, list(members)].double().mean(-1)
            shares[:, image] = shares[:, image].maximum(share)
    return shares


def _answers_without(context: EvalContext, important: Tensor, predicted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return whether the answer stays with the important parts alone, and whether it changes without them: [M, B, S].

    Distractors stay in the image.
    """
    parts = context.require_parts()
    methods, _, steps, _ = important.shape
    rows, variants = [], []
    for image, removable in enumerate(parts):
        count = removable.part_count
        rows_of_image = important[:, image, :, :count].flatten(0, 1)  # [M·S, P]
        sets, numbers = torch.unique(rows_of_image, dim=0, return_inverse=True)  # [U, P], [M·S]
        both = torch.cat([sets, ~sets])
        variants.append(F.pad(both, (0, removable.count - count), value=True))
        rows.append(numbers)
    stays, changes = [], []
    for image, logits in enumerate(logits_of_variants(context, variants)):
        same = (logits.argmax(-1) == predicted[image]).cpu().chunk(2)
        stays.append(same[0][rows[image]].reshape(methods, steps))
        changes.append(~same[1][rows[image]].reshape(methods, steps))
    return torch.stack(stays, 1).double(), torch.stack(changes, 1).double()


def _ignored_share(context: EvalContext, important: Tensor, drop: float) -> Tensor:
    """Return 1 − |important ∩ irrelevant| / |irrelevant|, [M, B, S]; NaN where every component is relevant."""
    shares = []
    for image, relevant in enumerate(_is_relevant(context, drop)):
        irrelevant = (~relevant).cpu().nonzero()[:, 0]
        shares.append(1 - important[:, image, :, irrelevant].double().mean(-1))  # the mean of nothing is NaN
    return torch.stack(shares, 1)


def _at_best_threshold(curves: CheckCurves, values: Tensor, meaning: str) -> MetricOutput:
    """Return a check at the threshold at which the set's completeness is highest; at one threshold, its value."""
    if len(curves.thresholds) == 1:
        return MetricOutput(values[..., 0])
    best = curves.completeness.nanmean(1).nan_to_num(nan=-math.inf).argmax(-1)  # [M], of this batch
    return MetricOutput(
        values.gather(2, best[:, None, None].expand(-1, values.shape[1], 1))[..., 0],
        curves.thresholds,
        values,
        meaning,
        ACROSS,
        criterion=curves.completeness,
        chooses="threshold",
    )


_COMPLETENESS_COST = Cost(2 * (USUAL_PARTS + 1) + USUAL_COMPONENTS)

_part_metric = functools.partial(metric, family="parts", better="higher", span=(0, 1), paper=PAPER, needs=("parts",))


class Check(NamedTuple):
    """A check of completeness: which curve of `CheckCurves` it reads, and what that says."""

    name: str
    curve: str
    meaning: str  # of the curve
    undefined: str
    doc: str


CHECKS = (
    Check(
        "controlled-synthetic-data-check",
        "synthetic",
        "share of a sufficient set",
        "images of which the explained class is not the predicted and the true one",
        """Return max_S |S ∩ important parts| / |S| over the minimal sets S of parts that are sufficient for the class.

        A part is important if the map's sum on it exceeds `threshold` times the whole sum; None takes, of 80 thresholds
        from 0.01 to 0.5, the one at which `part-completeness` of the set is highest. `drop` is that of
        `distractibility`, which takes part in this choice.
        """,
    ),
    Check(
        "preservation-check",
        "preservation",
        "same answer with the important parts alone",
        "images of which the explained class is not the predicted one",
        """Return 1 if the model's answer stays the same with the important parts alone, 0 if not: are they sufficient?

        All other parts of the object are removed, distractors stay. Options are those of
        `controlled-synthetic-data-check`.
        """,
    ),
    Check(
        "deletion-check",
        "deletion",
        "other answer without the important parts",
        "images of which the explained class is not the predicted one",
        """Return 1 if the model's answer changes without the important parts, 0 if not: are all important ones named?

        Options are those of `controlled-synthetic-data-check`.
        """,
    ),
    Check(
        "distractibility",
        "distractibility",
        "irrelevant components left out",
        "images in which every part and every distractor is relevant",
        """Return 1 − |important ∩ irrelevant| / |irrelevant| over parts and distractors: is the irrelevant left out?

        A component is irrelevant if the target's logit without it is higher, or lower by less than `drop` · |logit|.
        Other options are those of `controlled-synthetic-data-check`.
        """,
    ),
    Check(
        "part-completeness",
        "completeness",
        "completeness",
        "images in which distractibility or all of the three other checks are undefined",
        """Return ½ ((CSDC + PC + DC) / 3 + D), FunnyBirds' completeness.

        CSDC is `controlled-synthetic-data-check`, PC `preservation-check`, DC `deletion-check` and D `distractibility`,
        at the same threshold; options are theirs. Where one of the first three is undefined, the mean is that of the
        others.
        """,
    ),
)


def _register(check: Check) -> None:
    """Register a check of completeness as a metric."""

    def metric_of_check(
        context: EvalContext,
        threshold: Threshold | None = None,
        drop: Drop = DROP,
        relevance: Relevance = "signed",
        dilation: Dilation = DILATION,
        upsampling: Upsampling = "nearest",
    ) -> MetricOutput:
        curves = check_curves(context, threshold, drop, PartOptions(relevance, dilation, upsampling))
        return _at_best_threshold(curves, getattr(curves, check.curve), check.meaning)

    metric_of_check.__doc__ = inspect.cleandoc(check.doc)
    _part_metric(
        check.name,
        cost=lambda **_: _COMPLETENESS_COST,
        whole_set=True,
        undefined=check.undefined,
    )(metric_of_check)


for _check in CHECKS:
    _register(_check)


# Correctness and contrastivity


@_part_metric(
    "single-deletion",
    cost=lambda **_: Cost(USUAL_COMPONENTS),
    undefined="images in which all parts have the same importance, or the same effect",
)
def single_deletion(
    context: EvalContext,
    score: ScoreKind = "logit",
    relevance: Relevance = "signed",
    dilation: Dilation = DILATION,
    upsampling: Upsampling = "nearest",
) -> Tensor:
    """Return ½ + ½ ρ(importance of part p, f(x) − f(x without p)), FunnyBirds' correctness; ρ is Spearman's.

    Over the parts of the object, without distractors: 1 if they are ranked by their effect, ½ if the two orders are
    unrelated. Importance is a sum, so a map without information ranks parts by their area.
    """
    importance, _ = _importance(context, PartOptions(relevance, dilation, upsampling))
    count = context.require_parts()[0].part_count
    drops = torch.stack([falls[:count] for falls in _single_drops(context, score)])
    rank_correlation = spearman(importance[..., :count], drops.expand(len(importance), -1, -1))
    return _undefined_unless(context, 0.5 + 0.5 * rank_correlation, [True] * len(drops))


@metric(
    "target-sensitivity",
    family="parts",
    better="higher",
    span=(0, 1),
    paper=PAPER,
    needs=("parts", "methods"),
    cost=lambda **_: Cost(4),
    undefined="images whose class has no contrast classes, or where the model's scores of these do not depend on the "
    "parts that they share with the image",
)
def target_sensitivity(
    context: EvalContext,
    relevance: Relevance = "signed",
    dilation: Dilation = DILATION,
    upsampling: Upsampling = "nearest",
) -> Tensor:
    """Return ½ ([I₁(e₁) > I₁(e₂)] + [I₂(e₂) > I₂(e₁)]), FunnyBirds' contrastivity: does the map follow the class?

    Classes 1 and 2 share two parts each with the image, and no part is shared with both; e₁, e₂ are the maps of the two
    classes, I₁, I₂ the importance of the parts shared with class 1 and 2. Images are left out where removing the parts
    of class 1 does not lower its logit more than removing those of class 2, or the reverse. A map that does not depend
    on the class scores 0.
    """
    table, classes = _table_classes(context)
    labels = _labels(context)
    pairs = [None if label is None else table.contrast_classes(label) for label in labels]
    shared = [
        None if label is None or pair is None else tuple(table.shared(label, c) for c in pair)
        for label, pair in zip(labels, pairs, strict=True)
    ]
    defined = _follows_parts(context, pairs, shared, classes)
    contrasts = []
    for side in (0, 1):
        targets = [
            classes[pair[side]] if pair is not None else (context.target.classes[image] or 0)
            for image, pair in enumerate(pairs)
        ]
        contrasts.append(context.explain(context.trace.pixels, target=target_of_classes(context, targets)))
    options = PartOptions(relevance, dilation, upsampling)
    first, second = (_importance_of_maps(context, maps, options) for maps in contrasts)  # [M, B, K]
    values = torch.zeros(first.shape[:2], dtype=torch.float64, device=first.device)
    for image, sides in enumerate(shared):
        if sides is not None:
            of_first, of_second = (list(members) for members in sides)
            rises = first[:, image] - second[:, image]  # [M, K]
            values[:, image] += 0.5 * (_total(first, image, of_first) > _total(second, image, of_first)).double()
            values[:, image] += 0.5 * (_total(second, image, of_second) > _total(first, image, of_second)).double()
            values[:, image] = values[:, image].masked_fill(~rises.isfinite().all(1), math.nan)
    return _undefined_unless(context, values, defined)


def _total(importance: Tensor, image: int, members: Sequence[int]) -> Tensor:
    """Return the importance of several parts of an image together, [M]."""
    return importance[:, image, list(members)].sum(-1)


def _importance_of_maps(context: EvalContext, maps: Tensor, options: PartOptions) -> Tensor:
    """Return the importance of each component [M, B, K] of maps on the patches, [M, B, rows, cols]."""
    masks = component_masks(context.require_parts(), options.dilation).to(maps.device)
    corners = None if options.upsampling == "nearest" else False
    mode = "nearest-exact" if options.upsampling == "nearest" else options.upsampling
    fine = [F.interpolate(values[:, None], context.size, mode=mode, align_corners=corners)[:, 0] for values in maps]
    return torch.stack([part_importance(values, masks, options.relevance)[0] for values in fine])


def _follows_parts(
    context: EvalContext,
    pairs: Sequence[tuple[int, int] | None],
    shared: Sequence[tuple[tuple[int, ...], ...] | None],
    classes: Sequence[int],
) -> list[bool]:
    """Return whether each contrast class loses more by its own shared parts than by the other's, for each image."""
    parts = context.require_parts()
    variants = []
    for removable, sides in zip(parts, shared, strict=True):
        keep = torch.ones(2, removable.count, dtype=torch.bool)
        for side, members in enumerate(sides or ()):
            keep[side, list(members)] = False
        variants.append(keep)
    follows = []
    for pair, logits in zip(pairs, logits_of_variants(context, variants), strict=True):
        if pair is None:
            follows.append(False)
            continue
        first, second = (logits[:, classes[c]] for c in pair)  # without the parts of class 1, and of class 2
        follows.append(bool(first[0] < first[1]) and bool(second[1] < second[0]))
    return follows


# The model


@_part_metric(
    "background-independence",
    cost=lambda **_: Cost(USUAL_COMPONENTS),
    undefined="images without distractors",
)
def background_independence(
    context: EvalContext,
    drop: Drop = DROP,
) -> MetricOutput:
    """Return 1 − #relevant distractors / #distractors: a property of the model, the same for every method.

    A distractor is relevant if the target's logit falls by at least `drop` · |logit| without it. The score of a set
    counts all distractors of all images.
    """
    parts = context.require_parts()
    ignored = torch.zeros(len(parts), 1, 2, dtype=torch.float64)
    for image, relevant in enumerate(_is_relevant(context, drop)):
        background = relevant[parts[image].part_count :]
        ignored[image, 0] = torch.tensor([float((~background).sum()), len(background)])
    counts = ignored.to(context.trace.pixels.device).expand(len(context.raw), -1, -1, -1)
    return MetricOutput(counts[..., 0, 0] / counts[..., 0, 1], counts=counts)


@_part_metric(
    "part-accuracy",
    cost=lambda removed=0, **_: Cost(math.comb(USUAL_PARTS, removed)),
    undefined="images whose class is not known",
)
def part_accuracy(
    context: EvalContext,
    removed: Annotated[int, Range(ge=0, unit="parts", example=1), Doc("how many parts are removed, in all ways")] = 0,
) -> Tensor:
    """Return 1 if the model's answer has the visible parts, FunnyBirds' accuracy: a property of the model.

    With `removed=k` the mean over all ways to remove k parts, where every class that has the parts left is right: are
    images without parts in the model's domain?
    """
    parts, labels = context.require_parts(), _labels(context)
    table, classes = _table_classes(context)
    count = len(table.kinds)
    if removed > count:
        raise BadInput(f"removed={removed} was given; expected a number of parts to remove, 0 … {count}.")
    visible = list(itertools.combinations(range(count), count - removed))
    keep = torch.tensor([[part in members for part in range(count)] for members in visible])
    variants = [F.pad(keep, (0, image.count - count), value=True) for image in parts]
    shares = []
    for label, logits in zip(labels, logits_of_variants(context, variants), strict=True):
        answers = logits.argmax(-1).tolist()
        right = [
            label is not None and answer in [classes[c] for c in table.compatible(label, members)]
            for answer, members in zip(answers, visible, strict=True)
        ]
        shares.append(sum(right) / len(right) if label is not None else math.nan)
    return torch.tensor(shares, dtype=torch.float64).to(context.trace.pixels.device).expand(len(context.raw), -1)
