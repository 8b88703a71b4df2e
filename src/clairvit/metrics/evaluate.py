"""The verb `evaluate`: images, methods and metrics in, scores out; traces and perturbed passes are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clairvit.data.dataset import Failed, ImageDataset, SampleBatch, album_of, parts
from clairvit.data.hashing import model_record
from clairvit.errors import BadInput
from clairvit.execution import ExecutionOptions
from clairvit.methods.executor import Result
from clairvit.methods.explanation import Explanation
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.accumulator import BASELINES, ScoreAccumulator, Scores
from clairvit.metrics.context import EvalContext, shaped
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.registry import Metric, MetricSpec, resolve_metric
from clairvit.metrics.score import Score
from clairvit.models.model import Model
from clairvit.perturbation.aside import MapResult
from clairvit.perturbation.progress import report_progress
from clairvit.perturbation.rng import check_seed
from clairvit.targets.target import Target, find_class, resolve
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import Recording
from clairvit.tracing.trace import run_backward

AT_ONCE = {"cpu": 8, "cuda": 32}  # images
LABEL = "label"  # as a target: the true class


@dataclass(frozen=True, eq=False)
class _Request:
    """What `evaluate` was asked, settled."""

    model: Model
    dataset: ImageDataset
    specs: tuple[MethodSpec, ...]
    asked: tuple[MetricSpec, ...]
    given: Explanation | None
    target: Any
    shape: str
    luck: tuple[str, ...]  # baselines that are scored beside the methods
    skip: bool
    failed: Failed | None
    seed: int
    execution: ExecutionOptions


def evaluate(
    model: Model,
    images: Any,
    explanation: str | Explanation | Sequence[str],
    metric: str | Sequence[str] = "deletion",
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    others: Sequence[int | str | None] | None = None,
    target: Any = None,
    maps: str = "raw",
    baselines: bool = True,
    skip: bool = False,
    failed: Failed | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    **options: Any,
) -> Score | Scores:
    """How good is a map?

    cv.evaluate(model, images, "legrad", metric="deletion")              # Score: .values [B], .mean, .interval
    cv.evaluate(model, images, ex, metric="sparseness")                  # maps that are there already
    cv.evaluate(model, images, ["legrad", "rollout"], ["deletion", "insertion"])     # Scores: {(method, metric): Score}
    cv.evaluate(model, paths, "legrad", "iou", masks=paths_of_masks, mask_kind="trimap")

    Images are read a few at a time. `masks`: bool [N, H, W] as the model sees the images, or a path, picture or array
    of the whole image for each. `labels` are the true classes (target="label" scores by them), `others` classes of
    other objects in the images. `maps` is what is done to each map first: raw, abs, relu, min-max or over-largest.
    `baselines` scores a random and a centred map on the same images. `skip=True` leaves out methods that do not fit
    the model (`.skipped` says why), and `failed(name, error)` is told of images that cannot be read.
    """
    alone = isinstance(metric, str) and not isinstance(explanation, list | tuple)
    asked = [resolve_metric(metric, **options)] if isinstance(metric, str) else _settled(metric, options)
    given = explanation if isinstance(explanation, Explanation) else None
    names = [explanation.method] if isinstance(explanation, Explanation) else explanation
    specs = [resolve_method(name) for name in ([names] if isinstance(names, str) else names)]
    dataset = album_of(images, model, masks=masks, mask_kind=mask_kind, labels=labels, others=others)
    if given is not None and len(given) != len(dataset):
        raise BadInput(f"The explanation has {len(given)} maps and {len(dataset)} images were given; expected as many.")
    request = _Request(
        model,
        dataset,
        tuple({method_spec.text: method_spec for method_spec in specs}.values()),  # what is named twice is done once
        tuple({one.text: one for one in asked}.values()),
        given,
        target,
        maps,
        BASELINES if baselines else (),
        skip,
        failed,
        check_seed(seed),
        ExecutionOptions.from_caller(batch_size, autocast),
    )
    found = _evaluated(request)
    if alone and not found:
        raise BadInput("None of the images could be read; expected at least one that can.")
    return next(iter(found.values())) if alone else found


def _settled(texts: Sequence[str], options: Mapping[str, Any]) -> list[MetricSpec]:
    """Several metrics: each takes those of the options that it has, and every option must be somebody's."""
    if not texts:
        raise BadInput("No metrics were given; expected names such as ['deletion', 'sparseness'].")
    known = [_takes(resolve_metric(text).metric, options) for text in texts]
    for name in options:
        if not any(name in own for own in known):
            raise BadInput(
                f"None of the metrics {', '.join(texts)} has an option '{name}'; `clairvit metrics` lists them."
            )
    return [
        resolve_metric(text, **{name: value for name, value in options.items() if name in own})
        for text, own in zip(texts, known, strict=True)
    ]


def _takes(metric: Metric, options: Mapping[str, Any]) -> set[str]:
    """The options that a metric has; `preset` and `compat` too, if it has one of that name."""
    named = {word for word in ("preset", "compat") if options.get(word) in metric.presets}
    return set(metric.options) | named


