"""Reproduce a paper's experiment on the data at hand, stored as a study, with the paper's numbers next to ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clairvit.bench.plan import Plan, Study, settings_of
from clairvit.bench.results import read_scores, unreadable_images
from clairvit.bench.run import Outcome, run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.data.dataset import ImageDataset, masks_on_patches, void_as_object
from clairvit.errors import Argument, BadInput
from clairvit.methods.planner import record_for
from clairvit.methods.spec import resolve_method
from clairvit.metrics.registry import resolve_metric
from clairvit.metrics.score import Prediction, Score, Scores
from clairvit.models.model import Model
from clairvit.papers.comparison import (
    Agreement,
    ClaimResult,
    NamedScores,
    Row,
    agreements,
    compare_rows,
    evaluate_claims,
    measure_agreements,
)
from clairvit.papers.correctness import CorrectnessSplit, split_by_correctness
from clairvit.papers.cost import CostResult, check_costs, measure_costs
from clairvit.papers.multiverse import ModelLoader, Multiverse, run_multiverse
from clairvit.papers.needed_images import NeededImages, needed_images
from clairvit.papers.paper import Measure, Paper, Table, check_effort
from clairvit.papers.per_image import ImageScores, scores_by_image
from clairvit.papers.preparation import patch_grid, prepared
from clairvit.papers.setup import LoadedData, ReproductionConfig, differences, first_readable
from clairvit.papers.tuning import TunedStart, tune


@dataclass(frozen=True, eq=False)
class Sweep:
    """One method summed from each layer on."""

    method: str
    measure: Measure
    values: tuple[float, ...]  # by start layer, in the paper's unit
    best: int
    middle: int  # SkipPLUS's ceil(L/2)


@dataclass(frozen=True, eq=False)
class Reproduction:
    """The result of `reproduce`."""

    config: ReproductionConfig
    model: str
    images: int
    table: Table | None  # the paper's numbers that ours are compared with
    rows: tuple[Row, ...]
    agreements: tuple[Agreement, ...]
    measure_agreements: tuple[Agreement, ...]  # of our measures with each other
    claim_results: tuple[ClaimResult, ...]
    sweeps: tuple[Sweep, ...]
    differences: tuple[tuple[str, str], ...]  # topic and sentence
    failed: tuple[str, ...]  # errors of units, and of images that could not be read
    seconds: float
    model_record: Mapping[str, Any] = field(default_factory=dict)  # preprocessing, weights' hash, assumptions
    tuned: TunedStart | None = None  # the start layer that was chosen on other images
    by_correctness: tuple[CorrectnessSplit, ...] = ()  # where true classes are known
    costs: tuple[CostResult, ...] = ()  # what the paper says of time, measured
    training: Mapping[str, Any] = field(default_factory=dict)  # how the model was fine-tuned, where it was
    needed: tuple[NeededImages, ...] = ()  # how many images the differences that the paper prints need
    multiverse: Multiverse | None = None  # the claims under other protocols, where they were asked for
    by_image: tuple[ImageScores, ...] = ()
    predictions: tuple[Prediction, ...] = ()  # of the images that were scored
    scores: NamedScores = field(default_factory=dict)


def load_data(config: ReproductionConfig, model: Model) -> LoadedData:
    """Open the data set of a configuration with its own masks."""
    from clairvit.data.open import open_data

    data = config.data
    index = open_data(
        data.spec,
        split=data.split,
        limit=data.limit,
        seed=config.seed,
        masks=data.masks,
        mask_kind=data.mask_kind,
        names=data.names,
    )
    words = f"{index.title}, split {index.split}, {len(index)} of {index.total} images"
    classes = tuple(index.class_of(row) for row in range(len(index)))
    return LoadedData(
        index.dataset,
        words,
        data.masks or "",
        index.notes,
        unknown_classes=index.unknown_classes(model),
        classes=classes,
    )


def check_data(config: ReproductionConfig, data: LoadedData) -> tuple[Measure, ...]:
    """Return the measures that these images allow; raise `BadInput` if one that the paper needs is not possible."""
    paper = config.paper
    needed = [measure.name for measure in paper.measures if measure.needs_masks and not measure.optional]
    if needed and not data.dataset.has_masks:
        raise BadInput(
            f"'{paper.name}' compares maps with masks ({', '.join(needed)}), and {config.data.spec} has none; expected "
            "data with masks such as pets:PATH, or folder:PATH with a folder of masks or with 'mask-rcnn' for masks.",
            advice=[Argument("data", "folder:PATH"), Argument("masks", "mask-rcnn")],
        )
    if config.study_target == "label" and not data.dataset.has_labels:
        raise BadInput(
            f"'{paper.name}' explains the true class, and {config.data.spec} has none; expected data with classes, or ",
            Argument("target", "predicted"),
            ".",
        )
    if config.study_target == "label" and data.unknown_classes:
        listed = ", ".join(data.unknown_classes[:3]) + (", …" if len(data.unknown_classes) > 3 else "")
        raise BadInput(
            f"'{paper.name}' explains the true class, and the model has no class {listed} "
            f"({len(data.unknown_classes)} of the data's classes); expected a model of these classes, or "
            "target='predicted'.",
            advice=[Argument("model", "NAME"), Argument("labels", "FILE"), Argument("target", "predicted")],
        )
    return tuple(measure for measure in paper.measures if data.dataset.has_masks or not measure.needs_masks)


def depth(model: Model, dataset: ImageDataset) -> int:
    """Return the number of layers of a model, counted on the first image that can be read."""
    batch = first_readable(model, dataset)
    return len(record_for([resolve_method("raw-attention")], model, batch.pixels).calls)


def with_masks(
    config: ReproductionConfig, model: Model, dataset: ImageDataset
) -> tuple[ReproductionConfig, ImageDataset]:
    """Return the images with masks as the paper counts void pixels, on its grid of patches, and what to store of it."""
    paper = config.paper
    if paper.preparation.resolution == "patch" and dataset.has_masks:
        grid = patch_grid(model, dataset)
        dataset = dataset if grid is None else masks_on_patches(dataset, grid)
        config = replace(config, data=replace(config.data, mask_grid=grid))
    return config, void_as_object(dataset) if paper.void == "object" else dataset


def sweep_methods(paper: Paper, layers: int) -> dict[str, list[str]]:
    """Return method -> the same summed from layer 0, 1, … on."""
    return {method: [f"{method}+from:{layer}" for layer in range(layers)] for method in paper.sweep}


def study_of(config: ReproductionConfig, measures: Iterable[Measure], layers: int = 0) -> Study:
    """Return the study that computes everything a reproduction needs."""
    paper, effort = config.paper, config.effort
    check_effort(effort)
    methods = [paper.at_effort(effort, entry.method) for entry in paper.methods]
    methods += [text for texts in sweep_methods(paper, layers).values() for text in texts]
    return Study(
        models=(config.model,),
        data=(replace(config.data, void=paper.void),),  # stored, so that a report opens the same masks
        methods=tuple(methods),
        metrics=tuple(paper.at_effort(effort, measure.metric) for measure in measures),
        seed=config.seed,
        target=config.study_target,
    )


def reproduce(
    config: ReproductionConfig,
    store: Store,
    *,
    model: Model | None = None,
    data: LoadedData | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    cost: bool = False,
    variants: ModelLoader | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> Reproduction:
    """Compute the scores that the store lacks, and compare all scores with the numbers that the paper prints.

    Args:
        config: The paper, the model and the data.
        store: Where scores are kept; those that it has are not computed again.
        model: The loaded model; None loads `config.model`.
        data: The opened data; None opens `config.data`.
        device: Where the model runs, if it is loaded here.
        batch_size: Images per forward pass; None chooses.
        cost: Measure how long methods take, where the paper says something of it.
        variants: Returns the model with pictures cropped or squashed; each claim is then tested in a multiverse, under
            every protocol that is in use.
        on_plan: Called with each plan, of the start layers too, before its work begins.

    Raises:
        BadInput: If the data lacks masks or classes that the paper needs, or nothing could be scored.
    """
    check_effort(config.effort)
    config = prepared(config) if data is None else config
    model = model or config.model.load(device)
    data = data or load_data(config, model)
    measures = check_data(config, data)
    if cost:
        check_costs(config.paper)
    layers = depth(model, data.dataset) if config.paper.sweep or config.paper.tune else 0
    tuning = tune(config, store, model, data, layers, device=device, batch_size=batch_size, on_plan=on_plan)
    config, data, paper = tuning.config, tuning.data, tuning.config.paper
    config, dataset = with_masks(config, model, data.dataset)
    study = study_of(config, measures, layers)
    worker = Worker(study, device, batch_size, models={0: model}, datasets={0: dataset})
    outcome = run_study(study, store, worker=worker, on_plan=on_plan)
    scores, failed = _scores_and_errors(store, worker, study, outcome)
    by_name = named_scores(config, scores, measures)
    costs, unmeasured = measure_costs(paper, config.effort, model, dataset, config.seed) if cost else ((), ())
    data = replace(data, remarks=(*data.remarks, *(("cost", reason) for reason in unmeasured)))
    universes = None
    if variants is not None:
        universes = run_multiverse(
            config, store, data.dataset, variants, model, device=device, batch_size=batch_size, on_plan=on_plan
        )
    table = paper.table_for(config.data.spec)
    rows = compare_rows(paper, by_name, table)
    return Reproduction(
        config,
        model.name,
        len(scores.predictions),
        table,
        tuple(rows),
        tuple(agreements(paper, rows)),
        tuple(measure_agreements(paper, rows)),
        tuple(evaluate_claims(paper, by_name, rows)),
        tuple(_sweeps(config, scores, measures, layers)),
        tuple(differences(config, model, data, scores, measures, table)),
        (*tuning.failed, *failed, *(() if universes is None else universes.failed)),
        outcome.seconds,
        scores.model_record,
        tuning.tuned,
        split_by_correctness(paper, by_name, scores.predictions),
        costs,
        needed=needed_images(paper, by_name),
        multiverse=universes,
        by_image=scores_by_image(paper, by_name, scores.predictions, model.labels, table),
        predictions=tuple(scores.predictions),
        scores=by_name,
    )


def _scores_and_errors(store: Store, worker: Worker, study: Study, outcome: Outcome) -> tuple[Scores, tuple[str, ...]]:
    """Return the scores of a study of one model and data set, and why units or images have none."""
    images, settings = outcome.plan.images[0], settings_of(study)
    scores = read_scores(store, worker.model_hash(0), study.data[0].spec, settings, images, study.specs)
    errors = list(dict.fromkeys(error for _, error in outcome.failed))
    if not scores:
        raise BadInput(f"Nothing could be scored: {' '.join(errors) or 'none of the images could be read.'}")
    reasons = unreadable_images(store, worker.model_hash(0), settings, images)
    errors += [reason if name in reason else f"{name}: {reason}" for name, reason in reasons.items()]
    return scores, tuple(dict.fromkeys(errors))


def subset(score: Score, keep: Sequence[bool]) -> Score:
    """Return a score of some of its images."""
    rows = torch.tensor([row for row, kept in enumerate(keep) if kept], dtype=torch.long)
    curve = None if score.curve is None else replace(score.curve, y=score.curve.y[rows])
    return replace(
        score,
        values=score.values[rows],
        degenerate=score.degenerate[rows],
        names=tuple(name for name, kept in zip(score.names, keep, strict=True) if kept),
        curve=curve,
        counts=None if score.counts is None else score.counts[rows],
    )


def named_scores(
    config: ReproductionConfig, scores: Scores, measures: Sequence[Measure]
) -> dict[tuple[str, str], Score]:
    """Return scores by the paper's names of methods and measures, of confident images only where the paper does so."""
    paper = config.paper
    confidence = {prediction.image: prediction.probability or 0.0 for prediction in scores.predictions}
    by_name = {}
    for measure in measures:
        metric = resolve_metric(paper.at_effort(config.effort, measure.metric)).text
        for entry in paper.methods_and_baselines:
            score = scores.get((resolve_method(paper.at_effort(config.effort, entry.method)).text, metric))
            if score is None:
                continue
            if measure.min_confidence is not None:
                score = subset(score, [confidence[name] > measure.min_confidence for name in score.names])
            by_name[entry.name, measure.name] = score
    return by_name


def _sweeps(config: ReproductionConfig, scores: Scores, measures: Sequence[Measure], layers: int) -> list[Sweep]:
    paper = config.paper
    sweeps = []
    for method, texts in sweep_methods(paper, layers).items():
        for measure in measures:
            if measure.name not in paper.sweep_measures:
                continue
            metric = resolve_metric(paper.at_effort(config.effort, measure.metric)).text
            by_start = [scores.get((resolve_method(text).text, metric)) for text in texts]
            values = [math.nan if score is None else measure.as_printed(score.mean) for score in by_start]
            if all(map(math.isnan, values)):
                continue
            sign = 1 if measure.better == "higher" else -1
            upward = [-math.inf if math.isnan(value) else sign * value for value in values]
            sweeps.append(Sweep(method, measure, tuple(values), upward.index(max(upward)), math.ceil(layers / 2)))
    return sweeps
