"""Reproduce: a paper's experiment on the data at hand, stored as a study, with the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clairvit.bench.plan import Plan, Study, settings_of
from clairvit.bench.results import scores_of, unread
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.data.dataset import ImageDataset, parts, void_as_object
from clairvit.errors import BadInput
from clairvit.methods.planner import record_for
from clairvit.methods.spec import resolve_method
from clairvit.metrics.registry import resolve_metric
from clairvit.metrics.score import Curve, Score, Scores
from clairvit.models.model import Model
from clairvit.papers.comparison import Agreement, ClaimResult, Row, agreements, among_measures, line_up, verdicts
from clairvit.papers.paper import Measure, Paper, Table, check_effort
from clairvit.papers.setup import LoadedData, ReproductionConfig, differences


@dataclass(frozen=True, eq=False)
class Sweep:
    """One method summed from each layer on."""

    method: str
    measure: Measure
    values: tuple[float, ...]  # by start layer, as the paper writes them
    best: int
    middle: int  # SkipPLUS's choice


@dataclass(frozen=True, eq=False)
class Reproduction:
    """What came out."""

    wish: ReproductionConfig
    model: str
    images: int
    table: Table | None  # the paper's numbers that stand beside ours
    rows: tuple[Row, ...]
    agreements: tuple[Agreement, ...]
    among: tuple[Agreement, ...]  # of our measures with each other
    verdicts: tuple[ClaimResult, ...]
    sweeps: tuple[Sweep, ...]
    differences: tuple[tuple[str, str], ...]  # what about, and a sentence
    failed: tuple[str, ...]  # units, and images that could not be read
    seconds: float
    model_record: Mapping[str, Any] = field(default_factory=dict)  # preprocessing, weights' hash, assumptions


def open_shown(wish: ReproductionConfig, model: Model) -> LoadedData:
    """The data set with its own masks."""
    from clairvit.data.open import open_data

    data = wish.data
    found = open_data(
        data.spec, split=data.split, limit=data.limit, seed=wish.seed, masks=data.masks, mask_kind=data.mask_kind
    )
    words = f"{found.title}, split {found.split}, {len(found)} of {found.total} images"
    return LoadedData(found.dataset, words, data.masks or "", found.notes, found.unknown(model))


def check_data(wish: ReproductionConfig, shown: LoadedData) -> tuple[Measure, ...]:
    """The measures that can be taken of these images; what the paper cannot do without is asked for."""
    preset = wish.preset
    needed = [one.name for one in preset.measures if one.needs_masks and not one.optional]
    if needed and not shown.dataset.has_masks:
        raise BadInput(
            f"'{preset.name}' compares maps with masks ({', '.join(needed)}), and {wish.data.spec} has none; expected "
            "data with masks such as pets:PATH, or folder:PATH with a folder of masks or with 'mask-rcnn' for masks.",
            parameters={"data": "folder:PATH", "masks": "mask-rcnn"},
        )
    if wish.aim == "label" and not shown.dataset.has_labels:
        raise BadInput(
            f"'{preset.name}' explains the true class, and {wish.data.spec} has none; expected data with classes, or "
            "target='predicted'.",
            parameters={"target": "predicted"},
        )
    if wish.aim == "label" and shown.unknown:
        some = ", ".join(shown.unknown[:3]) + (", …" if len(shown.unknown) > 3 else "")
        raise BadInput(
            f"'{preset.name}' explains the true class, and the model has no class {some} ({len(shown.unknown)} of the "
            "data's classes); expected a model of these classes, or target='predicted'.",
            parameters={"model": "NAME", "labels": "FILE", "target": "predicted"},
        )
    return tuple(one for one in preset.measures if shown.dataset.has_masks or not one.needs_masks)


def depth(model: Model, dataset: ImageDataset) -> int:
    """How many layers there are to start at; asked of the first image that can be read."""
    for part in parts(dataset, model, 1, failed=lambda image, error: None):  # the study says what is wrong with it
        return len(record_for([resolve_method("raw-attention")], model, part.pixels).calls)
    raise BadInput(f"None of the {len(dataset)} images can be read; expected at least one.")


def sweep_methods(preset: Paper, layers: int) -> dict[str, list[str]]:
    """method -> the same summed from layer 0, 1, … on."""
    return {method: [f"{method}+from:{layer}" for layer in range(layers)] for method in preset.sweep}


def study_of(wish: ReproductionConfig, measures: Iterable[Measure], layers: int = 0) -> Study:
    """Everything that is asked, as one study."""
    preset, effort = wish.preset, wish.effort
    check_effort(effort)
    methods = [preset.at(effort, one.method) for one in preset.entrants]
    methods += [text for texts in sweep_methods(preset, layers).values() for text in texts]
    return Study(
        models=(wish.model,),
        data=(replace(wish.data, void=preset.void),),  # whoever opens it again sees what was scored
        methods=tuple(methods),
        metrics=tuple(preset.at(effort, one.metric) for one in measures),
        seed=wish.seed,
        target=wish.aim,
    )


def reproduce(
    wish: ReproductionConfig,
    store: Store,
    *,
    model: Model | None = None,
    shown: LoadedData | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    told: Callable[[Plan], None] = lambda plan: None,
) -> Reproduction:
    """Run what the store lacks, and set it beside what the paper prints."""
    check_effort(wish.effort)
    preset = wish.preset
    model = model or wish.model.load(device)
    shown = shown or open_shown(wish, model)
    measures = check_data(wish, shown)
    dataset = void_as_object(shown.dataset) if preset.void == "object" else shown.dataset
    layers = depth(model, dataset) if preset.sweep else 0
    study = study_of(wish, measures, layers)
    worker = Worker(study, device, batch_size, models={0: model}, albums={0: dataset})
    outcome = run_study(study, store, worker=worker, told=told)
    images, settings = outcome.plan.images[0], settings_of(study)
    scores = scores_of(store, worker.hash_of(0), wish.data.spec, settings, images)
    if not scores:
        why = dict.fromkeys(error for _, error in outcome.failed)
        raise BadInput(f"Nothing could be scored: {' '.join(why) or 'none of the images could be read.'}")
    reasons = unread(store, worker.hash_of(0), settings, images)
    lost = [why if name in why else f"{name}: {why}" for name, why in reasons.items()]
    failed = dict.fromkeys((*(error for _, error in outcome.failed), *lost))
    found = named(wish, scores, measures)
    table = preset.table_for(wish.data.spec)
    rows = line_up(preset, found, table)
    return Reproduction(
        wish,
        model.name,
        len(scores.seen),
        table,
        tuple(rows),
        tuple(agreements(preset, rows)),
        tuple(among_measures(preset, rows)),
        tuple(verdicts(preset, found, rows)),
        tuple(_sweeps(wish, scores, measures, layers)),
        tuple(differences(wish, model, shown, scores, measures, table)),
        tuple(failed),
        outcome.seconds,
        scores.model_record,
    )


def part(score: Score, keep: Sequence[bool]) -> Score:
    """Of some of its images."""
    rows = torch.tensor([place for place, one in enumerate(keep) if one], dtype=torch.long)
    curve = None if score.curve is None else Curve(score.curve.x, score.curve.y[rows], score.curve.meaning)
    return replace(
        score,
        values=score.values[rows],
        degenerate=score.degenerate[rows],
        names=tuple(name for name, one in zip(score.names, keep, strict=True) if one),
        curve=curve,
        counts=None if score.counts is None else score.counts[rows],
    )


def named(wish: ReproductionConfig, scores: Scores, measures: Sequence[Measure]) -> dict[tuple[str, str], Score]:
    """By the paper's names; the baselines by their own. Where the paper takes confident images only, so do we."""
    preset, sure = wish.preset, {one.image: one.probability for one in scores.seen}
    found = {}
    for measure in measures:
        metric = resolve_metric(preset.at(wish.effort, measure.metric)).text
        for entrant in preset.everyone:
            score = scores.get((resolve_method(preset.at(wish.effort, entrant.method)).text, metric))
            if score is None:
                continue
            if measure.above is not None:
                score = part(score, [(sure[name] or 0.0) > measure.above for name in score.names])
            found[entrant.name, measure.name] = score
    return found


def _sweeps(wish: ReproductionConfig, scores: Scores, measures: Sequence[Measure], layers: int) -> list[Sweep]:
    found = []
    for method, texts in sweep_methods(wish.preset, layers).items():
        for measure in measures:
            metric = resolve_metric(wish.preset.at(wish.effort, measure.metric)).text
            own = [scores.get((resolve_method(text).text, metric)) for text in texts]
            values = [math.nan if one is None else measure.written(one.mean) for one in own]
            if measure.name not in wish.preset.sweep_measures or all(map(math.isnan, values)):
                continue
            sign = 1 if measure.better == "higher" else -1
            best = max(
                range(layers), key=lambda layer: -math.inf if math.isnan(values[layer]) else sign * values[layer]
            )
            found.append(Sweep(method, measure, tuple(values), best, math.ceil(layers / 2)))
    return found
