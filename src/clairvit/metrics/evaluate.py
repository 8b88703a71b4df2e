"""The verb `evaluate`: images, methods and metrics in, scores out; traces and perturbed passes are shared."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.bind import Bound, bind
from clairvit.methods.explanation import Cost, Explanation
from clairvit.methods.together import record_for, run_all
from clairvit.metrics.case import Case
from clairvit.metrics.metric import Asked, Measured, ask
from clairvit.metrics.score import Curve, Score
from clairvit.models.images import Batch, prepare
from clairvit.models.model import Model
from clairvit.models.target import Target, resolve
from clairvit.perturb.batch import pace
from clairvit.trace.guest import own_grad_mode
from clairvit.trace.recording import Recording
from clairvit.trace.trace import follow

BASELINES = ("random", "center")
AT_ONCE = 8  # images


class Scores(dict[tuple[str, str], Score]):
    """(method, metric) -> Score; both canonical."""


@dataclass(eq=False)
class _Row:
    """What is known of one method and metric so far."""

    values: list[Tensor]
    degenerate: list[Tensor]
    lines: list[Tensor]
    counts: list[Tensor]
    x: Tensor | None = None
    meaning: str = ""
    cost: Cost = field(default_factory=Cost)


def evaluate(
    model: Model,
    images: Any,
    explanation: str | Explanation | Sequence[str],
    metric: str | Sequence[str] = "deletion",
    *,
    masks: Any = None,
    labels: Sequence[int] | None = None,
    target: Any = None,
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    **options: Any,
) -> Score | Scores:
    """How good is a map?

    cv.evaluate(model, images, "legrad", metric="deletion")              # Score: .values [B], .mean, .interval
    cv.evaluate(model, images, ex, metric="sparseness")                  # maps that are there already
    cv.evaluate(model, images, ["legrad", "rollout"], ["deletion", "insertion"])     # Scores: {(method, metric): Score}
    """
    alone = isinstance(metric, str) and not isinstance(explanation, list | tuple)
    asked = [ask(metric, **options)] if isinstance(metric, str) else _settled(metric, options)
    given = explanation if isinstance(explanation, Explanation) else None
    names = [explanation.method] if isinstance(explanation, Explanation) else explanation
    bounds = [bind(name) for name in ([names] if isinstance(names, str) else names)]
    batch = prepare(images, model)
    if given is not None and len(given) != len(batch):
        raise BadInput(f"The explanation has {len(given)} maps and {len(batch)} images were given; expected as many.")
    where = None if masks is None else _checked_masks(masks, batch)
    bounds = list({bound.text: bound for bound in bounds}.values())  # what is named twice is done once
    asked = list({one.text: one for one in asked}.values())
    with pace(batch_size, autocast):
        found = _evaluated(model, batch, bounds, asked, given, where, labels, target, seed)
    return next(iter(found.values())) if alone else found


def _settled(texts: Sequence[str], options: Mapping[str, Any]) -> list[Asked]:
    """Several metrics: each takes those of the options that it has, and every option must be somebody's."""
    if not texts:
        raise BadInput("No metrics were given; expected names such as ['deletion', 'sparseness'].")
    known = [set(ask(text).metric.options) for text in texts]
    for name in options:
        if not any(name in own for own in known):
            raise BadInput(
                f"None of the metrics {', '.join(texts)} has an option '{name}'; `clairvit metrics` lists them."
            )
    return [
        ask(text, **{name: value for name, value in options.items() if name in own})
        for text, own in zip(texts, known, strict=True)
    ]


def _checked_masks(masks: Any, batch: Batch) -> Tensor:
    """bool [N, H, W], as the model sees the images: cut and resized as they were."""
    found = torch.as_tensor(masks)
    expected = (len(batch), *batch.pixels.shape[-2:])
    if tuple(found.shape) != expected:
        raise BadInput(
            f"masks have shape {list(found.shape)} for {len(batch)} images of {expected[1]} × {expected[2]} pixels "
            f"as the model sees them; expected {list(expected)}, resized and cropped as the images are."
        )
    return found.to(batch.pixels.device) > 0


