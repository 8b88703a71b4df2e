"""Correctness: the scores of images whose class the model gets right, and of those it gets wrong (FocusViT, 4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clairvit.metrics.confidence_intervals import FEWEST, LEVEL
from clairvit.metrics.score import Prediction, Score
from clairvit.papers.comparison import NamedScores
from clairvit.papers.paper import Measure, Paper


@dataclass(frozen=True)
class GroupMean:
    """The mean of some images, in the paper's unit; NaN where none of them has a score."""

    mean: float
    error: float  # standard error; NaN of fewer than two
    images: int


@dataclass(frozen=True)
class CorrectnessSplit:
    """One method by one measure, on images that are classified rightly and on those that are not."""

    method: str
    measure: str
    right: GroupMean
    wrong: GroupMean
    interval: tuple[float, float]  # 95 %, of the difference right − wrong; NaN below `FEWEST` images in either

    @property
    def differs(self) -> bool:
        """Return whether the interval of the difference leaves out 0."""
        low, high = self.interval
        return low > 0 or high < 0


def split_by_correctness(
    paper: Paper, scores: NamedScores, predictions: Sequence[Prediction]
) -> tuple[CorrectnessSplit, ...]:
    """Return every score for right and for wrong predictions; nothing where no true class is known.

    Images whose class is not known, or is none of the model's, are in neither group.
    """
    correct = {
        prediction.image: prediction.predicted == prediction.label
        for prediction in predictions
        if prediction.label is not None
    }
    if not correct:
        return ()
    return tuple(
        _split(entry.name, measure, scores[entry.name, measure.name], correct)
        for measure in paper.measures
        for entry in paper.methods_and_baselines
        if (entry.name, measure.name) in scores
    )


def _split(method: str, measure: Measure, score: Score, correct: dict[str, bool]) -> CorrectnessSplit:
    right, wrong = (
        _group(measure, score.take([row for row, name in enumerate(score.names) if correct.get(name) is kind]))
        for kind in (True, False)
    )
    return CorrectnessSplit(method, measure.name, right, wrong, welch_interval(right, wrong))


def _group(measure: Measure, score: Score) -> GroupMean:
    if not score.n_valid:
        return GroupMean(math.nan, math.nan, 0)
    return GroupMean(measure.as_printed(score.mean), abs(measure.factor) * score.standard_error, score.n_valid)


def welch_interval(first: GroupMean, second: GroupMean) -> tuple[float, float]:
    """Return Welch's 95 % interval of the difference of two means of different images.

    d ± t s with s² = s₁² + s₂² and the degrees of freedom s⁴ / (s₁⁴ / (n₁ − 1) + s₂⁴ / (n₂ − 1)).
    """
    from scipy.stats import t as student

    if min(first.images, second.images) < FEWEST:
        return math.nan, math.nan
    difference = first.mean - second.mean
    variances = first.error**2, second.error**2
    total = sum(variances)
    if total == 0:
        return difference, difference
    freedom = total**2 / sum(v**2 / (group.images - 1) for v, group in zip(variances, (first, second), strict=True))
    reach = float(student.ppf(1 - LEVEL / 2, freedom)) * math.sqrt(total)
    return difference - reach, difference + reach
