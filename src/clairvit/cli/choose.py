"""`clairvit choose`: which method to trust for this model, on these images."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, image_source
from clairvit.cli.arguments import split_methods
from clairvit.cli.console import line, progress, remark
from clairvit.cli.evaluate import wanted_methods, wanted_metrics
from clairvit.cli.finish import end, print_json
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure
from clairvit.cli.picks import document, print_pick
from clairvit.cli.request import load, read_preprocess, read_targets
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.metrics.registry import MetricSpec

EXAMPLES = """[bold]Examples[/bold]

clairvit choose photos/

clairvit choose photos/ --masks masks/ --out recipe.json, then: clairvit explain cat.jpg --recipe recipe.json

clairvit choose photos/ --method legrad,genatt+skipplus,lime --metric 'deletion,insertion' --by mean-rank

clairvit choose photos/ --tune-start focusvit,genatt,ixg

clairvit choose pets:data/oxford-iiit-pet --limit 100 --model timm:vit_base_patch16_224
"""


def choose(
    images: options.ImagesOrData,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "--methods",
            metavar="A,B,…",
            help="Methods separated by commas; random and center are always there.",
            show_default="a dozen that need one forward and backward",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="A,B,…",
            help="Metrics separated by commas; the first one ranks, unless --by says otherwise.",
            show_default="insertion-deletion,faithfulness-correlation, with masks also ap,pointing-game",
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
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Find the best layer to start at for these methods, as FocusViT's m*: focusvit,genatt,decompx,ixg.",
        ),
    ] = None,
    masks: options.Masks = None,
    mask_kind: options.MaskKind = "nonzero",
    weights: options.Weights = None,
    truth: options.Truth = None,
    split: options.Split = None,
    limit: options.Limit = None,
    download: options.Download = False,
    model: options.ModelName = "pets",
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    labels: options.Labels = None,
    activation: options.Activation = None,
    device: options.Device = None,
    mean: options.Mean = None,
    std: options.Std = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    interpolation: options.Interpolation = None,
    target: options.OneTarget = None,
    maps: options.Maps = "raw",
    seed: options.Seed = 0,
    autocast: options.Autocast = None,
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FILE.json", help="Where the recipe is written.", rich_help_panel="Result"),
    ] = "recipe.json",
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    batch_size: options.BatchSize = None,
) -> None:
    import clairvit as cv
    from clairvit.perturbation.batching import check_pace
    from clairvit.selection.start_layer import base_of

    # What is misspelt is refused before a model is loaded.
    methods = None if method is None else wanted_methods(method)
    metrics = None if metric is None else wanted_metrics(metric)
    tuned = [] if tune_start is None else [base_of(text) for text in split_methods(tune_start)]
    _check(by, metrics, maps, out)
    check_pace(batch_size, autocast)
    how_seen = read_preprocess(mean, std, resize, crop, interpolation)
    source, failures = image_source(
        images, Annotations(masks, mask_kind, weights, truth), metrics or [], target, split, limit, download, seed
    )
    if source.is_empty:
        if as_json:
            print_json("choose", [], failures)
        end([], failures, "scored")
        return
    net = load(model, arch, no_pretrained, labels, device, activation, how_seen)
    dataset = source.open(net, by_label=target == "label").images
    remark((*net.assumptions, *dataset.notes), as_json or quiet)
    aims: list[Any] = ["label"] if target == "label" else read_targets([target] if target else None, None, net)
    if len(aims) > 1:
        raise BadInput(f"--target {target} names {len(aims)} classes; expected one, by which every image is scored.")
    with progress(f"{len(dataset)} images", 1, hidden=as_json or quiet):
        pick = cv.choose(
            net,
            dataset,
            methods,
            None if metrics is None else [one.text for one in metrics],
            target=aims[0] if aims else None,
            normalize=maps,
            by=by,
            tune_start=tuned,
            on_error=lambda image, error: failures.append(Failure(image, with_options(error))),
            seed=seed,
            batch_size=batch_size,
            autocast=autocast,
        )
    file = pick.save(out)
    if as_json:
        _print_json(document(pick, file, failures))
    elif not quiet:
        print_pick(pick)
        typed = {"--model": model if model != "pets" else None, "--arch": arch, "--labels": labels}
        typed["--activation"] = activation
        typed |= {"--mean": mean, "--std": std, "--resize": resize, "--crop": crop, "--interpolation": interpolation}
        also = [part for name, value in typed.items() if value is not None for part in (name, value)]
        line(f"Wrote {file}; use it by: {shlex.join(['clairvit', 'explain', 'IMAGE', *also, '--recipe', str(file)])}")
    end(pick.scores.seen, failures, "scored")


choose.__doc__ = f"Find the method to trust for this model on these images, and say how sure that is.\n\n{EXAMPLES}"


def _check(by: str, metrics: list[MetricSpec] | None, maps: str, out: str) -> None:
    from clairvit.metrics.context import check_shape
    from clairvit.metrics.registry import resolve_metric
    from clairvit.selection.choose import METRICS, WITH_MASKS, criterion

    criterion(by, metrics or [resolve_metric(text) for text in (*METRICS, *WITH_MASKS)])
    check_shape(maps)
    if Path(out).suffix.lower() != ".json":
        raise BadInput(f"--out {out} is no name for a recipe; expected one that ends in .json, such as recipe.json.")


def _print_json(content: dict[str, Any]) -> None:
    from clairvit.plotting.save import dumps

    print(dumps(content))
