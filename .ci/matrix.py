"""Test the versions that pyproject.toml claims: the lowest on the oldest Python, the newest on every Python there is.

Families of models that need a newer transformers than others are tested with theirs, and the lowest of all else.

Each combination gets a virtual environment of its own, into which the package itself (no editable copy) is installed.
Prints a Markdown table, for docs/testing.md; exit status 1 if a combination failed.

    python .ci/matrix.py                     # or: make matrix
    python .ci/matrix.py --only lowest --tests tests/tracing
    python .ci/matrix.py --python 3.13       # one Python; repeatable

Interpreters are those on the path and those of pyenv, whether they are switched on there or not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from clairvit.models.sources.hf_versions import FAMILIES  # noqa: E402 - imports no torch

PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ("study", "superpixels", "tiff", "hf", "clip", "web")
TESTS = (
    "tests/models",
    "tests/targets",
    "tests/tracing",
    "tests/methods",
    "tests/cuda",
    "tests/perturbation",
    "tests/metrics",
)
FAMILY_TESTS = (
    "tests/targets/test_next_token.py",
    "tests/targets/test_neuron.py",
)  # that have the families of FAMILIES
TEST_PACKAGES = ("pytest", "pytest-xdist", "hypothesis", "networkx", "h5py", "httpx")
SHOWN = ("torch", "torchvision", "timm", "transformers", "open_clip_torch", "numpy")
MARKERS = "not (slow or browser or ray or cuda)"


@dataclass(frozen=True)
class Combination:
    """One row of the matrix: a Python interpreter and which versions of the dependencies."""

    python: str  # "3.11"
    interpreter: str
    versions: str  # "lowest" or "newest"
    transformers: str = ""  # a version above the lowest, for the families that need it


@dataclass(frozen=True)
class Outcome:
    """What became of a combination: versions installed, and pytest's last line."""

    combination: Combination
    installed: dict[str, str]
    summary: str
    passed: bool


def lowest_versions(pyproject: str, extras: Sequence[str], transformers: str = "") -> list[str]:
    """Return "name==minimum" for every "name>=minimum" of the dependencies and of these extras."""
    project = tomllib.loads(pyproject)["project"]
    optional = project["optional-dependencies"]
    listed = [*project["dependencies"], *(entry for extra in extras for entry in optional[extra])]
    minima = [re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", entry) for entry in listed]
    unpinned = [entry for entry, match in zip(listed, minima, strict=True) if match is None]
    if unpinned:
        raise ValueError(f"{unpinned} have no lowest version; expected NAME>=VERSION.")
    pins = {match[1]: match[2] for match in minima if match} | ({"transformers": transformers} if transformers else {})
    return [f"{name}=={minimum}" for name, minimum in pins.items()]


def find_interpreter(python: str) -> str | None:
    """Return an interpreter of this version that runs: on the path, or one that pyenv has installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = sorted(pyenv.glob(f"{python}.*/bin/python"), key=lambda path: path.parent.parent.stat().st_mtime)
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in (shutil.which(f"python{python}"), *map(str, reversed(installed))):
        if path:  # pyenv has shims on the path for versions that are not switched on; they fail
            done = subprocess.run([path, "-c", code], check=False, capture_output=True, text=True)
            if done.stdout.strip() == python:
                return path
    return None


def combinations(only: str | None, pythons: Sequence[str] = PYTHONS) -> list[Combination]:
    """Return the rows that can be run here; the lowest versions are for the oldest Python."""
    present = [(python, path) for python in pythons if (path := find_interpreter(python))]
    rows = [
        Combination(python, path, "lowest", transformers)
        for python, path in present
        if python == PYTHONS[0]
        for transformers in ("", *sorted(set(FAMILIES.values())))
    ]
    rows += [Combination(python, path, "newest") for python, path in present]
    return [row for row in rows if only in (None, row.versions)]


def run(combination: Combination, folder: Path, tests: Sequence[str], jobs: int) -> Outcome:
    """Install into a fresh environment and run the tests against the installed package."""
    parts = (combination.python, combination.versions, combination.transformers)
    environment = folder / "-".join(filter(None, parts))
    subprocess.run([combination.interpreter, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if combination.versions == "lowest":
        constraints = folder / "lowest.txt"
        pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        pins = lowest_versions(pyproject, EXTRAS, combination.transformers)
        constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
        install += ["--constraint", str(constraints)]
    done = subprocess.run([*install, f"{ROOT}[{','.join(EXTRAS)}]", *TEST_PACKAGES], check=False)
    if done.returncode:
        return Outcome(combination, {}, "could not be installed", passed=False)
    settings = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "PYTHONPATH": ""}
    chosen = FAMILY_TESTS if combination.transformers else tests
    options = ["-p", "no:cacheprovider", "-n", str(jobs), "--cases", "1", "-m", MARKERS]
    command = [python, "-m", "pytest", *options, *chosen]
    done_tests = subprocess.run(command, cwd=ROOT, env=settings, check=False, capture_output=True, text=True)
    sys.stderr.write(done_tests.stdout[-4000:] if done_tests.returncode else "")
    lines = [line for line in done_tests.stdout.splitlines() if re.search(r"\b(passed|failed|error)", line)]
    summary = lines[-1].strip("= ") if lines else f"pytest ended with status {done_tests.returncode}"
    return Outcome(combination, installed_versions(python), summary, passed=done_tests.returncode == 0)


def installed_versions(python: str) -> dict[str, str]:
    """Return the versions of the packages that the table shows."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {SHOWN!r}}}))"
    shown = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(shown.stdout)
    return versions


def table(outcomes: Sequence[Outcome], absent_pythons: Sequence[str] = ()) -> str:
    """Return the Markdown table; interpreters that are not here have a row that says so."""
    rows = [("Python", "versions", *SHOWN, "tests")]
    for outcome in outcomes:
        installed = [outcome.installed.get(name, "–") for name in SHOWN]
        rows.append((outcome.combination.python, outcome.combination.versions, *installed, outcome.summary))
    absent = ["–"] * len(SHOWN)
    rows += [(python, "newest", *absent, "not on this machine") for python in absent_pythons]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> int:
    """Run the matrix and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", choices=("lowest", "newest"))
    parser.add_argument("--python", action="append", choices=PYTHONS, help="these Pythons alone")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the environments here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        pythons = arguments.python or PYTHONS
        rows = combinations(arguments.only, pythons)
        outcomes = [run(row, folder, arguments.tests, arguments.jobs) for row in rows]
    absent = [python for python in pythons if find_interpreter(python) is None]
    print(table(outcomes, absent))
    return int(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
