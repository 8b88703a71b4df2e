"""Missing: what a study planned and its store does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clairvit.bench.plan import Cell, Plan, Study, among_of, settings_of
from clairvit.metrics.registry import resolve_metric

NAMED = 6  # methods that a sentence lists; more of them are counted


@dataclass(frozen=True)
class Planned:
    """The plan of a study as the store keeps it: which weights, which images."""

    study: Study
    hashes: tuple[str, ...]  # of the models
    images: tuple[tuple[str, ...], ...]  # of each data: the marks of its images

    @classmethod
    def of(cls, study: Study, plan: Plan) -> Planned:
        return cls(study, plan.hashes, tuple(tuple(mark for _, mark in images) for images in plan.images))

    def as_document(self) -> dict[str, Any]:
        return {
            "study": self.study.as_document(),
            "models": list(self.hashes),
            "images": [list(i) for i in self.images],
        }


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
    lacking: tuple[tuple[str, tuple[str, ...], int], ...]  # metric, methods, number of images without their scores

    @property
    def sentence(self) -> str:
        where = f"{self.model} on {self.data}"
        if not self.cells_done:
            return f"{where}: nothing is computed (0 of {self.images} images)."
        done = f"{self.images_done} of {self.images} images are complete, {self.cells_done} of {self.cells} scores"
        return f"{where}: {done}. Not computed: {'; '.join(self._lines())}."

    def _lines(self) -> Iterable[str]:
        """Metrics that the same methods lack on the same number of images are named together."""
        together: dict[tuple[tuple[str, ...], int], list[str]] = {}
        for metric, methods, images in self.lacking:
            together.setdefault((methods, images), []).append(metric)
        for (methods, images), metrics in together.items():
            more = len(methods) - NAMED
            names = ", ".join(methods[:NAMED]) + (f" and {more} more" if more > 0 else "")
            names = "every method" if len(methods) == self.methods else names
            yield f"{', '.join(metrics)} of {names} on {images} image{'s' * (images != 1)}"

    def as_records(self) -> list[dict[str, Any]]:
        """Return a record for each metric with methods that lack it on the same number of images."""
        about = {
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
            {**about, "metric": metric, "methods": ", ".join(methods), "images_missing": images}
            for metric, methods, images in self.lacking
        ]


def missing_of(planned: Planned, cells: frozenset[Cell]) -> list[Missing]:
    """Return what the cells of a store lack of a plan, for each model and data set that is not complete."""
    study = planned.study
    found = [
        _missing(planned, model, data, cells) for model in range(len(study.models)) for data in range(len(study.data))
    ]
    return [one for one in found if one.cells_done < one.cells]


def _missing(planned: Planned, model: int, data: int, cells: frozenset[Cell]) -> Missing:
    study, weights, marks = planned.study, planned.hashes[model], planned.images[data]
    settings, among = settings_of(study), among_of(marks)
    left = dict.fromkeys(marks, 0)  # by image: scores that are not there
    absent: dict[tuple[str, int], list[str]] = {}  # metric and number of images -> methods
    for metric in study.metrics:
        group = among if resolve_metric(metric).metric.scope == "set" else ""
        for method in study.methods:
            without = [mark for mark in marks if Cell(weights, mark, method, metric, settings, group) not in cells]
            for mark in without:
                left[mark] += 1
            if without:
                absent.setdefault((metric, len(without)), []).append(method)
    total = len(marks) * len(study.methods) * len(study.metrics)
    return Missing(
        model=study.models[model].spec,
        model_hash=weights,
        data=study.data[data].spec,
        settings=settings,
        images_done=sum(left[mark] == 0 for mark in marks),
        images=len(marks),
        cells_done=total - sum(len(methods) * images for (_, images), methods in absent.items()),
        cells=total,
        methods=len(study.methods),
        lacking=tuple((metric, tuple(methods), images) for (metric, images), methods in absent.items()),
    )


def warning_of(missing: Sequence[Missing], unplanned: int) -> tuple[str, ...]:
    """Return the sentences that a reader of an incomplete study must see first; none if it is complete.

    `unplanned`: studies whose plan is not in the store.
    """
    sentences = []
    if missing:
        sentences.append(
            "This study is not complete: run it again to compute the rest. Images are computed in the order of their "
            "names, so those that are there are no random sample of the planned ones."
        )
        sentences += [one.sentence for one in missing]
    if unplanned:
        many = "1 study has" if unplanned == 1 else f"{unplanned} studies have"
        sentences.append(
            f"{many} no plan in the store (an older version ran it, or it ended before it was planned), so that "
            "what is missing is not known; run the study again to see."
        )
    return tuple(sentences)


def planned_from(document: Mapping[str, Any], study: Study) -> Planned:
    """Return a plan from what `Planned.as_document` wrote."""
    return Planned(study, tuple(document["models"]), tuple(tuple(images) for images in document["images"]))
