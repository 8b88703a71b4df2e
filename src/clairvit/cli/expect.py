"""`clairvit expect`: does the model look where it should? Exit status 0 or 1, for tests of models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clairvit.cli import options
from clairvit.cli.arguments import read_model, single_method
from clairvit.cli.command import Command, ScoringOptions
from clairvit.cli.console import print_line, print_result_note, table
from clairvit.cli.declare import option
from clairvit.cli.image_job import refuse_url_output

if TYPE_CHECKING:
    from clairvit.audit.expectation import Aggregate, Expectation

MOST_LISTED = 10  # images that are named
SHOWN = ("inside", "area", "excess_inside", "excess_outside", "answer_kept")
EXAMPLES = """[bold]Examples[/bold]

clairvit expect photos/ --masks masks/ --threshold 'inside >= 0.5 on 80%'

clairvit expect --data pets:data/oxford-iiit-pet --limit 100 --threshold 'mean excess_inside > 0' --out pets.csv

clairvit expect photos/ --masks masks/ --model file:v2.safetensors --against-model file:v1.safetensors --arch timm:NAME

[bold]Exit status[/bold]

0: every threshold holds, or none was named. 1: one does not hold. 2: bad input, or an image that could not be read.
"""


def expect(
    images: list[str] | None = options.ANNOTATED_IMAGES,
    *,
    method: list[str] | None = options.method_list(
        "The method of the maps: one of 'clairvit methods'.", "attnlrp+plus where it fits the model"
    ),
    threshold: list[str] | None = option(
        None,
        "What is expected, may be repeated: 'inside >= 0.5' of every image, 'inside >= 0.5 on 80%' of them, "
        "'mean excess_inside > 0' with its whole 95 % interval.",
        "'QUANTITY >= NUMBER'",
    ),
    against_model: str | None = option(
        None,
        "Another model, such as the version before, on the same images; its own options in parentheses behind it.",
        "MODEL",
    ),
    draws: int = option(2, "Random sets of as many patches that are hidden for comparison.", min=1),
    removal: str = option("token", "How patches are hidden: token, mean, blur, …"),
    question: ScoringOptions,
    out: str | None = options.out(None, "Where the result is written: .json or .csv (a row per image).", "FILE"),
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit._io import check_writable
    from clairvit._tables import SUFFIXES, check_suffix
    from clairvit.audit.expect import parse_conditions
    from clairvit.methods.spec import resolve_method
    from clairvit.perturbation.removal import check_removal

    parse_conditions(threshold, compares=against_model is not None)
    check_removal(removal)
    typed = single_method(method, "expect")
    spec = None if typed is None else resolve_method(typed)
    if out is not None:
        refuse_url_output(out)
        check_suffix(out, SUFFIXES)
        check_writable(Path(out))
    command = Command("expect", "used", output)
    opened = question.open(command, images, [])
    other = None
    if against_model is not None:
        name, settings = read_model(against_model)
        other = question.model_options.with_settings(settings).load(name)
    with command.progress(f"{len(opened.images)} images"):
        result = cv.expect(
            opened.model,
            opened.images,
            method=spec,
            threshold=threshold,
            against=other,
            draws=draws,
            removal=removal,
            **opened.arguments,
        )
    files = [] if out is None else [str(result.save(out))]

    def show() -> None:
        _print(result)
        for file in files:
            print_line(f"Wrote {file}")

    command.finish(len(result), lambda: result.to_dict() | {"files": files}, show)
    if result.passed is False:
        raise typer.Exit(1)


expect.__doc__ = f"Measure whether a model looks where it should, and test it with a threshold.\n\n{EXAMPLES}"


def _print(result: Expectation) -> None:
    """Print the means, per class too where there are several, the images that fail, and the tests."""
    from clairvit.plotting.labels import format_number

    shown = SHOWN if result.against is None else (*SHOWN[:3], "inside_change", "excess_inside_change")

    def cells(part: Expectation) -> list[str]:
        return [_mean(part.mean(name)) for name in shown]

    def _mean(entry: Aggregate) -> str:
        interval = "" if entry.low != entry.low else f"\n{format_number(entry.low)} … {format_number(entry.high)}"
        return f"{format_number(entry.mean)}{interval}"

    by_class = result.by_class()
    rows = [("all", str(len(result)), *cells(result))]
    if len(by_class) > 1:
        rows += [(name, str(len(part)), *cells(part)) for name, part in by_class.items()]
    title = f"{result.model} by {result.method}: means and 95 % intervals; falls in {result.unit}"
    table(title, ("class", "images", *shown), rows, right=("images", *shown))
    print_line(result.sentence)
    if result.against is not None:
        changed = sum(result.answer_changed)
        print_line(f"{changed} of {len(result)} answers are not those of {result.against.model}.")
    for name, reason in result.left_out[:MOST_LISTED]:
        print_line(f"Left out {name}: {reason}")
    if len(result.left_out) > MOST_LISTED:
        print_line(f"… and {len(result.left_out) - MOST_LISTED} more; --json lists all of them.")
    for note in result.notes:
        print_result_note(note)
    failed = result.failed.names if result.conditions else ()
    for test in result.tests:
        print_line(test.sentence)
    if failed:
        more = f" and {len(failed) - MOST_LISTED} more" if len(failed) > MOST_LISTED else ""
        print_line(f"It does not hold on: {', '.join(failed[:MOST_LISTED])}{more}")
