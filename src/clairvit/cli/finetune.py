"""`clairvit finetune`: a model of timm learns the classes of the user's images."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit._version import __version__
from clairvit.cli import options
from clairvit.cli.console import line, progress, remark, say, table
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure
from clairvit.cli.request import read_preprocess
from clairvit.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from clairvit.data.dataset import ImageDataset
    from clairvit.training.checkpoint import Epoch
    from clairvit.training.finetune import Trained

SCENES = "scenes"
MANY = 8000  # scenes, if nobody says how many
TRAINING_SEED = 1  # of the scenes trained on; those to evaluate on begin at seed 0 and are others
VALIDATION = ("val", "valid", "validation")
EXAMPLES = """[bold]Examples[/bold]

clairvit finetune photos/ --model timm:vit_base_patch16_224 --out photos.safetensors

clairvit finetune photos/ --model file:weights.safetensors --arch timm:vit_small_patch14_dinov2 --size 224

clairvit finetune scenes:4000 --model timm:vit_tiny_patch16_224 --no-pretrained --size 96 --resize 96 --rate 1e-3 \
--with patch_size=8,embed_dim=64,depth=4,num_heads=4
"""


def finetune(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A folder with a folder of images for each class (or with train/ and val/ of such), a data set "
            "(pets:PATH, …), or scenes:COUNT.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="timm:NAME, or file:PATH.safetensors.", rich_help_panel="Model")
    ] = "timm:vit_base_patch16_224",
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    shape: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="NAME=VALUE,…",
            help="Options of timm's model, e.g. patch_size=8,embed_dim=64.",
            rich_help_panel="Model",
        ),
    ] = "",
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Image size of the model.", show_default="its own", rich_help_panel="Model"),
    ] = None,
    mean: options.Mean = None,
    std: options.Std = None,
    device: options.Device = None,
    download: options.Download = False,
    recipe: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="'default' suits pretrained weights, also on few images; 'focusvit' is the paper's: one rate of 1e-4 "
            "for all weights, no warm-up, no clipping. The options below change it.",
            rich_help_panel="Recipe",
        ),
    ] = "default",
    epochs: Annotated[int, typer.Option(min=1, help="At most so many.", rich_help_panel="Recipe")] = 50,
    batch: Annotated[int, typer.Option(min=1, help="Images in one step.", rich_help_panel="Recipe")] = 32,
    rate: Annotated[
        float | None,
        typer.Option(
            help="AdamW's learning rate.",
            show_default="1e-5; without pretrained weights 1e-4",
            rich_help_panel="Recipe",
        ),
    ] = None,
    head_rate: Annotated[
        float | None,
        typer.Option(
            help="Of a new head.", show_default="100 × rate, at most 1e-3; else the rate", rich_help_panel="Recipe"
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Epochs over which the rate rises.", show_default="1", rich_help_panel="Recipe"),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="Largest norm of the gradient.", show_default="1; focusvit: none", rich_help_panel="Recipe"),
    ] = None,
    decay: Annotated[float, typer.Option(help="AdamW's weight decay.", rich_help_panel="Recipe")] = 0.01,
    gamma: Annotated[float, typer.Option(help="The rate's factor …", rich_help_panel="Recipe")] = 0.7,
    every: Annotated[int, typer.Option(min=1, help="… after so many epochs.", rich_help_panel="Recipe")] = 10,
    patience: Annotated[
        int, typer.Option(min=1, help="Stop after so many epochs without a better one.", rich_help_panel="Recipe")
    ] = 5,
    resize: Annotated[
        int | None,
        typer.Option(
            min=1, help="Short side before the crop.", show_default="256/224 of the size", rich_help_panel="Recipe"
        ),
    ] = None,
    rotation: Annotated[float, typer.Option(help="Degrees to either side.", rich_help_panel="Recipe")] = 15.0,
    jitter: Annotated[float, typer.Option(help="Of brightness, contrast, saturation.", rich_help_panel="Recipe")] = 0.2,
    no_flip: Annotated[bool, typer.Option("--no-flip", help="Do not mirror images.", rich_help_panel="Recipe")] = False,
    held_out: Annotated[
        float,
        typer.Option(help="Share of each class to validate on, where there is no val/.", rich_help_panel="Recipe"),
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.", rich_help_panel="Recipe")] = 0,
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FILE", help="The best weights: .safetensors", rich_help_panel="Result"),
    ] = "model.safetensors",
    half: Annotated[bool, typer.Option("--half", help="Write float16.", rich_help_panel="Result")] = False,
    discard_state: Annotated[
        bool,
        typer.Option(
            "--discard-state",
            help="Remove the training state (three times the size of the weights) when training is complete.",
            rich_help_panel="Result",
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew where a run was interrupted.", rich_help_panel="Result")
    ] = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    from clairvit.training.finetune import finetune as train
    from clairvit.training.training_config import named_recipe

    own: dict[str, Any] = {"rate": rate, "head_rate": head_rate, "warmup": warmup, "clip": clip}
    settings = replace(
        named_recipe(recipe),
        epochs=epochs,
        batch=batch,
        decay=decay,
        gamma=gamma,
        every=every,
        patience=patience,
        resize=resize,
        rotation=rotation,
        jitter=jitter,
        flip=not no_flip,
        held_out=held_out,
        seed=seed,
        **{name: value for name, value in own.items() if value is not None},
    )
    dataset, validation, classes = open_images(data, download)
    failures: list[Failure] = []
    begun = time.monotonic()
    silent = as_json or quiet
    remark((*dataset.notes, *(validation.notes if validation is not None else ())), silent)

    def told(epoch: Epoch) -> None:
        if not silent:
            say(f"epoch {epoch.number}: loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.1%} (rate {epoch.rate:.2g})")

    with progress("fine-tuning", 1, hidden=silent):
        done = train(
            dataset,
            model,
            validation=validation,
            recipe=settings,
            out=out,
            classes=classes,
            pretrained=not no_pretrained,
            arch=arch,
            options=read_options(shape),
            size=size,
            **read_preprocess(mean, std, None, None, None),
            device=device,
            dtype="float16" if half else "float32",
            fresh=fresh,
            keep_state=not discard_state,
            failed=lambda image, error: failures.append(Failure(image, with_options(error))),
            told=told,
        )
    if as_json:
        from clairvit.plotting.save import dumps

        print(dumps(document(done, failures, time.monotonic() - begun)))
    elif not quiet:
        print_result(done)
    for failure in failures:
        say(f"left out: {failure.error}")
    if failures:
        raise typer.Exit(2)


finetune.__doc__ = f"Teach a model the classes of your images; stopped and typed again, it goes on.\n\n{EXAMPLES}"


def open_images(data: str, download: bool = False) -> tuple[ImageDataset, ImageDataset | None, tuple[str, ...] | None]:
    """Images to train on, to validate on (None: held out from the first) and the classes (None: as they are met)."""
    if data == SCENES or re.fullmatch(rf"{SCENES}:\d+", data):
        from clairvit.data.scenes import CLASSES, scenes

        count = int(data.partition(":")[2] or MANY)
        return scenes(count, TRAINING_SEED), None, CLASSES
    folder = Path(data).expanduser()
    if not folder.is_dir():
        if ":" in data:
            return open_set(data, download)
        near = did_you_mean(data, [SCENES])
        raise BadInput(
            f"'{data}' is not a folder.{near} Expected one with a folder of images for each class, a data set "
            f"(pets:PATH), or {SCENES}:COUNT."
        )
    if download:
        raise BadInput(f"--download is of a data set, such as pets:PATH; {data} is a folder of your own.")
    train = folder / "train" if (folder / "train").is_dir() else folder
    kept = next((folder / name for name in VALIDATION if train != folder and (folder / name).is_dir()), None)
    return class_folders(train), class_folders(kept) if kept is not None else None, None


def open_set(spec: str, download: bool = False) -> tuple[ImageDataset, ImageDataset | None, tuple[str, ...] | None]:
    """A data set's own part for training, and its part for validation where it has one."""
    from clairvit.data.open import datasets, open_data

    splits = next((known.splits for known in datasets() if known.name == spec.partition(":")[0]), ())
    train = next((name for name in splits if name.startswith("train")), None)
    found = open_data(spec, split=train, download=download)
    kept = next((name for name in splits if name.startswith("val")), None) if train is not None else None
    return found.dataset, open_data(spec, split=kept).dataset if kept is not None else None, found.classes or None


