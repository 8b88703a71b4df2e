"""Right and wrong predictions: the means are those of the images, the interval is scipy's Welch interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind

from clairvit.metrics.score import Prediction, Score
from clairvit.papers.correctness import GroupMean, split_by_correctness, welch_interval
from clairvit.papers.paper import find_paper

COUNT = 20
VALUES = np.random.default_rng(0).normal(size=COUNT)


def score(values: np.ndarray) -> Score:
    count = len(values)
    return Score(
        "iou",
        "rollout",
        torch.from_numpy(values),
        "higher",
        (-math.inf, math.inf),
        torch.zeros(count).bool(),
        tuple(map(str, range(count))),
        "model",
    )


def predictions(labels: list[int | None]) -> list[Prediction]:
    """The model always says class 0."""
    return [Prediction(str(row), 0, 0.9, label) for row, label in enumerate(labels)]


def test_means_errors_and_interval_are_those_of_the_two_groups() -> None:
    paper = find_paper("joita")  # per cent: the factor is 100
    labels: list[int | None] = [row % 3 and 1 for row in range(COUNT)]  # every third one is right
    (split,) = split_by_correctness(paper, {("Classical Rollout", "mIoU"): score(VALUES)}, predictions(labels))
    right, wrong = (100 * VALUES[[label == kind for label in labels]] for kind in (0, 1))
    for group, values in ((split.right, right), (split.wrong, wrong)):
        assert group.images == len(values)
        assert group.mean == pytest.approx(values.mean(), abs=1e-9)
        assert group.error == pytest.approx(values.std(ddof=1) / math.sqrt(len(values)), abs=1e-9)
    interval = ttest_ind(right, wrong, equal_var=False).confidence_interval()
    assert split.interval == pytest.approx((interval.low, interval.high), abs=1e-8)
    assert split.differs == (interval.low > 0 or interval.high < 0)


def test_undefined_values_and_unknown_classes_are_in_no_group() -> None:
    values = VALUES.copy()
    values[0] = math.nan
    labels: list[int | None] = [0] * 10 + [1] * 6 + [None] * 4
    (split,) = split_by_correctness(
        find_paper("joita"), {("Classical Rollout", "mIoU"): score(values)}, predictions(labels)
    )
    assert (split.right.images, split.wrong.images) == (9, 6)


def test_without_true_classes_there_is_no_split() -> None:
    scores = {("Classical Rollout", "mIoU"): score(VALUES)}
    assert split_by_correctness(find_paper("joita"), scores, predictions([None] * COUNT)) == ()


def test_few_images_have_no_interval() -> None:
    (split,) = split_by_correctness(
        find_paper("joita"), {("Classical Rollout", "mIoU"): score(VALUES)}, predictions([0] * 15 + [1] * 5)
    )
    assert math.isnan(split.interval[0])
    assert not split.differs
    none_wrong = split_by_correctness(
        find_paper("joita"), {("Classical Rollout", "mIoU"): score(VALUES)}, predictions([0] * COUNT)
    )
    assert none_wrong[0].wrong.images == 0
    assert math.isnan(none_wrong[0].wrong.mean)


def test_equal_values_differ_by_exactly_their_means() -> None:
    assert welch_interval(GroupMean(3.0, 0.0, 8), GroupMean(1.0, 0.0, 8)) == (2.0, 2.0)
