"""The markers of conftest.py, and its line about tests that were skipped for want of a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SUITE = """
import pytest

@pytest.mark.browser
@pytest.mark.parametrize("page", range(3))
def test_page(page): pass

@pytest.mark.parametrize("case", range(20))
def test_sweep(case): pass
"""

PAIRS = """
import pytest
from helpers.covering import covering_array

@pytest.mark.parametrize(("row", "column"), covering_array(range(8), range(8, 16)))
def test_pair(row, column): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Return a folder with this suite's conftest.py and two test files of its own."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    for folder in ("metrics", "web"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(SUITE)
    markers = "\n".join(f"    {name}: see docs/testing.md" for name in ("browser", "cuda", "numeric", "ray", "slow"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\nmarkers =\n{markers}\n")
    return tmp_path


def run_pytest(suite: Path, *arguments: str, path: str | None = None) -> str:
    """Return what pytest prints in `suite`; `path` is what the environment variable PATH is to be."""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | ({} if path is None else {"PATH": path})
    environment.pop("PYTEST_ADDOPTS", None)
    plugins = ("-p", "xdist", "-p", "random_order.plugin")
    command = [sys.executable, "-m", "pytest", *plugins, "--strict-markers", "-q", *arguments]
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def collected(suite: Path, *arguments: str) -> list[str]:
    """Return the node identifiers that pytest selects, in order."""
    return re.findall(r"^\S+::\S+$", run_pytest(suite, "--collect-only", *arguments), re.MULTILINE)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_machine_without_chromium_is_advised_what_to_install(suite: Path, workers: str) -> None:
    printed = run_pytest(suite, "-n", workers, path=str(suite))
    line = "6 browser tests were skipped: no chromium found. Install it with: apt-get install chromium"
    assert printed.splitlines().count(line) == 1
    assert "40 passed, 6 skipped" in printed


def test_nothing_is_printed_where_no_test_needed_a_browser(suite: Path) -> None:
    assert "chromium" not in run_pytest(suite, "-m", "not browser", path=str(suite))


def test_nothing_is_printed_where_there_is_a_chromium(suite: Path) -> None:
    (suite / "chromium").touch(mode=0o755)
    printed = run_pytest(suite, path=str(suite))
    assert "chromium" not in printed
    assert "46 passed" in printed


def test_a_number_of_cases_is_the_same_whatever_the_order(suite: Path) -> None:
    expected = ["metrics/test_metrics.py::test_sweep[0]"]
    selection = ("metrics", "-m", "not (slow or browser)")
    assert collected(suite, *selection, "--cases=1") == expected
    assert collected(suite, *selection, "--cases=1", "--random-order", "--random-order-seed=1") == expected
    assert collected(suite, *selection, "--cases=4") == [
        f"metrics/test_metrics.py::test_sweep[{n}]" for n in (0, 5, 10, 15)
    ]
    assert len(collected(suite, *selection, "--cases=30")) == 20


def test_sweeps_are_covering_arrays_unless_all_cases_are_asked_for(suite: Path) -> None:
    (suite / "test_pairs.py").write_text(PAIRS)
    assert len(collected(suite, "test_pairs.py")) == 8
    assert len(collected(suite, "test_pairs.py", "--cases=all")) == 64
    assert "8 passed" in run_pytest(suite, "test_pairs.py", "-n", "2")
    assert "64 passed" in run_pytest(suite, "test_pairs.py", "-n", "2", "--cases=all")
    assert len(collected(suite, "test_pairs.py", "--cases=3")) == 3


def test_other_numbers_of_cases_are_refused(suite: Path) -> None:
    for wrong in ("0", "many", "-3"):
        with pytest.raises(AssertionError, match="expected covering, all, or a number such as 6"):
            run_pytest(suite, f"--cases={wrong}")


def test_tests_of_folders_of_numbers_are_numeric(suite: Path) -> None:
    numeric = collected(suite, "-m", "numeric")
    assert len(numeric) == 23
    assert all(name.startswith("metrics/") for name in numeric)


def test_the_folders_that_are_named_exist() -> None:
    """A folder that is renamed must not drop out of make test-portable."""
    root = Path(__file__).parent
    names = re.findall(
        r'"([a-z_.]+)"',
        re.search(
            r"NUMERIC_FOLDERS = .*?END_TO_END \|= [^\n]*", (root / "conftest.py").read_text(encoding="utf-8"), re.DOTALL
        )[0],
    )
    assert [name for name in names if not (root / name).exists()] == []
