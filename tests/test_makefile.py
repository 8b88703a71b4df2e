"""Targets of the Makefile, with a stand-in for Python that notes what it is asked to run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VARIABLES = ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "PYTHONHASHSEED")
STUB = """#!/bin/sh
[ "$1" = -m ] || exit 0
echo "run: ATEN_CPU_CAPABILITY=$ATEN_CPU_CAPABILITY OMP_NUM_THREADS=$OMP_NUM_THREADS PYTHONHASHSEED=$PYTHONHASHSEED $*"
[ "$ATEN_CPU_CAPABILITY" != "$BROKEN" ] && [ "$3" != "$BROKEN" ]
"""


def make(folder: Path, *arguments: str, broken: str = "none", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make with a virtual environment whose Python fails under the kernels, or as the subcommand, `broken`."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    for name in ("pyvenv.cfg", ".installed-dev"):  # in this order, and newer than pyproject.toml
        (folder / name).touch()
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", *VARIABLES)  # of the make that runs this test
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        ["make", *arguments, f"VENV={folder}"],
        cwd=cwd,
        env=environment | {"BROKEN": broken},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(autouse=True)
def _needs_make() -> None:
    assert shutil.which("make"), "make test needs make"


def test_every_setting_is_run_and_every_value_appears(tmp_path: Path) -> None:
    done = make(tmp_path, "test-portable")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("test-portable: passed under: native avx2 sse\n")
    runs = re.findall(r"^run: .*$", done.stdout, re.MULTILINE)
    assert len(runs) == 3
    values = {name: {re.findall(rf"{name}=(\S*)", run)[0] for run in runs} for name in VARIABLES}
    assert values["ATEN_CPU_CAPABILITY"] == {"", "avx2", "default"}
    assert values["OMP_NUM_THREADS"] == {"1", "2"}
    assert len(values["PYTHONHASHSEED"]) == 2
    orders = [re.search(r"--random-order-seed=\d+", run) for run in runs]
    assert orders.count(None) == 1
    assert all("numeric" in run for run in runs)


def test_a_setting_that_fails_is_named_and_the_others_are_run(tmp_path: Path) -> None:
    done = make(tmp_path, "test-portable", broken="avx2")
    assert done.returncode != 0
    assert "test-portable: FAILED under: avx2 (of: native avx2 sse)" in done.stderr
    assert len(re.findall(r"^run: ", done.stdout, re.MULTILINE)) == 3


def test_a_setting_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = make(tmp_path, "test-portable", "SETTINGS=avx3")
    assert done.returncode != 0
    assert "There is no setting 'avx3'; expected one of: native avx2 sse." in done.stderr


def test_quick_leaves_out_what_is_slow_or_needs_more_than_python(tmp_path: Path) -> None:
    done = make(tmp_path, "test-quick")
    assert done.returncode == 0, done.stderr
    assert "-m not (slow or browser or ray or cuda)" in done.stdout


def test_coverage_below_the_floor_fails(tmp_path: Path) -> None:
    """The status of `coverage report` is that of the target: a pipe after it would hide it."""
    shutil.copy(ROOT / "Makefile", tmp_path)  # elsewhere: it removes data files of coverage, which may run this test
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src").mkdir()
    done = make(tmp_path, "coverage", "FLOOR=99", broken="report", cwd=tmp_path)
    assert "coverage report" in done.stdout
    assert "--fail-under=99" in done.stdout
    assert done.returncode != 0
