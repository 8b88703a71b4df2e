"""Ranks against scipy, agreement counted by hand, claims by paired differences, the area of our own numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from clairvit.metrics.score import Score
from clairvit.papers.comparison import (
    Cell,
    ClaimResult,
    Row,
    agreement,
    agreements,
    compare_rows,
    evaluate_claims,
    measure_agreements,
    radar_radii,
    ranks,
)
from clairvit.papers.paper import Claim, Measure, MethodEntry, Paper, Table
from helpers.fixed_scores import fixed_score

NAN = math.nan


def score(method: str, metric: str, values: list[float], better: str = "higher") -> Score:
    return fixed_score(method, values, metric, better)


def preset(area: str | None = None, *claims: Claim) -> Paper:
    return Paper(
        *("toy", "Toy", "nobody", "none", "none", "3", "none"),
        methods=(MethodEntry("A", "rollout"), MethodEntry("B", "genatt"), MethodEntry("X", "legrad", extra=True)),
        measures=(
            Measure("up", "iou", 100),
            Measure("down", "deletion"),
            Measure("complement", "insertion", complement=True),
        ),
        tables=(Table("here", "Table 1", ("A", "B"), {"up": (10.0, 20.0), "down": (0.5, 0.2), "area": (0.0, 1.0)}),),
        gaps=(),
        claims=claims,
        area=area,
    )


OUR_SCORES = {
    ("A", "up"): score("rollout", "iou", [0.1, 0.2, 0.3] * 3),
    ("B", "up"): score("genatt", "iou", [0.2, 0.3, 0.5] * 3),
    ("X", "up"): score("legrad", "iou", [0.9, 0.9, 0.9] * 3),
    ("A", "down"): score("rollout", "deletion", [0.1, 0.2, 0.6] * 3, "lower"),
    ("B", "down"): score("genatt", "deletion", [0.4, 0.4, 0.4] * 3, "lower"),
    ("A", "complement"): score("rollout", "insertion", [0.1, 0.1, 0.4] * 3),
    ("B", "complement"): score("genatt", "insertion", [0.3, 0.5, 0.4] * 3),
}


def test_ranks_are_scipys() -> None:
    values = [0.3, 0.1, 0.3, 0.9, 0.1, 0.1]
    assert ranks(values, "lower") == rankdata(values).tolist()
    assert ranks(values, "higher") == rankdata([-value for value in values]).tolist()
    some = ranks([0.5, NAN, 0.2], "higher")
    assert some[0] == 1
    assert math.isnan(some[1])
    assert some[2] == 2, "what has no number takes no place"


def test_agreement_is_spearmans_and_counts_pairs() -> None:
    first, second = [1.0, 2.0, 3.0, 3.0, NAN], [10.0, 30.0, 20.0, 40.0, 5.0]
    correlation = agreement("m", "d", first, second)
    assert (correlation.methods, correlation.alike, correlation.pairs) == (4, 4, 5), (
        "one tie of six pairs; 2 against 3 is the other way"
    )
    assert correlation.rho == pytest.approx(spearmanr(first[:4], second[:4]).statistic, abs=1e-12)
    tied = agreement("m", "d", [1.0, 2.0], [3.0, 3.0])
    assert (tied.alike, tied.pairs) == (0, 0), "a tie is no order, neither in print nor here"
    assert agreement("m", "d", [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).rho == pytest.approx(-1)
    two = agreement("m", "d", [1.0, 2.0], [2.0, 1.0])
    assert (two.alike, two.pairs) == (0, 1)
    assert math.isnan(two.rho), "of two methods it could only be ±1; the pair says it already"
    assert math.isnan(agreement("m", "d", [1.0, 1.0, 1.0], [2.0, 1.0, 3.0]).rho)
    assert agreement("m", "d", [NAN, 1.0], [2.0, NAN]).methods == 0


def test_numbers_stand_beside_each_other_as_the_paper_writes_them() -> None:
    rows = {row.entry.name: row.cells for row in compare_rows(preset(), OUR_SCORES, preset().tables[0])}
    assert list(rows) == ["A", "B", "X", "random", "center"]
    cell = rows["A"]["up"]
    assert (cell.paper, cell.paper_rank, cell.our_rank, cell.images) == (10.0, 2, 2, 9)
    assert cell.ours == pytest.approx(20)
    assert cell.error == pytest.approx(100 * np.std([0.1, 0.2, 0.3] * 3, ddof=1) / math.sqrt(9))
    low, high = cell.interval
    assert 10 <= low <= 20 <= high <= 30
    assert rows["A"]["down"].our_rank == 1
    assert rows["A"]["down"].paper_rank == 2, "lower is better"
    turned = rows["B"]["complement"]
    assert turned.ours == pytest.approx(0.6)
    assert turned.interval[0] <= turned.ours <= turned.interval[1], "turned round, low stays below high"
    assert math.isnan(turned.paper)
    assert turned.our_rank == 1, "insertion should be high, so 1 − insertion low: 0.6 against 0.8"
    extra = rows["X"]["up"]
    assert extra.ours == pytest.approx(90)
    assert math.isnan(extra.our_rank), "it is not among the paper's methods"
    assert math.isnan(rows["random"]["up"].ours)


def test_agreement_with_the_papers_tables() -> None:
    by_measure = {entry.measure: entry for entry in agreements(preset(), compare_rows(preset(), OUR_SCORES, None))}
    assert set(by_measure) == {"up", "down"}, "of `turned` the paper has no numbers"
    assert (by_measure["up"].alike, by_measure["up"].pairs) == (1, 1)
    assert (by_measure["down"].alike, by_measure["down"].pairs) == (0, 1)


def test_the_area_of_ours() -> None:
    with_area = preset("area")
    rows = {row.entry.name: row.cells for row in compare_rows(with_area, OUR_SCORES, with_area.tables[0])}
    r = radar_radii(with_area, rows, ["A", "B"], printed=False)
    assert r == {"A": (0.0, 1.0, 0.0), "B": (1.0, 0.0, 1.0)}
    assert rows["B"]["area"].ours == pytest.approx(math.sin(2 * math.pi / 3) / 2)
    assert rows["A"]["area"].ours == 0
    assert (rows["A"]["area"].paper_rank, rows["A"]["area"].our_rank) == (2, 2)
    assert "area" not in rows["X"]
    assert radar_radii(with_area, rows, ["A", "X"], printed=False) == {}, "one whole method is none to compare"


def test_the_radar_of_the_paper_is_of_its_numbers() -> None:
    printed = Table("here", "Table 1", ("A", "B"), {"up": (10, 20), "down": (0.5, 0.2), "complement": (0.3, 0.9)})
    rows = {row.entry.name: row.cells for row in compare_rows(preset(), OUR_SCORES, printed)}
    assert radar_radii(preset(), rows, ["A", "B"], printed=True) == {"A": (0.0, 0.0, 1.0), "B": (1.0, 1.0, 0.0)}


def claim(winner: str, loser: str, *measures: str) -> Claim:
    return Claim("w", "s", ((winner, loser),), measures)


def claim_result_of(stated: Claim, area: str | None = None) -> ClaimResult:
    preset_of_claim = preset(area, stated)
    (claim_result,) = evaluate_claims(
        preset_of_claim, OUR_SCORES, compare_rows(preset_of_claim, OUR_SCORES, preset_of_claim.tables[0])
    )
    return claim_result


def test_claims_are_tested_by_paired_differences() -> None:
    true = claim_result_of(claim("B", "A", "up"))
    assert (true.verdict, true.true, true.surely, true.surely_not) == ("holds", 1, 1, 0), "0.1 to 0.2: all above 0"
    wrong = claim_result_of(claim("A", "B", "up"))
    assert (wrong.verdict, wrong.true, wrong.surely, wrong.surely_not) == ("does not hold", 0, 0, 1)
    unsure = claim_result_of(claim("A", "B", "down"))
    assert (unsure.verdict, unsure.surely, unsure.surely_not) == ("holds", 0, 0), (
        "0.3, 0.2, −0.2, three times: not known"
    )
    mixed = claim_result_of(claim("B", "A", "up", "down", "complement"))
    assert (mixed.verdict, mixed.true, mixed.comparisons) == ("holds in part", 2, 3)
    lacking = claim_result_of(claim("X", "A", "down"))
    assert (lacking.verdict, lacking.comparisons, lacking.missing) == ("cannot be said", 0, 1)
    area = claim_result_of(claim("B", "A", "area"), "area")
    assert (area.verdict, area.surely) == ("holds", 0), "an area has no interval"


def test_claims_are_tested_on_the_images_that_both_have() -> None:
    """A unit that failed leaves a method with fewer images than the others."""
    with_claim = preset(None, claim("B", "A", "up"))
    both = OUR_SCORES["B", "up"], OUR_SCORES["A", "up"]
    fewer = replace(both[0], values=both[0].values[1:], degenerate=both[0].degenerate[1:], names=both[0].names[1:])
    scores = {**OUR_SCORES, ("B", "up"): fewer}
    (claim_result,) = evaluate_claims(with_claim, scores, compare_rows(with_claim, scores, None))
    assert (claim_result.comparisons, claim_result.true, claim_result.surely) == (1, 1, 1), "0.1 and 0.2 ahead"


def test_measures_are_compared_by_the_ranks_they_give() -> None:
    first, second = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 3.0, 5.0, 4.0]
    rows = [
        Row(MethodEntry(str(k), "rollout"), {"up": Cell(NAN, 0.0, our_rank=a), "down": Cell(NAN, 0.0, our_rank=b)})
        for k, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    extra = Row(MethodEntry("x", "rollout", extra=True), {"up": Cell(NAN, 0.0), "down": Cell(NAN, 0.0)})
    (measured,) = measure_agreements(preset(), [*rows, extra])
    assert (measured.measure, measured.data, measured.methods, measured.alike, measured.pairs) == (
        "up",
        "down",
        5,
        8,
        10,
    )
    assert measured.rho == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)
    assert measure_agreements(preset(), rows[:4]) == []
