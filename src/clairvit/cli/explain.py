"""`clairvit explain`: one method, any number of images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.console import line
from clairvit.cli.finish import end, print_classes, print_files, print_json, print_notes, print_statistics
from clairvit.cli.image_job import file_name
from clairvit.cli.request import Request, read_preprocess

if TYPE_CHECKING:
    from clairvit.methods.explanation import Explanation
    from clairvit.methods.recipe import Recipe
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

EXAMPLES = """[bold]Examples[/bold]

clairvit explain demo

clairvit explain photos/ --method rollout --out maps/

clairvit explain cat.jpg --target 'Egyptian Mau,Bengal' --out cat.pdf

clairvit explain cat.jpg --contrast Bengal Sphynx --method genatt+plus --layers

clairvit explain cat.jpg --method rollout --layers --heads

clairvit explain cat.jpg --method lime --samples 2000 --removal blur

clairvit explain cat.jpg --recipe recipe.json

clairvit explain cat.jpg --model torchvision:resnet50 --method gradcam --features
"""


def explain(
    images: options.Images,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="Any of 'clairvit methods', e.g. legrad, 'rollout(fusion=max)+skipplus'.",
            show_default="legrad, or the recipe's",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What 'clairvit choose' found best for the model; with --method 'focusvit(m=auto)' its start layer.",
        ),
    ] = None,
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
    target: options.Target = None,
    contrast: options.Contrast = None,
    score: options.Score = None,
    seed: options.Seed = 0,
    samples: options.Samples = None,
    removal: options.Removal = None,
    autocast: options.Autocast = None,
    layers: Annotated[bool, typer.Option("--layers", help="Draw what each layer says, too.")] = False,
    features: Annotated[
        bool,
        typer.Option("--features", help="Draw feature maps, too: the strongest channels of a CNN's stages or blocks."),
    ] = False,
    heads: Annotated[bool, typer.Option("--heads", help="Draw what each head of each layer says, too.")] = False,
    out: options.Out = "out/",
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    batch_size: options.BatchSize = None,
) -> None:
    import clairvit as cv
    from clairvit.methods.recipe import USUAL
    from clairvit.methods.spec import resolve_method
    from clairvit.perturbation.batching import check_pace

    own = {name: value for name, value in (("samples", samples), ("removal", removal)) if value is not None}
    advice = None if recipe is None else _read(recipe)
    chosen = USUAL if method is None else method
    spec = resolve_method(
        chosen if advice is None else advice.method_for(method), **own
    )  # misspelt: refused before a model
    check_pace(batch_size, autocast)
    asked = Request(
        images,
        model,
        arch,
        no_pretrained,
        labels,
        device,
        target,
        contrast,
        out,
        as_json,
        quiet,
        batch_size,
        activation,
        preprocess=read_preprocess(mean, std, resize, crop, interpolation),
    )

    unchecked = [] if advice is None else [advice]

    def verb(net: Model, batch: Batch, aim: Any) -> dict[str, Explanation]:
        while unchecked:
            unchecked.pop().check(net)  # once, not for each batch
        made = cv.explain(
            net,
            batch,
            spec.text,
            aim,
            score=score,
            seed=seed,
            layers=layers,
            by_head=heads,
            batch_size=batch_size,
            autocast=autocast,
        )
        return {spec.text: made}

    save = _save_with_features if features else _save
    results, failures = asked.carry_out(verb, save, spec.text, file_name(spec.text))
    if as_json:
        entries = [{"image": one.image, "files": [str(f) for f in one.files], **one.first} for one in results]
        print_json("explain", entries, failures)
    elif not quiet:
        print_classes(results)
        print_statistics(results)
        print_notes(results)
        if layers and results and results[0].first["layers"] is None:
            line(f"Note: {spec.text} does not speak layer by layer, so there is no strip of layers.")
        print_files(results)
    end(results, failures)


explain.__doc__ = f"Show where a model looked, by one method.\n\n{EXAMPLES}"


def _read(recipe: str) -> Recipe:
    from clairvit.methods.recipe import read_recipe

    return read_recipe(recipe)


def _save(_: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
    """The file itself and, where they were asked for, 'cat-layers.png' and 'cat-heads.png' beside 'cat.png'."""
    from clairvit.plotting.save import PICTURES

    (explanation,) = explanations.values()
    files = [explanation.save(path)]
    if explanation.layers is not None and path.suffix.lower() in PICTURES:
        files.append(explanation.save(path.with_stem(f"{path.stem}-layers"), layers=True))
    if explanation.heads is not None and path.suffix.lower() in PICTURES:
        files.append(explanation.save(path.with_stem(f"{path.stem}-heads"), heads=True))
    return files


def _save_with_features(model: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
    """The same and the feature maps: 'cat-features.png' beside 'cat.png', numbered where one file has many images."""
    from clairvit.methods.features import features
    from clairvit.plotting.features import features_figure
    from clairvit.plotting.save import PICTURES, write_figure
    from clairvit.plotting.tiles import same_image

    files = _save(model, explanations, path)
    if path.suffix.lower() in PICTURES:
        (explanation,) = explanations.values()
        first = [group[0] for group in same_image(explanation)]  # an image with several targets has its features once
        found = features(model, explanation.pixels[first], names=[explanation.names[item] for item in first])
        for number, one in enumerate(found, 1):
            ending = "features" if len(found) == 1 else f"features-{number}"
            files.append(write_figure(features_figure([one]), path.with_stem(f"{path.stem}-{ending}")))
    return files
