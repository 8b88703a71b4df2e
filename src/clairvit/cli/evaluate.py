"""`clairvit evaluate`: methods scored by metrics on any number of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clairvit.cli import options
from clairvit.cli.paper import line, progress
from clairvit.cli.report import end, print_json
from clairvit.cli.request import load, read_targets
from clairvit.cli.scores import by_metric, document, long_form, print_scores
from clairvit.cli.split import split_methods
from clairvit.cli.work import Failure, Place, file_name, find, place
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from clairvit.metrics.metric import Asked
    from clairvit.metrics.score import Score
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

TABLES = (".json", ".csv")
EXAMPLES = """[bold]Examples[/bold]

clairvit evaluate demo

clairvit evaluate photos/ --method legrad,rollout --metric 'deletion,insertion(removal=blur)' --out scores/

clairvit evaluate photos/ --masks masks/ --metric iou,pointing-game --out scores.csv
"""


def evaluate(
    images: options.Images,
    method: Annotated[
        str, typer.Option("--method", metavar="A,B,…", help="Methods separated by commas, any of 'clairvit methods'.")
    ] = "legrad,rollout",
    metric: Annotated[
        str, typer.Option("--metric", metavar="A,B,…", help="Metrics separated by commas, any of 'clairvit metrics'.")
    ] = "deletion,insertion,sparseness",
    masks: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="A folder with a mask for each image, 'cat.png' for 'cat.jpg': not zero is the object."
        ),
    ] = None,
    model: options.ModelName = "pets",
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    labels: options.Labels = None,
    device: options.Device = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="CLASS",
            help="A class name (or its unique beginning) or number; default: what is predicted for each image.",
            rich_help_panel="What is explained",
        ),
    ] = None,
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
    from clairvit.perturb.batch import check_pace

    methods, metrics = wanted_methods(method), wanted_metrics(metric)  # refused, if misspelt, before a model is loaded
    folder = check_masks(masks, metrics)
    check_pace(batch_size, autocast)
    where = place(out, check_table)
    found, failures = find(images)
    net = load(model, arch, no_pretrained, labels, device)
    aims = read_targets([target] if target is not None else None, None, net)
    if len(aims) > 1:
        raise BadInput(f"--target {target} names {len(aims)} classes; expected one, by which every image is scored.")
    read = read_all(found, net, folder, failures)
    if read is None:
        if as_json:
            print_json("evaluate", [], failures)
        end([], failures, "scored")
        return
    with progress(f"{len(methods)} methods, {len(metrics)} metrics", 1, hidden=as_json or quiet):
        scores = cv.evaluate(
            net,
            read.batch,
            methods,
            [one.text for one in metrics],
            masks=read.masks,
            target=aims[0] if aims else None,
            seed=seed,
            batch_size=batch_size,
            autocast=autocast,
        )
    assert isinstance(scores, Mapping)  # a list of methods gives all of them
    rows = by_metric(scores)
    content = document(rows, methods, target, read.unmasked, failures)
    files = write(where, rows, content)
    if as_json:
        from clairvit.show.save import dumps

        print(dumps({**content, "files": [str(file) for file in files]}))
    elif not quiet:
        print_scores(rows, methods)
        for note in notes(rows, read.unmasked, folder):
            line(f"Note: {note}")
        for file in files:
            line(f"Wrote {file}")
    end(read.batch.names, failures, "scored")


evaluate.__doc__ = f"Score methods by metrics, with how sure one may be and what luck would score.\n\n{EXAMPLES}"


def wanted_methods(text: str) -> list[str]:
    """Canonical, each once."""
    from clairvit.methods.bind import bind

    if not text.strip(" ,"):
        raise BadInput("No method was given; write e.g. --method legrad,rollout.")
    return list(dict.fromkeys(bind(one).text for one in split_methods(text)))


def wanted_metrics(text: str) -> list[Asked]:
    """Settled, each once."""
    from clairvit.metrics.metric import ask

    if not text.strip(" ,"):
        raise BadInput("No metric was given; write e.g. --metric deletion,insertion.")
    return list({asked.text: asked for asked in map(ask, split_methods(text))}.values())


def check_masks(masks: str | None, metrics: Sequence[Asked]) -> Path | None:
    """The folder, if masks are needed or given."""
    if masks is None:
        for asked in metrics:
            if "masks" in asked.metric.needs:
                raise BadInput(
                    f"'{asked.metric.name}' compares maps with masks, and none were given; expected a folder with a "
                    "mask for each image: --masks DIR."
                )
        return None
    if not Path(masks).is_dir():
        raise BadInput(f"--masks {masks} is not a folder; expected one with 'cat.png' for the image 'cat.jpg'.")
    return Path(masks)


def check_table(path: Path) -> None:
    """'scores.json' and 'scores.csv' are files of scores."""
    if path.suffix.lower() not in TABLES:
        raise BadInput(
            f"'{path}' ends in '{path.suffix}'; write scores to a name that ends in {' or '.join(TABLES)}, or to a "
            "folder, which gets pictures of the curves too."
        )


@dataclass(frozen=True, eq=False)
class Read:
    """All images that could be read, as the model takes them."""

    batch: Batch
    masks: Tensor | None  # bool [B, H, W]
    unmasked: tuple[str, ...]  # images without a mask; theirs is empty


def read_all(images: Sequence[str], model: Model, folder: Path | None, failures: list[Failure]) -> Read | None:
    """Images and masks; what cannot be read is added to `failures`, and None means that nothing is left."""
    import torch

    from clairvit.models.images import Batch, prepare, read_image
    from clairvit.models.masks import prepare_mask, read_mask

    pixels, masks, names, unmasked = [], [], [], []
    for image in images:
        try:
            picture = read_image(image)
            seen = prepare([picture], model).pixels
            if folder is not None:
                file = folder / f"{Path(image).stem}.png"
                if file.exists():
                    masks.append(prepare_mask(read_mask(file, picture.size), model.preprocess))
                else:
                    masks.append(torch.zeros(seen.shape[-2:], dtype=torch.bool))
                    unmasked.append(image)
        except BadInput as error:
            failures.append(Failure(image, str(error)))
            continue
        pixels.append(seen)
        names.append(image)
    if not names:
        return None
    batch = Batch(torch.cat(pixels), tuple(names))
    return Read(batch, torch.stack(masks) if masks else None, tuple(unmasked))


def notes(rows: Mapping[str, Mapping[str, Score]], unmasked: Sequence[str], folder: Path | None) -> list[str]:
    """What a reader of the table must know, each said once."""
    found: list[str] = []
    if unmasked:
        some = ", ".join(unmasked[:3]) + (", …" if len(unmasked) > 3 else "")
        found.append(f"{len(unmasked)} without a mask in {folder}, so without a score by masks: {some}.")
    for scores in rows.values():
        for score in scores.values():
            found += score.notes
            if score.n_degenerate:
                found.append(f"{score.n_degenerate} of {len(score.values)} maps of {score.method} are constant.")
    return list(dict.fromkeys(found))


def write(where: Place, rows: Mapping[str, Mapping[str, Score]], content: Mapping[str, object]) -> list[Path]:
    """One file, or the folder's: scores.json, scores.csv and a picture for each metric with curves."""
    from clairvit.show.save import write_json, write_text

    if where.is_file and where.path.suffix.lower() == ".json":
        return [write_json(content, where.path)]
    if where.is_file:
        return [write_text(long_form(rows), where.path)]
    files = [write_json(content, where.path / "scores.json"), write_text(long_form(rows), where.path / "scores.csv")]
    drawn = {metric: scores for metric, scores in rows.items() if any(one.curve is not None for one in scores.values())}
    if drawn:
        from clairvit.show.curves import curves_figure
        from clairvit.show.save import write_figure

        for metric, scores in drawn.items():
            files.append(write_figure(curves_figure(list(scores.values())), where.path / f"{file_name(metric)}.png"))
    return files
