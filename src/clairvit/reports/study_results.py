"""Read a store for a report: scores, images, failures, versions, and what is missing."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clairvit.bench.plan import DataConfig, ModelConfig, Specs, StoredPlan, Study
from clairvit.bench.results import Missing, combinations, find_missing, missing_warnings, read_scores
from clairvit.bench.store import Store
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.score import Score, Scores
from clairvit.reports.ranking import mean_ranks, ranks


@dataclass(frozen=True, eq=False)
class StudyResults:
    """The results of one model on one set of images."""

    model: str
    model_hash: str
    data: str
    settings: str
    scores: Scores
    methods: tuple[str, ...]  # the best mean rank first; without baselines
    metrics: tuple[str, ...]
    image_hashes: Mapping[str, tuple[str, ...]]  # image -> the hash of its content; several if it has changed
    unreadable: Mapping[str, str]  # image -> reason
    classes: tuple[str, ...] = ()  # names by index, where they are known
    specs: Specs = field(default_factory=Specs)

    @property
    def baselines(self) -> tuple[str, ...]:
        """Return the baselines that have scores."""
        scored = {method for method, _ in self.scores}
        return tuple(name for name in BASELINES if name in scored)

    @property
    def key_metric(self) -> str | None:
        """Return the metric by which examples and classes are compared: the first of faithfulness, else the first."""
        defined = [metric for metric in self.metrics if any(score.n_valid for score in self.by_method(metric).values())]
        faithful = [metric for metric in defined if self.specs.metric(metric).metric.family == "faithfulness"]
        return next(iter([*faithful, *defined]), None)

    def by_method(self, metric: str) -> dict[str, Score]:
        """Return the scores by method, baselines last."""
        methods = (*self.methods, *self.baselines)
        return {method: self.scores[method, metric] for method in methods if (method, metric) in self.scores}

    def short_name(self, name: str) -> str:
        """Return an image's name without the folder that it shares with all others; any other name as it is."""
        images = self.image_hashes
        if name in images and len(images) > 1 and all("/" in image for image in images):
            return name[len(posixpath.commonpath(list(images))) :].lstrip("/") or name
        return name

    def class_name(self, index: int) -> str:
        """Return the name of a class, or 'class 3' where names are not known."""
        return self.classes[index] if index < len(self.classes) else f"class {index}"

    def record(self, **values: Any) -> dict[str, Any]:
        """Return a record that begins with the model and data."""
        names = {"model": self.model, "model_hash": self.model_hash, "data": self.data, "settings": self.settings}
        return {**names, **values}


@dataclass(frozen=True, eq=False)
class StoreContents:
    """The results of all studies in a store."""

    path: Path
    studies: tuple[Study, ...]
    results: tuple[StudyResults, ...]
    failures: tuple[Mapping[str, Any], ...]
    broken: tuple[str, ...]  # parts that could not be read
    versions: tuple[str, ...]  # of ClairViT, that wrote the results
    written: datetime | None  # time of the last part
    missing: tuple[Missing, ...] = ()  # planned and not computed
    unplanned: int = 0  # studies whose plan the store does not have

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return sentences about what is missing; none if every study is complete."""
        return missing_warnings(self.missing, self.unplanned)


def read_store(store: Store) -> StoreContents:
    """Return everything that is in a store."""
    specs = Specs()
    studies = tuple(parse_study(document).sharing(specs) for document in store.studies())
    images: dict[tuple[str, str, str], dict[str, tuple[list[str], str | None]]] = {}
    _, rows = store.query(
        "select model_hash, data, settings, image, list(distinct image_hash order by image_hash), "
        "case when count(predicted) = 0 then coalesce(min(note), '') end from results group by all"
    )
    for model_hash, data, settings, image, hashes, reason in rows:
        images.setdefault((model_hash, data, settings), {})[image] = (hashes, reason)
    results = [_study_results(store, studies, names, images[names[1:]], specs) for names in combinations(store)]
    _, versions = store.query("select distinct version from results order by version")
    intact, _ = store.parts()
    latest = max((file.stat().st_mtime for file in intact), default=None)
    missing, unplanned = _missing(store, studies, specs)
    return StoreContents(
        store.path,
        studies,
        tuple(results),
        tuple(store.failures()),
        tuple(sorted(file.name for file in (store.path / "broken").glob("*.parquet"))),
        tuple(str(version) for (version,) in versions if version),
        None if latest is None else datetime.fromtimestamp(latest, UTC),
        missing,
        unplanned,
    )


def _missing(store: Store, studies: Sequence[Study], specs: Specs) -> tuple[tuple[Missing, ...], int]:
    """Return what the plans in a store have and its results do not, and how many studies have no plan there."""
    plans = {
        study: StoredPlan.from_document(document, study)
        for document in store.plans()
        if (study := parse_study(document["study"]).sharing(specs))
    }
    cells = store.cells() if plans else frozenset()
    missing = [entry for study in studies if study in plans for entry in find_missing(plans[study], cells)]
    return tuple(missing), sum(study not in plans for study in studies)


def _study_results(
    store: Store,
    studies: Sequence[Study],
    names: tuple[str, str, str, str],
    images: Mapping[str, tuple[list[str], str | None]],
    specs: Specs,
) -> StudyResults:
    """Return the results of one model on one set of images, methods in the order of their mean ranks."""
    model, model_hash, data, settings = names
    scores = read_scores(store, model_hash, data, settings, specs=specs)
    scored_methods, scored_metrics = {method for method, _ in scores}, {metric for _, metric in scores}
    study_methods = [*(method for study in studies for method in study.methods), *sorted(scored_methods)]
    study_metrics = [*(metric for study in studies for metric in study.metrics), *sorted(scored_metrics)]
    methods = [
        method for method in dict.fromkeys(study_methods) if method in scored_methods and method not in BASELINES
    ]
    metrics = tuple(metric for metric in dict.fromkeys(study_metrics) if metric in scored_metrics)
    mean = mean_ranks(ranks(scores, methods, metrics))
    order = sorted(range(len(methods)), key=lambda row: (mean[row] != mean[row], mean[row]))  # NaN comes last
    return StudyResults(
        model,
        model_hash,
        data,
        settings,
        scores,
        tuple(methods[row] for row in order),
        metrics,
        {image: tuple(hashes) for image, (hashes, _) in images.items()},
        {image: reason for image, (_, reason) in sorted(images.items()) if reason is not None},
        specs=specs,
    )


def parse_study(document: Mapping[str, Any]) -> Study:
    """Return the study that `Study.as_document` wrote."""
    models = tuple(ModelConfig(**_hashable_values(entry)) for entry in document["models"])
    data = tuple(DataConfig(**_hashable_values(entry)) for entry in document["data"])
    settings = {name: _hashable(value) for name, value in document.items() if name not in ("models", "data")}
    return Study(models=models, data=data, **settings)


def _hashable_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _hashable(value) for key, value in entry.items()}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
