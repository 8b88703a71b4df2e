"""Example images of a report, chosen by their scores and explained again by the study's own model."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from clairvit.numerics import percent
from clairvit.plotting.labels import decimals_for, format_number
from clairvit.plotting.overlay import Array, blend, denormalised_photo, overlay, scale_of, to_numpy
from clairvit.plotting.style import LEGEND_WORDS, PlotStyle
from clairvit.reports.blocks import Badge, ColourBars, Example, Tile
from clairvit.reports.ranking import higher_is_better
from clairvit.reports.study_results import StudyResults

MOST_METHODS = 6  # tiles next to the photo
TILE_SIZE = 176  # pixels
JPEG_QUALITY = 82
BAR_STOPS = 9  # colours of a legend
WorkerFactory = Callable[[Study], Worker]


@dataclass(frozen=True, eq=False)
class Source:
    """The model and images of a study."""

    study: Study
    model: Model
    dataset: ImageDataset


@dataclass(frozen=True)
class SelectedImage:
    """An image and why it is shown."""

    image: str
    reasons: tuple[str, ...]


def load_source(results: StudyResults, studies: Sequence[Study], open_worker: WorkerFactory) -> Source | str:
    """Return the model and images of some results; or the sentence that says why they cannot be loaded."""
    candidates = [
        (study, data_index)
        for study in studies
        if settings_of(study) == results.settings
        for data_index, config in enumerate(study.data)
        if config.spec == results.data
    ]
    reason = "no study in the store names this data"
    for study, data_index in candidates:
        worker = open_worker(study)
        for model in range(len(study.models)):
            try:
                if worker.model_hash(model) == results.model_hash:
                    return Source(study, worker.model(model), worker.dataset(data_index))
                reason = f"{study.models[model].spec} has other weights now than when the study was run"
            except (ClairError, OSError, RuntimeError, ValueError) as error:  # a report goes on without images
                reason = str(error)
    return reason


def select_examples(results: StudyResults) -> list[SelectedImage]:
    """Return the images on which the best method does best and worst, methods disagree, or the model is surest."""
    metric, methods = results.key_metric, results.methods
    if metric is None or not methods:
        return []
    reasons: dict[str, list[str]] = {}

    def add(images: Iterable[str], reason: str) -> None:
        for image in images:
            reasons.setdefault(image, []).append(reason)

    values = _image_values(results, methods[0], metric)
    order = sorted(values, key=lambda image: (-values[image], image))
    count = min(2, len(order) // 2) or min(1, len(order))
    add(order[:count], f"best {metric} of {methods[0]}")
    if len(order) > 1:
        add(order[::-1][:count], f"worst {metric} of {methods[0]}")
        spread = _standard_deviations(results, metric)
        add(sorted(spread, key=lambda image: (-spread[image], image))[:2], f"methods disagree most by {metric}")
    by_confidence = _by_confidence(results.scores.predictions)
    add(
        [prediction.image for prediction in by_confidence if prediction.predicted == prediction.label][:1],
        "surest right prediction",
    )
    add(
        [prediction.image for prediction in by_confidence if prediction.predicted != prediction.label][:2],
        "surest wrong prediction",
    )
    return [SelectedImage(image, tuple(image_reasons)) for image, image_reasons in reasons.items()]


def _by_confidence(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the predictions whose true class and probability are known, the surest first."""
    labelled = [
        (prediction.probability, prediction)
        for prediction in predictions
        if prediction.label is not None and prediction.probability is not None
    ]
    return [prediction for _, prediction in sorted(labelled, key=lambda pair: (-pair[0], pair[1].image))]


def _image_values(results: StudyResults, method: str, metric: str) -> dict[str, float]:
    """Return image -> value, oriented so that higher is better."""
    score = results.scores.get((method, metric))
    if score is None:
        return {}
    pairs = zip(score.names, score.values.tolist(), strict=True)
    return {image: higher_is_better(score, value) for image, value in pairs if math.isfinite(value)}


def _standard_deviations(results: StudyResults, metric: str) -> dict[str, float]:
    """Return image -> the standard deviation over methods, where two or more have a value."""
    by_image: dict[str, list[float]] = {}
    for method in results.methods:
        for image, value in _image_values(results, method, metric).items():
            by_image.setdefault(image, []).append(value)
    return {image: float(np.std(values)) for image, values in by_image.items() if len(values) > 1}


