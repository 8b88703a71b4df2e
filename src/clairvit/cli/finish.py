"""How a command ends: the JSON document, or tables; then the failures; then the exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from clairvit._version import __version__
from clairvit.cli.console import is_printed, line, say, table
from clairvit.cli.image_job import Delivered, Failure

SLOW = "it is slow"  # how the reason begins for which "all" leaves a method out
MOST_LINES = 40  # of a table nobody asked for


def print_json(command: str, results: Sequence[Mapping[str, Any]], failures: Sequence[Failure]) -> None:
    from clairvit._io import dumps_json

    document = {"clairvit": __version__, "command": command, "results": list(results)}
    print(dumps_json({**document, "failed": [vars(failure) for failure in failures]}))


def print_classes(results: Sequence[Delivered]) -> None:
    """One image: its most probable classes, or highest scores. Several: the predicted class of each."""
    from clairvit.plotting.labels import named, percent

    if len(results) == 1:
        top = results[0].first["top"][0]
        if not top:
            return
        title = f"What {results[0].first['model']} sees in {results[0].image}"
        if results[0].first["activation"] == "raw":
            table(title, ("output", "score"), [(one["name"], f"{one['score']:.4g}") for one in top], right=("score",))
        else:
            rows = [(one["name"], percent(one["probability"]), _bar(one["probability"])) for one in top]
            table(title, ("class", "probability", ""), rows, right=("probability",))
        return
    lines = []
    for result in results[:MOST_LINES]:
        best = [named(one["name"], one["probability"], one["score"]) for one in result.first["top"][0][:2]]
        lines.append((result.image, *best, *[""] * (2 - len(best)), ", ".join(dict.fromkeys(result.first["targets"]))))
    if lines:
        table(f"{len(results)} images", ("image", "predicted", "then", "explained"), lines)
    if len(results) > MOST_LINES:
        line(f"… and {len(results) - MOST_LINES} more images; --json lists all of them.")


def print_statistics(results: Sequence[Delivered]) -> None:
    """One image: lowest, mean and highest value of each of its maps, and of each layer where layers were asked for."""
    if len(results) != 1:
        return
    record = results[0].first
    rows = [(target, *_three(one)) for target, one in zip(record["targets"], record["statistics"], strict=True)]
    for target, one in zip(record["targets"], record["standard_error"] or [], strict=False):
        rows.append((f"{target}, standard error", *_three(one)))
    for layer, ones in enumerate(record["layer_statistics"] or []):
        for target, one in zip(record["targets"], ones, strict=True):
            rows.append((f"{target}, layer {layer}", *_three(one)))
    table(f"Values of the {record['method']} map", ("map", "min", "mean", "max"), rows, ("min", "mean", "max"))
    print_cost(record)


def print_cost(record: Mapping[str, Any]) -> None:
    """What a method spent that makes passes of its own."""
    from clairvit.methods.explanation import Cost
    from clairvit.plotting.labels import effort

    cost = Cost(**record["cost"])
    if cost.forwards > 1:
        line(f"It took {effort(cost)} and {cost.seconds:.1f} seconds.")


def _three(statistics: Mapping[str, float | None]) -> list[str]:
    return ["–" if statistics[name] is None else f"{statistics[name]:.4g}" for name in ("min", "mean", "max")]


def print_left_out(left_out: Mapping[str, str]) -> None:
    """Print which methods were left out and why, one line per reason; all slow ones are one line."""
    groups: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        shared = f"{SLOW}; --method all,NAME adds one." if reason.startswith(SLOW) else reason
        groups.setdefault(shared, []).append(name)
    for reason, names in groups.items():
        line(f"Left out {', '.join(names)}: {reason}")


def print_notes(results: Sequence[Delivered]) -> None:
    """Fallbacks that methods took, each said once."""
    notes = [note for result in results for record in result.records.values() for note in record["notes"]]
    for note in dict.fromkeys(notes):
        if not is_printed(note):
            line(f"Note: {note}")


def print_files(results: Sequence[Delivered]) -> None:
    """Where to look."""
    files = list(dict.fromkeys(file for result in results for file in result.files))
    if len(files) > 4:
        line(f"Wrote {len(files)} files to {files[0].parent}/")
    else:
        for file in files:
            line(f"Wrote {file}")


def end(results: Sequence[Any], failures: Sequence[Failure], what: str = "explained") -> None:
    """Failures come last, where they are seen, and make the exit status 2."""
    if not failures:
        return
    if results or len(failures) > 1:
        say(f"{len(failures)} of {len(results) + len(failures)} could not be {what}:")
    for failure in failures:
        say(failure.error if failure.image in failure.error else f"{failure.image}: {failure.error}")
    raise typer.Exit(2)


def _bar(probability: float) -> str:
    return "█" * round(24 * probability) or "▏"
