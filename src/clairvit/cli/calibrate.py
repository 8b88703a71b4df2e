"""`clairvit calibrate`: an explanation that is fitted to this model, on these images."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, image_source
from clairvit.cli.arguments import read_single_target, resolve_metrics
from clairvit.cli.console import print_data_notes, print_line, progress_bar
from clairvit.cli.finish import exit_on_failures, print_document
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure
from clairvit.cli.output import print_calibration
from clairvit.errors import BadInput

EXAMPLES = """[bold]Examples[/bold]

clairvit calibrate photos/ --out mine.json, then: clairvit explain cat.jpg --method mine.json

clairvit calibrate photos/ --masks masks/ --backwards 1

clairvit calibrate --data pets:data/oxford-iiit-pet --limit 50

clairvit evaluate others/ --method mine.json,attnlrp+plus --metric insertion-deletion, on other photos
"""


def calibrate(
    images: options.OptionalImages = None,
    *,
    sets: Annotated[
        int, typer.Option(min=2, help="Random token sets per image and keep rate; there are nine keep rates.")
    ] = 8,
    backwards: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many backward passes per explanation.", show_default="one per rule table"),
    ] = None,
    metric: Annotated[
        list[str] | None,
        options.metric_list(
            "Metrics, separated by commas or repeated, that state the gain over attnlrp+plus.",
            "insertion-deletion, with masks also ap",
        ),
    ] = None,
    data: options.DataOptions,
    annotations: Annotations,
    model: options.ModelName = "pets",
    model_options: options.ModelOptions,
    target: options.OneTarget = None,
    readouts: options.ReadoutOptions,
    run_options: options.RunOptions,
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FILE.json", help="Where the recipe is written.", rich_help_panel="Result"),
    ] = "mine.json",
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where the data of each image are kept, so that an interrupted run continues.",
            show_default="next to --out: mine.cache/",
            rich_help_panel="Result",
        ),
    ] = None,
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit._io import check_writable
    from clairvit.selection.calibrate import image_metrics

    # What is misspelt is refused before a model is loaded.
    metrics = None if not metric else [spec.text for spec in image_metrics(resolve_metrics(*metric))]
    file = Path(out)
    if file.suffix.lower() != ".json":
        raise BadInput(f"--out {out} is no name for a recipe; expected one that ends in .json, such as mine.json.")
    run_options.check()
    model_options.preprocess()
    typed_readouts = readouts.readouts()
    scored = [] if metric is None else resolve_metrics(*metric)
    source, failures = image_source(images, data, annotations, scored, target, run_options.seed)
    if source.is_empty:
        if output.as_json:
            print_document("calibrate", {"results": []}, failures)
        exit_on_failures(0, failures, "used")
        return
    check_writable(file)
    net = model_options.load(model)
    dataset = source.open(net, by_label=target == "label").images
    print_data_notes((*net.assumptions, *dataset.notes), output.hidden)
    with progress_bar(f"{len(dataset)} images", 1, hidden=output.hidden):
        recipe = cv.calibrate(
            net,
            dataset,
            target=read_single_target(target, net, typed_readouts),
            sets=sets,
            backwards=backwards,
            metrics=metrics,
            cache=cache or file.with_suffix(".cache"),
            on_error=lambda image, error: failures.append(Failure(image, with_options(error))),
            **run_options.arguments(),
        )
    recipe.save(file)
    if output.as_json:
        print_document("calibrate", {**asdict(recipe), "files": [str(file)]}, failures)
    elif not output.quiet:
        print_calibration(recipe)
        typed = [*(["--model", model] if model != "pets" else []), *model_options.typed()]
        command = shlex.join(["clairvit", "explain", "IMAGE", *typed, "--method", str(file)])
        print_line(f"Wrote {file}; use it by: {command}")
    exit_on_failures(recipe.images, failures, "used")


calibrate.__doc__ = (
    "Fit an explanation to this model: layer maps weighted so that they predict what removing tokens does.\n\n"
    f"{EXAMPLES}"
)
