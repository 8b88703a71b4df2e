"""Findings: all that a store knows, gathered for a report: scores, images, failures, versions."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clairvit.bench.missing import Missing, missing_of, planned_from, warning_of
from clairvit.bench.plan import DataConfig, ModelConfig, Study
from clairvit.bench.results import combinations, scores_of
from clairvit.bench.store import Store
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.registry import resolve_metric
from clairvit.metrics.score import Score, Scores
from clairvit.report.ranking import mean_ranks, ranks


@dataclass(frozen=True, eq=False)
class Findings:
    """One model on one set of images."""

    model: str
    model_hash: str
    data: str
    settings: str
    scores: Scores
    methods: tuple[str, ...]  # the best mean rank first; without baselines
    metrics: tuple[str, ...]
    marks: Mapping[str, tuple[str, ...]]  # image -> the hash of its content; several if it has changed
    unread: Mapping[str, str]  # image -> why
    classes: tuple[str, ...] = ()  # names by number, where they are known

    @property
    def baselines(self) -> tuple[str, ...]:
        scored = {method for method, _ in self.scores}
        return tuple(name for name in BASELINES if name in scored)

    @property
    def key_metric(self) -> str | None:
        """The metric by which examples and classes are looked at: the first of faithfulness, else the first."""
        some = [metric for metric in self.metrics if any(one.n_valid for one in self.of(metric).values())]
        faithful = [metric for metric in some if resolve_metric(metric).metric.family == "faithfulness"]
        return next(iter([*faithful, *some]), None)

    def of(self, metric: str) -> dict[str, Score]:
        """Method -> score, methods first and baselines last."""
        listed = (*self.methods, *self.baselines)
        return {method: self.scores[method, metric] for method in listed if (method, metric) in self.scores}

    def shown(self, name: str) -> str:
        """An image's name without the folder that it shares with all others; any other name as it is."""
        if name in self.marks and len(self.marks) > 1 and all("/" in image for image in self.marks):
            return name[len(posixpath.commonpath(list(self.marks))) :].lstrip("/") or name
        return name

    def class_name(self, number: int) -> str:
        return self.classes[number] if number < len(self.classes) else f"class {number}"

    def names(self) -> dict[str, str]:
        """What every record of this model and data begins with."""
        return {"model": self.model, "model_hash": self.model_hash, "data": self.data, "settings": self.settings}


@dataclass(frozen=True, eq=False)
class Account:
    """A whole store."""

    path: Path
    studies: tuple[Study, ...]
    findings: tuple[Findings, ...]
    failures: tuple[Mapping[str, Any], ...]
    broken: tuple[str, ...]  # parts that could not be read
    versions: tuple[str, ...]  # of ClairViT, that wrote the results
    written: datetime | None  # when the last part was
    missing: tuple[Missing, ...] = ()  # planned and not computed
    unplanned: int = 0  # studies whose plan the store does not have

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is missing, in sentences; none if every study is complete."""
        return warning_of(self.missing, self.unplanned)


def gather(store: Store) -> Account:
    """Everything that is in a store."""
    studies = tuple(study_from(document) for document in store.studies())
    known: dict[tuple[str, str, str], dict[str, tuple[list[str], str | None]]] = {}
    _, rows = store.query(
        "select model_hash, data, settings, image, list(distinct image_hash order by image_hash), "
        "case when count(predicted) = 0 then coalesce(min(note), '') end from results group by all"
    )
    for model_hash, data, settings, image, marks, why in rows:
        known.setdefault((model_hash, data, settings), {})[image] = (marks, why)
    found = []
    for model, model_hash, data, settings in combinations(store):
        images = known[model_hash, data, settings]
        found.append(_findings(store, studies, (model, model_hash, data, settings), images))
    _, versions = store.query("select distinct version from results order by version")
    whole, _ = store.parts()
    latest = max((file.stat().st_mtime for file in whole), default=None)
    return Account(
        store.path,
        studies,
        tuple(found),
        tuple(store.failures()),
        tuple(sorted(file.name for file in (store.path / "broken").glob("*.parquet"))),
        tuple(str(one) for (one,) in versions if one),
        None if latest is None else datetime.fromtimestamp(latest, UTC),
        *_missing(store, studies),
    )


def _missing(store: Store, studies: Sequence[Study]) -> tuple[tuple[Missing, ...], int]:
    """Return what the plans in a store have and its results do not, and how many studies have no plan there."""
    plans = {
        study: planned_from(document, study) for document in store.plans() if (study := study_from(document["study"]))
    }
    cells = store.cells() if plans else frozenset()
    missing = [one for study in studies if study in plans for one in missing_of(plans[study], cells)]
    return tuple(missing), sum(study not in plans for study in studies)


def _findings(
    store: Store,
    studies: Sequence[Study],
    name: tuple[str, str, str, str],
    images: Mapping[str, tuple[list[str], str | None]],
) -> Findings:
    model, model_hash, data, settings = name
    scores = scores_of(store, model_hash, data, settings)
    asked_methods = [*(one for study in studies for one in study.methods), *sorted({method for method, _ in scores})]
    asked_metrics = [*(one for study in studies for one in study.metrics), *sorted({metric for _, metric in scores})]
    methods = [one for one in dict.fromkeys(asked_methods) if any(one == method for method, _ in scores)]
    metrics = tuple(one for one in dict.fromkeys(asked_metrics) if any(one == metric for _, metric in scores))
    ours = [one for one in methods if one not in BASELINES]
    mean = mean_ranks(ranks(scores, ours, metrics))
    order = sorted(range(len(ours)), key=lambda place: (mean[place] != mean[place], mean[place]))  # NaN comes last
    return Findings(
        *(model, model_hash, data, settings, scores),
        tuple(ours[place] for place in order),
        metrics,
        {image: tuple(marks) for image, (marks, _) in images.items()},
        {image: why for image, (_, why) in sorted(images.items()) if why is not None},
    )


def study_from(document: Mapping[str, Any]) -> Study:
    """A study from what `Study.as_document` wrote."""
    models = tuple(ModelConfig(**{key: _settled(value) for key, value in one.items()}) for one in document["models"])
    data = tuple(DataConfig(**one) for one in document["data"])
    rest = {name: _settled(value) for name, value in document.items() if name not in ("models", "data")}
    return Study(models=models, data=data, **rest)


def _settled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def with_classes(findings: Findings, classes: Sequence[str]) -> Findings:
    return replace(findings, classes=tuple(classes))
