from __future__ import annotations

from pathlib import Path

import pytest

from clairvit.cli.arguments import split_labels, split_methods, split_targets
from clairvit.errors import BadInput

PETS = ("Bengal", "Egyptian Mau", "Wire-haired Pointer", "tabby, tabby cat")


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("rollout", ["rollout"]),
        ("rollout,genatt", ["rollout", "genatt"]),
        ("rollout(fusion=max,alpha=0.5),genatt", ["rollout(fusion=max,alpha=0.5)", "genatt"]),
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


def test_labels_are_a_file_or_the_names_themselves(tmp_path: Path) -> None:
    assert split_labels("labels.json") == "labels.json"
    assert split_labels("a cat, a dog") == ["a cat", "a dog"]
    (tmp_path / "a,b.json").write_text("[]")
    assert split_labels(str(tmp_path / "a,b.json")) == str(tmp_path / "a,b.json")
