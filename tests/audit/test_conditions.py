"""Conditions: what is read from a text, and where it holds."""

from __future__ import annotations

import math

import pytest
import torch

from clairvit.audit.conditions import Condition
from clairvit.audit.expectation import QUANTITIES
from clairvit.errors import BadInput, UnknownName
from clairvit.metrics.confidence_intervals import mean_interval, share_interval

NAN = math.nan


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("inside >= 0.5", Condition("inside", ">=", 0.5, 1.0), "inside >= 0.5"),
        ("  Inside≥.5 ", Condition("inside", ">=", 0.5, 1.0), "inside >= 0.5"),
        ("inside >= 0.5 on 80%", Condition("inside", ">=", 0.5, 0.8), "inside >= 0.5 on 80 %"),
        ("lift > 1 on 0.25", Condition("lift", ">", 1.0, 0.25), "lift > 1 on 25 %"),
        (
            "fall_outside ≤ -1e-1 on 99.5 %",
            Condition("fall_outside", "<=", -0.1, 0.995),
            "fall_outside <= -0.1 on 99.5 %",
        ),
        ("mean excess_inside > 0", Condition("excess_inside", ">", 0.0, None), "mean excess_inside > 0"),
        ("mean inside_change < 0.02", Condition("inside_change", "<", 0.02, None), "mean inside_change < 0.02"),
    ],
)
def test_a_text_is_read(text: str, expected: Condition, shown: str) -> None:
    condition = Condition.parse(text, QUANTITIES)
    assert condition == expected
    assert str(condition) == shown
    assert Condition.parse(str(condition), QUANTITIES) == condition


@pytest.mark.parametrize(
    "text", ["", "inside", "inside = 0.5", "inside > area", "0.5 < inside", "mean inside > 0 on 80%"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"expected one such as 'inside >= 0\.5'"):
        Condition.parse(text, QUANTITIES)


@pytest.mark.parametrize("text", ["inside > 0 on 120%", "inside > 0 on 0%", "inside > 0 on 80"])
def test_a_share_lies_between_0_and_1(text: str) -> None:
    with pytest.raises(BadInput, match="such as 80%"):
        Condition.parse(text, QUANTITIES)


def test_an_unknown_quantity_is_named_with_what_is_meant() -> None:
    with pytest.raises(UnknownName, match=r"no quantity 'insid'; expected one of inside, .*Did you mean 'inside'"):
        Condition.parse("insid >= 0.5", QUANTITIES)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (">=", [False, True, True, False]),
        (">", [False, False, True, False]),
        ("<=", [True, True, False, False]),
        ("<", [True, False, False, False]),
    ],
)
def test_where_a_condition_holds(operator: str, expected: list[bool]) -> None:
    values = torch.tensor([0.25, 0.5, 0.75, NAN], dtype=torch.float64)
    assert Condition("inside", operator, 0.5).holds(values).tolist() == expected


@pytest.mark.parametrize(("held", "passed"), [(5, True), (4, True), (3, False)])
def test_a_share_of_images_is_enough(held: int, passed: bool) -> None:
    """4 of 5 are 80 % exactly, though 0.8 is no binary fraction; an undefined value does not hold."""
    values = torch.tensor([1.0] * held + [NAN] * (5 - held), dtype=torch.float64)
    result = Condition("inside", ">=", 0.5, 0.8).test(values)
    assert (result.passed, result.held, result.images, result.undefined) == (passed, held, 5, 5 - held)
    assert result.value == held / 5
    assert math.isnan(result.low), "fewer than 6 images"


def test_the_interval_of_a_share_is_stated() -> None:
    values = torch.tensor([1.0] * 7 + [0.0], dtype=torch.float64)
    result = Condition("inside", ">=", 0.5, 0.8).test(values)
    assert (result.low, result.high) == share_interval(7, 8)
    assert result.sentence == (
        "inside >= 0.5 on 80 %: passed, it holds on 7 of 8 images (87.5 %, 95 % interval 47.3 % to 99.7 %)."
    )


@pytest.mark.parametrize(
    ("operator", "level", "passed"),
    [(">", 0.0, True), (">", 1.0, False), ("<", 1.0, False), ("<", 9.0, True), ("<=", 0.5, False), (">=", 0.5, False)],
)
def test_a_mean_needs_its_whole_interval(operator: str, level: float, passed: bool) -> None:
    values = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 0.3, NAN], dtype=torch.float64)
    low, high = mean_interval(values[:7].numpy(), 0)
    assert 0 < low < 0.5 < high < 1.5, "what the cases take for granted"
    result = Condition("excess_inside", operator, level, None).test(values)
    assert (result.passed, result.undefined, result.held) == (passed, 1, None)
    assert (result.low, result.high) == (low, high)


def test_too_few_values_never_pass() -> None:
    values = torch.ones(5, dtype=torch.float64)
    result = Condition("excess_inside", ">", 0.0, None).test(values)
    assert not result.passed
    assert result.sentence.endswith("5 values are too few for an interval; expected 6 or more.")
    nothing = Condition("inside", ">", 0.0).test(values[:0])
    assert not nothing.passed
    assert "no image is left" in nothing.sentence