@own_grad_mode()
def _evaluated(request: _Request) -> Scores:
    """A few images at a time, so that memory stays flat whatever their number."""
    named = {method_spec.text for method_spec in request.specs}
    every = (*request.specs, *(resolve_method(name) for name in request.luck if name not in named))
    table = ScoreAccumulator(request.model.name, request.seed, _settings(request))
    single = [one for one in request.asked if one.metric.scope == "image"]
    rows: list[int] = []
    logits: list[Tensor] = []
    labels: list[int | None] = []
    with report_progress("images", len(request.dataset)) as tell:
        for part in parts(request.dataset, request.model, AT_ONCE.get(request.model.device.type, 8), request.failed):
            recording = record_for(every, request.model, part.pixels, request.execution)
            goal = _targets(recording, part, request)
            if single:
                made = run_all(every, recording, [goal], seed=request.seed)
                every = _fitting(every, made, request, table)
                if every:  # it may be that no method fits
                    case = _case(request, part, recording, goal, every, made)
                    for one in single:
                        table.measure(case, one)
            rows += part.rows
            logits.append(recording.logits.detach().cpu())
            true = _numbers(part.labels, recording, request.model) or [None] * len(part.rows)
            labels += true
            table.see(part.names, logits[-1], true, request.model.activation)
            table.unmasked += part.unmasked
            tell(len(part.rows))
    if not rows:
        return Scores()  # `failed` was told why
    if every and len(single) < len(request.asked):
        known = tuple(labels) if request.dataset.has_labels else None
        shelf = DatasetContext(
            request.model,
            request.dataset,
            every,
            tuple(rows),
            torch.cat(logits),
            known,
            request.seed,
            MapResult(),
            options=request.execution,
        )
        for one in request.asked:
            if one.metric.scope == "set":
                table.measure_set(shelf, one)
    scores = table.scores(request.specs, request.asked, every, request.luck)
    scores.model_record = model_record(request.model)
    return scores


def _settings(request: _Request) -> dict[str, Any]:
    """What every score depends on beside the options of its metric."""
    target = "predicted" if request.target is None and request.given is None else "given"
    return {
        "target": LABEL if isinstance(request.target, str) and request.target == LABEL else target,
        "maps": request.shape,
        "activation": request.model.activation,
    }


def _fitting(
    every: tuple[MethodSpec, ...], made: Mapping[str, list[Result]], request: _Request, table: ScoreAccumulator
) -> tuple[MethodSpec, ...]:
    """The methods that fit the model; at the first images others are left out, if that was asked for."""
    found = []
    for method_spec in every:
        error = made[method_spec.text][0].error
        if error is None or (request.given is not None and method_spec.text == request.given.method):
            found.append(method_spec)
        elif not request.skip or table.names:
            raise error
        else:
            table.skipped[method_spec.text] = str(error)
    return tuple(found)


def _case(
    request: _Request,
    part: SampleBatch,
    recording: Recording,
    goal: Target,
    every: tuple[MethodSpec, ...],
    made: Mapping[str, list[Result]],
) -> EvalContext:
    def maps(method_spec: MethodSpec) -> Tensor:
        if request.given is not None and method_spec.text == request.given.method:
            return request.given.maps[list(part.rows)]
        found = made[method_spec.text][0].maps
        assert found is not None
        return found.detach()

    labels, others = (_numbers(given, recording, request.model) for given in (part.labels, part.others))
    return EvalContext(
        trace=run_backward(recording, goal, None),
        specs=every,
        raw=tuple(shaped(maps(method_spec), request.shape) for method_spec in every),
        masks=part.masks,
        void=part.void,
        labels=None if labels is None else tuple(labels),
        others=None if others is None else tuple(others),
        transform=request.shape,
        seed=request.seed,
    )


def _numbers(given: Sequence[int | str | None] | None, recording: Recording, model: Model) -> list[int | None] | None:
    """Classes, which may be named, as numbers."""
    if given is None:
        return None
    count = recording.logits.shape[-1]
    return [None if one is None else find_class(one, model.labels, count) for one in given]


def _targets(recording: Recording, part: SampleBatch, request: _Request) -> Target:
    """What is scored: the class that was explained, what the caller names, the true class, or the prediction."""
    logits, spec = recording.logits.detach(), request.target
    if request.given is not None and spec is None:
        spec = [request.given.classes[row] for row in part.rows]
        if None in spec:
            raise BadInput(
                "The explanation's target is no class (a contrast or a function); expected one to score by. "
                "Pass target= as it was explained."
            )
    elif isinstance(spec, str) and spec == LABEL:
        spec = _numbers(part.labels, recording, request.model)
        if spec is None or None in spec:
            raise BadInput(
                "target='label' was given without labels for all images; expected labels=[…], the true class of each "
                "image.",
                parameters={"truth": "FILE"},
            )
    elif isinstance(spec, list | tuple):
        if len(spec) != len(request.dataset):
            raise BadInput(f"{len(spec)} targets were given for {len(request.dataset)} images; expected one for each.")
        spec = [spec[row] for row in part.rows]
    model = request.model
    (goal,) = resolve(spec, logits, model.labels, classifier=model.classifier, activation=model.activation)
    return goal
