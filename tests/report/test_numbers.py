"""What a report ranks, against scipy, intervals of differences and sums by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from clairvit.metrics.confidence_intervals import mean_interval
from clairvit.metrics.score import Score, Scores, lead
from clairvit.plotting.labels import decimals_for, format_number, format_seconds
from clairvit.reports.blocks import Text
from clairvit.reports.ranking import FOCUSVIT, agreement, class_means, mean_ranks, radar_data, ranks
from clairvit.reports.sections import compare_with_random, radar_section, split_metrics
from clairvit.reports.study_results import StudyResults
from helpers.fixed_scores import fixed_score
from helpers.small_report import (
    noise,
)


def table(rows: dict[tuple[str, str], Score]) -> Scores:
    scores = Scores()
    scores.update(rows)
    return scores


def test_ranks_count_from_the_best_share_ties_and_leave_out_what_is_undefined() -> None:
    scores = table(
        {
            **{(m, "deletion"): fixed_score(m, [v]) for m, v in zip("abcd", (0.1, 0.3, 0.3, math.nan), strict=True)},
            **{
                (m, "iou"): fixed_score(m, [v], "iou", "higher")
                for m, v in zip("abcd", (0.1, 0.3, 0.2, 0.0), strict=True)
            },
        }
    )
    ranking = ranks(scores, "abcd", ("deletion", "iou"))
    np.testing.assert_array_equal(ranking, [[1, 3], [2.5, 1], [2.5, 2], [math.nan, 4]])
    np.testing.assert_array_equal(mean_ranks(ranking), [2, 1.75, 2.25, 4])


def test_a_lead_is_the_paired_difference_turned_so_that_more_is_better() -> None:
    ours, theirs = noise(9).tolist(), noise(9, seed=1).tolist()
    ours[2] = math.nan
    differences = np.delete(np.array(ours) - np.array(theirs), 2)
    gap, interval = differences.mean(), mean_interval(differences, 0)
    difference, (low, high) = lead(fixed_score("a", ours), fixed_score("b", theirs))
    assert difference == pytest.approx(-gap, rel=1e-12)
    assert (low, high) == (pytest.approx(-interval[1], rel=1e-9), pytest.approx(-interval[0], rel=1e-9))
    up, edges = lead(fixed_score("a", ours, better="higher"), fixed_score("b", theirs, better="higher"))
    assert up == pytest.approx(gap, rel=1e-12)
    assert edges == pytest.approx(interval, rel=1e-9)


def test_a_lead_is_over_images_of_the_same_name() -> None:
    from dataclasses import replace

    first = fixed_score("a", [0.1, 0.2, 0.3, 0.9])
    second = replace(fixed_score("b", [0.3, 0.2]), names=("2.jpg", "1.jpg"))
    assert lead(first, second)[0] == pytest.approx(0, abs=1e-15)
    assert math.isnan(lead(first, replace(second, names=("x", "y")))[0])


def test_a_lead_of_pooled_scores_is_the_difference_of_pooled_scores() -> None:
    counts = noise(7, 2, 2)
    first = fixed_score("a", [0.5] * 7, better="higher", counts=counts)
    second = fixed_score("b", [0.5] * 7, better="higher", counts=noise(7, 2, 2, seed=3))
    gap, (low, high) = lead(first, second)
    assert gap == pytest.approx(first.mean - second.mean, rel=1e-12)
    assert low < gap < high


def test_a_lead_of_pooled_scores_is_over_images_that_have_a_score() -> None:
    counts, others = noise(4, 1, 2), noise(4, 1, 2, seed=3)
    values = [0.5, math.nan, 0.5, 0.5]
    gap, _ = lead(
        fixed_score("a", values, better="higher", counts=counts),
        fixed_score("b", [0.5] * 4, better="higher", counts=others),
    )
    there = [0, 2, 3]
    parts = [matrix[there].sum(0)[0] for matrix in (counts, others)]
    assert gap == pytest.approx(float(parts[0][0] / parts[0][1] - parts[1][0] / parts[1][1]), rel=1e-12)


def test_compare_with_random_says_better_worse_or_unclear() -> None:
    random = fixed_score("random", [0.5, 0.6, 0.4, 0.55] * 2)
    scores = {
        "good": fixed_score("good", [0.1, 0.2] * 4),  # lower is better
        "bad": fixed_score("bad", [0.9, 0.8] * 4),
        "odd": fixed_score("odd", [0.1, 0.9] * 4),
        "random": random,
    }
    verdicts = compare_with_random(scores)
    assert {name: word for name, (word, _) in verdicts.items()} == {"good": "better", "bad": "worse", "odd": "unclear"}
    assert verdicts["good"][1] == 3 * 2 / 2**8, "the smallest p of 8 images, times 3 methods"
    assert compare_with_random({"good": scores["good"]}) == {}


def test_agreement_is_spearmans() -> None:
    values = noise(6, 3)
    rows = {
        (f"m{i}", metric): fixed_score(f"m{i}", [float(values[i, k])], metric, better)
        for i in range(6)
        for k, (metric, better) in enumerate((("deletion", "lower"), ("iou", "higher"), ("road", "higher")))
    }
    correlation = agreement(table(rows), [f"m{i}" for i in range(6)], ("deletion", "iou", "road"))
    turned = values.numpy() * np.array([-1, 1, 1])
    np.testing.assert_allclose(correlation, spearmanr(turned).statistic, rtol=1e-12)
    equal = {(f"m{i}", "iou"): fixed_score(f"m{i}", [0.5], "iou", "higher") for i in range(6)}
    same = agreement(table(rows | equal), [f"m{i}" for i in range(6)], ("deletion", "iou"))
    assert math.isnan(same[0, 1])
    assert same[0, 0] == 1
    assert np.isnan(agreement(table(rows), ["m0", "m1"], ("deletion", "iou"))).all(), "two methods can only give ±1"


def test_a_radar_is_focusvits_where_its_four_metrics_were_run() -> None:
    better = {"faithfulness-correlation": "higher", "mprt": "lower", "max-sensitivity": "lower", "sparseness": "higher"}
    values = {"a": (0.9, 0.1, 0.2, 0.5), "b": (0.1, 0.3, 0.4, 0.7), "c": (0.5, 0.2, 0.3, 0.6)}
    rows = {
        (method, metric): fixed_score(method, [value], metric, better[metric])
        for method, row in values.items()
        for metric, value in zip(better, row, strict=True)
    } | {(method, "deletion"): fixed_score(method, [0.5]) for method in values}
    radar = radar_data(table(rows), "abc", ("deletion", *better))
    assert not isinstance(radar, str)
    assert radar.axes == FOCUSVIT
    assert radar.focusvit
    r = np.array([[1, 1, 0, 1], [0, 0, 1, 0], [0.5, 0.5, 0.5, 0.5]])
    np.testing.assert_allclose(radar.r, r, atol=1e-12)
    np.testing.assert_allclose(radar.areas, [(1 + 0) * (1 + 1) / 2, 0, 0.5], atol=1e-12)


@pytest.mark.parametrize(("better", "warned"), [("higher", True), ("lower", False)])
def test_an_area_with_sparseness_the_other_way_round_is_not_focusvits(better: str, warned: bool) -> None:
    rows = {
        (method, metric): fixed_score(method, [place + column / 10], metric, better)
        for place, method in enumerate("ab")
        for column, metric in enumerate(FOCUSVIT)
    }
    section = radar_section(StudyResults("m", "0", "d", "s", table(rows), ("a", "b"), FOCUSVIT, {}, {}))
    words = section.blocks[0]
    assert isinstance(words, Text)
    assert "over FocusViT's four metrics" in words.text
    assert ("areas do not compare with its table" in words.text) == warned


def test_a_radar_leaves_out_methods_without_a_score_and_metrics_nobody_has() -> None:
    metrics = ("deletion", "insertion", "sparseness", "iou")
    rows = {(m, k): fixed_score(m, [float(noise(1, seed=ord(m) + i))], k) for m in "abc" for i, k in enumerate(metrics)}
    for m in "abc":
        rows[m, "iou"] = fixed_score(m, [math.nan], "iou")
    del rows["c", "insertion"]
    radar = radar_data(table(rows), "abc", metrics)
    assert not isinstance(radar, str)
    assert radar.axes == metrics[:3]
    assert radar.methods == ("a", "b")
    assert radar.left_out == ("c",)
    assert not radar.focusvit


def test_classes_pool_what_was_counted() -> None:
    counts = torch.tensor([[[1.0, 2.0]], [[3.0, 10.0]], [[5.0, 5.0]]], dtype=torch.float64)
    score = fixed_score("a", [0.5, 0.3, math.nan], counts=counts)
    means = class_means(score, {"0.jpg": 4, "1.jpg": 4, "2.jpg": 7})
    assert means[4] == (pytest.approx(4 / 12), 2)
    assert math.isnan(means[7][0])
    assert means[7][1] == 0


def test_numbers_are_printed_alike_in_a_column() -> None:
    assert [decimals_for([v]) for v in (0.0, 0.02, 0.5, 3.0, 31.0, 4000.0, 1e-9)] == [3, 4, 3, 3, 2, 0, 6]
    assert format_number(-0.0001, 3) == "0.000"
    assert format_number(-1.5, 2) == "−1.50"
    assert format_number(math.nan) == "–"
    assert format_number(2.5e9) == "2.50e+09"
    assert format_number(1e-7) == "1.00e−07"
    assert [format_seconds(v) for v in (0.4, 42.2, 200, 7500)] == ["0.40 s", "42 s", "3 min 20 s", "2 h 05 min"]


def test_metrics_are_split_into_tables_of_about_the_same_width() -> None:
    assert [len(part) for part in split_metrics("abcde")] == [3, 2]
    assert [len(part) for part in split_metrics("abcdefgh")] == [4, 4]
    assert [len(part) for part in split_metrics("abcdefghi")] == [3, 3, 3]
    assert split_metrics("") == []
