"""Results: from a store back to the scores that `cv.evaluate` gives, and what a plan has and the store does not."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from clairvit._cost import Cost
from clairvit.bench.plan import Cell, CellSet, Specs, StoredPlan, image_set_hash, settings_of
from clairvit.bench.store import Store, sql_text
from clairvit.errors import BadInput, ClairWarning, UnknownName
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.registry import MetricSpec
from clairvit.metrics.score import Curve, Prediction, Score, Scores

Record = dict[str, Any]  # a row of the store
Groups = dict[tuple[str, str], list[Record]]  # method and metric -> records
FIELDS = (
    *("image", "label", "predicted", "probability", "value", "degenerate", "x", "y", "meaning", "across", "counts"),
    *("forwards", "backwards", "seconds", "note", "options", "better", "method", "metric"),
)
LISTED_METHODS = 6  # in a sentence; more of them are counted


def combinations(store: Store) -> list[tuple[str, str, str, str]]:
    """Return model, its hash, data and settings of all results in a store."""
    _, rows = store.query("select distinct model, model_hash, data, settings from results order by all")
    return [(str(a), str(b), str(c), str(d)) for a, b, c, d in rows]


def read_scores(
    store: Store,
    model_hash: str,
    data: str,
    settings: str,
    images: Sequence[tuple[str, str]] | None = None,
    specs: Specs | None = None,
) -> Scores:
    """Return the scores of every method and metric of one model, with images in the order of their names.

    An image that could not be read is in no score, a method that does not fit the model is in `.skipped`.

    Args:
        store: Where the results are.
        model_hash: Which model.
        data: Which data set, by its spec.
        settings: As `settings_of` writes them.
        images: Name and hash of each image, as `Plan.images` has them: their results, even if they were computed under
            another name or in another data set. None: all images that `data` ever had.
        specs: Methods and metrics that the caller reads too.
    """
    records = _records(store, model_hash, settings, data, images)
    if images is not None:
        by_hash: dict[str, list[Record]] = {}
        for record in records:
            by_hash.setdefault(record["image_hash"], []).append(record)
        records = [{**record, "image": name} for name, hashed in sorted(images) for record in by_hash.get(hashed, ())]
    groups: Groups = {}
    for record in records:
        if record["predicted"] is not None:
            groups.setdefault((record["method"], record["metric"]), []).append(record)
    predictions = {
        record["image"]: Prediction(record["image"], record["predicted"], record["probability"], record["label"])
        for group in groups.values()
        for record in group
    }
    scores = Scores()
    scores.model_record = {key: value for key, value in store.models().get(model_hash, {}).items() if key != "model"}
    scores.predictions = tuple(predictions[image] for image in sorted(predictions))
    scores.skipped = {
        record["method"]: record["note"]
        for record in records
        if record["predicted"] is None and record["image"] in predictions and record["note"]
    }
    known, metrics = _resolvable(groups, specs or Specs())
    by_key = {key: _score(group, *key, metrics[key[1]]) for key, group in known.items()}
    for (method, metric), score in by_key.items():
        baselines = {name: by_key[name, metric] for name in BASELINES if (name, metric) in by_key}
        scores[method, metric] = replace(score, baselines=baselines)
    return scores


def _resolvable(groups: Groups, specs: Specs) -> tuple[Groups, dict[str, MetricSpec]]:
    """Return the groups whose method and metric this version has, and these metrics; warn about the others."""
    unknown: dict[str, str] = {}
    metrics: dict[str, MetricSpec] = {}
    for text in sorted({method for method, _ in groups}):
        try:
            specs.method(text)
        except (BadInput, UnknownName) as error:
            unknown[text] = str(error)
    for text in sorted({metric for _, metric in groups}):
        try:
            metrics[text] = specs.metric(text)
        except (BadInput, UnknownName) as error:
            unknown[text] = str(error)
    for text, reason in unknown.items():
        warnings.warn(
            f"'{text}' is in the store and left out here: {reason} Another version of ClairViT, or a method of your "
            "own, made these numbers; a query of the store shows them.",
            ClairWarning,
            stacklevel=3,
        )
    known = {key: group for key, group in groups.items() if unknown.keys().isdisjoint(key)}
    return known, metrics


def unreadable_images(
    store: Store, model_hash: str, settings: str, images: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Return image -> error, for images that have no score by any method, not even a baseline."""
    records = _records(store, model_hash, settings, "", images)
    read = {record["image_hash"] for record in records if record["predicted"] is not None}
    errors = {record["image_hash"]: record["note"] for record in records if record["image_hash"] not in read}
    return {name: errors[hashed] for name, hashed in images if hashed in errors}