def draw_examples(
    results: StudyResults, selected: Sequence[SelectedImage], source: Source
) -> tuple[list[Example], list[str]]:
    """Return a row of images per selected image, and sentences on those that cannot be shown."""
    examples, problems = [], []
    rows = {name: row for row, name in enumerate(source.dataset.names)}
    for example in selected:
        name = results.short_name(example.image)
        try:
            if example.image not in rows:
                problems.append(f"{name} is no longer in {results.data}.")
            elif source.dataset.content_hash(rows[example.image]) not in results.image_hashes[example.image]:
                problems.append(f"{name} is not shown: its picture, mask or class is not the one that was scored.")
            else:
                examples.append(_example(results, example, source, rows[example.image]))
        except (ClairError, OSError) as error:
            problems.append(f"{name} cannot be shown: {error}")
    return examples, problems


def _example(results: StudyResults, selected: SelectedImage, source: Source, row: int) -> Example:
    """Return the photo and the maps of the best methods, computed with the study's target and seed."""
    model, name = source.model, results.short_name(selected.image)
    methods = list(results.methods[:MOST_METHODS])
    prediction = next(prediction for prediction in results.scores.predictions if prediction.image == selected.image)
    pixels = source.dataset.read(row, model).pixels[None].to(model.device, model.dtype)
    target = prediction.label if source.study.target == "label" else None
    batch = Batch(pixels, (selected.image,), single=False)
    explanations = compare(
        model, batch, list(map(results.specs.method, methods)), target, seed=source.study.seed, skip=True
    )
    photo = denormalised_photo(pixels[0], model.preprocess)
    values = {method: _value(results, method, selected.image) for method in methods}
    decimals = decimals_for(values.values())
    alternative = f"The photo {name} as the model sees it"
    tiles = [Tile(data_uri(photo), alternative, "photo", _prediction_text(results, prediction))]
    tiles += [
        _map_tile(name, method, explanation, photo, format_number(values[method], decimals))
        for method, explanation in explanations.items()
    ]
    return Example(f"{name}: {'; '.join(selected.reasons)}.", tuple(tiles), _badge(explanations))


def _badge(explanations: Mapping[str, Explanation]) -> Badge | None:
    """Return how far to trust the map of the first method; None without maps."""
    for method, explanation in explanations.items():
        check = explanation.check()
        return Badge(check[0].badge_style, check[0].badge, f"Check of {method}: {check}")
    return None


def colour_bars(examples: Iterable[Example]) -> ColourBars:
    """Return the legends of the kinds of maps that are shown, in the colours that they have on a grey photo."""
    shown = {tile.diverging for example in examples for tile in example.tiles}
    return ColourBars(tuple((_bar_colours(kind), *LEGEND_WORDS[kind]) for kind in (True, False) if kind in shown))


def _bar_colours(signed: bool) -> tuple[str, ...]:
    values = np.linspace(-1.0 if signed else 0.0, 1.0, BAR_STOPS)[None]
    grey = np.full((1, BAR_STOPS, 3), 0.5)
    colours = blend(grey, values, scale_of(values, signed, PlotStyle(robust=0)))[0]
    return tuple(f"rgb({', '.join(str(round(255 * channel)) for channel in colour)})" for colour in colours.tolist())


def _prediction_text(results: StudyResults, prediction: Prediction) -> str:
    """Return 'Beagle 92 % ✓' or 'Beagle 92 %, is Pug', with spaces that do not break before '%' and '✓'."""
    probability = percent(prediction.probability).replace("%", "\u00a0%")
    text = f"{results.class_name(prediction.predicted)} {probability}".rstrip()
    if prediction.label is None:
        return text
    correct = prediction.label == prediction.predicted
    return f"{text}\u00a0✓" if correct else f"{text}, is {results.class_name(prediction.label)}"


def _value(results: StudyResults, method: str, image: str) -> float:
    """Return the value of the key metric on one image; NaN where there is none."""
    score = results.scores.get((method, results.key_metric or ""))
    if score is None or image not in score.names:
        return math.nan
    return float(score.values[score.names.index(image)])


def _map_tile(image: str, method: str, explanation: Explanation, photo: Array, value: str) -> Tile:
    values = to_numpy(explanation.maps[0])
    scale = scale_of(values, explanation.signed)
    alternative = f"Map of {method} for {explanation.targets[0]} on {image}"
    return Tile(data_uri(overlay(photo, values, scale)), alternative, method, value, scale.diverging)


def data_uri(picture: Array) -> str:
    """Return an image [H, W, 3] from 0 to 1 as a small JPEG inside a URI."""
    image = Image.fromarray((picture * 255).round().astype(np.uint8))
    image.thumbnail((TILE_SIZE, TILE_SIZE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
