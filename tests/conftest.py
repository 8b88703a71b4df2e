"""Apply the markers of pyproject.toml and choose the cases that are run: see docs/testing.md.

`browser`, `ray` and `cuda` are written on the tests; `numeric` follows from the folder or is written on the test;
`slow` is written on tests that take seconds and applied here to folders of whole commands. `--cases` says how many
cases of a sweep are run: covering arrays, all of them, or a number.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.browser import find_chromium
from helpers.covering import run_all_cases

TESTS = Path(__file__).parent
NUMERIC_FOLDERS = {
    "audit",
    "cuda",
    "data",
    "diagnostics",
    "methods",
    "metrics",
    "models",
    "perturbation",
    "targets",
    "tracing",
}
# Whole commands, servers, studies and processes: each test takes seconds, so all of them are slow.
END_TO_END = {"bench", "cli", "diagnostics", "fuzz", "papers", "plotting", "report", "selection", "training", "web"}
END_TO_END |= {
    "test_architecture.py",
    "test_docs.py",
    "test_public_api.py",
    "test_integrity.py",
    "test_leak.py",
    "test_threads.py",
}


def cases(text: str) -> str | int:
    """Return a value of --cases: "covering", "all", or how many cases of each parametrised test."""
    if text in ("covering", "all"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} was given; expected covering, all, or a number such as 6")
    return int(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose how many cases of each sweep it tests."""
    text = (
        "covering (the default): covering arrays of sweeps; all: whole products; N: N cases of each parametrised test"
    )
    parser.addoption("--cases", type=cases, default="covering", metavar="covering|all|N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Set the cases before test files, which build their sweeps when they are imported, are collected."""
    run_all_cases(config.getoption("--cases") == "all")


@pytest.hookimpl(tryfirst=True)  # before -m selects by these markers and before --random-order shuffles
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by folder; leave a number of cases of each parametrised test in, spread evenly, if one was given."""
    sweeps: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        sweeps[item.nodeid.partition("[")[0]].append(item)
        place = item.path.relative_to(TESTS).parts[0]
        if place in NUMERIC_FOLDERS:
            item.add_marker(pytest.mark.numeric)
        if place in END_TO_END:
            item.add_marker(pytest.mark.slow)
    count = config.getoption("--cases")
    if isinstance(count, int):
        kept = {id(sweep[number * len(sweep) // count]) for sweep in sweeps.values() for number in range(count)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from garbage collection."""
    freeze_heap()


@pytest.fixture
def frozen_heap() -> None:
    """Exclude objects that exist before the test from `gc.get_objects`, which makes counting fast."""
    freeze_heap()


def freeze_heap() -> None:
    """Move every object that is alive to the generation that the garbage collector skips."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run."""
    if item.get_closest_marker("browser") and find_chromium() is None:
        pytest.skip("no chromium found")
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Share a model no longer that a test changed: the next test gets a new one."""
    yield
    if shared := sys.modules.get("helpers.shared_models"):
        shared.forget_changed_models()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report in one line how many tests were skipped because there is no browser, and what to install."""
    if find_chromium() is not None:
        return
    skipped = sum("browser" in report.keywords for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        tests = "1 browser test was" if skipped == 1 else f"{skipped} browser tests were"
        terminalreporter.write_line(
            f"{tests} skipped: no chromium found. Install it with: apt-get install chromium", yellow=True
        )
