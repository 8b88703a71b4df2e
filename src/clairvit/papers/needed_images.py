"""Needed images: how many it takes to tell a difference that a paper prints from noise.

The paper prints two means and no variance. That of the paired differences is taken from the table itself, where it has
a number for each image, else from our scores of the same methods on our images.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from clairvit.metrics.confidence_intervals import FEWEST, LEVEL, standard_deviation
from clairvit.metrics.score import leads
from clairvit.papers.comparison import NamedScores
from clairvit.papers.paper import Measure, Paper, Table

POWER = 0.8  # the chance that so many images show the difference
MOST_IMAGES = 10**7  # beyond which no number is named


@dataclass(frozen=True)
class NeededImages:
    """A printed difference of two methods, and how many images would tell it from noise.

    Attributes:
        data: The table's data, as the paper calls it.
        measure: The measure.
        better, other: The paper's names of the methods, the one with the better printed value first.
        difference: The printed difference, in the unit of the paper, never negative.
        deviation: The standard deviation of the paired differences, in the same unit.
        estimated_on: Of the images that the deviation is from: "ours", or the "paper's".
        estimated_from: Their number.
        images: How many images show such a difference with 80 % power (paired t-test at 5 %); None: more than
            `MOST_IMAGES`, or no difference is printed.
        had: How many images the paper had, where it is known.
        next_in_rank: Whether no other method of the table lies between the two.
    """

    data: str
    measure: str
    better: str
    other: str
    difference: float
    deviation: float
    estimated_on: Literal["ours", "paper's"]
    estimated_from: int
    images: int | None
    had: int | None
    next_in_rank: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON values."""
        return dict(vars(self))


def images_for(difference: float, deviation: float) -> int | None:
    """Return the fewest images with which a two-sided paired t-test at 5 % has a power of 80 %; None above a limit.

    With n images t has n − 1 degrees of freedom and noncentrality √n · difference / deviation; never fewer than
    `FEWEST`, below which nothing is claimed.

    Args:
        difference: The true mean of the paired differences.
        deviation: Their standard deviation.
    """
    from scipy.stats import nct
    from scipy.stats import t as student

    if difference == 0 or math.isnan(difference) or math.isnan(deviation):
        return None
    if deviation == 0:
        return FEWEST
    effect = abs(difference) / deviation

    def power(images: int) -> float:
        critical = student.ppf(1 - LEVEL / 2, images - 1)
        return float(nct.sf(critical, images - 1, math.sqrt(images) * effect))

    most = FEWEST
    while power(most) < POWER:
        most *= 2
        if most > MOST_IMAGES:
            return None
    return FEWEST + bisect.bisect_left(range(FEWEST, most), POWER, key=power)


def needed_images(paper: Paper, scores: NamedScores) -> tuple[NeededImages, ...]:
    """Return every printed difference with the images that it needs; none where no deviation is known.

    Args:
        paper: The paper with its tables.
        scores: Ours, by the paper's names of methods and measures.
    """
    return tuple(
        entry
        for table in paper.tables
        for measure in paper.measures
        if measure.name in table.values
        for entry in _of_measure(table, measure, scores)
    )


def _of_measure(table: Table, measure: Measure, scores: NamedScores) -> Iterator[NeededImages]:
    """Yield the differences of every two methods of a table, by the rank of the better one."""
    sign = 1 if measure.better == "higher" else -1
    order = sorted(table.methods, key=lambda name: -sign * table.value(measure.name, name))
    had = len(table.images) or table.count
    for (place, better), (other_place, other) in itertools.combinations(enumerate(order), 2):
        spread = _deviation(table, measure, better, other, scores)
        if spread is None:
            continue
        deviation, source, count = spread
        difference = abs(table.value(measure.name, better) - table.value(measure.name, other))
        yield NeededImages(
            *(table.data, measure.name, better, other, difference, deviation, source, count),
            images=images_for(difference, deviation),
            had=had,
            next_in_rank=other_place == place + 1,
        )


def _deviation(
    table: Table, measure: Measure, first: str, second: str, scores: NamedScores
) -> tuple[float, Literal["ours", "paper's"], int] | None:
    """Return the standard deviation of the paired differences, whose images it is from, and how many."""
    printed = table.per_image.get(measure.name)
    if printed is not None:
        differences = np.subtract(printed[first], printed[second])
        return standard_deviation(differences), "paper's", len(differences)
    if (first, measure.name) not in scores or (second, measure.name) not in scores:
        return None
    differences = abs(measure.factor) * leads(scores[first, measure.name], scores[second, measure.name])
    if len(differences) < FEWEST:
        return None
    return standard_deviation(differences), "ours", len(differences)
