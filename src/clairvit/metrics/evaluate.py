"""The verb `evaluate`: score maps of methods with metrics; traces and perturbed passes are shared."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from clairvit._presets import choose_preset
from clairvit._progress import report_progress
from clairvit._rng import check_seed
from clairvit.data.dataset import ErrorHandler, ImageDataset, SampleBatch, as_dataset, iter_batches
from clairvit.data.hashing import model_record
from clairvit.errors import Argument, BadInput, ClairError, ClairWarning, user_stacklevel
from clairvit.execution import ExecutionOptions
from clairvit.methods.executor import Result
from clairvit.methods.explanation import Explanation
from clairvit.methods.planner import misfits, record_for, run_all
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.accumulator import BASELINES, ScoreAccumulator
from clairvit.metrics.context import EvalContext, Notes, planar_maps, transform_maps
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.registry import Metric, MetricSpec, resolve_metric
from clairvit.metrics.score import Score, Scores
from clairvit.models.coerce import ModelLike, model_and_images
from clairvit.models.model import Model
from clairvit.targets.base import TargetBatch
from clairvit.targets.class_ import find_class
from clairvit.targets.resolve import readouts_by_image, resolve_for
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import Recording
from clairvit.tracing.trace import run_backward

CHUNK_SIZE = {"cpu": 8, "cuda": 32}  # images that are read and scored together
LABEL = "label"  # as a target: the true class

OneMethod = str | MethodSpec | Explanation
OneMetric = str | MetricSpec
OnError = Literal["raise", "skip"] | Callable[[str, ClairError], None] | None


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
    method_specs = [resolve_method(method) for method in _method_list(methods)]
    model, images = model_and_images(model, images, inputs)
    dataset = as_dataset(images, model, masks=masks, mask_kind=mask_kind, labels=labels, others=distractors)
    readouts = readouts_by_image(model, target, len(dataset))
    if explanation is not None and len(explanation) != len(dataset):
        raise BadInput(
            f"The explanation has {len(explanation)} maps and {len(dataset)} images were given; expected as many."
        )
    request = _Request(
        model=readouts[0] if len({id(readout) for readout in readouts}) == 1 else model,
        readouts=tuple(readouts),
        dataset=dataset,
        methods=tuple({spec.text: spec for spec in method_specs}.values()),  # what is named twice is run once
        metrics=tuple({spec.text: spec for spec in metric_specs}.values()),
        explanation=explanation,
        target=target,
        normalize=normalize,
        baselines=BASELINES if baselines else (),
        skip=skip,
        on_error=error_handler(on_error),
        seed=check_seed(seed),
        execution=ExecutionOptions.from_caller(batch_size, autocast),
    )
    scores = _evaluate(request)
    if isinstance(methods, list | tuple) or isinstance(metrics, list | tuple):
        return scores
    if not scores:
        raise BadInput("None of the images could be read; expected at least one that can.")
    return next(iter(scores.values()))


def error_handler(on_error: OnError) -> ErrorHandler | None:
    """Return the function that is called with the name and the error of an image; None: the error is raised."""
    if on_error is None or on_error == "raise":
        return None
    if on_error == "skip":
        return _warn_of_unreadable
    if not callable(on_error):
        raise BadInput(f"on_error={on_error!r} was given; expected 'raise', 'skip' or a function of name and error.")
    return on_error


def _warn_of_unreadable(name: str, error: ClairError) -> None:
    warnings.warn(f"{name} is left out: {error}", ClairWarning, stacklevel=user_stacklevel())


@dataclass(frozen=True, eq=False)
class _Request:
    """The arguments of `evaluate`, checked."""

    model: Model  # whose scores all targets are about; the user's, where these are different outputs of it
    readouts: tuple[Model, ...]  # of each image
    dataset: ImageDataset
    methods: tuple[MethodSpec, ...]
    metrics: tuple[MetricSpec, ...]
    explanation: Explanation | None  # maps that exist already
    target: Any
    normalize: str
    baselines: tuple[str, ...]  # methods that are scored next to those asked for
    skip: bool
    on_error: ErrorHandler | None
    seed: int
    execution: ExecutionOptions

    @property
    def models(self) -> list[Model]:
        """Return the different models whose scores the targets are about."""
        return list({id(readout): readout for readout in self.readouts}.values())

    def is_explained(self, spec: MethodSpec) -> bool:
        """Return whether the maps of this method exist already."""
        return self.explanation is not None and spec.text == self.explanation.method


def _method_list(methods: OneMethod | Sequence[str | MethodSpec]) -> Sequence[str | MethodSpec]:
    if isinstance(methods, Explanation):
        return [methods.method]
    return [methods] if isinstance(methods, str | MethodSpec) else methods


def _metric_specs(metrics: OneMetric | Sequence[OneMetric], options: Mapping[str, Any]) -> list[MetricSpec]:
    """Return the metrics; each of several takes the options that it has, and every option must belong to one."""
    if isinstance(metrics, str | MetricSpec):
        return [resolve_metric(metrics, **options)]
    if not metrics:
        raise BadInput("No metrics were given; expected names such as ['deletion', 'sparseness'].")
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
def _evaluate(request: _Request) -> Scores:
    """Score a few images at a time, so that memory does not grow with their number."""
    named = {spec.text for spec in request.methods}
    specs = (*request.methods, *(resolve_method(name) for name in request.baselines if name not in named))
    accumulator = ScoreAccumulator(request.model.name, request.seed, _settings(request))
    for model in request.models:
        accumulator.skipped |= misfits(specs, model, skip=request.skip)
    specs = tuple(spec for spec in specs if spec.text not in accumulator.skipped)
    per_image = [metric for metric in request.metrics if metric.metric.scope == "image"]
    _check_set_metrics(request)
    rows: list[int] = []
    logits: list[Tensor] = []
    labels: list[int | None] = []
    size = CHUNK_SIZE.get(request.model.device.type, 8)
    with report_progress("images", len(request.dataset)) as advance, closing(_batches(request, size)) as batches:
        for model, part in batches:
            recording = record_for(specs, model, part.pixels, request.execution)
            target = _resolve_target(recording, part, request)
            if per_image:
                results = run_all(specs, recording, [target], seed=request.seed)
                specs = _applicable(specs, results, request, accumulator)
                if specs:  # perhaps no method fits
                    context = _eval_context(request, part, recording, target, specs, results)
                    for metric in per_image:
                        accumulator.measure(context, metric)
            rows += part.rows
            logits.append(recording.logits.detach().cpu())
            classes = _class_indices(part.labels, recording) or [None] * len(part.rows)
            labels += classes
            accumulator.add_predictions(part.names, logits[-1], classes, model.activation)
            accumulator.unmasked += part.unmasked
            advance(len(part.rows))
    if not rows:
        return Scores()  # `on_error` was called with the reasons
    if specs and len(per_image) < len(request.metrics):
        _measure_set(request, accumulator, specs, rows, torch.cat(logits), labels)
    scores = accumulator.scores(request.methods, request.metrics, specs, request.baselines)
    scores.model_record = model_record(request.model)
    return scores


def _batches(request: _Request, size: int) -> Generator[tuple[Model, SampleBatch], None, None]:
    """Yield batches of images whose targets read the same output of the model, in the order of the data set."""
    with closing(iter_batches(request.dataset, request.model, size, request.on_error)) as batches:
        for batch in batches:
            readouts = [request.readouts[row] for row in batch.rows]
            for _, group in itertools.groupby(enumerate(readouts), lambda item: id(item[1])):
                chosen = [position for position, _ in group]
                part = batch if len(chosen) == len(batch.rows) else batch.take(chosen)
                yield request.readouts[part.rows[0]], part


def _check_set_metrics(request: _Request) -> None:
    """Raise BadInput for a metric of all images together where targets read different outputs of the model."""
    together = [metric.text for metric in request.metrics if metric.metric.scope == "set"]
    if together and len(request.models) > 1:
        raise BadInput(
            f"{together[0]} is a score of all images together, and the targets of the list read different outputs of "
            "the model (regions, queries or tokens of their own for each image); expected one that all images share."
        )


def _measure_set(
    request: _Request,
    accumulator: ScoreAccumulator,
    specs: tuple[MethodSpec, ...],
    rows: Sequence[int],
    logits: Tensor,
    labels: Sequence[int | None],
) -> None:
    """Score the metrics of all images together."""
    true_classes = tuple(labels) if request.dataset.has_labels else None
    context = DatasetContext(
        request.model,
        request.dataset,
        specs,
        tuple(rows),
        logits,
        true_classes,
        request.seed,
        Notes(),
        options=request.execution,
    )
    for metric in request.metrics:
        if metric.metric.scope == "set":
            accumulator.measure_set(context, metric)


def _settings(request: _Request) -> dict[str, Any]:
    """Return what every score depends on next to the options of its metric."""
    target = "predicted" if request.target is None and request.explanation is None else "given"
    return {
        "target": LABEL if isinstance(request.target, str) and request.target == LABEL else target,
        "maps": request.normalize,
        "activation": ", ".join(dict.fromkeys(model.activation for model in request.models)),
    }


def _applicable(
    specs: tuple[MethodSpec, ...],
    results: Mapping[str, list[Result]],
    request: _Request,
    accumulator: ScoreAccumulator,
) -> tuple[MethodSpec, ...]:
    """Return the methods that fit the model; with `skip`, others are left out at the first images, else raised."""
    applicable = []
    for spec in specs:
        error = results[spec.text][0].error
        if error is None or request.is_explained(spec):
            applicable.append(spec)
        elif not request.skip or accumulator.names:
            raise error
        else:
            accumulator.skipped[spec.text] = str(error)
    return tuple(applicable)


def _eval_context(
    request: _Request,
    part: SampleBatch,
    recording: Recording,
    target: TargetBatch,
    specs: tuple[MethodSpec, ...],
    results: Mapping[str, list[Result]],
) -> EvalContext:
    """Return the maps of some images with all that metrics read next to them."""

    def maps(spec: MethodSpec) -> Tensor:
        if request.explanation is not None and request.is_explained(spec):
            return request.explanation.maps[list(part.rows)]
        computed = results[spec.text][0].maps
        assert computed is not None
        return computed.detach()

    labels, distractors = (_class_indices(names, recording) for names in (part.labels, part.others))
    trace = run_backward(recording, target, None)
    return EvalContext(
        trace=trace,
        specs=specs,
        raw=tuple(transform_maps(planar_maps(maps(spec).double(), trace), request.normalize) for spec in specs),
        masks=part.masks,
        void=part.void,
        labels=None if labels is None else tuple(labels),
        others=None if distractors is None else tuple(distractors),
        transform=request.normalize,
        seed=request.seed,
        parts=part.parts,
    )


def _class_indices(classes: Sequence[int | str | None] | None, recording: Recording) -> list[int | None] | None:
    """Return the indices of classes that may be given by name."""
    if classes is None:
        return None
    count, labels = recording.logits.shape[-1], recording.model.labels
    return [None if name is None else find_class(name, labels, count) for name in classes]


def _resolve_target(recording: Recording, part: SampleBatch, request: _Request) -> TargetBatch:
    """Return what is scored: the class that was explained, or what the caller asks for."""
    target = request.target
    if request.explanation is not None and target is None:
        target = list(request.explanation.classes)
        if any(target[row] is None for row in part.rows):
            raise BadInput(
                "The explanation's target is no class (a contrast or a function); expected one to score by. "
                "Pass target= as it was explained."
            )
    return resolve_batch_target(target, recording, part, len(request.dataset))


def resolve_batch_target(target: Any, recording: Recording, part: SampleBatch, count: int) -> TargetBatch:
    """Return the target of a batch of a data set of `count` images.

    It is what the caller names (a list has one per image of the data set), the true class, or the prediction.
    """
    logits, model = recording.logits.detach(), recording.model
    if isinstance(target, str) and target == LABEL:
        target = _class_indices(part.labels, recording)
        if target is None or None in target:
            raise BadInput(
                "target='label' was given without labels for all images; expected ",
                Argument("labels", [...], of="evaluate"),
                ", the true class of each image.",
            )
    elif isinstance(target, list | tuple):
        if len(target) != count:
            raise BadInput(f"{len(target)} targets were given for {count} images; expected one for each.")
        target = [target[row] for row in part.rows]
    (resolved,) = resolve_for(model, target, logits)
    return resolved