@own_grad_mode()
def _evaluated(
    model: Model,
    batch: Batch,
    bounds: list[Bound],
    asked: list[Asked],
    given: Explanation | None,
    masks: Tensor | None,
    labels: Sequence[int] | None,
    target: Any,
    seed: int,
) -> Scores:
    """Batch by batch, so that memory stays flat whatever the number of images."""
    every = (*bounds, *(bind(name) for name in BASELINES if name not in {bound.text for bound in bounds}))
    table = {(bound.text, one.text): _Row([], [], [], []) for bound in every for one in asked}
    notes: list[str] = []
    for start in range(0, len(batch), AT_ONCE):
        rows = range(start, min(start + AT_ONCE, len(batch)))
        part = slice(rows.start, rows.stop)
        recording = record_for(every, model, batch.pixels[part])
        goal = _targets(recording, model, given, target, labels, rows)
        made = run_all(every, recording, [goal], seed=seed)
        raw = _maps(every, made, given, part)
        case = Case(
            trace=follow(recording, goal, None),
            bounds=every,
            raw=raw,
            masks=None if masks is None else masks[part],
            labels=None if labels is None else tuple(labels[part]),
            seed=seed,
        )
        for one in asked:
            _measure(case, one, table)
        notes += [note for note in case.aside.notes if note not in notes]
    return _scores(model, batch, bounds, every, asked, table, seed, tuple(notes))


def _targets(
    recording: Recording,
    model: Model,
    given: Explanation | None,
    target: Any,
    labels: Sequence[int] | None,
    rows: range,
) -> Target:
    """What is scored: the class that was explained, what the caller names, "label", or the prediction."""
    logits = recording.logits.detach()
    spec: Any = target
    if given is not None and target is None:
        spec = [given.classes[i] for i in rows]
        if None in spec:
            raise BadInput(
                "The explanation's target is no class (a contrast or a function); expected one to score by. "
                "Pass target= as it was explained."
            )
    elif isinstance(target, str) and target == "label":
        if labels is None:
            raise BadInput(
                "target='label' was given without labels; expected labels=[…], the true class of each image."
            )
        spec = [labels[i] for i in rows]
    elif isinstance(target, list | tuple):
        spec = [target[i] for i in rows]
    (goal,) = resolve(spec, logits, model.labels, classifier=model.classifier)
    return goal


def _maps(
    bounds: Sequence[Bound], made: Mapping[str, Any], given: Explanation | None, part: slice
) -> tuple[Tensor, ...]:
    found = []
    for bound in bounds:
        if given is not None and bound.text == given.method:
            found.append(given.maps[part])
            continue
        (result,) = made[bound.text]
        if result.error is not None:
            raise result.error
        found.append(result.maps.detach())
    return tuple(found)


def _measure(case: Case, one: Asked, table: dict[tuple[str, str], _Row]) -> None:
    """Ask the metric, keep what it says; invalid maps have no score, and what it spent is shared by the methods."""
    recording, started = case.trace.recording, time.perf_counter()
    before = recording.forwards, recording.backwards
    said = one(case)
    measured = said if isinstance(said, Measured) else Measured(said)
    values = measured.values.masked_fill(case.invalid, math.nan)
    count = len(case.bounds)
    cost = Cost(
        math.ceil((recording.forwards - before[0]) / count),
        math.ceil((recording.backwards - before[1]) / count),
        (time.perf_counter() - started) / count,
    )
    for place, bound in enumerate(case.bounds):
        row = table[bound.text, one.text]
        row.values.append(values[place])
        row.degenerate.append(case.degenerate[place])
        row.cost = replace(cost, seconds=row.cost.seconds + cost.seconds)
        row.x, row.meaning = measured.x, measured.meaning
        if measured.y is not None:
            row.lines.append(measured.y[place])
        if measured.counts is not None:
            row.counts.append(measured.counts[place])


def _scores(
    model: Model,
    batch: Batch,
    bounds: Sequence[Bound],
    every: Sequence[Bound],
    asked: Sequence[Asked],
    table: Mapping[tuple[str, str], _Row],
    seed: int,
    notes: tuple[str, ...],
) -> Scores:
    found = Scores()
    for one in asked:
        made: dict[str, Score] = {}
        for bound in every:
            row = table[bound.text, one.text]
            curve = None if row.x is None else Curve(row.x, torch.cat(row.lines), row.meaning)
            made[bound.text] = Score(
                metric=one.text,
                method=bound.text,
                values=torch.cat(row.values),
                better=one.better,
                span=one.metric.span,
                degenerate=torch.cat(row.degenerate),
                names=batch.names,
                model=model.name,
                settings=dict(one.options),
                seed=seed,
                cost=row.cost,
                curve=curve,
                notes=notes,
                counts=torch.cat(row.counts) if row.counts else None,
            )
        luck = {name: made[name] for name in BASELINES}
        for bound in bounds:
            found[bound.text, one.text] = replace(made[bound.text], baselines=luck)
    return found
