from __future__ import annotations

from pathlib import Path

import pytest

import clairvit as cv
from clairvit.cli.arguments import read_seconds, split_labels, split_methods, split_targets
from clairvit.errors import BadInput
from clairvit.methods.parsing import parse_spec

PETS = ("Bengal", "Egyptian Mau", "Wire-haired Pointer", "tabby, tabby cat")


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("rollout", ["rollout"]),
        ("rollout,genatt", ["rollout", "genatt"]),
        ("rollout(fusion=max,residual=0.5),genatt", ["rollout(fusion=max,residual=0.5)", "genatt"]),
        ("legrad(layers=(-2,-1))+last, ixg+plus", ["legrad(layers=(-2,-1))+last", "ixg+plus"]),
        (" a , ,b,a", ["a", "b"]),
    ],
)
def test_commas_inside_parentheses_belong_to_the_method(text: str, methods: list[str]) -> None:
    assert split_methods(text) == methods


@pytest.mark.parametrize("text", ["rollout(fusion=max,genatt", "rollout)", ")(", "", " , "])
def test_lists_that_cannot_be_read_say_what_to_type(text: str) -> None:
    with pytest.raises(BadInput, match=r"write e\.g\."):
        split_methods(text)


def test_targets_are_names_or_numbers() -> None:
    assert split_targets(["Egyptian Mau,Bengal", "3"], PETS) == ["Egyptian Mau", "Bengal", "3"]
    assert split_targets([], PETS) == []


def test_a_dash_is_part_of_a_name_and_never_a_contrast() -> None:
    assert split_targets(["Wire-haired Pointer"], PETS) == ["Wire-haired Pointer"]


def test_a_name_with_a_comma_may_be_written_out() -> None:
    assert split_targets(["Tabby, tabby cat"], PETS) == ["Tabby, tabby cat"]


def test_a_target_without_a_class_is_refused() -> None:
    with pytest.raises(BadInput, match=r"names no class; write e\.g\. --target"):
        split_targets([" , "], PETS)


@pytest.mark.parametrize("text", ["0,,1", "Bengal,", ",Sphynx", "Bengal, ,Sphynx"])
def test_an_empty_target_among_others_is_refused(text: str) -> None:
    """As of `-t "$FIRST,$SECOND"` with an unset variable."""
    with pytest.raises(BadInput, match=rf"--target '{text}' names nothing at one of its commas"):
        split_targets([text], PETS)


@pytest.mark.parametrize(
    "text", ["rollout(fusion=max,fusion=min)", "smooth(ixg, n=3, n=4)", "rollout(fusion=max, fusion=max)"]
)
def test_an_option_given_twice_is_refused(text: str) -> None:
    option = "n" if "n=3" in text else "fusion"
    with pytest.raises(BadInput, match=rf"gives {option}= twice; expected it once"):
        parse_spec(text)
    with pytest.raises(BadInput, match="twice"):
        cv.parse_method(text)


def test_a_metrics_option_given_twice_is_refused() -> None:
    from clairvit.metrics.registry import resolve_metric

    with pytest.raises(BadInput, match="gives steps= twice"):
        resolve_metric("deletion(steps=5,steps=6)")


def test_a_value_that_is_nested_deep_is_a_word() -> None:
    value = "(" * 3_000 + ")" * 3_000
    assert parse_spec(f"rollout(fusion={value})").options == {"fusion": value}


def test_labels_are_a_file_or_the_names_themselves(tmp_path: Path) -> None:
    assert split_labels("labels.json") == "labels.json"
    assert split_labels("a cat, a dog") == ["a cat", "a dog"]
    (tmp_path / "a,b.json").write_text("[]")
    assert split_labels(str(tmp_path / "a,b.json")) == str(tmp_path / "a,b.json")


def test_times_are_read_in_seconds() -> None:
    times = {"2s": 2.0, "2": 2.0, "500ms": 0.5, "1.5m": 90.0, " .5 s ": 0.5}
    assert {text: read_seconds(text, "--budget") for text in times} == times
    for text in ("", "fast", "0s", "-1s", "1h", "nan", "1e3", "9" * 400):
        with pytest.raises(BadInput, match=r"expected a time such as 2s, 500ms or 1m"):
            read_seconds(text, "--budget")
