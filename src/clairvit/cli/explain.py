"""`clairvit explain`: one method, any number of images."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.paper import line, progress
from clairvit.cli.report import end, print_classes, print_files, print_json, print_notes
from clairvit.cli.split import split_labels, split_targets
from clairvit.cli.work import Job, carry_out, file_name, find, place

if TYPE_CHECKING:
    from clairvit.methods.explanation import Explanation
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

EXAMPLES = """[bold]Examples[/bold]

clairvit explain demo

clairvit explain photos/ --method rollout --out maps/

clairvit explain cat.jpg --target 'Egyptian Mau,Bengal' --out cat.pdf

clairvit explain cat.jpg --contrast Bengal Sphynx --method genatt+plus --layers

clairvit explain cat.jpg --model torchvision:resnet50 --method gradcam --features
"""


def explain(
    images: options.Images,
    method: Annotated[
        str, typer.Option("--method", help="Any of 'clairvit methods', e.g. legrad, 'rollout(fusion=max)+skipplus'.")
    ] = "legrad",
    model: options.ModelName = "pets",
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    labels: options.Labels = None,
    device: options.Device = None,
    target: options.Target = None,
    contrast: options.Contrast = None,
    score: options.Score = "logit",
    seed: options.Seed = 0,
    layers: Annotated[bool, typer.Option("--layers", help="Draw what each layer says, too.")] = False,
    features: Annotated[
        bool,
        typer.Option("--features", help="Draw feature maps, too: the strongest channels of a CNN's stages or blocks."),
    ] = False,
    out: options.Out = "out/",
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    batch_size: options.BatchSize = 8,
) -> None:
    import clairvit as cv
    from clairvit.methods.bind import bind

    where = place(out)
    bound = bind(method)  # a misspelt method is refused before a model is loaded
    found, failures = find(images)
    net = load(model, arch, no_pretrained, labels, device)

    def verb(batch: Batch, aim: Any) -> dict[str, Explanation]:
        return {bound.text: cv.explain(net, batch, method, aim, score=score, seed=seed, layers=layers)}

    targets = read_targets(target, contrast, net)
    save = functools.partial(_save_with_features, net) if features else _save
    job = Job(net, targets, verb, save, where, file_name(bound.text), batch_size, values=as_json)
    with progress(bound.text, len(found), hidden=as_json or quiet) as advance:
        results = carry_out(job, found, failures, advance)
    if as_json:
        entries = [{"image": one.image, "files": [str(f) for f in one.files], **one.first} for one in results]
        print_json("explain", entries, failures)
    elif not quiet:
        print_classes(results)
        print_notes(results)
        if layers and results and results[0].first["layers"] is None:
            line(f"Note: {bound.text} does not speak layer by layer, so there is no strip of layers.")
        print_files(results)
    end(results, failures)


explain.__doc__ = f"Show where a model looked, by one method.\n\n{EXAMPLES}"


def load(model: str, arch: str | None, no_pretrained: bool, labels: str | None, device: str | None) -> Model:
    """The model options of every command."""
    import clairvit as cv

    names = split_labels(labels) if labels is not None else None
    return cv.load(model, pretrained=not no_pretrained, arch=arch, labels=names, device=device)


def read_targets(target: Sequence[str] | None, contrast: tuple[str, str] | None, model: Model) -> list[Any]:
    """--target and --contrast together, in that order; none of them: the predicted class."""
    import clairvit as cv

    targets: list[Any] = list(split_targets(target or [], model.labels))
    if contrast is not None:
        targets.append(cv.contrast(*contrast))
    return targets


def _save(explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
    """The file itself and, where the layers were asked for, their strip: 'cat-layers.png' beside 'cat.png'."""
    from clairvit.show.save import PICTURES

    (explanation,) = explanations.values()
    files = [explanation.save(path)]
    if explanation.layers is not None and path.suffix.lower() in PICTURES:
        files.append(explanation.save(path.with_stem(f"{path.stem}-layers"), layers=True))
    return files


def _save_with_features(model: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
    """The same and the feature maps: 'cat-features.png' beside 'cat.png', numbered where one file has many images."""
    from clairvit.show.features import explained_features, features_figure
    from clairvit.show.figures import same_image
    from clairvit.show.save import PICTURES, write_figure

    files = _save(explanations, path)
    if path.suffix.lower() in PICTURES:
        (explanation,) = explanations.values()
        first = [group[0] for group in same_image(explanation)]  # an image with several targets has its features once
        found = explained_features(model, explanation.pixels[first], [explanation.names[item] for item in first])
        for number, one in enumerate(found, 1):
            ending = "features" if len(found) == 1 else f"features-{number}"
            files.append(write_figure(features_figure([one]), path.with_stem(f"{path.stem}-{ending}")))
    return files
