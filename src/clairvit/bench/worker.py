"""Worker: computes the rows of a unit, in this process, in another one or on another machine."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clairvit._version import __version__
from clairvit.bench.plan import Study, Unit, image_hashes, settings_of
from clairvit.bench.store import Row
from clairvit.data.dataset import ImageDataset
from clairvit.data.hashing import weights_hash
from clairvit.errors import ClairError
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.own_code import Codes, codes_of
from clairvit.metrics.score import Prediction, Score, Scores
from clairvit.models.model import Model
from clairvit.plugins import Import, import_code


@dataclass(eq=False)
class Worker:
    """Keeps the models and data sets of a study, each opened when it is first needed; indices are the study's."""

    study: Study
    device: str | None = None
    batch_size: int | None = None
    models: dict[int, Model] = field(default_factory=dict)
    datasets: dict[int, ImageDataset] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)  # of the models
    codes: Codes | None = None  # of own methods and metrics
    imports: tuple[Import, ...] = ()  # what registers them

    def model(self, index: int) -> Model:
        if index not in self.models:
            self.models[index] = self.study.models[index].load(self.device)
        return self.models[index]

    def dataset(self, index: int) -> ImageDataset:
        if index not in self.datasets:
            self.datasets[index] = self.study.data[index].open(self.study.seed)
        return self.datasets[index]

    def open(self) -> None:
        """Open all data sets, then load all models."""
        for index in range(len(self.study.data)):
            self.dataset(index)
        for index in range(len(self.study.models)):
            self.model_hash(index)

    def model_hash(self, index: int) -> str:
        """Return the hash of a model's weights, preprocessing and activation."""
        if index not in self.hashes:
            self.hashes[index] = weights_hash(self.model(index))
        return self.hashes[index]

    def rows(self, unit: Unit) -> list[Row]:
        """Compute a unit. An image that cannot be read and a method that does not fit have rows with a note."""
        import_code(self.imports)
        model, dataset = self.model(unit.model), self.dataset(unit.data)
        self._check_hashes(unit, model, dataset)
        study = self.study
        errors: dict[str, str] = {}  # by image
        scores = evaluate(
            model,
            dataset.take(unit.rows),
            [study.method_specs[text] for text in unit.methods],
            [study.metric_specs[text] for text in unit.metrics],
            target=study.target,
            normalize=study.maps,
            baselines=False,
            skip=True,
            on_error=lambda name, error: errors.update({name: str(error)}),
            seed=study.seed,
            batch_size=self.batch_size,
            autocast=study.autocast,
        )
        shared = {
            "unit": unit.key,
            "model": model.name,
            "model_hash": self.model_hash(unit.model),
            "data": study.data[unit.data].spec,
            "settings": settings_of(study),
            "among": unit.image_set or None,
            "version": __version__,
        }
        hashes = {dataset.names[row]: hashed for row, hashed in zip(unit.rows, unit.image_hashes, strict=True)}
        return [{**shared, **row} for row in _rows(unit, scores, hashes, errors)]

    def _check_hashes(self, unit: Unit, model: Model, dataset: ImageDataset) -> None:
        """Raise `ClairError` if model, images or own code changed under the same name since the study was planned."""
        if self.codes is None:  # kept, because running may fill a cache that a method has as a global
            self.study = study = self.study.resolved()
            self.codes = codes_of(study.method_specs.values(), study.metric_specs.values())
        here = self.codes.among(unit.methods, unit.metrics)
        others = [text for pair in zip(here, unit.codes, strict=True) for text, _ in set(pair[0]) ^ set(pair[1])]
        if others:
            raise ClairError(
                f"The code of '{min(others)}' is another one here than where the study was planned; expected the same "
                "file of own methods and metrics everywhere, whose constants stay as they are. Start the study again."
            )
        if self.model_hash(unit.model) != unit.weights:
            raise ClairError(
                f"{model.name} has other weights here than where the study was planned; expected the same file or "
                "version of the model everywhere."
            )
        if max(unit.rows) >= len(dataset):
            raise ClairError(
                f"{self.study.data[unit.data].spec} has {len(dataset)} images here, fewer than where the study was "
                "planned; expected the same files everywhere."
            )
        images = dataset.take(unit.rows)
        for row, present, hashed in zip(unit.rows, image_hashes(images), unit.image_hashes, strict=True):
            if present != hashed:
                raise ClairError(
                    f"{dataset.names[row]} is not the image that it was when the study was planned; expected files "
                    "that stay as they are. Start the study again."
                )


def compute_rows(worker: Worker, unit: Unit) -> tuple[list[Row], str | None]:
    """Return the rows of a unit, or no rows and the error: one unit that fails must not end the others."""
    try:
        return worker.rows(unit), None
    except ClairError as error:
        return [], str(error)
    except Exception as error:  # a user's model may raise anything, and memory may run out
        *_, last = traceback.extract_tb(error.__traceback__)
        return [], f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def _rows(unit: Unit, scores: Scores, hashes: Mapping[str, str], errors: Mapping[str, str]) -> list[Row]:
    """Return one row per metric, method and image; `hashes` and `errors` are by image."""
    rows: list[Row] = []
    for metric in unit.metrics:
        for method in unit.methods:
            names = {"method": method, "metric": metric, "code": unit.codes.of(method, metric)}
            score = scores.get((method, metric))
            reason = scores.skipped.get(method, "") if score is None else ""
            for image, hashed in hashes.items():
                if image in errors or score is None:
                    note = errors.get(image) or reason
                    rows.append({**names, "image": image, "image_hash": hashed, "note": note})
            if score is not None:
                rows += [{**names, **row} for row in _score_rows(score, scores.predictions, hashes)]
    return rows


def _score_rows(score: Score, predictions: Sequence[Prediction], hashes: Mapping[str, str]) -> list[Row]:
    """Return a row for each image that could be read."""
    rows = []
    curve = score.curve
    for index, prediction in enumerate(predictions):
        value = float(score.values[index])
        rows.append(
            {
                "image": prediction.image,
                "image_hash": hashes[prediction.image],
                "label": prediction.label,
                "predicted": prediction.predicted,
                "probability": prediction.probability,
                "options": json.dumps(dict(score.settings), sort_keys=True, default=str),
                "better": score.better,
                "value": value if math.isfinite(value) else None,
                "degenerate": bool(score.degenerate[index]),
                "x": None if curve is None else curve.x.tolist(),
                "y": None if curve is None else curve.y[index].tolist(),
                "meaning": None if curve is None else curve.meaning,
                "across": None if curve is None else curve.across,
                "counts": None if score.counts is None else score.counts[index].flatten().tolist(),
                "forwards": score.cost.forwards,
                "backwards": score.cost.backwards,
                "seconds": score.cost.seconds / len(predictions),
                "note": "; ".join(score.notes) or None,
            }
        )
    return rows
