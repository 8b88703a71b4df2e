"""Calibrate: fit the weights of layer maps to what a model does when tokens are removed, and score them honestly.

For each image: the layer maps of all kinds from one forward and one backward pass per rule table, and the target's
probability on random token sets at nine keep rates. The weights that best predict its log-odds from the sum of the
map over a set, shrunk to `attnlrp+plus`, are the calibrated method (`methods/calibrated.py`, `selection/ridge.py`).
Every score that is reported of an image is of weights that were fitted without it.
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clairvit._io import atomic_write
from clairvit._progress import report_progress
from clairvit._rng import random_sets
from clairvit.data.dataset import ErrorHandler, ImageDataset
from clairvit.data.hashing import digest, model_record, weights_hash
from clairvit.errors import BadInput, ClairWarning, NotApplicable
from clairvit.methods.calibrated import (
    KINDS,
    PRIOR,
    PRIOR_METHOD,
    Calibration,
    calibrated_spec,
    layer_specs,
    scaled_layer_maps,
    table_of,
)
from clairvit.methods.explain import explain
from clairvit.methods.planner import run_all
from clairvit.methods.recipe import Recipe
from clairvit.methods.runs import LABEL, OnError, Question, Run, error_handler, iter_runs
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.confidence_intervals import EVERYWHERE, Array, outside
from clairvit.metrics.context import fraction_counts
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.own_code import codes_of
from clairvit.metrics.registry import MetricSpec, resolve_metric
from clairvit.metrics.score import Score, Scores
from clairvit.models.coerce import ModelLike
from clairvit.models.model import Model
from clairvit.perturbation.probe import probing
from clairvit.selection.ridge import Candidate, Fit, Indices, Moments, cross_fit, fit, held_out_correlation, log_odds
from clairvit.selection.stats import paired_interval
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.trace import run_backward

KEEP_RATES = tuple(k / 10 for k in range(1, 10))
SETS = 8  # random token sets per keep rate
FEWEST_IMAGES = 8
METRIC, WITH_MASKS = "insertion-deletion", "ap"
CACHE_FORMAT = 1


def calibrate(
    model: ModelLike,
    images: Any,
    *,
    target: Any = None,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    sets: int = SETS,
    backwards: int | None = None,
    metrics: Sequence[str | MetricSpec] | None = None,
    cache: PathLike[str] | str | None = None,
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
) -> Recipe:
    """Fit an explanation to this model: a weighted sum of layer maps that predicts what removing tokens does.

    Weights are fitted by ridge regression towards `attnlrp+plus`. The recipe states the scores of both, cross-fitted:
    each image is scored by weights that were fitted without it.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`; a Vision Transformer that `attnlrp+plus` fits.
        images: As in `cv.explain`; 8 or more, 20 to 100 are usual. Do not score the recipe on them again.
        target: As in `cv.evaluate`; None is the predicted class.
        masks: As in `cv.evaluate`; with masks the recipe also states average precision.
        mask_kind: As in `cv.evaluate`.
        labels: As in `cv.evaluate`.
        sets: Random token sets per image and keep rate; there are nine keep rates.
        backwards: At most so many backward passes per explanation: the rule tables with the least loss in
            cross-validation are kept. None is all.
        metrics: What both methods are scored by; None is insertion − deletion, with masks also average precision.
        cache: A folder for the data of each image, so that an interrupted run continues; None stores nothing.
        on_error: As in `cv.evaluate`.
        seed: The seed of everything random.
        batch_size: As in `cv.evaluate`.
        autocast: As in `cv.evaluate`.

    Returns:
        A `Recipe` that `cv.explain(model, image, recipe)` follows; `.save("mine.json")` writes it, and "mine.json" then
        stands wherever a method string does. `.answer` says in words what was gained, `.clear` whether the gain over
        `attnlrp+plus` is significant.

    Raises:
        BadInput: Fewer than 8 images, or options that cannot be used.
        NotApplicable: `attnlrp+plus` does not fit the model: a CNN, or windowed attention.

    Example:
        >>> import clairvit as cv
        >>> import torch
        >>> model = cv.load("scenes")
        >>> noise = torch.randn(8, 3, 96, 96, generator=torch.Generator().manual_seed(0))
        >>> mine = cv.calibrate(model, noise, sets=2, metrics=["deletion(steps=2)"])
        >>> cv.explain(model, noise[:1], mine).cost.forwards
        1
    """
    question = Question.of_dataset(
        model,
        images,
        target,
        masks=masks,
        mask_kind=mask_kind,
        labels=labels,
        seed=seed,
        batch_size=batch_size,
        autocast=autocast,
    ).of_one_output()
    request = CalibrationRequest(
        question,
        sets=sets,
        backwards=backwards,
        cache=None if cache is None else Path(cache),
        on_error=error_handler(on_error),
    )
    default = [METRIC, *([WITH_MASKS] if request.dataset.has_masks else [])]
    specs = image_metrics(default if metrics is None else metrics)
    fitted = fit_calibration(request)
    return _recipe(request, fitted, specs, _cross_fitted_values(request, fitted, specs))


@dataclass(frozen=True, eq=False)
class CalibrationRequest:
    """What `calibrate` is asked, about one output of the model, and how it is fitted."""

    question: Question
    sets: int = SETS
    backwards: int | None = None
    cache: Path | None = None
    on_error: ErrorHandler | None = None

    def __post_init__(self) -> None:
        if self.sets < 2:
            raise BadInput(f"sets={self.sets} was given; expected 2 or more token sets per keep rate, such as 8.")
        if self.backwards is not None and self.backwards < 1:
            raise BadInput(f"backwards={self.backwards} was given; expected 1 or more backward passes, or None.")
        check_count(len(self.dataset))

    @property
    def model(self) -> Model:
        """Return the model whose scores the target is about."""
        return self.question.model

    @property
    def dataset(self) -> ImageDataset:
        """Return the images."""
        assert isinstance(self.question.images, ImageDataset)
        return self.question.images


def check_count(images: int) -> None:
    """Raise BadInput for fewer images than can be fitted and cross-validated."""
    if images < FEWEST_IMAGES:
        raise BadInput(
            f"{images} images were given; expected {FEWEST_IMAGES} or more, 20 to 100 are better: weights are fitted "
            "to some and scored on others, and fewer say nothing about either."
        )


def image_metrics(metrics: Sequence[str | MetricSpec]) -> list[MetricSpec]:
    """Return metrics that score each image; raise BadInput for none, and for one number of a whole set."""
    if isinstance(metrics, str) or not metrics:
        raise BadInput(f"metrics={metrics!r} was given; expected a list, such as ['insertion-deletion'].")
    specs = [resolve_metric(metric) for metric in metrics]
    of_set = next((spec.text for spec in specs if spec.metric.scope == "set"), None)
    if of_set is not None:
        raise BadInput(
            f"'{of_set}' is one number for all images, and calibrated weights differ from part to part of them; "
            "expected metrics of each image, such as insertion-deletion."
        )
    return specs


@dataclass(frozen=True)
class Setup:
    """Which layer maps a model has."""

    kinds: tuple[str, ...]
    layers: int
    grid: tuple[int, int]  # of patches
    size: tuple[int, int]  # of the images, in pixels
    has_probability: bool  # else the target's own score is predicted
    notes: tuple[str, ...] = ()

    def direction(self, kind: str) -> Array:
        """Return weights [F] of the plain sum over all layers of one kind."""
        return np.repeat(np.array([float(name == kind) for name in self.kinds]), self.layers)


@dataclass(frozen=True, eq=False)
class Observations:
    """Of each image: sums of all layer maps over its token sets [S, F], and the score with each set [S]."""

    setup: Setup
    rows: tuple[int, ...]  # of the data set: those that could be read
    sums: tuple[Array, ...]
    scores: tuple[Array, ...]
    rates: Indices  # [S]: the number of each set's keep rate


@dataclass(frozen=True, eq=False)
class FittedCalibration:
    """The calibration fitted to all images, and one per part of the images that was fitted without that part."""

    calibration: Calibration
    fit: Fit
    parts: tuple[tuple[tuple[int, ...], Calibration], ...]  # rows of the data set, and the weights for them
    correlations: Array  # [2, n]: cross-fitted calibration and attnlrp+plus, on the token sets of each image
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of the data set that were used."""
        return tuple(sorted(row for rows, _ in self.parts for row in rows))


def fit_calibration(request: CalibrationRequest) -> FittedCalibration:
    """Observe all images, and fit the weights to all and to all but each part."""
    data = observe(request)
    check_count(len(data.rows))
    observed = [log_odds(scores) for scores in data.scores] if data.setup.has_probability else data.scores
    moments = Moments.of(data.sums, observed, [data.rates] * len(data.rows))
    candidates = _candidates(data.setup, request.backwards)
    final = fit(moments, candidates, request.question.seed)
    cross_fitted = cross_fit(moments, candidates, request.question.seed)
    prior = data.setup.direction(PRIOR)
    correlations = np.full((2, len(data.rows)), math.nan)
    for places, part in cross_fitted:
        for number, weights in enumerate((part.weights, prior)):
            correlations[number, places] = [
                held_out_correlation(data.sums[place], data.scores[place], data.rates, weights) for place in places
            ]
    parts = tuple(
        (tuple(data.rows[place] for place in places), _calibration(request.model, data.setup, part.weights))
        for places, part in cross_fitted
    )
    calibration = _calibration(request.model, data.setup, final.weights)
    return FittedCalibration(calibration, final, parts, correlations, data.setup.notes)


def _calibration(model: Model, setup: Setup, weights: Array) -> Calibration:
    """Return weights [F] as a calibration; kinds without weight are left out, so that their tables cost nothing."""
    if not weights.any():  # no score ever changed, so nothing was learnt
        weights = setup.direction(PRIOR)
    by_kind = zip(setup.kinds, weights.reshape(len(setup.kinds), setup.layers), strict=True)
    used = {kind: tuple(row.tolist()) for kind, row in by_kind if row.any()}
    return Calibration(used, model.name, weights_hash(model), setup.size, setup.grid)


def _candidates(setup: Setup, backwards: int | None) -> list[Candidate]:
    """Return the sets of features to choose from: all kinds that so many backward passes give.

    Weights are shrunk to `attnlrp+plus` or, without its rule table, to the sum over layers of any other kind.
    """
    tables = {kind: table_of(kind) for kind in setup.kinds}
    distinct = list(dict.fromkeys(table for table in tables.values() if table is not None))
    count = len(distinct) if backwards is None else min(backwards, len(distinct))
    candidates = []
    for chosen in itertools.combinations(distinct, count):
        kinds = [kind for kind in setup.kinds if tables[kind] is None or tables[kind] in chosen]
        features = np.repeat([kind in kinds for kind in setup.kinds], setup.layers)
        for kind in [PRIOR] if PRIOR in kinds else [kind for kind in kinds if tables[kind] in chosen]:
            candidates.append(Candidate(features, setup.direction(kind)))
    return candidates


# Observations


@own_grad_mode()
def observe(request: CalibrationRequest) -> Observations:
    """Return the layer maps' sums and the scores of random token sets of all images; what the cache has is read."""
    setup = _set_up(request)
    keys = {row: _cache_key(request, row, setup.kinds) for row in range(len(request.dataset))}
    arrays = {row: stored for row, key in keys.items() if (stored := _read_arrays(request.cache, key)) is not None}
    missing = [row for row in keys if row not in arrays]
    notes = dict.fromkeys(setup.notes)
    specs = layer_specs(setup.kinds, setup.layers)
    unseen = iter_runs(request.question.take(missing), specs, on_error=request.on_error)
    with report_progress("calibrate", len(keys)) as advance, closing(unseen) as runs:
        advance(len(arrays))
        for run in runs:
            sums, scores, probe_notes = _observe_run(request, setup, specs, run)
            notes |= dict.fromkeys(probe_notes)
            for position, *of_image in zip(run.rows, sums, scores, strict=True):
                row = missing[position]
                arrays[row] = (of_image[0], of_image[1])
                _write_arrays(request.cache, keys[row], arrays[row])
            advance(len(run.rows))
    rows = tuple(sorted(arrays))
    rates = np.repeat(np.arange(len(KEEP_RATES)), request.sets)
    sums_by_row, scores_by_row = (tuple(arrays[row][place] for row in rows) for place in (0, 1))
    return Observations(replace(setup, notes=tuple(notes)), rows, sums_by_row, scores_by_row, rates)


def _observe_run(
    request: CalibrationRequest, setup: Setup, specs: Sequence[MethodSpec], run: Run
) -> tuple[Array, Array, tuple[str, ...]]:
    """Return the sums [B, S, F] of all layer maps over random token sets, the scores [B, S] with them, and notes."""
    seed = request.question.seed
    results = [result for (result,) in run_all(specs, run.recording, run.targets, seed=seed).values()]
    error = next((result.error for result in results if result.error is not None), None)
    if error is not None:
        raise error
    layer_maps = [result.maps for result in results if result.maps is not None]
    features = scaled_layer_maps(layer_maps, len(setup.kinds)).flatten(0, 1)  # [F, B, patches]
    patches = features.shape[-1]
    counts = fraction_counts(patches, KEEP_RATES)
    trace = run_backward(run.recording, run.targets[0].with_preferred_score("prob"), None)
    forwards = len(counts) * request.sets
    with probing(trace, "token", label="token sets", forwards=forwards, seed=request.question.seed) as probe:
        drawn = [
            random_sets(probe.image_seeds, request.sets, patches, count, "calibrate/token sets", k)
            for k, count in enumerate(counts)
        ]
        keep = torch.cat(drawn, 1).to(features.device)  # [B, S, patches]
        scores = probe.score_kept(keep)
    sums = torch.einsum("bsp,fbp->bsf", keep.double(), features)
    return sums.cpu().numpy(), scores.cpu().numpy(), probe.notes


def _set_up(request: CalibrationRequest) -> Setup:
    """Return which layer maps the model has, found on the first image that can be read.

    Raises:
        NotApplicable: `attnlrp+plus` does not fit it.
    """
    model = request.model
    first = request.question.first_image(skip=request.on_error is not None)
    target = None if request.question.targets.kind == LABEL else request.question.target_of(first.rows[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # of zero maps: this is about shapes
        try:
            reference = explain(model, first.pixels, PRIOR_METHOD, target, layers=True)
        except NotApplicable as error:
            raise NotApplicable(
                f"{model.name} cannot be calibrated, as '{PRIOR_METHOD}' does not fit it: {error}"
            ) from error
    if reference.layers is None or reference.layer_grids:
        raise NotApplicable(
            f"{model.name} cannot be calibrated: its layers have maps of different sizes; expected a Vision "
            "Transformer whose blocks all see the same tokens. Use cv.choose(model, images)."
        )
    layers = len(reference.layers)
    specs = {kind: layer_specs([kind], layers) for kind in KINDS}
    every = [spec for group in specs.values() for spec in group]
    with closing(iter_runs(request.question.take(first.rows), every)) as runs:
        run = next(runs)
    results = run_all(every, run.recording, run.targets, seed=request.question.seed)
    reasons: dict[str, str] = {}
    for kind, group in specs.items():
        errors = [result.error for spec in group for result in results[spec.text] if result.error is not None]
        reasons |= {kind: str(errors[0])} if errors else {}
    (rows, cols), (height, width) = reference.maps.shape[-2:], first.pixels.shape[-2:]
    return Setup(
        kinds=tuple(kind for kind in KINDS if kind not in reasons),
        layers=layers,
        grid=(int(rows), int(cols)),
        size=(int(height), int(width)),
        has_probability=run.targets[0].with_preferred_score("prob").score == "prob",
        notes=tuple(f"the layer maps '{kind}' are left out: {reason}" for kind, reason in reasons.items()),
    )


def _cache_key(request: CalibrationRequest, row: int, kinds: Sequence[str]) -> str:
    """Return a hash of all that the observations of an image depend on."""
    settings = (
        CACHE_FORMAT,
        request.sets,
        KEEP_RATES,
        request.question.seed,
        tuple(kinds),
        repr(request.question.target_of(row)),
    )
    parts = (
        weights_hash(request.model),
        request.dataset.content_hash(row),
        repr(settings),
        request.question.execution.autocast,
    )
    return digest(repr(parts).encode())


def _read_arrays(cache: Path | None, key: str) -> tuple[Array, Array] | None:
    """Return the arrays of a file of the cache; None if there is none."""
    file = None if cache is None else cache / f"{key}.npz"
    if file is None or not file.exists():
        return None
    try:
        with np.load(file, allow_pickle=False) as content:
            return content["first"], content["second"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(f"'{file}' cannot be read ({error}); expected a file of cv.calibrate. Delete it.") from error


def _write_arrays(cache: Path | None, key: str, arrays: tuple[Array, Array]) -> None:
    if cache is not None:
        buffer = io.BytesIO()
        np.savez(buffer, first=arrays[0], second=arrays[1])
        atomic_write(cache / f"{key}.npz", buffer.getvalue())


# Cross-fitted scores


def cross_fitted_scores(
    request: CalibrationRequest, fitted: FittedCalibration, metrics: Sequence[MetricSpec], normalize: str = "raw"
) -> dict[str, Score]:
    """Return metric -> the score of the calibrated method, each image by the weights that were fitted without it."""
    text = calibrated_spec(fitted.calibration).text
    parts = [
        (
            rows,
            calibrated_spec(part).text,
            _evaluate_part(request, rows, [calibrated_spec(part).text], metrics, normalize),
        )
        for rows, part in fitted.parts
    ]
    order = np.argsort([row for rows, _, _ in parts for row in rows])
    return {
        spec.text: Score.concat(replace(scores[name, spec.text], method=text) for _, name, scores in parts).take(
            order.tolist()
        )
        for spec in metrics
    }


def _evaluate_part(
    request: CalibrationRequest,
    rows: Sequence[int],
    methods: Sequence[str],
    metrics: Sequence[MetricSpec],
    normalize: str,
) -> Scores:
    part = request.question.take(rows)
    return evaluate(
        request.model,
        part.images,
        list(methods),
        [spec.text for spec in metrics],
        target=None if part.targets.items is None else part.targets.items[0],
        normalize=normalize,
        baselines=False,
        seed=request.question.seed,
        batch_size=request.question.execution.batch_size,
        autocast=request.question.execution.autocast,
    )


def _cross_fitted_values(
    request: CalibrationRequest, fitted: FittedCalibration, metrics: Sequence[MetricSpec]
) -> Array:
    """Return the values [2 methods, metrics, n] of the cross-fitted calibration and of `attnlrp+plus`.

    What the cache has is read: an interrupted run loses the scores of one part at most.
    """
    parts = []
    for rows, calibration in fitted.parts:
        methods = [calibrated_spec(calibration).text, PRIOR_METHOD]
        hashes = [request.dataset.content_hash(row) for row in rows]
        targets = [repr(request.question.target_of(row)) for row in rows]
        texts = [spec.text for spec in metrics]
        settings = (CACHE_FORMAT, methods, texts, request.question.seed, hashes, targets)
        own = [codes for codes in codes_of((), texts) if codes]
        key = digest(repr((weights_hash(request.model), settings, request.question.execution.autocast, *own)).encode())
        stored = _read_arrays(request.cache, key)
        if stored is None:
            scores = _evaluate_part(request, rows, methods, metrics, "raw")
            values = np.array(
                [[scores[text, spec.text].values.double().numpy() for spec in metrics] for text in methods]
            )
            stored = (values, np.array(rows, dtype=np.float64))
            _write_arrays(request.cache, key, stored)
        parts.append(stored[0])
    order = np.argsort([row for rows, _ in fitted.parts for row in rows])
    return np.asarray(np.concatenate(parts, 2)[:, :, order])


# The recipe


def _recipe(
    request: CalibrationRequest, fitted: FittedCalibration, metrics: Sequence[MetricSpec], values: Array
) -> Recipe:
    """Return the recipe: weights, settings, cross-fitted scores of both methods and the paired gain."""
    seed, spec = request.question.seed, calibrated_spec(fitted.calibration)
    rows = [_comparison(metric, values[:, place], seed) for place, metric in enumerate(metrics)]
    by_sets = "correlation on held-out token sets"
    rows.append(_compared(by_sets, "higher", (-1, 1), fitted.correlations, seed))
    clear = rows[0]["gain_interval"][0] > 0
    return Recipe(
        method=spec.text,
        model=request.model.name,
        weights=fitted.calibration.model_hash,
        metrics=tuple(metric.text for metric in metrics),
        by=metrics[0].text,
        settings={
            "target": request.question.targets.kind,
            "sets": request.sets,
            "keep_rates": list(KEEP_RATES),
            "strength": "prior" if math.isinf(fitted.fit.strength) else fitted.fit.strength,
            "backwards": spec.backwards,
            "scores": "cross-fitted",
            "data": digest(*sorted(request.dataset.content_hash(row).encode() for row in fitted.rows)),
        },
        images=len(fitted.rows),
        seed=seed,
        clear=clear,
        answer=_answer(request, fitted, rows, clear),
        ranking=tuple(rows),
        model_record=model_record(request.model),
        calibration=fitted.calibration,
    )


def _comparison(metric: MetricSpec, values: Array, seed: int) -> dict[str, Any]:
    span = EVERYWHERE if len(outside(values, metric.span)) else metric.span  # as of raw scores
    return _compared(metric.text, metric.better, span, values, seed)


def _compared(name: str, better: str, span: tuple[float, float], values: Array, seed: int) -> dict[str, Any]:
    """Return means, intervals and the paired gain of values [2, n]: the calibrated method, then `attnlrp+plus`."""
    gaps = (values[0] - values[1]) * (1.0 if better == "higher" else -1.0)
    means = [float(np.nanmean(row)) if np.isfinite(row).any() else math.nan for row in values]
    return {
        "metric": name,
        "better": better,
        "calibrated": means[0],
        "calibrated_interval": list(paired_interval(values[0], seed, span)),
        PRIOR_METHOD: means[1],
        f"{PRIOR_METHOD}_interval": list(paired_interval(values[1], seed, span)),
        "gain": float(np.nanmean(gaps)) if np.isfinite(gaps).any() else math.nan,
        "gain_interval": list(paired_interval(gaps, seed)),
    }


def _answer(
    request: CalibrationRequest, fitted: FittedCalibration, rows: Sequence[Mapping[str, Any]], clear: bool
) -> tuple[str, ...]:
    """Return the result in sentences."""

    def numbers(row: Mapping[str, Any]) -> str:
        low, high = row["gain_interval"]
        interval = f" [{low:.3g}, {high:.3g}]" if math.isfinite(low) else ""
        return (
            f"{row['metric']} {row['calibrated']:.3g}, {PRIOR_METHOD} {row[PRIOR_METHOD]:.3g}: gain {row['gain']:.3g}"
            f"{interval}"
        )

    verdict = (
        f"The gain over {PRIOR_METHOD} is significant."
        if clear
        else f"The gain over {PRIOR_METHOD} is not significant on these images: use {PRIOR_METHOD}, or more images."
    )
    backwards = calibrated_spec(fitted.calibration).backwards
    localisation = [row["metric"] for row in rows if row["metric"].split("(")[0] == WITH_MASKS]
    return (
        f"Calibrated on {len(fitted.rows)} images of {request.model.name}, cross-fitted: {numbers(rows[0])}. {verdict}",
        *(f"{numbers(row)}." for row in rows[1:]),
        *(
            f"{metric} is localisation, which is not what was fitted: a map may rise in one and fall in the other."
            for metric in localisation
        ),
        f"An explanation costs 1 forward and {backwards} backward{'s' * (backwards != 1)}.",
        *(f"Note: {note}." for note in fitted.notes),
    )
