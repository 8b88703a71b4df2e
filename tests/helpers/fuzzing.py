"""Fuzzing: how many cases each family gets, from which seed, and what a case must not do.

CLAIRVIT_FUZZ_CASES (2,000 unless set; `make fuzz` sets 10,000) is shared out among the families. The seed is fixed, so
that a run is the same everywhere; CLAIRVIT_FUZZ_SEED is another one.
"""

from __future__ import annotations

import faulthandler
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from clairvit.errors import ClairError, ClairWarning

CASES = int(os.environ.get("CLAIRVIT_FUZZ_CASES", "2000"))
SEED = int(os.environ.get("CLAIRVIT_FUZZ_SEED", "20260714"))
SHARES = {  # parts of a thousand
    "images": 170,
    "files": 80,
    "tensors": 130,
    "targets": 110,
    "methods": 200,
    "metrics": 90,
    "masks": 80,
    "studies": 80,
    "requests": 60,
}
MINUTES = 30  # after which a family hangs: hundreds of times what it takes


def cases_of(family: str) -> int:
    """Return how many cases a family gets."""
    return CASES * SHARES[family] // sum(SHARES.values())


class Cases:
    """What became of the cases of one family."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.outcomes: Counter[str] = Counter()

    @contextmanager
    def case(self) -> Iterator[list[str]]:
        """Count a case as done or refused. Errors of our own are answers; any other error ends the test.

        Yields:
            The warnings that the case caused, complete once the block has ended.
        """
        messages: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield messages
            except ClairError as error:
                self.outcomes["refused" if str(error).strip() else "refused without a word"] += 1
            else:
                self.outcomes["done"] += 1
            finally:
                messages += [str(warning.message) for warning in caught if issubclass(warning.category, ClairWarning)]


def run_family(family: str, request: pytest.FixtureRequest, test: Callable[..., None], **strategies: Any) -> None:
    """Run `test(cases, **drawn)` on as many examples as the family gets, and keep the counts for the summary."""
    cases, case_count = Cases(family), cases_of(family)

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=case_count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(**strategies)
    def attempt(**drawn: Any) -> None:
        test(cases, **drawn)

    faulthandler.dump_traceback_later(60 * MINUTES, exit=True)
    try:
        attempt()
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert set(cases.outcomes) <= {"done", "refused"}, f"{family}: {cases.outcomes}"
    request.node.user_properties.append(("fuzz", (family, dict(cases.outcomes))))
    assert cases.outcomes.total() >= case_count, f"{family}: {cases.outcomes.total()} cases of {case_count}"
    assert min(cases.outcomes["done"], cases.outcomes["refused"]) >= case_count // 50, f"one-sided: {cases.outcomes}"
