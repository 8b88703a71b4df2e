"""`clairvit doctor`: can this model be explained as it is?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit._version import __version__
from clairvit.cli import options
from clairvit.cli.console import line, progress, table
from clairvit.cli.finish import end
from clairvit.cli.image_job import Failure, find
from clairvit.cli.request import load, read_preprocess
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
    method: Annotated[
        str | None,
        typer.Option(
            help="The method whose maps are compared with random ones.",
            show_default="attnlrp+plus, or another that applies",
            rich_help_panel="What is explained",
        ),
    ] = None,
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    labels: options.Labels = None,
    device: options.Device = None,
    activation: options.Activation = None,
    mean: options.Mean = None,
    std: options.Std = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    interpolation: options.Interpolation = None,
    seed: options.Seed = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 on warnings too.", rich_help_panel="Result")
    ] = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    import clairvit as cv
    from clairvit.methods.spec import resolve_method

    if method is not None:
        resolve_method(method)  # what is misspelt is refused before a model is loaded
    preprocess = read_preprocess(mean, std, resize, crop, interpolation)
    paths, failures = find(images) if images else ([], [])
    net = load(model, arch, no_pretrained, labels, device, activation, preprocess)
    readable = _readable(paths, net, failures)
    if images and not readable:
        end(readable, failures, "read")
    with progress("doctor", 1, hidden=as_json or quiet):
        diagnosis = cv.doctor(net, readable or None, method=method, seed=seed)
    if as_json:
        _print_json(diagnosis, failures)
    elif not quiet:
        _print_checks(diagnosis)
    end(readable, failures, "read")
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
    rows = [
        (check.status, check.name, f"{check.finding}\n→ {check.advice}" if check.advice else check.finding)
        for check in diagnosis.checks
    ]
    table(f"{diagnosis.model} on {_images(diagnosis)}", ("", "check", "finding"), rows)
    line(diagnosis.summary())


def _images(diagnosis: Diagnosis) -> str:
    count = len(diagnosis.images)
    return diagnosis.images[0] if count == 1 else f"{count} images"


def _print_json(diagnosis: Diagnosis, failures: list[Failure]) -> None:
    from clairvit._io import dumps_json

    content: dict[str, Any] = {"clairvit": __version__, "command": "doctor", **diagnosis.to_dict()}
    print(dumps_json({**content, "failed": [vars(failure) for failure in failures]}))
