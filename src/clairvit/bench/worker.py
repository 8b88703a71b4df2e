"""Work: from a unit to its rows. The same in this process, in another one and on another machine."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clairvit._version import __version__
from clairvit.bench.plan import Study, Unit, mark_of, settings_of
from clairvit.bench.store import Row
from clairvit.data.dataset import ImageDataset
from clairvit.data.hashing import weights_hash
from clairvit.errors import ClairError
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.score import Prediction, Score, Scores
from clairvit.models.model import Model


@dataclass(eq=False)
class Worker:
    """Keeps the models and albums of a study, each opened when it is first needed."""

    study: Study
    device: str | None = None
    batch_size: int | None = None
    models: dict[int, Model] = field(default_factory=dict)
    albums: dict[int, ImageDataset] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)  # of the models

    def model(self, place: int) -> Model:
        if place not in self.models:
            self.models[place] = self.study.models[place].load(self.device)
        return self.models[place]

    def dataset(self, place: int) -> ImageDataset:
        if place not in self.albums:
            self.albums[place] = self.study.data[place].open(self.study.seed)
        return self.albums[place]

    def open(self) -> None:
        """Everything, now; images first, which is quick."""
        for place in range(len(self.study.data)):
            self.dataset(place)
        for place in range(len(self.study.models)):
            self.hash_of(place)

    def hash_of(self, place: int) -> str:
        if place not in self.hashes:
            self.hashes[place] = weights_hash(self.model(place))
        return self.hashes[place]

    def rows(self, unit: Unit) -> list[Row]:
        """Compute a unit. An image that cannot be read and a method that does not fit have rows too, with a note."""
        model, dataset, study = self.model(unit.model), self.dataset(unit.data), self.study
        self._check(unit, model, dataset)
        unread: dict[str, str] = {}
        scores = evaluate(
            model,
            dataset.take(unit.rows),
            list(unit.methods),
            list(unit.metrics),
            target=study.target,
            normalize=study.maps,
            baselines=False,
            skip=True,
            on_error=lambda name, error: unread.update({name: str(error)}),
            seed=study.seed,
            batch_size=self.batch_size,
        )
        shared = {
            "unit": unit.key,
            "model": model.name,
            "model_hash": self.hash_of(unit.model),
            "data": study.data[unit.data].spec,
            "settings": settings_of(study),
            "among": unit.among or None,
            "version": __version__,
        }
        marks = {dataset.names[row]: mark for row, mark in zip(unit.rows, unit.marks, strict=True)}
        return [{**shared, **row} for row in _rows(unit, scores, marks, unread)]

    def _check(self, unit: Unit, model: Model, dataset: ImageDataset) -> None:
        """What is behind the same names elsewhere, or later, may be something else: then nothing is stored."""
        if self.hash_of(unit.model) != unit.weights:
            raise ClairError(
                f"{model.name} has other weights here than where the study was planned; expected the same file or "
                "version of the model everywhere."
            )
        if max(unit.rows) >= len(dataset):
            raise ClairError(
                f"{self.study.data[unit.data].spec} has {len(dataset)} images here, fewer than where the study was "
                "planned; expected the same files everywhere."
            )
        for row, mark in zip(unit.rows, unit.marks, strict=True):
            if mark_of(dataset, row) != mark:
                raise ClairError(
                    f"{dataset.names[row]} is not the image that it was when the study was planned; expected files "
                    "that stay as they are. Start the study again."
                )


def _rows(unit: Unit, scores: Scores, marks: dict[str, str], unread: dict[str, str]) -> list[Row]:
    found: list[Row] = []
    for metric in unit.metrics:
        for method in unit.methods:
            own = {"method": method, "metric": metric}
            score = scores.get((method, metric))
            why = scores.skipped.get(method, "") if score is None else ""
            for image, mark in marks.items():
                if image in unread or score is None:
                    note = unread.get(image) or why
                    found.append({**own, "image": image, "image_hash": mark, "note": note})
            if score is not None:
                found += [{**own, **row} for row in _of_score(score, scores.seen, marks)]
    return found


def _of_score(score: Score, seen: Sequence[Prediction], marks: dict[str, str]) -> list[Row]:
    """A row for each image that could be read."""
    found = []
    for place, one in enumerate(seen):
        value = float(score.values[place])
        curve = score.curve
        found.append(
            {
                "image": one.image,
                "image_hash": marks[one.image],
                "label": one.label,
                "predicted": one.predicted,
                "probability": one.probability,
                "options": json.dumps(dict(score.settings), sort_keys=True, default=str),
                "better": score.better,
                "value": value if math.isfinite(value) else None,
                "degenerate": bool(score.degenerate[place]),
                "x": None if curve is None else curve.x.tolist(),
                "y": None if curve is None else curve.y[place].tolist(),
                "meaning": None if curve is None else curve.meaning,
                "across": None if curve is None else curve.across,
                "counts": None if score.counts is None else score.counts[place].flatten().tolist(),
                "forwards": score.cost.forwards,
                "backwards": score.cost.backwards,
                "seconds": score.cost.seconds / len(seen),
                "note": "; ".join(score.notes) or None,
            }
        )
    return found


def attempted(worker: Worker, unit: Unit) -> tuple[list[Row], str | None]:
    """Rows, or the sentence that says why there are none: one unit that fails must not end the others."""
    try:
        return worker.rows(unit), None
    except ClairError as error:
        return [], str(error)
    except Exception as error:  # a model of anybody's may raise anything, and memory may run out
        *_, last = traceback.extract_tb(error.__traceback__)
        place = f"{Path(last.filename).name}, line {last.lineno}"  # a bug must be found, too
        return [], f"{type(error).__name__}: {error} ({place})"
