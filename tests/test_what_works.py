"""docs/what-works.md says what the code does: some rows in whole, of the others a sample of methods, or all of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from helpers.covering import all_cases, covering_array
from helpers.families import COLUMNS, FAMILIES, Family, methods_of, reasons, sentence, table_row, what_runs

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "what-works.md"
UPDATE = "run: make what-works"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.quick], ids=lambda family: family.examples)
def test_the_row_of_a_family_is_what_runs(family: Family) -> None:
    page, runs = PAGE.read_text(encoding="utf-8"), what_runs(family)
    assert table_row(family, runs) in page.splitlines(), UPDATE
    assert set(reasons(family, runs)) <= set(page.splitlines()), UPDATE


def row_of(family: Family) -> str:
    """Return how the row of a family begins."""
    return f"| **{family.name}** | {family.examples} |"


COLUMN_OF = {method: column for column in (*COLUMNS, "perturbation") for method in methods_of(column)}
# Each method on a family, each family with a method of each column.
SAMPLE = covering_array(list(COLUMN_OF), [row_of(f) for f in FAMILIES], row_traits=lambda method: [COLUMN_OF[method]])


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.quick], ids=lambda family: family.examples)
def test_methods_that_run_on_a_family_are_those_of_its_row(family: Family) -> None:
    page = PAGE.read_text(encoding="utf-8")
    header = cells(next(line for line in page.splitlines() if line.startswith("| model")))
    (row,) = (
        dict(zip(header, cells(line), strict=True)) for line in page.splitlines() if line.startswith(row_of(family))
    )
    runs = what_runs(family, [method for method, row_start in SAMPLE if row_start == row_of(family)])
    for column in (*COLUMNS, "perturbation"):
        assert not runs.maps[column] or row[column] != "no", (column, runs.maps[column], UPDATE)
        assert not runs.refused[column] or row[column] != "yes", (column, runs.refused[column], UPDATE)
        for method, reason in runs.refused[column].items():
            assert f": {sentence(method, reason)}\n" in page, UPDATE
    assert row[header[-1]] == ", ".join(name for name, reason in runs.targets.items() if not reason), UPDATE


@pytest.mark.slow
@pytest.mark.skipif(not all_cases(), reason="every method on every family: make test-all")
def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = importlib.import_module("generate_what_works").page()
    assert page == PAGE.read_text(encoding="utf-8"), UPDATE


def test_every_family_has_a_row_and_every_column_methods() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(family.name, family.examples) for family in FAMILIES], UPDATE
    assert all(methods_of(column) for column in (*COLUMNS, "perturbation"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def words(cell: str) -> list[str]:
    """Return the names in a list such as "ViT, PVT (timm, your own)"."""
    return [word.strip() for word in re.split(r"[,()]", cell) if word.strip()]


def test_the_table_in_the_readme_says_no_more_than_the_page() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    header = cells(next(line for line in lines if line.startswith("| model")))
    rows = [dict(zip(header, cells(line), strict=True)) for line in lines if line.startswith("| **")]
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What works")[2].partition("\n## ")[0]
    claims = [cells(line) for line in section.splitlines() if line.startswith("|")][2:]
    assert len(claims) >= 4
    for models, methods, _ in claims:
        columns = [*COLUMNS, "perturbation"] if methods == "every family" else words(methods.replace("(some)", ""))
        for name in words(models):
            named = [row for row in rows if re.match(rf"\*\*{name.removesuffix('s')}\b", row["model"])]
            assert named or name in ("timm", "transformers", "torchvision", "open_clip", "your own", "clips"), name
            assert {row[column] for row in named for column in columns}.isdisjoint({"no"}), name
