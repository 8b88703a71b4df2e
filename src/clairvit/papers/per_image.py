"""Scores of single images: ours of every method by every measure, and the paper's where it prints them by image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from clairvit.metrics.score import Prediction
from clairvit.papers.comparison import NamedScores
from clairvit.papers.paper import Paper, Table
from clairvit.targets.base import class_name


@dataclass(frozen=True)
class ImageScores:
    """One image: what the model says of it, and its scores by (method, measure), in the paper's unit."""

    image: str
    predicted: str  # the name of the class
    probability: float | None  # of it; None where the scores are raw
    label: str | None  # the true class
    values: Mapping[tuple[str, str], float]  # NaN where a score is undefined, or is not of this image
    printed_as: str | None  # the paper's image of this name
    printed: Mapping[tuple[str, str], float]  # the paper's numbers of it


def scores_by_image(
    paper: Paper, scores: NamedScores, predictions: Sequence[Prediction], labels: Sequence[str], table: Table | None
) -> tuple[ImageScores, ...]:
    """Return the scores of each image, in the order of the predictions.

    The paper's numbers of one of its images belong to a file of the same name: "Piggy bank.jpg" is its "piggy bank".
    """
    rows = {key: dict(zip(score.names, score.values.tolist(), strict=True)) for key, score in scores.items()}
    measures = {measure.name: measure for measure in paper.measures}
    printed_names = {} if table is None else {_letters(name): name for name in table.images}
    images = []
    for prediction in predictions:
        values = {
            (method, measure): measures[measure].as_printed(by_image.get(prediction.image, math.nan))
            for (method, measure), by_image in rows.items()
        }
        printed_as = printed_names.get(_letters(PurePath(prediction.image).stem))
        images.append(
            ImageScores(
                prediction.image,
                class_name(labels, prediction.predicted),
                prediction.probability,
                None if prediction.label is None else class_name(labels, prediction.label),
                values,
                printed_as,
                _printed(table, printed_as),
            )
        )
    return tuple(images)


def _printed(table: Table | None, image: str | None) -> dict[tuple[str, str], float]:
    """Return the numbers of one of the paper's images by (method, measure)."""
    if table is None or image is None:
        return {}
    place = table.images.index(image)
    return {(method, measure): row[place] for measure, rows in table.per_image.items() for method, row in rows.items()}


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())
