"""The helper that all comparisons of numbers use: what it lets through, and what it does not."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.rounding import DEFAULT_GROWTH, assert_same, growth, magnified, rounding_bound, same

EPS = torch.finfo(torch.float64).eps


def test_the_bound_is_eps_times_magnitude_times_growth() -> None:
    assert rounding_bound(3.0, growth(2, 5)) == EPS * 3 * 10
    assert rounding_bound(3.0, 10, torch.float32) == 2.0**-23 * 3 * 10


@pytest.mark.parametrize(("steps", "equal"), [(0.9, True), (1.1, False)])
def test_differences_up_to_the_bound_are_rounding(steps: float, equal: bool) -> None:
    expected = torch.tensor([4.0, -8.0], dtype=torch.float64)
    actual = expected + steps * rounding_bound(8.0, 100)
    assert same(actual, expected, growth=100) == equal
    assert same(actual, expected, growth=50, magnitude=16) == equal


def test_float32_is_taken_from_the_coarser_tensor_and_refused_where_float64_is_named() -> None:
    double = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    single = double.float()
    assert same(single, double, growth=1)
    assert not same(single.double(), double)
    with pytest.raises(AssertionError, match="expected float64"):
        assert_same(single, double, dtype=torch.float64)


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        ([1.0, 2.0], [1.0], "shapes"),
        ([1.0, math.nan], [1.0, 2.0], "NaN in different places"),
        ([1.0, math.inf], [1.0, -math.inf], "infinities in different places"),
        ([1.0, 2.0], [1.0, 2.1], r"largest difference 0\.1, rounding explains"),
    ],
)
def test_what_differs_is_named(actual: list[float], expected: list[float], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        assert_same(actual, expected)


def test_nan_and_infinity_equal_themselves() -> None:
    assert_same([math.nan, math.inf, 1.0], [math.nan, math.inf, 1.0])
    assert_same([math.nan], [math.nan])


def test_sums_that_cancel_are_measured_by_float32() -> None:
    """(1 + x) - 1 loses what 1 is larger than x: its rounding is that of 1, not that of x."""
    x = torch.tensor([1e-6 / 3], dtype=torch.float64)
    cancelled, single = (1 + x) - 1, (1 + x.float()) - 1
    assert not same(cancelled, x, growth=8)
    assert rounding_bound(magnified(single, x)) >= float((cancelled - x).abs())
    assert rounding_bound(magnified(single, x)) < 1e-9 * 2**8
    assert magnified(x.float(), x) <= 1.1 * 2**8 / DEFAULT_GROWTH * float(x) + float(x)
