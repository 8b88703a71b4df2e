"""`clairvit choose`: the most faithful method for this model, on these images."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, image_source
from clairvit.cli.arguments import read_single_target, resolve_methods, resolve_metrics, split_methods
from clairvit.cli.console import print_data_notes, print_line, progress_bar
from clairvit.cli.finish import exit_on_failures, print_document
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure
from clairvit.cli.output import print_selection, selection_document
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.metrics.registry import MetricSpec

EXAMPLES = """[bold]Examples[/bold]

clairvit choose photos/

clairvit choose photos/ --masks masks/ --out recipe.json, then: clairvit explain cat.jpg --recipe recipe.json

clairvit choose photos/ --method attnlrp+plus,genatt+skipplus,lime --metric 'deletion,insertion' --by mean-rank

clairvit choose photos/ --tune-start focusvit,genatt,ixg

clairvit choose photos/ --calibrate

clairvit choose --data pets:data/oxford-iiit-pet --limit 100 --model timm:vit_base_patch16_224
"""


def choose(
    images: options.OptionalImages = None,
    *,
    method: Annotated[
        list[str] | None,
        options.method_list(
            "Methods, separated by commas or repeated; random and center are always there.",
            "well-known ones that need one trace each",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        options.metric_list(
            "Metrics, separated by commas or repeated; the first one ranks, unless --by says otherwise.",
            "insertion-deletion,faithfulness-correlation, with masks also ap,pointing-game",
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="first|mean-rank|METRIC",
            help="What ranks: the first metric, the mean rank over all faithfulness metrics, or one of the metrics.",
        ),
    ] = "first",
    tune_start: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Find the best start layer of these methods, FocusViT's m*: focusvit,genatt,decompx,ixg.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Fit a calibrated method too, and rank it by cross-fitted scores; 8 or more images."
        ),
    ] = False,
    data: options.DataOptions,
    annotations: Annotations,
    model: options.ModelName = "pets",
    model_options: options.ModelOptions,
    target: options.OneTarget = None,
    readouts: options.ReadoutOptions,
    maps: options.Maps = "raw",
    run_options: options.RunOptions,
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FILE.json", help="Where the recipe is written.", rich_help_panel="Result"),
    ] = "recipe.json",
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.selection.start_layer import base_method

    # What is misspelt is refused before a model is loaded.
    methods = resolve_methods(*method) if method else None
    metrics = resolve_metrics(*metric) if metric else None
    tuned = [base_method(text) for text in split_methods(*tune_start)] if tune_start else []
    _check(by, metrics, maps, out)
    run_options.check()
    model_options.preprocess()
    typed_readouts = readouts.readouts()
    source, failures = image_source(images, data, annotations, metrics or [], target, run_options.seed)
    if source.is_empty:
        if output.as_json:
            print_document("choose", {"results": []}, failures)
        exit_on_failures(0, failures, "scored")
        return
    net = model_options.load(model)
    dataset = source.open(net, by_label=target == "label").images
    print_data_notes((*net.assumptions, *dataset.notes), output.hidden)
    with progress_bar(f"{len(dataset)} images", 1, hidden=output.hidden):
        selection = cv.choose(
            net,
            dataset,
            methods,
            None if metrics is None else [spec.text for spec in metrics],
            target=read_single_target(target, net, typed_readouts),
            normalize=maps,
            by=by,
            tune_start=tuned,
            calibrate=calibrate,
            on_error=lambda image, error: failures.append(Failure(image, with_options(error))),
            **run_options.arguments(),
        )
    file = selection.save(out)
    if output.as_json:
        print_document("choose", selection_document(selection, file), failures)
    elif not output.quiet:
        print_selection(selection)
        typed = [*(["--model", model] if model != "pets" else []), *model_options.typed()]
        command = shlex.join(["clairvit", "explain", "IMAGE", *typed, "--recipe", str(file)])
        print_line(f"Wrote {file}; use it by: {command}")
    exit_on_failures(len(selection.scores.predictions), failures, "scored")


choose.__doc__ = (
    f"Find the most faithful method for this model on these images, with its statistical certainty.\n\n{EXAMPLES}"
)


def _check(by: str, metrics: list[MetricSpec] | None, maps: str, out: str) -> None:
    from clairvit.metrics.context import check_map_transform
    from clairvit.metrics.registry import resolve_metric
    from clairvit.selection.choose import METRICS, WITH_MASKS, criterion

    criterion(by, metrics or [resolve_metric(text) for text in (*METRICS, *WITH_MASKS)])
    check_map_transform(maps)
    if Path(out).suffix.lower() != ".json":
        raise BadInput(f"--out {out} is no name for a recipe; expected one that ends in .json, such as recipe.json.")
