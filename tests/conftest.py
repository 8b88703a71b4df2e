"""Apply the markers of pyproject.toml: see docs/testing.md.

`browser`, `ray` and `cuda` are written on the tests; `numeric` follows from the folder or is written on the test;
`slow` is written on tests that take seconds and applied here to all but a few cases of each large parametrised test.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from pathlib import Path

import pytest

from helpers.browser import find_chromium

TESTS = Path(__file__).parent
NUMERIC_FOLDERS = {"data", "diagnostics", "methods", "metrics", "models", "perturbation", "targets", "tracing"}
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose how many cases of each parametrised test are quick."""
    text = "cases of each parametrised test that are not marked slow, spread evenly (default: 1)"
    parser.addoption("--quick-cases", type=int, default=1, help=text)


@pytest.hookimpl(tryfirst=True)  # before -m selects by these markers and before --random-order shuffles
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests as numeric by folder and as slow by their position among the cases of one parametrised test."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
        place = item.path.relative_to(TESTS).parts[0]
        if place in NUMERIC_FOLDERS:
            item.add_marker(pytest.mark.numeric)
        if place in END_TO_END:
            item.add_marker(pytest.mark.slow)
    count: int = config.getoption("--quick-cases")
    for sweep in cases.values():
        quick = {number * len(sweep) // count for number in range(count)}  # spread evenly
        for number, item in enumerate(sweep):
            if len(sweep) > count and number not in quick:
                item.add_marker(pytest.mark.slow)


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
