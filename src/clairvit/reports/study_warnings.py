"""Warnings of a study: unreadable images, undefined scores, constant maps, failed units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clairvit.bench.results import Missing
from clairvit.plotting.labels import count_images
from clairvit.reports.blocks import Item, Items, Section, Text
from clairvit.reports.study_results import StoreContents, StudyResults

MOST_LISTED = 20  # warnings in a list; the CSV has all


@dataclass(frozen=True)
class StudyWarning:
    """A sentence about an image, a method, a metric or a part of the store."""

    kind: str
    subject: str
    text: str


def warnings_section(results: StudyResults, missing: Sequence[Missing] = ()) -> Section:
    """Return the warnings of one model and data; `missing` is of the whole store, and its own entries come first."""
    key = (results.model_hash, results.data, results.settings)
    warnings = [
        StudyWarning("incomplete", "Not complete:", entry.sentence)
        for entry in missing
        if (entry.model_hash, entry.data, entry.settings) == key
    ]
    warnings += study_warnings(results)
    if not warnings:
        return Section("Warnings", [Text("None.")])
    records = tuple(
        results.record(kind=warning.kind, about=warning.subject, warning=warning.text) for warning in warnings
    )
    items = [Item(warning.text, results.short_name(warning.subject)) for warning in warnings]
    return Section("Warnings", [Items(_first(items), "warnings", records)])


def study_warnings(results: StudyResults) -> list[StudyWarning]:
    """Return the warnings about images, metrics and methods of one model and data."""
    return [*_image_warnings(results), *_metric_warnings(results), *_method_warnings(results)]


def _image_warnings(results: StudyResults) -> Iterator[StudyWarning]:
    for image, reason in results.unreadable.items():
        yield StudyWarning("unreadable", image, f"could not be read: {reason}")
    for method, reason in results.scores.skipped.items():
        yield StudyWarning("skipped", method, f"does not fit the model: {reason}")
    for image, hashes in results.image_hashes.items():
        if len(hashes) > 1:
            text = f"is in the store with {len(hashes)} different contents, each of them counted"
            yield StudyWarning("changed", image, text)


def _metric_warnings(results: StudyResults) -> Iterator[StudyWarning]:
    total = len(results.scores.predictions)
    for metric in results.metrics:
        scores = results.by_method(metric)
        undefined = {method: score.n_invalid for method, score in scores.items() if score.n_invalid}
        reason = results.specs.metric(metric).metric.undefined
        because = f" ({reason})" if reason else ""
        yield from _by_count("undefined", metric, f"undefined for {{}} of {total}{because}", undefined, len(scores))
        missing_counts = {
            method: total - len(score.values) for method, score in scores.items() if len(score.values) < total
        }
        yield from _by_count("incomplete", metric, f"not computed yet for {{}} of {total}", missing_counts, len(scores))
        for note in dict.fromkeys(note for score in scores.values() for note in score.notes):
            yield StudyWarning("note", metric, note)


def _method_warnings(results: StudyResults) -> Iterator[StudyWarning]:
    constant: dict[str, int] = {}
    for (method, _), score in results.scores.items():
        constant[method] = max(constant.get(method, 0), score.n_degenerate)
    total = len(results.scores.predictions)
    for method, count in constant.items():
        if count:
            text = f"{count_images(count)} of {total} have a constant map, whose patches are in random order"
            yield StudyWarning("degenerate", method, text)
    for method in sorted({method for method, _ in results.scores}):
        missing_metrics = [metric for metric in results.metrics if (method, metric) not in results.scores]
        if missing_metrics:
            yield StudyWarning("incomplete", method, f"not scored by {', '.join(missing_metrics)}")


def _by_count(
    kind: str, metric: str, sentence: str, counts: Mapping[str, int], method_count: int
) -> Iterator[StudyWarning]:
    """Yield one warning for all methods with the same count."""
    for count in sorted(set(counts.values())):
        methods = [method for method, n in counts.items() if n == count]
        listed = "every method" if len(methods) == method_count else ", ".join(methods)
        yield StudyWarning(kind, metric, f"{sentence.format(count_images(count))}, of {listed}")


def _first(items: Sequence[Item]) -> tuple[Item, ...]:
    """Return the first items, and how many there are more."""
    hidden = len(items) - MOST_LISTED
    if hidden <= 1:
        return tuple(items)
    return (*items[:MOST_LISTED], Item(f"… and {hidden} more; --format csv lists all of them."))


def store_warnings(contents: StoreContents) -> Items | None:
    """Return what went wrong with the store itself; None if nothing did."""
    warnings = []
    for failure in contents.failures:
        methods, metrics = (", ".join(failure.get(word, ())) for word in ("methods", "metrics"))
        size = count_images(len(failure.get("rows", ())))
        text = f"failed: {failure.get('error')} ({size}; {methods}; {metrics})"
        warnings.append(StudyWarning("failed", f"Unit {str(failure.get('unit', '?'))[:8]}", text))
    for name in contents.broken:
        text = "could not be read and was moved to broken/; run the study again to compute it anew"
        warnings.append(StudyWarning("broken", f"Part {name[:8]}", text))
    if len(contents.versions) > 1:
        text = f"were written by several versions: {', '.join(contents.versions)}"
        warnings.append(StudyWarning("versions", "Results", text))
    if not warnings:
        return None
    records = tuple({"kind": warning.kind, "about": warning.subject, "warning": warning.text} for warning in warnings)
    return Items(_first([Item(warning.text, warning.subject) for warning in warnings]), "warnings", records)
