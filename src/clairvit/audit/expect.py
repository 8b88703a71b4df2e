"""The verb `expect`: does the model look where it should?

For each image its map by one forward (and backward), and 2 + 2 · draws passes: without the region, without the rest,
and each without as many random patches. `audit/expectation.py` has the quantities, `audit/conditions.py` the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clairvit.audit.conditions import Condition
from clairvit.audit.expectation import QUANTITIES, SPANS, Expectation
from clairvit.data.dataset import ErrorHandler, ImageDataset
from clairvit.errors import Argument, BadInput, ClairError
from clairvit.methods.explain import run_by_default
from clairvit.methods.planner import misfits, run_all, spent_on
from clairvit.methods.runs import OnError, Question, Run, class_indices, error_handler, iter_runs
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.check import log_odds, quantity_of
from clairvit.metrics.context import EvalContext, planar_maps
from clairvit.metrics.localisation import patch_foreground
from clairvit.models.activation import probabilities
from clairvit.models.coerce import ModelLike
from clairvit.numerics import widened
from clairvit.perturbation.probe import ScoreFunction
from clairvit.perturbation.removal import check_removal
from clairvit.targets.base import TargetBatch, class_name
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.trace import run_backward

NAME = "expect"  # of the progress, and of notes
DRAWS = 2  # random sets of patches of each size
NO_MASK = "it has no mask"
EMPTY = "its region has no patch of which half or more lies in the mask"
MIXED = "Some targets have a probability and others do not; expected targets of one kind."
FULL = "its region is the whole image, so that there is no outside"


def expect(
    model: ModelLike,
    images: Any,
    masks: Any = None,
    method: str | MethodSpec | None = None,
    target: Any = None,
    *,
    threshold: str | Sequence[str] | None = None,
    against: ModelLike | None = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    draws: int = DRAWS,
    removal: str = "token",
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Expectation:
    """Measure whether a model looks where it should: the share of the evidence in a region, and what hiding it costs.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.evaluate`; read a few at a time.
        masks: The region of each image, as in `cv.evaluate`; a single mask for a single image. Patches of which half
            or more lies in the mask are the region. Images without a mask, or whose region is empty or everything, are
            left out and named.
        method: The method of the maps; None is the default for the model.
        target: What is explained and scored, as in `cv.evaluate`: None is the predicted class, "label" the true one.
        threshold: What is expected, one condition or several: "inside >= 0.5" of every image, "inside >= 0.5 on 80%"
            of the images, "mean excess_inside > 0" with its whole 95 % interval. `.passed` says whether all hold.
        against: Another model, such as the version before: the same images by it, row by row, in `.against`.
        mask_kind: How pictures of masks are read: nonzero, trimap, …
        labels: The true class of each image; means are per class then.
        draws: How many random sets of as many patches are hidden for comparison.
        removal: How patches are hidden: token (dropped from the sequence), mean, blur, …
        on_error: As in `cv.evaluate`.
        seed: The seed of everything random.
        batch_size: At most so many perturbed images in one pass; None: chosen by size.
        autocast: "bfloat16" makes perturbed passes faster and less exact.
        inputs: As in `cv.explain`.

    Returns:
        An `Expectation`: `.inside` [B], `.mean("excess_inside")`, `.by_class()`, `.passed`, `.failed`,
        `.save("expectation.csv")`.

    Raises:
        BadInput: Images, masks or thresholds that cannot be used, or no image is left.
        UnknownName: A method, class or quantity that does not exist.
        NotApplicable: The method does not fit the model, or the model has no patches that could be removed.

    Example:
        >>> import clairvit as cv
        >>> import torch
        >>> region = torch.zeros(224, 224, dtype=torch.bool)
        >>> region[48:176, 48:176] = True
        >>> result = cv.expect("pets", "demo", region)
        >>> result.cost.forwards, result.cost.backwards
        (7, 1)
        >>> result.values("fall_inside").shape, result.mean("area").images
        (torch.Size([1]), 1)
    """
    conditions = parse_conditions(threshold, compares=against is not None)
    check_removal(removal)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise BadInput(f"draws={draws!r} was given; expected 1 or more random sets of patches, such as {DRAWS}.")
    spec = None if method is None else resolve_method(method)
    ask = functools.partial(
        Question.of_dataset,
        mask_kind=mask_kind,
        labels=labels,
        seed=seed,
        batch_size=batch_size,
        autocast=autocast,
        inputs=inputs,
    )
    if isinstance(images, ImageDataset) and (masks is not None or labels is not None):
        raise BadInput("masks or labels were given with a data set that has its own; expected them with images.")
    question = ask(model, images, target, masks=_as_list(masks))
    dataset = question.images
    assert isinstance(dataset, ImageDataset)
    if not dataset.has_masks:
        raise BadInput("No regions were given; expected one mask per image: ", Argument("masks", [...]), ".")
    request = Request(draws, removal, error_handler(on_error))
    measured = _measure_model(question, request, spec)
    if against is not None:
        other = _measure_model(ask(against, dataset, target), request, spec)
        measured = _paired(measured, other)
    return replace(measured, conditions=conditions)


def parse_conditions(threshold: str | Sequence[str] | None, *, compares: bool = False) -> tuple[Condition, ...]:
    """Return the conditions of thresholds, each once; raise an error for one that cannot be read."""
    listed = [] if threshold is None else [threshold] if isinstance(threshold, str) else list(threshold)
    quantities = QUANTITIES if compares else tuple(SPANS)
    return tuple(dict.fromkeys(Condition.parse(text, quantities) for text in listed))


def _as_list(masks: Any) -> Any:
    """Return one mask as a list of one; lists, batches [N, H, W] and functions as they are."""
    is_one = isinstance(masks, str | Path | Image.Image) or (isinstance(masks, Tensor | np.ndarray) and masks.ndim == 2)
    return [masks] if is_one else masks


@dataclass(frozen=True, eq=False)
class Request:
    """How it is measured."""

    draws: int
    removal: str
    on_error: ErrorHandler | None


def _measure_model(question: Question, request: Request, spec: MethodSpec | None) -> Expectation:
    """Measure all images by a method, or by the default for the model."""
    if spec is not None:
        return _measure(question, request, spec)
    skip = request.on_error is not None
    measured, notes = run_by_default(question, lambda default, _: _measure(question, request, default), skip=skip)
    return replace(measured, notes=(*measured.notes, *notes))


@own_grad_mode()
def _measure(question: Question, request: Request, spec: MethodSpec) -> Expectation:
    misfits([spec], question.models, skip=False)
    left_out: list[tuple[str, str]] = []

    def on_error(name: str, error: ClairError) -> None:
        assert request.on_error is not None
        left_out.append((name, str(error)))
        request.on_error(name, error)

    handler = None if request.on_error is None else on_error
    parts: list[Expectation] = []
    with closing(iter_runs(question, [spec], on_error=handler, label=NAME)) as runs:
        for run in runs:
            part = _measure_run(run, request, spec, question.seed, left_out)
            if part is not None:
                parts.append(part)
            del run
    dataset = question.images
    assert isinstance(dataset, ImageDataset)
    if not parts:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out[:3])
        raise BadInput(f"No image with a region is left ({reasons}); expected masks that cover a part of an image.")
    if len({part.quantity for part in parts}) > 1:
        raise BadInput(MIXED)
    measured = Expectation.concat(parts)
    notes = (*question.model.assumptions, *dataset.notes, *measured.notes)
    return replace(measured, left_out=tuple(left_out), notes=tuple(dict.fromkeys(notes)))


def _measure_run(
    run: Run, request: Request, spec: MethodSpec, seed: int, left_out: list[tuple[str, str]]
) -> Expectation | None:
    """Measure a few images; None if none of them has a region."""
    trace = run_backward(run.recording, run.targets[0], None)
    results = run_all([spec], run.recording, run.targets, seed=seed)[spec.text]
    if results[0].error is not None:
        raise results[0].error
    assert results[0].maps is not None
    context = EvalContext(trace=trace, specs=(spec,), raw=(planar_maps(results[0].maps.detach(), trace),), seed=seed)
    inside, outside = _regions(run, context)
    rows = _usable(run, inside, outside, left_out)
    if not rows:
        return None
    target = run.targets[0]
    quantities = [quantity_of(target, row) for row in rows]
    if len(set(quantities)) > 1:
        raise BadInput(MIXED)
    values, answers = _removals(context, inside, outside, rows, request)
    classes = class_indices(run.batch.labels, run.model, run.logits.shape[-1]) or [None] * len(run.rows)
    maps = context.maps[0].flatten(1)[rows].cpu()
    inside, outside = inside[rows].cpu(), outside[rows].cpu()
    positive, size = maps.clamp(min=0), maps.abs() * (inside | outside)
    full = _value_function(target)(run.logits, list(range(len(run.logits))))[rows, :2].cpu()
    draws = request.draws
    return Expectation(
        rows=tuple(run.rows[row] for row in rows),
        names=tuple(run.batch.names[row] for row in rows),
        classes=tuple(
            target.names[row] if (index := classes[row]) is None else class_name(run.model.labels, index)
            for row in rows
        ),
        targets=tuple(target.names[row] for row in rows),
        answers=_answers(run, run.logits.argmax(1)[rows].tolist()),
        inside=(positive * inside).sum(1) / (positive * (inside | outside)).sum(1),
        net_inside=(maps * inside).sum(1) / size.sum(1),
        net_outside=(maps * outside).sum(1) / size.sum(1),
        area=inside.sum(1) / (inside | outside).sum(1).double(),
        patches=inside.sum(1),
        full=full,
        without_inside=values[:, 0],
        without_outside=values[:, 1],
        random_inside=values[:, 2 : 2 + draws],
        random_outside=values[:, 2 + draws :],
        answers_without_inside=_answers(run, answers[:, 0].tolist()),
        answers_without_outside=_answers(run, answers[:, 1].tolist()),
        model=run.model.name,
        method=spec.text,
        quantity=quantities[0],
        removal=request.removal,
        seed=seed,
        cost=spent_on(run.recording, [spec]),
        notes=(*run.batch.notes, *results[0].notes, *context.notes_log.notes),
    )


def _regions(run: Run, context: EvalContext) -> tuple[Tensor, Tensor]:
    """Return which patches are inside the region and which outside, bool [B, patches]; void patches are neither."""
    masks = run.batch.masks
    assert masks is not None
    valid = torch.ones_like(masks) if run.batch.void is None else ~run.batch.void
    foreground, counted = patch_foreground(masks & valid, valid, context.trace.layout.plane, "area")
    inside = foreground.flatten(1) > 0
    return inside, (counted.flatten(1) > 0) & ~inside


def _usable(run: Run, inside: Tensor, outside: Tensor, left_out: list[tuple[str, str]]) -> list[int]:
    """Return the images of a run that have both an inside and an outside, and note why the others have not."""
    rows = []
    lacks_mask = run.batch.lacks_mask or (False,) * len(run.rows)
    for row, name in enumerate(run.batch.names):
        if lacks_mask[row]:
            left_out.append((name, NO_MASK))
        elif not inside[row].any():
            left_out.append((name, EMPTY))
        elif not outside[row].any():
            left_out.append((name, FULL))
        else:
            rows.append(row)
    return rows


def _removals(
    context: EvalContext, inside: Tensor, outside: Tensor, rows: Sequence[int], request: Request
) -> tuple[Tensor, Tensor]:
    """Return values and evidence [B, 2 + 2 draws, 2], and answers [B, 2 + 2 draws], of the chosen images [B]."""
    counted = inside | outside
    hidden = [inside, outside]
    for number, part in enumerate((inside, outside)):
        streams = range(number * request.draws, (number + 1) * request.draws)
        hidden += [random_patches(context, counted, part.sum(1), stream) for stream in streams]
    keep = ~torch.stack(hidden, 1)[list(rows)]  # [B, V, patches]
    images = torch.tensor(list(rows)).repeat_interleave(keep.shape[1])
    with context.probe(request.removal, NAME, keep.shape[1]) as probe:
        scores = probe.score_pairs(images, keep.flatten(0, 1), _value_function(context.target))
    scores = scores.reshape(*keep.shape[:2], 3).cpu()
    return scores[..., :2], scores[..., 2].long()


def random_patches(context: EvalContext, among: Tensor, counts: Tensor, index: int) -> Tensor:
    """Return `counts` [B] random patches of those in `among`, bool [B, patches], from the seed of each image."""
    keys = context.tie_order(context.patches, "expect/random patches", index).masked_fill(~among, context.patches)
    return (keys.argsort(1).argsort(1) < counts[:, None]) & among


def _value_function(target: TargetBatch) -> ScoreFunction:
    """Return a function (logits [n, C], images [n]) -> value, evidence and answer, [n, 3] in float64.

    Value and evidence are the probability and the log-odds of a class, or twice the score of any other target.
    """

    def values(logits: Tensor, images: list[int]) -> Tensor:
        result = torch.empty(len(logits), 3, dtype=torch.float64, device=logits.device)
        result[:, 2] = logits.argmax(1)
        for image in dict.fromkeys(images):
            places = [place for place, of in enumerate(images) if of == image]
            of_image, index = logits[places], target.classes[image]
            if quantity_of(target, image) == "probability" and index is not None:
                p = probabilities(of_image.double(), target.activation)
                assert p is not None
                result[places, 0] = p[:, index]
                result[places, 1] = log_odds(of_image, index, target.activation)
            else:
                scores = target.take([image] * len(places))(widened(of_image)).double()
                result[places, :2] = scores[:, None].expand(-1, 2)
        return result

    return values


def _answers(run: Run, indices: Sequence[int]) -> tuple[str, ...]:
    """Return the names of answers; "" for a model that does not answer by a class."""
    answers = run.model.classifier and run.logits.shape[-1] > 1 and run.targets[0].activation != "raw"
    return tuple(class_name(run.model.labels, index) if answers else "" for index in indices)


def _paired(result: Expectation, other: Expectation) -> Expectation:
    """Return the images that both models have a result for, with that of the other in `against`."""
    places = {row: place for place, row in enumerate(other.rows)}
    kept = [place for place, row in enumerate(result.rows) if row in places]
    if not kept:
        raise BadInput("No image has a region for both models; expected masks that both see a part of.")
    if result.quantity != other.quantity:
        raise BadInput(
            f"{result.model} gives a {result.quantity} and {other.model} a {other.quantity}; expected two models "
            "whose scores mean the same."
        )
    left_out = list(result.left_out)
    for part, partner in ((result, other), (other, result)):
        known, named = set(partner.rows), {name for name, _ in left_out}
        alone = [name for row, name in zip(part.rows, part.names, strict=True) if row not in known]
        left_out += [(name, f"{partner.model} has no result for it") for name in alone if name not in named]
    matched = other.take([places[result.rows[place]] for place in kept])
    return replace(replace(result, left_out=tuple(left_out)).take(kept), against=matched)
