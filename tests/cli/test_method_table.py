"""The table of docs/methods.md and `clairvit methods`: a row a method, every cell filled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clairvit.cli import main
from clairvit.methods.registry import FAMILIES, by_family, list_methods

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| [`")]


def cells(row: str) -> list[str]:
    """A bar ends a cell, unless a backslash stands before it."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_there_is_one_row_for_each_method_family_by_family() -> None:
    names = [re.match(r"\[`(.+?)`\]\(#(.+?)\)", cells(row)[0]) for row in ROWS]
    assert all(name is not None and name[1] == name[2] for name in names)
    listed = list_methods()
    assert [name[1] for name in names if name] == [listed[i].name for i in by_family(m.family for m in listed)]
    for name in names:
        assert name is not None
        assert f"\n#### `{name[1]}`\n" in PAGE, "the link leads somewhere"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: cells(row)[0].split("`")[1])
def test_every_cell_is_filled(row: str) -> None:
    columns = cells(row)
    assert len(columns) == 6
    assert all(columns)
    assert re.fullmatch(r"`[^`]+`(<br>layers: .+)?", columns[1]), "a formula as code"
    assert re.fullmatch(r"(signed|not negative|signed with `relu=False`)(; the same for all classes)?", columns[2])


def test_what_papers_disagree_about_is_in_the_details() -> None:
    for method in list_methods():
        section = PAGE.partition(f"\n#### `{method.name}`\n")[2].partition("\n#### ")[0]
        assert method.caveats.discrepancies in section, method.name


def test_families_have_an_order_and_unknown_ones_a_place() -> None:
    given = ["baseline", "cam", "yours", "attention", "cam"]
    assert [given[place] for place in by_family(given)] == ["attention", "cam", "cam", "yours", "baseline"]
    assert len(set(FAMILIES)) == len(FAMILIES)


def test_the_list_says_what_is_slow_delicate_or_particular(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    column = next(line.index("method ") for line in lines if "family" in line and "method " in line)
    for method in list_methods():
        (line,) = [line for line in lines if line[column:].startswith(f"{method.name} ")]
        assert ("slow" in line) == method.slow, method.name
        assert ("delicate" in line) == bool(method.caveats.numerically_unstable), method.name
        assert ("±" in line) == (method.signed and not method.relu), method.name
        assert ("∀" in line) == (not method.class_specific), method.name


def test_one_method_tells_where_papers_disagree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "rollout"]) == 0
    assert "forward order" in " ".join(capsys.readouterr().out.split())
