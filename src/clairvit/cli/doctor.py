"""`clairvit doctor`: check whether a model can be explained as it is."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from clairvit.cli import options
from clairvit.cli.arguments import single_method
from clairvit.cli.console import print_line, progress_bar, table
from clairvit.cli.finish import exit_on_failures, print_document
from clairvit.cli.hints import option_of, with_named_options
from clairvit.cli.image_job import Failure, find_image_files
from clairvit.errors import BadInput

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
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name as --model of other commands takes it, or MODULE:ATTRIBUTE of your own code.",
            show_default=False,
        ),
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE",
            help="Files, folders or globs, six or more for a test of deletion; default: a built-in photo of a cat.",
            show_default=False,
        ),
    ] = None,
    *,
    method: Annotated[
        list[str] | None,
        options.method_list(
            "The method whose maps are compared with random ones.", "attnlrp+plus, or another that applies"
        ),
    ] = None,
    model_options: options.ModelOptions,
    seed: options.Seed = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 on warnings too.", rich_help_panel="Result")
    ] = False,
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.methods.spec import resolve_method

    # What is misspelt is refused before a model is loaded.
    method_text = single_method(method, "doctor")
    if method_text is not None:
        resolve_method(method_text)
    model_options.preprocess()
    paths, failures = find_image_files(images) if images else ([], [])
    net = model_options.load(model)
    readable = _readable(paths, net, failures)
    if images and not readable:
        exit_on_failures(0, failures, "read")
    with progress_bar("doctor", 1, hidden=output.hidden):
        diagnosis = cv.doctor(net, readable or None, method=method_text, seed=seed)
    if output.as_json:
        print_document("doctor", diagnosis.to_dict(), failures)
    elif not output.quiet:
        _print_checks(diagnosis)
    exit_on_failures(len(readable), failures, "read")
    if not diagnosis.ok or (strict and diagnosis.warnings):
        raise typer.Exit(1)


doctor.__doc__ = f"Check whether a model can be explained as it is, and say what to do.\n\n{EXAMPLES}"


def _readable(paths: list[str], model: Model, failures: list[Failure]) -> list[str]:
    """Return the images that can be read; the others are added to `failures`."""
    from clairvit.models.images import prepare

    readable = []
    for path in paths:
        try:
            prepare(path, model)
            readable.append(path)
        except BadInput as error:
            failures.append(Failure(path, str(error)))
    return readable


def _print_checks(diagnosis: Diagnosis) -> None:
    """Print one row per check, advice below the finding."""
    from clairvit.diagnostics.report import condensed

    available = {option_of(field.name) for field in fields(options.ModelOptions)}
    texts = {check.name: f"{check.finding}\n→ {check.advice}" for check in diagnosis.checks if check.advice}
    rows = [
        (check.status, check.name, with_named_options(texts.get(check.name, check.finding), available))
        for check in condensed(diagnosis.checks)
    ]
    count = len(diagnosis.images)
    images = diagnosis.images[0] if count == 1 else f"{count} images"
    table(f"{diagnosis.model} on {images}", ("", "check", "finding"), rows)
    print_line(diagnosis.summary())
