"""docs/what-works.md says what the code does: quick rows in every run of the tests, all rows in the slow ones."""

from __future__ import annotations

import re
import subprocess
import sys
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
def test_the_page_is_up_to_date() -> None:
    script = ROOT / "docs" / "generate_what_works.py"
    printed = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, encoding="utf-8").stdout
    assert printed == PAGE.read_text(encoding="utf-8"), UPDATE


def test_every_family_has_a_row_and_every_column_methods() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(family.name, family.examples) for family in FAMILIES], UPDATE
    assert all(methods_of(column) for column in (*COLUMNS, "perturbation"))
