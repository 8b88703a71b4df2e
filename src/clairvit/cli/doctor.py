"""`clairvit doctor`: check whether a model can be explained as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from clairvit.cli import options
from clairvit.cli.arguments import single_method
from clairvit.cli.command import Command
from clairvit.cli.console import print_line, table
from clairvit.cli.declare import argument, option
from clairvit.cli.hints import worded
from clairvit.errors import BadInput, Message

if TYPE_CHECKING:
    from clairvit.diagnostics.report import Diagnosis
    from clairvit.models.model import Model

EXAMPLES = """[bold]Examples[/bold]

clairvit doctor pets

clairvit doctor mypackage.models:build photos/ --labels labels.json

clairvit doctor timm:vit_base_patch16_224 photos/ --strict --json

[bold]Exit status[/bold]

0: every check passed, warnings included. 1: a check failed (with --strict: or warned). 2: bad input.
"""


def doctor(
    model: str = argument(
        ..., "A name as --model of other commands takes it, or MODULE:ATTRIBUTE of your own code.", "MODEL"
    ),
    images: list[str] | None = argument(
        None,
        "Files, folders or globs, six or more for a test of deletion; default: a built-in photo of a cat.",
        "IMAGE",
    ),
    *,
    method: list[str] | None = options.method_list(
        "The method whose maps are compared with random ones.", "attnlrp+plus, or another that applies"
    ),
    model_options: options.ModelOptions,
    seed: int = options.SEED,
    strict: bool = option(False, "Exit with status 1 on warnings too.", panel=options.RESULT),
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.methods.spec import resolve_method

    method_text = single_method(method, "doctor")
    spec = None if method_text is None else resolve_method(method_text)
    model_options.preprocess()
    command = Command("doctor", "read", output)
    paths = command.image_files(images) if images else []
    net = model_options.load(model)
    readable = _readable(paths, net, command)
    if images and not readable:
        command.stop()
    with command.progress("doctor"):
        diagnosis = cv.doctor(net, readable or None, method=spec, seed=seed)
    command.finish(len(readable), diagnosis.to_dict, lambda: _print_checks(diagnosis))
    if not diagnosis.ok or (strict and diagnosis.warnings):
        raise typer.Exit(1)


doctor.__doc__ = f"Check whether a model can be explained as it is, and say what to do.\n\n{EXAMPLES}"


def _readable(paths: list[str], model: Model, command: Command) -> list[str]:
    """Return the images that can be read; the others are failures of the command."""
    from clairvit.models.images import prepare

    readable = []
    for path in paths:
        try:
            prepare(path, model)
            readable.append(path)
        except BadInput as error:
            command.on_error(path, error)
    return readable


def _print_checks(diagnosis: Diagnosis) -> None:
    """Print one row per check, advice below the finding."""
    from clairvit.diagnostics.report import condensed

    rows = [
        (check.status, check.name, worded(Message(check.finding, *(("\n→ ", check.advice) if check.advice else ()))))
        for check in condensed(diagnosis.checks)
    ]
    count = len(diagnosis.images)
    images = diagnosis.images[0] if count == 1 else f"{count} images"
    table(f"{diagnosis.model} on {images}", ("", "check", "finding"), rows)
    print_line(diagnosis.summary())
