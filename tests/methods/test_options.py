"""Ranges of options, declared in their types; presets of compat/ and discrepancies of methods, read from data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from clairvit.errors import BadInput, UnknownName
from clairvit.methods.registry import list_methods
from clairvit.methods.spec import resolve_method
from clairvit.option_types import Range, check_fields, check_range


def half_open(ratio: Annotated[float, Range(ge=0, lt=1, unit="of all", example=0.5)] = 0.0) -> float:
    return ratio


def optional(count: Annotated[int, Range(ge=2)] | None = None, name: str = "") -> int | None:
    return count


@dataclass(frozen=True)
class Checked:
    scale: Annotated[float, Range(gt=0, example=1)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize("value", [0, 0.0, 0.999])
def test_values_in_range_pass(value: float) -> None:
    check_range(half_open, "ratio", value)


@pytest.mark.parametrize("value", [-1e-9, 1, 1.0, float("nan"), float("inf")])
def test_values_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(BadInput, match=r"was given; expected 0 or more and below 1 of all, such as ratio=0\.5\.$"):
        check_range(half_open, "ratio", value)


def test_the_name_that_was_typed_is_shown() -> None:
    with pytest.raises(BadInput, match=r"^m=2 was given; .* such as m=0\.5\.$"):
        check_range(half_open, "ratio", 2, typed="m")


def test_ranges_inside_unions_and_options_without_one() -> None:
    check_range(optional, "count", None)
    check_range(optional, "name", "anything")
    with pytest.raises(BadInput, match=r"^count=1 was given; expected 2 or more\.$"):
        check_range(optional, "count", 1)


def test_fields_of_dataclasses() -> None:
    assert Checked(2.0).scale == 2.0
    with pytest.raises(BadInput, match=r"scale=0 was given; expected more than 0, such as scale=1"):
        Checked(0.0)


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Range(ge=1), "1 or more"),
        (Range(gt=0), "more than 0"),
        (Range(ge=0, le=1, unit="(a cosine)"), "from 0 to 1 (a cosine)"),
        (Range(gt=0, lt=1), "more than 0 and below 1"),
        (Range(gt=0, le=1), "more than 0 and at most 1"),
        (Range(ge=0, lt=1), "0 or more and below 1"),
    ],
)
def test_ranges_in_words(bounds: Range, text: str) -> None:
    assert str(bounds) == text


def test_discrepancies_are_one_line() -> None:
    texts = [method.caveats.discrepancies for method in list_methods()]
    assert sum(map(bool, texts)) > 40
    assert all("\n" not in text and "  " not in text for text in texts)


@pytest.mark.parametrize("method", ["gmar-l1", "gmar-l2", "gmar-l1(plus_mode=subnetwork)+plus", "gmar-l2+rollout"])
def test_gmars_alpha_is_the_residual_and_is_not_mixed_in_silence(method: str) -> None:
    """The paper's Π(Â + αI): `alpha` would compute α Â + (1 − α) I, off by a third of the largest value."""
    with pytest.raises(UnknownName, match=r"has no option 'alpha': GMAR's α weighs the residual.*type residual=0\.3"):
        resolve_method(method, alpha=0.3)
    assert "alpha" not in resolve_method(method).method.options
    assert "residual=0.3" in resolve_method(method.partition("(")[0].partition("+")[0], residual=0.3).text
