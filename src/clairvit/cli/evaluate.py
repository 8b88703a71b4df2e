"""`clairvit evaluate`: methods scored by metrics on any number of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, image_source
from clairvit.cli.arguments import split_methods
from clairvit.cli.compare import ALL, choose
from clairvit.cli.console import line, progress, remark
from clairvit.cli.finish import end, print_json, print_left_out
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure, Place, file_name, place
from clairvit.cli.request import load, read_preprocess, read_targets
from clairvit.cli.scores import by_metric, document, long_form, print_scores
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.metrics.registry import MetricSpec
    from clairvit.metrics.score import Score

TABLES = (".json", ".csv")
EXAMPLES = """[bold]Examples[/bold]

clairvit evaluate demo

clairvit evaluate photos/ --method legrad,rollout --metric 'deletion,insertion(removal=blur)' --out scores/

clairvit evaluate photos/ --masks masks/ --metric iou,pointing-game --out scores.csv

clairvit evaluate pets:data/oxford-iiit-pet --limit 50 --metric ap,deletion

clairvit evaluate images/ --masks trimaps/ --mask-kind trimap --truth folders --target label --metric ap,faf
"""


def evaluate(
    images: options.ImagesOrData,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "--methods",
            metavar="A,B,…",
            help="Methods separated by commas; 'all' are those that fit the model and are not slow.",
        ),
    ] = "legrad,rollout",
    metric: Annotated[
        str, typer.Option("--metric", metavar="A,B,…", help="Metrics separated by commas, any of 'clairvit metrics'.")
    ] = "deletion,insertion,sparseness",
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
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="A folder (scores.json, scores.csv and pictures of curves) or one file: .json .csv",
            rich_help_panel="Result",
        ),
    ] = "out/",
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    batch_size: options.BatchSize = None,
) -> None:
    import clairvit as cv
    from clairvit.metrics.context import check_shape
    from clairvit.perturbation.batching import check_pace

    methods, metrics = wanted_methods(method), wanted_metrics(metric)  # refused, if misspelt, before a model is loaded
    everything = ALL in split_methods(method)
    check_shape(maps)
    check_pace(batch_size, autocast)
    where = place(out, check_table)
    how_seen = read_preprocess(mean, std, resize, crop, interpolation)
    source, failures = image_source(
        images, Annotations(masks, mask_kind, weights, truth), metrics, target, split, limit, download, seed
    )
    if source.is_empty:
        if as_json:
            print_json("evaluate", [], failures)
        end([], failures, "scored")
        return
    net = load(model, arch, no_pretrained, labels, device, activation, how_seen)
    dataset = source.open(net, by_label=target == "label")
    remark((*net.assumptions, *dataset.images.notes), as_json or quiet)
    aims: list[Any] = ["label"] if target == "label" else read_targets([target] if target else None, None, net)
    if len(aims) > 1:
        raise BadInput(f"--target {target} names {len(aims)} classes; expected one, by which every image is scored.")
    with progress(f"{len(methods)} methods, {len(metrics)} metrics", 1, hidden=as_json or quiet):
        scores = cv.evaluate(
            net,
            dataset.images,
            methods,
            [one.text for one in metrics],
            target=aims[0] if aims else None,
            normalize=maps,
            skip=everything,
            on_error=lambda image, error: failures.append(Failure(image, with_options(error))),
            seed=seed,
            batch_size=batch_size,
            autocast=autocast,
        )
    if not scores:
        if as_json:
            print_json("evaluate", [], failures)
        end([], failures, "scored")
        return
    rows = by_metric(scores)
    content = document(rows, methods, target, scores.unmasked, failures)
    content |= {**scores.model_record, "foreground": dataset.detected, "skipped": scores.skipped}
    files = write(where, rows, content)
    if as_json:
        from clairvit.plotting.save import dumps

        print(dumps({**content, "files": [str(file) for file in files]}))
    elif not quiet:
        print_scores(rows, methods)
        print_left_out(scores.skipped)
        beware = [f"Note: {note}" for note in notes(rows, scores.unmasked, masks, dataset.detected)]
        for sentence in (*beware, *(f"Wrote {file}" for file in files)):
            line(sentence)
    end(content["images"], failures, "scored")


evaluate.__doc__ = f"Score methods by metrics, with how sure one may be and what luck would score.\n\n{EXAMPLES}"


def wanted_methods(text: str) -> list[str]:
    """Canonical, each once."""
    from clairvit.methods.registry import list_methods
    from clairvit.methods.spec import resolve_method

    if not text.strip(" ,"):
        raise BadInput("No method was given; write e.g. --method legrad,rollout.")
    listed, _ = choose(split_methods(text), list_methods())
    return list(dict.fromkeys(resolve_method(one).text for one in listed))


def wanted_metrics(text: str) -> list[MetricSpec]:
    """Settled, each once."""
    from clairvit.metrics.registry import resolve_metric

    if not text.strip(" ,"):
        raise BadInput("No metric was given; write e.g. --metric deletion,insertion.")
    return list({asked.text: asked for asked in map(resolve_metric, split_methods(text))}.values())


def check_table(path: Path) -> None:
    """'scores.json' and 'scores.csv' are files of scores."""
    if path.suffix.lower() not in TABLES:
        raise BadInput(
            f"'{path}' ends in '{path.suffix}'; write scores to a name that ends in {' or '.join(TABLES)}, or to a "
            "folder, which gets pictures of the curves too."
        )


def notes(
    rows: Mapping[str, Mapping[str, Score]],
    unmasked: Sequence[str],
    masks: str | None,
    detected: Mapping[str, Sequence[tuple[str, float]]],
) -> list[str]:
    """What a reader of the table must know, each said once."""
    found: list[str] = []
    if unmasked:
        some = ", ".join(unmasked[:3]) + (", …" if len(unmasked) > 3 else "")
        found.append(f"{len(unmasked)} without a mask in {masks}, so without a score by masks: {some}.")
    if detected:
        seen = Counter(name for classes in detected.values() for name in {name for name, _ in classes})
        most = sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:8]  # a set has no order of its own
        listed = ", ".join(f"{name} ({count})" for name, count in most) or "nothing"
        nothing = sum(not classes for classes in detected.values())
        found.append(f"Foreground found in the images: {listed}; none in {nothing}, which have no score by masks.")
    for scores in rows.values():
        for score in scores.values():
            found += score.notes
            if score.n_degenerate:
                found.append(f"{score.n_degenerate} of {len(score.values)} maps of {score.method} are constant.")
    return list(dict.fromkeys(found))


def write(where: Place, rows: Mapping[str, Mapping[str, Score]], content: Mapping[str, object]) -> list[Path]:
    """One file, or the folder's: scores.json, scores.csv and a picture for each metric with curves."""
    from clairvit.plotting.save import write_json, write_text

    if where.is_file and where.path.suffix.lower() == ".json":
        return [write_json(content, where.path)]
    if where.is_file:
        return [write_text(long_form(rows), where.path)]
    files = [write_json(content, where.path / "scores.json"), write_text(long_form(rows), where.path / "scores.csv")]
    drawn = {metric: scores for metric, scores in rows.items() if any(one.curve is not None for one in scores.values())}
    if drawn:
        from clairvit.plotting.curves import curves_figure
        from clairvit.plotting.save import write_figure

        for metric, scores in drawn.items():
            files.append(write_figure(curves_figure(list(scores.values())), where.path / f"{file_name(metric)}.png"))
    return files
