"""docs/what-works.md says what the code does: quick rows in every run of the tests, all rows in the slow ones."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from helpers.families import COLUMNS, FAMILIES, Family, methods_of, reasons, table_row, what_runs

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "what-works.md"
UPDATE = "run: make what-works"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.quick], ids=lambda family: family.examples)
def test_the_row_of_a_family_is_what_runs(family: Family) -> None:
    page, runs = PAGE.read_text(encoding="utf-8"), what_runs(family)
    assert table_row(family, runs) in page.splitlines(), UPDATE
    assert set(reasons(family, runs)) <= set(page.splitlines()), UPDATE


@pytest.mark.slow
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
