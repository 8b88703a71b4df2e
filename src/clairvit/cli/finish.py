"""Output at the end of a command: tables, notes and files on stdout, failures on stderr, the exit status."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from clairvit._version import __version__
from clairvit.cli.arguments import SLOW
from clairvit.cli.console import is_printed, print_json, print_line, print_message, print_result_note, table
from clairvit.cli.image_job import Failure, WrittenResult

MAX_ROWS = 40  # images in the table of predictions


def print_document(command: str, content: Mapping[str, Any], failures: Sequence[Failure] | None = None) -> None:
    """Print the JSON document of a command; `failures` are the images that could not be used."""
    failed = {} if failures is None else {"failed": [vars(failure) for failure in failures]}
    print_json({"clairvit": __version__, "command": command, **content, **failed})


def print_predictions(results: Sequence[WrittenResult]) -> None:
    """Print the most probable classes (or highest scores) of one image, or the predicted class of each of several."""
    from clairvit.numerics import percent
    from clairvit.plotting.labels import class_label

    if len(results) == 1:
        top = results[0].first["top"][0]
        if not top:
            return
        title = f"What {results[0].first['model']} sees in {results[0].image}"
        if results[0].first["activation"] == "raw":
            rows = [(guess["name"], f"{guess['score']:.4g}") for guess in top]
            table(title, ("output", "score"), rows, right=("score",))
        else:
            bars = [(guess["name"], percent(guess["probability"]), _bar(guess["probability"])) for guess in top]
            table(title, ("class", "probability", ""), bars, right=("probability",))
        return
    lines = []
    for result in results[:MAX_ROWS]:
        best = [
            class_label(guess["name"], guess["probability"], guess["score"]) for guess in result.first["top"][0][:2]
        ]
        lines.append((result.image, *best, *[""] * (2 - len(best)), ", ".join(dict.fromkeys(result.first["targets"]))))
    if lines:
        table(f"{len(results)} images", ("image", "predicted", "then", "explained"), lines)
    if len(results) > MAX_ROWS:
        print_line(f"… and {len(results) - MAX_ROWS} more images; --json lists all of them.")


def print_statistics(results: Sequence[WrittenResult]) -> None:
    """Print the lowest, mean and highest value of each map, and layer if there are layers, of a single image."""
    if len(results) != 1:
        return
    record = results[0].first
    targets, scores = record["targets"], record["target_scores"]
    rows = [(target, *_min_mean_max(values)) for target, values in zip(targets, record["statistics"], strict=True)]
    for target, values in zip(targets, record["standard_error"] or [], strict=False):
        rows.append((f"{target}, standard error", *_min_mean_max(values)))
    names = [grid["name"] for grid in record["layer_grids"]]
    for layer, layer_maps in enumerate(record["layer_statistics"] or []):
        for target, values in zip(targets, layer_maps, strict=True):
            rows.append((f"{target}, {names[layer] if names else f'layer {layer}'}", *_min_mean_max(values)))
    columns = ["map", "min", "mean", "max"]
    if any(score is not None for score in scores):  # the value that is explained: a cosine, a logit, an activation
        columns.append("score" if record["score"] == "custom" else record["score"])
        values_shown = ["–" if score is None else f"{score:.4g}" for score in scores]
        rows = [(*row, value) for row, value in zip(rows, values_shown + [""] * len(rows), strict=False)]
    table(f"Values of the {record['method']} map", columns, rows, columns[1:])
    print_cost(record)


def print_refinements(results: Sequence[WrittenResult]) -> None:
    """Print how many of the brightest patches are surely among them, for each refined map."""
    for result in results[:MAX_ROWS]:
        sentences = result.first["refinement"] or []
        for target, sentence in zip(result.first["targets"][: len(sentences)], sentences, strict=True):
            name = ", ".join([result.image] * (len(results) > 1) + [target] * (len(sentences) > 1))
            print_line(f"{name}: {sentence}" if name else sentence)


def print_checks(results: Sequence[WrittenResult]) -> None:
    """Print what was found of each map that was checked and of its answer, and the notes of the checks."""
    notes: list[str] = []
    for result in results:
        checked = result.first["check"]
        for check in [] if checked is None else checked["checks"]:
            several = len(results) > 1 or len(checked["checks"]) > 1
            name = f"{result.image}, {check['target']}" if several else "Check"
            remarks = "" if check["verdict"] is None else "".join(f" {remark}" for remark in check["remarks"])
            print_line(f"{name}: {check['badge']}. {check['sentence']}{remarks}")
            print_line(f"Answer: {check['answer']['sentence']}")
        notes += [] if checked is None else checked["notes"]
    for note in dict.fromkeys(notes):
        print_result_note(note)


def print_certificates(results: Sequence[WrittenResult]) -> None:
    """Print what a certificate says of each map, and what it takes for granted."""
    records = [(result.image, result.first["certified"]) for result in results if result.first["certified"] is not None]
    several = sum(len(record["maps"]) for _, record in records) > 1
    for image, record in records:
        for marked in record["maps"]:
            print_line(f"{image if several else 'Certificate'}: {marked['sentence']}")
    for condition in dict.fromkeys(record["condition"] for _, record in records):
        print_line(condition)


def print_cost(record: Mapping[str, Any]) -> None:
    """Print the passes and seconds of a method that runs the model more than once."""
    from clairvit._cost import Cost
    from clairvit.plotting.labels import cost_label

    cost = Cost(**record["cost"])
    if cost.forwards > 1:
        print_line(f"It took {cost_label(cost)} and {cost.seconds:.1f} seconds.")


def _min_mean_max(statistics: Mapping[str, float | None]) -> list[str]:
    return ["–" if statistics[name] is None else f"{statistics[name]:.4g}" for name in ("min", "mean", "max")]


def print_skipped(skipped: Mapping[str, str], slow: Collection[str] = ()) -> None:
    """Print which methods were left out and why, one line per reason; those that 'all' left out as slow are one."""
    groups: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        groups.setdefault(reason, []).append(name)
    if slow:
        groups[f"{SLOW}; --method all,NAME adds one."] = list(slow)
    for reason, names in groups.items():
        print_line(f"Left out {', '.join(names)}: {reason}")


def print_notes(results: Sequence[WrittenResult]) -> None:
    """Print the notes of all methods, each once."""
    notes = [note for result in results for record in result.records.values() for note in record["notes"]]
    for note in dict.fromkeys(notes):
        if not is_printed(note):
            print_result_note(note)


def print_files(results: Sequence[WrittenResult]) -> None:
    """Print the files that were written, or their number and folder if they are many."""
    print_paths([file for result in results for file in result.files])


def print_paths(paths: Sequence[Path]) -> None:
    """Print which files were written, each once, or their number and folder if they are many."""
    files = list(dict.fromkeys(paths))
    if len(files) > 4:
        print_line(f"Wrote {len(files)} files to {files[0].parent}/")
    else:
        for file in files:
            print_line(f"Wrote {file}")


def exit_on_failures(succeeded: int, failures: Sequence[Failure], participle: str = "explained") -> None:
    """Print the failures on stderr and end with exit status 2; return if there are none."""
    if not failures:
        return
    if succeeded or len(failures) > 1:
        print_message(f"{len(failures)} of {succeeded + len(failures)} could not be {participle}:")
    for failure in failures:
        print_message(failure.error if failure.image in failure.error else f"{failure.image}: {failure.error}")
    raise typer.Exit(2)


def _bar(probability: float) -> str:
    return "█" * round(24 * probability) or "▏"
