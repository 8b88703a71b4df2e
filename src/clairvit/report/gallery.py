"""Gallery: images that are worth a look, explained again by the study's own model."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from clairvit.bench.plan import Study, settings_of
from clairvit.bench.worker import Worker
from clairvit.data.dataset import ImageDataset
from clairvit.errors import ClairError
from clairvit.methods.explain import compare
from clairvit.methods.explanation import Explanation
from clairvit.metrics.score import Prediction
from clairvit.models.images import Batch
from clairvit.models.model import Model
from clairvit.plotting.colour import Array, scale_of
from clairvit.plotting.labels import named
from clairvit.plotting.overlay import numbers, overlay, photo_of
from clairvit.report.blocks import Figure, Tile
from clairvit.report.numbers import places_for, short
from clairvit.report.ranking import turned
from clairvit.report.study_results import Findings

MOST_METHODS = 6  # tiles beside the photo
SIDE = 176  # pixels of a tile
QUALITY = 82
Opener = Callable[[Study], Worker]


@dataclass(frozen=True, eq=False)
class Source:
    """The model and images that findings are about."""

    study: Study
    model: Model
    dataset: ImageDataset


@dataclass(frozen=True)
class Example:
    """An image and why it is shown."""

    image: str
    reasons: tuple[str, ...]


def find_source(findings: Findings, studies: Sequence[Study], open_worker: Opener) -> Source | str:
    """Load what findings are about; or the sentence that says why this cannot be done."""
    fitting = [
        (study, place)
        for study in studies
        if settings_of(study) == findings.settings
        for place, wish in enumerate(study.data)
        if wish.spec == findings.data
    ]
    why = "no study in the store names this data"
    for study, place in fitting:
        worker = open_worker(study)
        for model in range(len(study.models)):
            try:
                if worker.hash_of(model) == findings.model_hash:
                    return Source(study, worker.model(model), worker.dataset(place))
                why = f"{study.models[model].spec} has other weights now than when the study was run"
            except (ClairError, OSError, RuntimeError, ValueError) as error:  # a report goes on without pictures
                why = str(error)
    return why


def pick(findings: Findings) -> list[Example]:
    """Best and worst for the leading method, most disagreement between methods, surest right and wrong answers."""
    metric, methods = findings.key_metric, findings.methods
    if metric is None or not methods:
        return []
    reasons: dict[str, list[str]] = {}

    def add(images: Iterable[str], reason: str) -> None:
        for image in images:
            reasons.setdefault(image, []).append(reason)

    own = _values(findings, methods[0], metric)
    order = sorted(own, key=lambda image: (-own[image], image))
    count = min(2, len(order) // 2) or min(1, len(order))
    add(order[:count], f"best {metric} of {methods[0]}")
    if len(order) > 1:
        add(order[::-1][:count], f"worst {metric} of {methods[0]}")
        spread = _spreads(findings, metric)
        add(sorted(spread, key=lambda image: (-spread[image], image))[:2], f"methods disagree most by {metric}")
    known = [one for one in findings.scores.seen if one.label is not None]
    sure = [
        (one.probability, one) for one in known if one.probability is not None
    ]  # raw scores are not sure of a class
    surest = [one for _, one in sorted(sure, key=lambda pair: (-pair[0], pair[1].image))]
    add([one.image for one in surest if one.predicted == one.label][:1], "surest right prediction")
    add([one.image for one in surest if one.predicted != one.label][:2], "surest wrong prediction")
    return [Example(image, tuple(why)) for image, why in reasons.items()]


def _values(findings: Findings, method: str, metric: str) -> dict[str, float]:
    """Image -> value, turned so that more is better."""
    score = findings.scores.get((method, metric))
    if score is None:
        return {}
    pairs = zip(score.names, score.values.tolist(), strict=True)
    return {image: turned(score, value) for image, value in pairs if math.isfinite(value)}


def _spreads(findings: Findings, metric: str) -> dict[str, float]:
    """Image -> the standard deviation over methods; only where there are two or more."""
    by_image: dict[str, list[float]] = {}
    for method in findings.methods:
        for image, value in _values(findings, method, metric).items():
            by_image.setdefault(image, []).append(value)
    return {image: float(np.std(values)) for image, values in by_image.items() if len(values) > 1}


def show(findings: Findings, examples: Sequence[Example], source: Source) -> tuple[list[Figure], list[str]]:
    """A row of pictures for each example, and sentences on those that cannot be shown."""
    figures, missing = [], []
    seen = {one.image: one for one in findings.scores.seen}
    places = {name: place for place, name in enumerate(source.dataset.names)}
    methods = list(findings.methods[:MOST_METHODS])
    for example in examples:
        if example.image not in places:
            missing.append(f"{findings.shown(example.image)} is no longer in {findings.data}.")
            continue
        try:
            if source.dataset.mark(places[example.image]) not in findings.marks[example.image]:
                missing.append(
                    f"{findings.shown(example.image)} is not shown: its picture, mask or class is not the one that was "
                    "scored."
                )
                continue
            figures.append(_figure(findings, example, seen[example.image], source, places[example.image], methods))
        except (ClairError, OSError) as error:
            missing.append(f"{findings.shown(example.image)} cannot be shown: {error}")
    return figures, missing


def _figure(
    findings: Findings, example: Example, seen: Prediction, source: Source, place: int, methods: Sequence[str]
) -> Figure:
    model = source.model
    pixels = source.dataset.read(place, model).pixels[None].to(model.device, model.dtype)
    target = seen.label if source.study.target == "label" else None
    batch = Batch(pixels, (example.image,), single=False)
    maps = compare(model, batch, methods, target, seed=source.study.seed, skip=True)
    photo = photo_of(pixels[0], model.preprocess)
    tiles = [
        Tile(
            data_uri(photo),
            f"The photo {findings.shown(example.image)} as the model sees it",
            "photo",
            _said(findings, seen),
        )
    ]
    metric = findings.key_metric or ""
    own = {method: _value(findings, method, metric, example.image) for method in methods}
    digits = places_for(own.values())
    for method, explanation in maps.items():
        tiles.append(_tile(findings.shown(example.image), method, explanation, photo, short(own[method], digits)))
    said = "; ".join(example.reasons)
    return Figure(f"{findings.shown(example.image)}: {said}.", tiles=tuple(tiles))


def _said(findings: Findings, seen: Prediction) -> str:
    """'Beagle 92% ✓' or 'Beagle 92%, is Pug'"""
    guess = named(findings.class_name(seen.predicted), seen.probability)
    if seen.label is None:
        return guess
    return f"{guess} ✓" if seen.label == seen.predicted else f"{guess}, is {findings.class_name(seen.label)}"


def _value(findings: Findings, method: str, metric: str, image: str) -> float:
    score = findings.scores.get((method, metric))
    if score is None or image not in score.names:
        return math.nan
    return float(score.values[score.names.index(image)])


def _tile(image: str, method: str, explanation: Explanation, photo: Array, value: str) -> Tile:
    values = numbers(explanation.maps[0])
    picture = overlay(photo, values, scale_of(values, explanation.signed))
    what = f"Map of {method} for {explanation.targets[0]} on {image}"
    return Tile(data_uri(picture), what, method, value)


def data_uri(picture: Array) -> str:
    """[H, W, 3] from 0 to 1 -> a small JPEG in the page itself."""
    image = Image.fromarray((picture * 255).round().astype(np.uint8))
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
