"""Tuning: choose the start layer of a paper's method on images that are not scored, FocusViT's m*.

The candidates are a study of their own in the store of the reproduction: all starts of an image come from one trace,
what was computed is found again, and a run that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from clairvit.bench.plan import Plan, Study, settings_of
from clairvit.bench.results import read_scores
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.errors import Argument, BadInput, NotApplicable
from clairvit.metrics.registry import resolve_metric
from clairvit.models.model import Model
from clairvit.papers.paper import Paper, Tuning
from clairvit.papers.setup import LoadedData, ReproductionConfig
from clairvit.papers.split import check_portion, portion_size, split_off
from clairvit.selection.start_layer import StartLayer, base_method, candidates, start_at, start_layer

FEW_VALIDATION_IMAGES = 30  # below this, a note says so


@dataclass(frozen=True, eq=False)
class TunedStart:
    """The start layer that was chosen, m*, with the score of every other one."""

    tuning: Tuning
    start: StartLayer
    images: int  # that chose it; none of them is scored

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the paper's names of the methods that start there."""
        return (self.tuning.method, *self.tuning.together)


@dataclass(frozen=True, eq=False)
class TuningOutcome:
    """What is left to score, by which methods."""

    config: ReproductionConfig  # whose methods start where it was chosen
    data: LoadedData  # without the images that chose it
    tuned: TunedStart | None = None
    failed: tuple[str, ...] = ()


def check_validation(config: ReproductionConfig) -> None:
    """Raise `BadInput` for a validation part that is none, or of a paper that chooses nothing on one."""
    if config.validation is None:
        return
    check_portion(config.validation, "validation")
    if config.paper.tune is None and config.validation:
        raise BadInput(
            Argument("validation", config.validation),
            f" was given, and nothing of '{config.paper.name}' is chosen on validation images; leave it out.",
        )


def tune(
    config: ReproductionConfig,
    store: Store,
    model: Model,
    data: LoadedData,
    layers: int,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> TuningOutcome:
    """Split off the validation images of a paper that tunes a start layer, and choose it by them.

    Args:
        config: The paper, the model and the data.
        store: Where the candidates' scores are kept.
        model: The loaded model.
        data: All images.
        layers: How many layers the model has.
        device: Where the model runs.
        batch_size: Images per forward pass; None chooses.
        on_plan: Called with the plan of the candidates.
    """
    check_validation(config)
    tuning = config.paper.tune
    if tuning is None or config.validation == 0 or not layers:
        return TuningOutcome(config, _with_note(data, _untuned(config, layers)))
    total = len(data.dataset)
    count = portion_size(tuning.share if config.validation is None else config.validation, total)
    if count >= total:
        raise BadInput(
            f"{count} of {total} images were to choose the start layer of {tuning.method}, and none would be left to "
            "score; expected more images, or ",
            Argument("validation", 0),
            " to start at the middle layer.",
        )
    chosen, scored = split_off(data.strata, count, config.seed, "papers/validation")
    base = base_method(config.paper.at_effort(config.effort, _method(config.paper, tuning.method)))
    methods = candidates(base, layers)
    metric = resolve_metric(tuning.metric)
    study = Study(
        (config.model,), (config.data,), tuple(methods), (metric.text,), seed=config.seed, target=config.study_target
    )
    validation = data.dataset.take(chosen)
    worker = Worker(study, device, batch_size, models={0: model}, datasets={0: validation})
    outcome = run_study(study, store, worker=worker, on_plan=on_plan)
    scores = read_scores(
        store, worker.model_hash(0), config.data.spec, settings_of(study), outcome.plan.images[0], study.specs
    )
    failed = tuple(dict.fromkeys(error for _, error in outcome.failed))
    remaining = data.part(scored)
    by_start = [scores.get((study.specs.method(text).text, metric.text)) for text in methods]
    try:
        start = start_layer(base, metric, methods, by_start, scores.skipped, config.seed)
    except NotApplicable as error:
        note = f"The start layer of {tuning.method} could not be chosen, so it is the middle one. {error}"
        return TuningOutcome(config, _with_note(remaining, note), failed=failed)
    tuned = TunedStart(tuning, start, len(scores.predictions))
    paper = _starting_at(config, tuned, layers)
    return TuningOutcome(
        replace(config, paper=paper), _with_note(remaining, _sentence(tuned, len(scored))), tuned, failed
    )


def _method(paper: Paper, name: str) -> str:
    """Return our method of a name of the paper."""
    return next(entry.method for entry in paper.methods if entry.name == name)


def _starting_at(config: ReproductionConfig, tuned: TunedStart, layers: int) -> Paper:
    """Return the paper with its methods started at the chosen layer."""
    paper = config.paper
    entries = [
        replace(
            entry,
            method=start_at(base_method(paper.at_effort(config.effort, entry.method)), tuned.start.best, layers),
        )
        if entry.name in tuned.methods
        else entry
        for entry in paper.methods
    ]
    return replace(paper, methods=tuple(entries))


def _with_note(data: LoadedData, note: str) -> LoadedData:
    return replace(data, remarks=(*data.remarks, ("validation", note))) if note else data


def _untuned(config: ReproductionConfig, layers: int) -> str:
    """Return why no start layer was chosen; "" of a paper that chooses none."""
    tuning = config.paper.tune
    if tuning is None:
        return ""
    if not layers:
        return f"The start layer of {tuning.method} could not be chosen: the model has no attention layers."
    return f"No images were split off to choose the start layer of {tuning.method}: it is the middle one, ceil(L/2)."


def _sentence(tuned: TunedStart, scored: int) -> str:
    """Return on what m* was chosen, and whether that is many images."""
    few = "" if tuned.images >= FEW_VALIDATION_IMAGES else " So few images may choose another layer the next time."
    return (
        f"The start layer of {' and '.join(tuned.methods)} was chosen on {tuned.images} images that are not scored; "
        f"{scored} others are. {tuned.start.sentence}{few}"
    )