def _records(
    store: Store, model_hash: str, settings: str, data: str, images: Sequence[tuple[str, str]] | None
) -> list[Record]:
    """Return each cell once, in a fixed order; for a metric of whole sets: of these images, or of the largest set."""
    if images is None:
        where, same_image = f"data = {sql_text(data)}", "image_hash, image"
        image_set = "first_value(among) over (partition by metric order by size desc, among)"
    else:
        hashes = [hashed for _, hashed in images]
        where = f"image_hash in ({', '.join(map(sql_text, dict.fromkeys(hashes)))})"
        same_image, image_set = "image_hash", sql_text(image_set_hash(hashes))
    names, rows = store.query(
        "with selected as (select *, count(*) over (partition by metric, among) as size from results "
        f"where model_hash = {sql_text(model_hash)} and settings = {sql_text(settings)} and {where}), "
        f"candidates as (select *, {image_set} as image_set from selected) "
        f"select model, settings, image_hash, {', '.join(FIELDS)} from candidates "
        "where among is null or among = image_set "
        f"qualify row_number() over (partition by {same_image}, method, metric order by unit, image) = 1 "
        "order by metric, method, image, unit"
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _score(records: Sequence[Record], method: str, metric: str, spec: MetricSpec) -> Score:
    first = records[0]
    values = [math.nan if record["value"] is None else record["value"] for record in records]
    options, curve, counts = json.loads(first["options"]), None, None
    if first["x"] is not None:
        x = torch.tensor(first["x"], dtype=torch.float64)
        y = torch.tensor([record["y"] for record in records], dtype=torch.float64)
        curve = Curve(x, y, str(first["meaning"]), str(first["across"]))
    if first["counts"] is not None:
        counts = torch.tensor([record["counts"] for record in records], dtype=torch.float64)
        counts = counts.reshape(len(records), -1, 2)
    seed = dict(setting.split("=", 1) for setting in str(first["settings"]).split(","))["seed"]
    notes = dict.fromkeys(note for record in records for note in (record["note"] or "").split("; ") if note)
    return Score(
        metric=metric,
        method=method,
        values=torch.tensor(values, dtype=torch.float64),
        better=first["better"],
        span=spec.span_with(options),
        degenerate=torch.tensor([bool(record["degenerate"]) for record in records]),
        names=tuple(record["image"] for record in records),
        model=first["model"],
        settings=options,
        seed=int(seed),
        cost=Cost(first["forwards"], first["backwards"], sum(record["seconds"] for record in records)),
        curve=curve,
        counts=counts,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Missing:
    """One model on one data set of a study: how much of the plan is computed, and which scores are not."""

    model: str  # as the study names it
    model_hash: str
    data: str
    settings: str
    images_done: int  # with every method and metric
    images: int
    cells_done: int
    cells: int
    methods: int  # baselines too
    missing_scores: tuple[
        tuple[str, tuple[str, ...], int], ...
    ]  # metric, methods, number of images without their scores

    @property
    def sentence(self) -> str:
        where = f"{self.model} on {self.data}"
        if not self.cells_done:
            return f"{where}: nothing is computed (0 of {self.images} images)."
        done = f"{self.images_done} of {self.images} images are complete, {self.cells_done} of {self.cells} scores"
        return f"{where}: {done}. Not computed: {'; '.join(self._groups())}."

    def _groups(self) -> Iterable[str]:
        """Yield what is missing, with the metrics of the same methods and number of images together."""
        groups: dict[tuple[tuple[str, ...], int], list[str]] = {}
        for metric, methods, images in self.missing_scores:
            groups.setdefault((methods, images), []).append(metric)
        for (methods, images), metrics in groups.items():
            unlisted = len(methods) - LISTED_METHODS
            names = ", ".join(methods[:LISTED_METHODS]) + (f" and {unlisted} more" if unlisted > 0 else "")
            names = "every method" if len(methods) == self.methods else names
            yield f"{', '.join(metrics)} of {names} on {images} image{'s' * (images != 1)}"

    def as_records(self) -> list[dict[str, Any]]:
        """Return a record for each metric with methods that lack it on the same number of images."""
        shared = {
            "model": self.model,
            "model_hash": self.model_hash,
            "data": self.data,
            "settings": self.settings,
            "images_done": self.images_done,
            "images": self.images,
            "scores_done": self.cells_done,
            "scores": self.cells,
        }
        return [
            {**shared, "metric": metric, "methods": ", ".join(methods), "images_missing": images}
            for metric, methods, images in self.missing_scores
        ]


def find_missing(plan: StoredPlan, cells: Set[Cell]) -> list[Missing]:
    """Return what the cells of a store lack of a plan, for each model and data set that is not complete."""
    study, computed = plan.study, CellSet.of(cells)
    statuses = [
        _missing(plan, model, data, computed) for model in range(len(study.models)) for data in range(len(study.data))
    ]
    return [missing for missing in statuses if missing.cells_done < missing.cells]


def _missing(plan: StoredPlan, model: int, data: int, cells: CellSet) -> Missing:
    study, weights, images = plan.study, plan.hashes[model], plan.images[data]
    settings = settings_of(study)
    missing_scores = dict.fromkeys(images, 0)
    lacking: dict[tuple[str, int], list[str]] = {}  # metric and number of images -> methods
    for metric in study.metrics:
        image_set = image_set_hash(images) if study.metric_specs[metric].metric.needs_whole_set else ""
        pairs = {image: cells.pairs(weights, image, settings, image_set) for image in images}
        for method in study.methods:
            unscored = [image for image in images if (method, metric) not in pairs[image]]
            for image in unscored:
                missing_scores[image] += 1
            if unscored:
                lacking.setdefault((metric, len(unscored)), []).append(method)
    total = len(images) * len(study.methods) * len(study.metrics)
    return Missing(
        model=study.models[model].spec,
        model_hash=weights,
        data=study.data[data].spec,
        settings=settings,
        images_done=sum(missing_scores[image] == 0 for image in images),
        images=len(images),
        cells_done=total - sum(len(methods) * count for (_, count), methods in lacking.items()),
        cells=total,
        methods=len(study.methods),
        missing_scores=tuple((metric, tuple(methods), count) for (metric, count), methods in lacking.items()),
    )


def missing_warnings(missing: Sequence[Missing], unplanned: int) -> tuple[str, ...]:
    """Return the sentences that a reader of an incomplete study must see first; none if it is complete.

    `unplanned`: studies whose plan is not in the store.
    """
    sentences = []
    if missing:
        sentences.append(
            "This study is not complete: run it again to compute the rest. Images are computed in the order of their "
            "names, so those that are there are no random sample of the planned ones."
        )
        sentences += [part.sentence for part in missing]
    if unplanned:
        count = "1 study has" if unplanned == 1 else f"{unplanned} studies have"
        sentences.append(
            f"{count} no plan in the store (an older version ran it, or it ended before it was planned), so that "
            "what is missing is not known; run the study again to see."
        )
    return tuple(sentences)