def class_folders(folder: Path) -> ImageDataset:
    """PHOTOS/cat/1.jpg is a cat."""
    from torch import nn

    from clairvit.data.dataset import album_of
    from clairvit.models.image_files import find_images, folders_in
    from clairvit.models.model import Model

    inside = folders_in(folder)
    if len(inside) < 2:
        raise BadInput(
            f"'{folder}' has {len(inside)} folders; expected one for each class, at least two: {folder}/cat/1.jpg, "
            f"{folder}/dog/1.jpg, …"
        )
    images: list[str] = []
    labels: list[str] = []
    for path in inside:
        try:
            found = find_images(path)
        except BadInput as error:
            raise BadInput(
                f"The class folder '{path}' has no images; expected some in each class: fill it, or take it away."
            ) from error
        images += map(str, found)
        labels += [path.name] * len(found)
    nobody = Model(nn.Identity(), "nobody")  # an album asks the model about tensors only, and these are files
    return album_of(images, nobody, labels=labels)


def read_options(text: str) -> dict[str, Any]:
    """'patch_size=8,qk_norm=true' -> {'patch_size': 8, 'qk_norm': True}"""
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise BadInput(f"--with {part} was given; expected NAME=VALUE, e.g. --with patch_size=8,embed_dim=64.")
        found[name] = _value(value)
    return found


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def document(done: Trained, failures: list[Failure], seconds: float) -> dict[str, Any]:
    from clairvit.data.hashing import plain_preprocess

    return {
        "clairvit": __version__,
        "command": "finetune",
        "file": str(done.path),
        "classes": list(done.classes),
        "images": done.images,
        "validation_images": done.validated,
        "accuracy": done.best.accuracy,
        "best_epoch": done.best.number,
        "epochs": [vars(epoch) for epoch in done.history],
        "resumed_after": done.resumed,
        "stopped_early": done.stopped_early,
        "preprocess": plain_preprocess(done.preprocess),
        "assumptions": list(done.assumptions),
        "seconds": seconds,
        "failed": [vars(failure) for failure in failures],
    }


def print_result(done: Trained) -> None:
    from clairvit.training.finetune import checkpoint_of

    rows = [
        (str(one.number), f"{one.loss:.3f}", f"{one.trained:.1%}", f"{one.accuracy:.1%}", f"{one.rate:.2g}")
        for one in done.history
    ]
    title = f"{done.images} images of {len(done.classes)} classes, validated on {done.validated}"
    columns = ("epoch", "loss", "accuracy trained", "accuracy", "rate")
    table(title, columns, rows, right=columns)
    for note in done.assumptions:
        line(f"Note: {note}")
    if done.resumed:
        line(f"{done.resumed} of these epochs {'was' if done.resumed == 1 else 'were'} done before.")
    line(f"Best after epoch {done.best.number}: {done.best.accuracy:.1%}. Wrote {done.path}")
    state = checkpoint_of(done.path)
    if state.exists():
        size = f"{state.stat().st_size / 1e6:.0f} MB"
        line(f"{state} ({size}) stays: the same command with more --epochs goes on from it. Delete it, or type")
        line("--discard-state next time, if you will not train on.")
    line(f"Explain it:  clairvit explain IMAGE --model file:{done.path}")
