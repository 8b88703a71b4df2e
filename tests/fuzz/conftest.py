"""After a run the counts reached are printed, family by family."""

from __future__ import annotations

from typing import Any

from helpers.fuzzing import SEED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    counts = [value for report in reports for name, value in report.user_properties if name == "fuzz"]
    if not counts:
        return
    terminalreporter.section("fuzz")
    for family, outcomes in sorted(counts):
        done, refused = outcomes.get("done", 0), outcomes.get("refused", 0)
        terminalreporter.write_line(f"{family:10} {done + refused:6} cases: {done} done, {refused} refused in words")
    total = sum(sum(outcomes.values()) for _, outcomes in counts)
    terminalreporter.write_line(f"{'together':10} {total:6} cases, seed {SEED}")
