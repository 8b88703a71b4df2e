"""`clairvit evaluate`: methods scored by metrics on any number of images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clairvit.cli import options
from clairvit.cli.annotations import AnnotatedImages, Annotations, image_source
from clairvit.cli.arguments import ALL, read_single_target, resolve_methods, resolve_metrics, split_methods
from clairvit.cli.console import print_data_notes, print_json, print_line, print_result_note, progress_bar
from clairvit.cli.finish import exit_on_failures, print_document, print_skipped
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure, OutputPath, output_path
from clairvit.cli.output import by_metric, print_scores, score_document, score_notes, write_scores
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.metrics.score import Scores

FILE_SUFFIXES = (".json", ".csv")
METHODS, METRICS = "attnlrp+plus,rollout", "deletion,insertion,sparseness"  # defaults, also of `clairvit bench`
EXAMPLES = """[bold]Examples[/bold]

clairvit evaluate demo

clairvit evaluate photos/ --method attnlrp+plus,rollout --metric 'deletion,insertion(removal=blur)' --out scores/

clairvit evaluate photos/ --masks masks/ --metric iou,pointing-game --out scores.csv

clairvit evaluate --data pets:data/oxford-iiit-pet --limit 50 --metric ap,deletion

clairvit evaluate images/ --masks trimaps/ --mask-kind trimap --truth folders --target label --metric ap,faf
"""


def evaluate(
    images: options.OptionalImages = None,
    *,
    method: Annotated[list[str] | None, options.method_list(options.METHODS_HELP, METHODS)] = None,
    metric: Annotated[list[str] | None, options.metric_list(options.METRICS_HELP, METRICS)] = None,
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
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="A folder (scores.json, scores.csv and pictures of curves) or one file: .json .csv",
            rich_help_panel="Result",
        ),
    ] = "out/",
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.metrics.context import check_map_transform

    # What is misspelt is refused before a model is loaded.
    typed = method or [METHODS]
    methods, metrics = resolve_methods(*typed), resolve_metrics(*(metric or [METRICS]))
    check_map_transform(maps)
    run_options.check()
    path = output_path(out, check_suffix)
    model_options.preprocess()
    typed_readouts = readouts.readouts()
    source, failures = image_source(images, data, annotations, metrics, target, run_options.seed)
    if source.is_empty:
        _finish_without_scores(failures, output)
        return
    net = model_options.load(model)
    dataset = source.open(net, by_label=target == "label")
    print_data_notes((*net.assumptions, *dataset.images.notes), output.hidden)
    with progress_bar(f"{len(methods)} methods, {len(metrics)} metrics", 1, hidden=output.hidden):
        scores = cv.evaluate(
            net,
            dataset.images,
            methods,
            [spec.text for spec in metrics],
            target=read_single_target(target, net, typed_readouts),
            normalize=maps,
            skip=ALL in split_methods(*typed),
            on_error=lambda image, error: failures.append(Failure(image, with_options(error))),
            **run_options.arguments(),
        )
    if not scores:
        _finish_without_scores(failures, output)
        return
    _write_and_print(scores, methods, readouts.title(target), annotations.masks, dataset, path, failures, output)


evaluate.__doc__ = f"Score methods by metrics, with confidence intervals and random baselines.\n\n{EXAMPLES}"


def _finish_without_scores(failures: list[Failure], output: options.OutputOptions) -> None:
    if output.as_json:
        print_document("evaluate", {"results": []}, failures)
    exit_on_failures(0, failures, "scored")


def _write_and_print(
    scores: Scores,
    methods: list[str],
    target: str | None,
    masks: str | None,
    dataset: AnnotatedImages,
    path: OutputPath,
    failures: list[Failure],
    output: options.OutputOptions,
) -> None:
    rows = by_metric(scores)
    document = score_document("evaluate", rows, methods, target, scores.unmasked, failures)
    document |= {**scores.model_record, "foreground": dataset.detected, "skipped": scores.skipped}
    files = write_scores(path, rows, document)
    if output.as_json:
        print_json({**document, "files": [str(file) for file in files]})
    elif not output.quiet:
        print_scores(rows, methods)
        print_skipped(scores.skipped)
        for note in score_notes(rows, scores.unmasked, masks, dataset.detected):
            print_result_note(note)
        for file in files:
            print_line(f"Wrote {file}")
    exit_on_failures(len(document["images"]), failures, "scored")


def check_suffix(path: Path) -> None:
    """Raise BadInput for a file that is neither 'scores.json' nor 'scores.csv'."""
    if path.suffix.lower() not in FILE_SUFFIXES:
        raise BadInput(
            f"'{path}' ends in '{path.suffix}'; write scores to a name that ends in {' or '.join(FILE_SUFFIXES)}, or "
            "to a folder, which gets pictures of the curves too."
        )
