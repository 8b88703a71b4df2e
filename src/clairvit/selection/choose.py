"""Choose a method for a model and some images: evaluate many, rank them, and test the differences."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from clairvit._cost import Cost
from clairvit.data.dataset import ErrorHandler, ImageDataset, SampleBatch
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput, ClairWarning, did_you_mean
from clairvit.methods.calibrated import PRIOR_METHOD, Calibration, calibrated_spec
from clairvit.methods.explain import explain
from clairvit.methods.recommended import defaults_for, kind_of_comparison
from clairvit.methods.runs import LABEL, OnError, Question, error_handler
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.confidence_intervals import Array
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.registry import MetricSpec, resolve_metric
from clairvit.metrics.score import Score, Scores
from clairvit.models.coerce import ModelLike
from clairvit.models.model import Model
from clairvit.selection.calibrate import CalibrationRequest, cross_fitted_scores, fit_calibration, image_metrics
from clairvit.selection.ranking import RankingInput, join, rank_methods, summarise
from clairvit.selection.result import Selection
from clairvit.selection.start_layer import StartLayer, base_method, tune_start_layers
from clairvit.selection.stats import mean_ranks, spearman
from clairvit.tracing.structure import model_structure

# Well known, of every family, and all of them computed from the same trace.
PANEL = (
    *("raw-attention", "rollout", "grad-rollout", "genatt", "genatt+skipplus", "transatt", "legrad"),
    *("focusvit", "ixg+skipplus", "decompx+skipplus", "attnlrp", "attnlrp+plus", "gradcam"),
    *("libra-fullgrad-plus", "libra-attcat", "libra-genatt", "libra-xgradcam-plus", "libra-hirescam"),
)
METRICS = ("insertion-deletion", "faithfulness-correlation")
WITH_MASKS = ("ap", "pointing-game")
FIRST, MEAN_RANK = "first", "mean-rank"
FRONT = ("faithfulness", "localisation")  # families of metrics that, with cost, are the goals of the Pareto front


def choose(
    model: ModelLike,
    images: Any,
    methods: Sequence[str | MethodSpec] | None = None,
    metrics: Sequence[str | MetricSpec] | None = None,
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    distractors: Sequence[int | str | None] | None = None,
    target: Any = None,
    normalize: str = "raw",
    by: str = FIRST,
    tune_start: Sequence[str | MethodSpec] = (),
    calibrate: bool = False,
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Selection:
    """Rank methods by how faithful they are to this model on these images, with intervals and corrected tests.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`; six or more, so that there are intervals.
        methods: Method strings or specs; None is `PANEL` and what `cv.explain` uses for this kind of model, those left
            out that do not fit the model.
            The baselines `random` and `center` are always added.
        metrics: Metric strings or specs; None is insertion − deletion and faithfulness correlation, with masks also
            average precision and the pointing game.
        masks: As in `cv.evaluate`.
        mask_kind: As in `cv.evaluate`.
        labels: As in `cv.evaluate`.
        distractors: As in `cv.evaluate`.
        target: As in `cv.evaluate`.
        normalize: As in `cv.evaluate`.
        by: What ranks: "first" (the first metric), the name of a metric, or "mean-rank" (the mean rank per image over
            all metrics of faithfulness).
        tune_start: Methods whose best start layer is searched, such as ["focusvit"] for FocusViT's m*.
        calibrate: Fit a calibrated method too (`cv.calibrate`) and rank it with `attnlrp+plus` among the others. It is
            ranked by cross-fitted scores: each image by weights that were fitted without it. Needs 8 or more images.
        on_error: As in `cv.evaluate`.
        seed: The seed of everything random.
        batch_size: As in `cv.evaluate`.
        autocast: As in `cv.evaluate`.
        inputs: As in `cv.explain`.

    Returns:
        A `Selection`: `.best`, `.clear` (is it significantly better than all others?), `.ranking`, `.answer` (in
        words); `.save("recipe.json")` writes the recipe that `cv.explain(model, image, "recipe.json")` follows.

    Raises:
        BadInput: Images or options that cannot be used, or no method that fits the model.
        UnknownName: A method, metric or class that does not exist.

    Example:
        >>> import clairvit as cv
        >>> picked = cv.choose("pets", ["demo"] * 2, ["legrad", "rollout"], ["deletion(steps=3)"])
        >>> len(picked.ranking), picked.by
        (4, 'deletion(steps=3)')
    """
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
    readouts, dataset = question.models, question.images
    assert isinstance(dataset, ImageDataset)
    if not question.model.has_input_rows and (calibrate or tune_start or len(readouts) == 1):
        question = question.of_one_output()  # what is fitted is fitted to one output of the model
    on_read_error = error_handler(on_error)
    _check_lists(methods=methods, metrics=metrics, tune_start=tune_start)
    panel = _panel(methods, with_prior=calibrate, with_starts=bool(tune_start))
    bases = list(dict.fromkeys(base_method(str(text)) for text in tune_start))
    specs = _metric_specs(metrics, dataset)
    criteria = criterion(by, specs)
    first = question.first_image(skip=on_read_error is not None)
    panel += _quick_default(readouts[0], first.pixels, question.targets.items) if methods is None else []
    options: dict[str, Any] = {"normalize": normalize, "seed": seed, "batch_size": batch_size, "autocast": autocast}
    calibrated = None
    if calibrate:
        request = CalibrationRequest(question, on_error=_silenced(on_read_error))
        calibrated = _calibrated(request, specs, normalize)
    starts: Mapping[str, StartLayer] = {}
    if bases:
        handler = _silenced(on_read_error)
        starts = tune_start_layers(
            question.model, dataset, bases, criteria[0], target, first.pixels, on_error=handler, **options
        )
    candidates = {spec.text: spec for spec in panel}
    further = (*(start.method for start in starts.values()), *BASELINES)
    candidates |= {text: resolve_method(text) for text in further if text not in candidates}
    scores = evaluate(
        question.model,
        dataset,
        list(candidates.values()),
        specs,
        target=target,
        baselines=False,
        skip=methods is None,
        on_error=on_read_error,
        **options,
    )
    compared = _without_skipped(question.model, list(candidates.values()), scores)
    if calibrated is not None:
        compared = [*compared, calibrated.spec]
        scores.update({(calibrated.method, metric): score for metric, score in calibrated.scores.items()})
    costs = _map_costs(question, first, compared, batch_size)
    texts, of_panel = [spec.text for spec in compared], {spec.text for spec in panel}
    data = _ranking_input(texts, scores, specs, criteria, by, starts, of_panel, costs, seed)
    return _selection(question.model, scores, data, specs, starts, question.settings(normalize), calibrated)


@dataclass(frozen=True, eq=False)
class _Calibrated:
    """A calibrated method with its cross-fitted scores by metric."""

    calibration: Calibration
    scores: Mapping[str, Score]
    images: int

    @functools.cached_property
    def spec(self) -> MethodSpec:
        return calibrated_spec(self.calibration)

    @property
    def method(self) -> str:
        return self.spec.text

    @property
    def sentence(self) -> str:
        return (
            f"{self.method} is fitted to these {self.images} images and ranked by cross-fitted scores: each image by "
            "weights that were fitted without it."
        )


def _calibrated(request: CalibrationRequest, metrics: Sequence[MetricSpec], normalize: str) -> _Calibrated:
    """Fit a calibrated method and score it, each image by weights that were fitted without it."""
    image_metrics(metrics)
    fitted = fit_calibration(request)
    return _Calibrated(fitted.calibration, cross_fitted_scores(request, fitted, metrics, normalize), len(fitted.rows))


def _panel(methods: Sequence[str | MethodSpec] | None, *, with_prior: bool, with_starts: bool) -> list[MethodSpec]:
    """Return the methods that are named, or the usual ones; raise `BadInput` if nothing could be chosen from."""
    panel = [resolve_method(method) for method in (PANEL if methods is None else methods)]
    panel += [resolve_method(PRIOR_METHOD)] if with_prior and PRIOR_METHOD not in map(str, panel) else []
    if not with_starts and all(spec.text in BASELINES for spec in panel):
        raise BadInput("No method but the baselines was given; expected at least one, such as ['legrad', 'genatt'].")
    return panel


def _check_lists(**arguments: Sequence[object] | None) -> None:
    """Raise `BadInput` for a single text where a list is expected."""
    for name, value in arguments.items():
        if isinstance(value, str):
            raise BadInput(f"{name}={value!r} was given; expected a list, such as ['{value}'].")


def _without_skipped(model: Model, methods: Sequence[MethodSpec], scores: Scores) -> list[MethodSpec]:
    """Return the methods that fit the model; raise `BadInput` if only baselines do."""
    methods = [spec for spec in methods if spec.text not in scores.skipped]
    if all(spec.text in BASELINES for spec in methods):
        reason = next(iter(scores.skipped.values()), "")
        raise BadInput(f"None of the methods fits {model.name}; expected at least one. {reason}")
    return methods


def _selection(
    model: Model,
    scores: Scores,
    data: RankingInput,
    metrics: Sequence[MetricSpec],
    starts: Mapping[str, StartLayer],
    settings: Mapping[str, Any],
    calibrated: _Calibrated | None,
) -> Selection:
    ranking = rank_methods(data)
    agreement = _agreement(data, metrics)
    answer = [
        *summarise(ranking, data.by, agreement, tuple(data.goals)),
        *_images_without_masks(scores, metrics),
        *(start.sentence for start in starts.values()),
        *([] if calibrated is None else [calibrated.sentence]),
    ]
    return Selection(
        best=ranking.best.method,
        ranking=ranking.rows,
        scores=scores,
        by=data.by,
        better=data.better,
        metrics=tuple(spec.text for spec in metrics),
        clear=ranking.clear,
        tied=tuple(row.method for row in ranking.tied),
        groups=ranking.groups,
        agreement=agreement,
        tuned=starts,
        answer=tuple(answer),
        model=model.name,
        weights=weights_hash(model),
        settings=settings,
        seed=data.seed,
        skipped=dict(scores.skipped),
        model_record=scores.model_record,
        calibration=None if calibrated is None else calibrated.calibration,
    )


def _images_without_masks(scores: Scores, metrics: Sequence[MetricSpec]) -> list[str]:
    """Return a sentence about images that count in some metrics only, if there are any."""
    with_masks = [spec.text for spec in metrics if "masks" in spec.metric.needs]
    if not scores.unmasked or not with_masks:
        return []
    listed = ", ".join(scores.unmasked[:3]) + (", …" if len(scores.unmasked) > 3 else "")
    return [
        f"{len(scores.unmasked)} of {len(scores.predictions)} images have no mask, so no {join(with_masks)}: {listed}."
    ]


def _metric_specs(metrics: Sequence[str | MetricSpec] | None, dataset: ImageDataset) -> list[MetricSpec]:
    default = (*METRICS, *(WITH_MASKS if dataset.has_masks else ()))
    if metrics is not None and not metrics:
        raise BadInput("No metrics were given; expected names such as ['insertion-deletion'], or none for the usual.")
    specs = map(resolve_metric, default if metrics is None else metrics)
    return list({spec.text: spec for spec in specs}.values())


def criterion(by: str, metrics: Sequence[MetricSpec]) -> list[MetricSpec]:
    """Return the metrics that rank: one, or all of faithfulness for "mean-rank"."""
    texts = [spec.text for spec in metrics]
    if by == FIRST:
        chosen = [metrics[0]]
    elif by == MEAN_RANK:
        chosen = [spec for spec in metrics if spec.metric.family == "faithfulness"]
    else:
        chosen = [spec for spec in metrics if by in (spec.text, spec.metric.name)]
    if not chosen and by == MEAN_RANK:
        raise BadInput(f"by=mean-rank ranks by metrics of faithfulness, and {', '.join(texts)} has none of them.")
    if not chosen:
        choices = [FIRST, MEAN_RANK, *texts]
        raise BadInput(f"by={by} was given; expected one of {', '.join(choices)}.{did_you_mean(by, choices)}")
    set_metric = next((spec.text for spec in chosen if spec.metric.scope == "set"), None)
    if set_metric is not None:
        raise BadInput(
            f"'{set_metric}' is one number for all images; expected a metric of each image to rank by, by=…."
        )
    return chosen


def _quick_default(model: Model, pixels: Tensor, targets: Sequence[Any] | None) -> list[MethodSpec]:
    """Return the method that is used where none is named, if it is one of few passes."""
    compares = kind_of_comparison(model, targets)
    default = defaults_for(model_structure(model, pixels), compares=compares)[0].spec
    return [] if default.method.slow else [default]


def _silenced(on_read_error: ErrorHandler | None) -> ErrorHandler | None:
    """Return a handler that skips unreadable images without a report, which the evaluation makes; None raises."""
    return None if on_read_error is None else lambda name, error: None


def _map_costs(
    question: Question, first: SampleBatch, specs: Sequence[MethodSpec], batch_size: int | None
) -> tuple[Cost, ...]:
    """Return passes and seconds of one map of the first image by each method, computed alone."""
    (row,) = first.rows
    target = None if question.targets.kind == LABEL else question.target_of(row)
    model = question.model.for_row(row)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # of zero maps: the evaluation has warned
        return tuple(explain(model, first.pixels, spec, target, batch_size=batch_size).cost for spec in specs)


def _sign(metric: MetricSpec) -> float:
    return 1.0 if metric.better == "higher" else -1.0


def _ranking_input(
    methods: Sequence[str],
    scores: Scores,
    metrics: Sequence[MetricSpec],
    criteria: Sequence[MetricSpec],
    by: str,
    starts: Mapping[str, StartLayer],
    panel: Collection[str],
    costs: tuple[Cost, ...],
    seed: int,
) -> RankingInput:
    """Return scores as arrays; a start that was picked on these images has cross-fitted values."""
    cross_fitted = {
        (start.method, start.metric): values
        for start in starts.values()
        if start.method not in panel and (values := start.cross_fitted()) is not None
    }

    def upward(spec: MetricSpec) -> Array:
        """Return the values of a metric, [K, n], higher is better."""
        rows = [
            cross_fitted.get((text, spec.text), _sign(spec) * scores[text, spec.text].values.double().numpy())
            for text in methods
        ]
        return np.stack(rows)

    for spec in criteria:
        if scores[methods[0], spec.text].counts is not None:
            raise BadInput(f"'{spec.text}' is one number for all images; expected a metric of each image to rank by.")
    means = {spec.text: np.array([scores[text, spec.text].mean for text in methods]) for spec in metrics}
    signs = {spec.text: _sign(spec) for spec in metrics}
    for (text, metric), values in cross_fitted.items():
        means[metric][list(methods).index(text)] = signs[metric] * float(np.nanmean(values))
    span: tuple[float, float]
    if by == MEAN_RANK:
        values = mean_ranks(np.stack([upward(spec) for spec in criteria]))
        goal = -values
        label, better, span = "mean rank over " + ", ".join(spec.text for spec in criteria), "lower", (1, len(methods))
    else:
        goal = upward(criteria[0])
        values = goal if criteria[0].better == "higher" else -goal
        label, better, span = criteria[0].text, criteria[0].better, scores[methods[0], criteria[0].text].span
    goal_means = np.array([float(np.nanmean(row)) if np.isfinite(row).any() else math.nan for row in goal])
    goals = _goals(criteria[0], goal_means, metrics, means)
    return RankingInput(tuple(methods), values, label, better, means, goals, costs, seed, span)


def _goals(
    criterion: MetricSpec, criterion_means: Array, metrics: Sequence[MetricSpec], means: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the goals of the Pareto front, higher is better: the criterion, and the first metric of other families."""
    goals = {}
    for family in FRONT:
        first = next((spec for spec in metrics if spec.metric.family == family), None)
        if first is not None:
            in_family = family == criterion.metric.family
            goals[family] = criterion_means if in_family else _sign(first) * means[first.text]
    return goals if criterion.metric.family in FRONT else {criterion.text: criterion_means, **goals}


def _agreement(data: RankingInput, metrics: Sequence[MetricSpec]) -> dict[tuple[str, str], float]:
    """Return Spearman's rho of each two metrics' means over the methods that are no baselines."""
    rows = [row for row, text in enumerate(data.methods) if text not in BASELINES]
    upward = {spec.text: _sign(spec) * data.means[spec.text][rows] for spec in metrics}
    return {
        (first, second): spearman(upward[first], upward[second]) for first, second in itertools.combinations(upward, 2)
    }
