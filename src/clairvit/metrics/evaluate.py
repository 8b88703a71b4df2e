"""The verb `evaluate`: score maps of methods with metrics; traces and perturbed passes are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from clairvit._presets import choose_preset
from clairvit.data.dataset import ErrorHandler, ImageDataset
from clairvit.data.hashing import model_record
from clairvit.errors import BadInput
from clairvit.methods.executor import Result
from clairvit.methods.explanation import Explanation
from clairvit.methods.planner import misfits, run_all
from clairvit.methods.runs import OnError, Question, Run, class_indices, error_handler, iter_runs
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.accumulator import BASELINES, ScoreAccumulator
from clairvit.metrics.context import EvalContext, Notes, planar_maps, transform_maps
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.registry import Metric, MetricSpec, resolve_metric
from clairvit.metrics.score import Score, Scores
from clairvit.models.coerce import ModelLike
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.trace import run_backward

OneMethod = str | MethodSpec | Explanation
OneMetric = str | MetricSpec


@overload
def evaluate(
    model: ModelLike,
    images: Any,
    methods: OneMethod,
    metrics: OneMetric = "deletion",
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    distractors: Sequence[int | str | None] | None = None,
    target: Any = None,
    normalize: str = "raw",
    baselines: bool = True,
    skip: bool = False,
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Score: ...
@overload
def evaluate(
    model: ModelLike,
    images: Any,
    methods: list[str] | list[MethodSpec] | list[str | MethodSpec] | tuple[str | MethodSpec, ...],
    metrics: OneMetric | list[str] | list[MetricSpec] | list[str | MetricSpec] | tuple[OneMetric, ...] = "deletion",
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    distractors: Sequence[int | str | None] | None = None,
    target: Any = None,
    normalize: str = "raw",
    baselines: bool = True,
    skip: bool = False,
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Scores: ...
@overload
def evaluate(
    model: ModelLike,
    images: Any,
    methods: OneMethod,
    metrics: list[str] | list[MetricSpec] | list[str | MetricSpec] | tuple[OneMetric, ...],
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    distractors: Sequence[int | str | None] | None = None,
    target: Any = None,
    normalize: str = "raw",
    baselines: bool = True,
    skip: bool = False,
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Scores: ...
def evaluate(
    model: ModelLike,
    images: Any,
    methods: Any,
    metrics: Any = "deletion",
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    distractors: Sequence[int | str | None] | None = None,
    target: Any = None,
    normalize: str = "raw",
    baselines: bool = True,
    skip: bool = False,
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Score | Scores:
    """Score how good the maps of methods are, with baselines and the interval of each mean.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`; read a few at a time. The labels of a data set are used as `labels`.
        methods: A method string, a `MethodSpec`, an `Explanation` whose maps exist already, or a list of methods.
        metrics: A metric string, a `MetricSpec`, or a list of these.
        masks: bool [N, H, W] as the model sees the images, or a path, picture or array of the whole image for each, or
            a function of name and picture.
        mask_kind: How pictures of masks are read: nonzero, trimap, …
        labels: The true class of each image; target="label" scores by them.
        distractors: The class of another object in each image, or None.
        target: What is scored, one per image, as in `cv.explain`; None is the predicted class, or what an
            `Explanation` explains; "label" the true class.
        normalize: What is done to each map first: raw (nothing), abs, relu, min-max or over-largest.
        baselines: Score a random and a centred map on the same images too.
        skip: Leave out methods that do not fit the model; `.skipped` says why.
        on_error: What to do with images that cannot be read: "raise", "skip" (with a warning), or a function of the
            image's name and the error.
        seed: The seed of everything random.
        batch_size: At most so many perturbed images in one pass; None: chosen by size.
        autocast: "bfloat16" makes perturbed passes faster and less exact.
        inputs: As in `cv.explain`.
        **options: Options of the metrics, e.g. removal="mean"; each metric takes those that it has.

    Returns:
        One method and one metric: a `Score` (`.values` [B], `.mean`, `.interval`, `.baselines`). A list of either:
        `Scores`, a mapping from (method, metric) to `Score`.

    Raises:
        BadInput: Images, masks, labels or options that cannot be used.
        UnknownName: A method, metric, class or option that does not exist.
        NotApplicable: A method does not fit the model, unless `skip` is set.

    Example:
        >>> import clairvit as cv
        >>> model = cv.load("pets")
        >>> cv.evaluate(model, "demo", "legrad", "sparseness").n_valid
        1
        >>> ex = cv.explain(model, "demo", "rollout")
        >>> cv.evaluate(model, "demo", ex, "sparseness").method
        'rollout'
        >>> list(cv.evaluate(model, "demo", ["legrad", "rollout"], ["sparseness"]))
        [('legrad', 'sparseness'), ('rollout', 'sparseness')]
    """
    explanation = methods if isinstance(methods, Explanation) else None
    metric_specs = _metric_specs(metrics, options)
    several = isinstance(methods, list | tuple)
    method_list = methods if several else [methods if explanation is None else explanation.method]
    method_specs = [resolve_method(method) for method in method_list]
    question = Question.of_dataset(
        model,
        images,
        target,
        masks=masks,
        mask_kind=mask_kind,
        labels=labels,
        distractors=distractors,
        seed=seed,
        batch_size=batch_size,
        autocast=autocast,
        inputs=inputs,
    )
    if explanation is not None:
        question = _about_explanation(question, explanation)
    scores = _evaluate(
        question,
        {spec.text: spec for spec in method_specs},  # what is named twice is run once
        list({spec.text: spec for spec in metric_specs}.values()),
        explanation,
        normalize=normalize,
        baselines=BASELINES if baselines else (),
        skip=skip,
        on_error=error_handler(on_error),
    )
    if several or isinstance(metrics, list | tuple):
        return scores
    if not scores:
        raise BadInput("None of the images could be read; expected at least one that can.")
    return next(iter(scores.values()))


def _metric_specs(metrics: OneMetric | Sequence[OneMetric], options: Mapping[str, Any]) -> list[MetricSpec]:
    """Return the metrics; each of several takes the options that it has, and every option must belong to one."""
    if isinstance(metrics, str | MetricSpec):
        return [resolve_metric(metrics, **options)]
    if not metrics:
        raise BadInput("No metrics were given; expected names such as ['deletion', 'sparseness'].")
    if not options:
        return list(map(resolve_metric, metrics))
    accepted = [_accepted_options(resolve_metric(metric).metric, options) for metric in metrics]
    for name in options:
        if not any(name in names for names in accepted):
            listed = ", ".join(map(str, metrics))
            raise BadInput(
                f"None of the metrics {listed} has an option '{name}'; cv.parse_metric(name).options lists them."
            )
    return [
        resolve_metric(metric, **{name: value for name, value in options.items() if name in names})
        for metric, names in zip(metrics, accepted, strict=True)
    ]


def _accepted_options(metric: Metric, options: Mapping[str, Any]) -> set[str]:
    """Return the options that a metric has; `preset` and `compat` too, if it has one of that name."""
    accepted = set()
    for keyword in ("preset", "compat"):
        if options.get(keyword) in metric.presets:
            metric, _ = choose_preset(metric, options[keyword])
            accepted.add(keyword)
    return set(metric.options) | accepted


@own_grad_mode()
def _evaluate(
    question: Question,
    methods: Mapping[str, MethodSpec],
    metrics: Sequence[MetricSpec],
    explanation: Explanation | None,
    *,
    normalize: str,
    baselines: Sequence[str],
    skip: bool,
    on_error: ErrorHandler | None,
) -> Scores:
    """Score a few images at a time, so that memory does not grow with their number.

    Args:
        question: What is asked.
        methods: The methods by their text.
        metrics: The metrics.
        explanation: Maps that exist already, of one of the methods.
        normalize: What is done to each map first.
        baselines: Methods that are scored next to those named.
        skip: Leave out methods that do not fit the model.
        on_error: Called for each image that cannot be read.
    """
    dataset = question.images
    assert isinstance(dataset, ImageDataset)
    models = question.models
    model = models[0] if len(models) == 1 else question.model  # whose scores all targets are about
    together = [metric for metric in metrics if metric.metric.scope == "set"]
    per_image = [metric for metric in metrics if metric.metric.scope == "image"]
    if together and len(models) > 1:
        raise BadInput(
            f"{together[0].text} is a score of all images together, and the targets of the list read different outputs "
            "of the model (regions, queries or tokens of their own for each image); expected one that all images share."
        )
    accumulator = ScoreAccumulator(model.name, question.seed, question.settings(normalize))
    specs = [*methods.values(), *(resolve_method(name) for name in baselines if name not in methods)]
    accumulator.skipped |= misfits(specs, models, skip=skip)
    specs = [spec for spec in specs if spec.text not in accumulator.skipped]
    known = () if explanation is None else (explanation.method,)
    rows: list[int] = []
    logits: list[Tensor] = []
    labels: list[int | None] = []
    with closing(iter_runs(question, specs, on_error=on_error, label="images")) as runs:
        for run in runs:
            if per_image:
                results = run_all(specs, run.recording, run.targets, seed=question.seed)
                # with `skip`, those that do not fit the first images go
                accumulator.skipped |= _failures(specs, results, known, skip=skip and not accumulator.names)
                specs[:] = [spec for spec in specs if spec.text not in accumulator.skipped]  # also for the next run
                if specs:  # perhaps no method fits
                    context = _eval_context(run, specs, results, explanation, normalize, question.seed)
                    for metric in per_image:
                        accumulator.measure(context, metric)
            rows += run.rows
            logits.append(run.recording.logits.detach().cpu())
            classes = class_indices(run.batch.labels, run.model, logits[-1].shape[-1]) or [None] * len(run.rows)
            labels += classes
            accumulator.add_predictions(run.batch.names, logits[-1], classes, run.model.activation)
            accumulator.unmasked += run.batch.unmasked
    if not rows:
        return Scores()  # `on_error` was called with the reasons
    if specs and together:
        true_classes = tuple(labels) if dataset.has_labels else None
        every, options = torch.cat(logits), question.execution
        of_all = DatasetContext(
            model, dataset, tuple(specs), tuple(rows), every, true_classes, question.seed, Notes(), options=options
        )
        for metric in together:
            accumulator.measure_set(of_all, metric)
    scores = accumulator.scores(tuple(methods.values()), metrics, specs, baselines)
    scores.model_record = model_record(model)
    return scores


def _failures(
    specs: Sequence[MethodSpec], results: Mapping[str, list[Result]], known: Sequence[str], *, skip: bool
) -> dict[str, str]:
    """Return the methods that do not fit the model, with the reason; raise it unless they may be skipped.

    Maps of the `known` methods exist already.
    """
    failed: dict[str, str] = {}
    for spec in specs:
        error = results[spec.text][0].error
        if error is not None and spec.text not in known:
            if not skip:
                raise error
            failed[spec.text] = str(error)
    return failed


def _about_explanation(question: Question, explanation: Explanation) -> Question:
    """Return the question about the classes that were explained, unless the user named others."""
    if len(explanation) != len(question.images):
        raise BadInput(
            f"The explanation has {len(explanation)} maps and {len(question.images)} images were given; expected as "
            "many."
        )
    if question.targets.items is not None:
        return question
    if None in explanation.classes:
        raise BadInput(
            "The explanation's target is no class (a contrast or a function); expected one to score by. "
            "Pass target= as it was explained."
        )
    return replace(question, targets=replace(question.targets, items=(list(explanation.classes),)))


def _eval_context(
    run: Run,
    specs: Sequence[MethodSpec],
    results: Mapping[str, list[Result]],
    explanation: Explanation | None,
    normalize: str,
    seed: int,
) -> EvalContext:
    """Return the maps of some images with all that metrics read next to them."""
    batch, count = run.batch, run.recording.logits.shape[-1]
    trace = run_backward(run.recording, run.targets[0], None)
    raw = []
    for spec in specs:
        maps = results[spec.text][0].maps
        if explanation is not None and spec.text == explanation.method:
            maps = explanation.maps[list(run.rows)]
        assert maps is not None
        raw.append(transform_maps(planar_maps(maps.detach().double(), trace), normalize))
    labels, distractors = (class_indices(names, run.model, count) for names in (batch.labels, batch.others))
    return EvalContext(
        trace=trace,
        specs=tuple(specs),
        raw=tuple(raw),
        masks=batch.masks,
        void=batch.void,
        labels=None if labels is None else tuple(labels),
        others=None if distractors is None else tuple(distractors),
        transform=normalize,
        seed=seed,
        parts=batch.parts,
    )
