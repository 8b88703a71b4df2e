"""Cautions: what a reader must know before trusting the numbers, each said once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clairvit.bench.results import Missing
from clairvit.metrics.registry import resolve_metric
from clairvit.report.blocks import Items, Section, Text
from clairvit.report.charts import images
from clairvit.report.study_results import Account, Findings

MOST = 20  # of a list


def warnings_section(findings: Findings, missing: Sequence[Missing] = ()) -> Section:
    """`missing`: of the whole store; those of this model and data come first."""
    mine = (findings.model_hash, findings.data, findings.settings)
    found = [
        ("incomplete", "Not complete:", one.sentence)
        for one in missing
        if (one.model_hash, one.data, one.settings) == mine
    ]
    found += cautions(findings)
    if not found:
        return Section("Warnings", [Text("None.")])
    records = tuple({**findings.names(), "kind": kind, "about": about, "warning": said} for kind, about, said in found)
    items = tuple(f"{findings.shown(about)}\t{said}" for _, about, said in found)
    return Section("Warnings", [Items(_some(items), "warnings", records)])


def cautions(findings: Findings) -> list[tuple[str, str, str]]:
    """(kind, what it is about, sentence)"""
    found = [("unreadable", image, f"could not be read: {why}") for image, why in findings.unread.items()]
    found += [("skipped", method, f"does not fit the model: {why}") for method, why in findings.scores.skipped.items()]
    for image, marks in findings.marks.items():
        if len(marks) > 1:
            found.append(
                ("changed", image, f"is in the store with {len(marks)} different contents, each of them counted")
            )
    every = len(findings.scores.seen)
    for metric in findings.metrics:
        own = findings.of(metric)
        invalid = {method: score.n_invalid for method, score in own.items() if score.n_invalid}
        reason = resolve_metric(metric).metric.undefined
        because = f" ({reason})" if reason else ""
        found += _grouped("undefined", metric, f"undefined for {{}} of {every}{because}", invalid, len(own))
        short = {method: every - len(score.values) for method, score in own.items() if len(score.values) < every}
        found += _grouped("incomplete", metric, f"not computed yet for {{}} of {every}", short, len(own))
        notes = dict.fromkeys(note for score in own.values() for note in score.notes)
        found += [("note", metric, note) for note in notes]
    flat: dict[str, int] = {}
    for (method, _), score in findings.scores.items():
        flat[method] = max(flat.get(method, 0), score.n_degenerate)
    for method, count in flat.items():
        if count:
            found.append(
                ("degenerate", method, f"{images(count)} of {every} have a constant map, whose order is a lottery")
            )
    there = {method for method, _ in findings.scores}
    for method in sorted(there):
        lacking = [metric for metric in findings.metrics if (method, metric) not in findings.scores]
        if lacking:
            found.append(("incomplete", method, f"not scored by {', '.join(lacking)}"))
    return found


def _grouped(
    kind: str, metric: str, sentence: str, counts: Mapping[str, int], methods: int
) -> list[tuple[str, str, str]]:
    """One line for all methods with the same count."""
    found = []
    for count in sorted(set(counts.values())):
        own = [method for method, one in counts.items() if one == count]
        who = "every method" if len(own) == methods else ", ".join(own)
        found.append((kind, metric, f"{sentence.format(images(count))}, of {who}"))
    return found


def _some(items: Sequence[str]) -> tuple[str, ...]:
    """Not more than a page of them."""
    left = len(items) - MOST
    return tuple(items) if left <= 1 else (*items[:MOST], f"… and {left} more; --format csv lists all of them.")


def store_warnings(account: Account) -> Items | None:
    """What went wrong with the store itself."""
    found: list[tuple[str, str, str]] = []
    for failure in account.failures:
        methods, metrics = (", ".join(failure.get(word, ())) for word in ("methods", "metrics"))
        size = images(len(failure.get("rows", ())))
        said = f"failed: {failure.get('error')} ({size}; {methods}; {metrics})"
        found.append(("failed", f"Unit {str(failure.get('unit', '?'))[:8]}", said))
    for name in account.broken:
        said = "could not be read and was moved to broken/; run the study again to make it anew"
        found.append(("broken", f"Part {name[:8]}", said))
    if len(account.versions) > 1:
        found.append(("versions", "Results", f"were written by several versions: {', '.join(account.versions)}"))
    if not found:
        return None
    records = tuple({"kind": kind, "about": about, "warning": said} for kind, about, said in found)
    return Items(_some([f"{about}\t{said}" for _, about, said in found]), "warnings", records)
