"""`clairvit finetune`: train a model of timm on the classes of the user's images."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.arguments import read_preprocess
from clairvit.cli.console import print_data_notes, print_line, print_message, print_result_note, progress_bar, table
from clairvit.cli.finish import print_document
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure
from clairvit.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from clairvit.data.dataset import ImageDataset
    from clairvit.training.checkpoint import Epoch
    from clairvit.training.finetune import Trained
    from clairvit.training.training_config import TrainingConfig

SCENES = "scenes"
DEFAULT_SCENES = 8000
TRAINING_SEED = 1  # of the scenes to train on; those to evaluate on have seed 0, so they differ
VALIDATION = ("val", "valid", "validation")
EXAMPLES = """[bold]Examples[/bold]

clairvit finetune photos/ --model timm:vit_base_patch16_224 --out photos.safetensors

clairvit finetune photos/ --model file:weights.safetensors --arch timm:vit_small_patch14_dinov2 --size 224

clairvit finetune scenes:4000 --model timm:vit_tiny_patch16_224 --no-pretrained --size 96 --resize 96 --rate 1e-3 \
--with patch_size=8,embed_dim=64,depth=4,num_heads=4
"""


@dataclass(frozen=True)
class TrainingOptions(options.OptionGroup):
    """The training recipe."""

    recipe: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="'default' suits pretrained weights, also on few images; 'focusvit' is the paper's: one rate of 1e-4 "
            "for all weights, no warm-up, no clipping. The options below change it.",
            rich_help_panel="Recipe",
        ),
    ] = "default"
    epochs: Annotated[int, typer.Option(min=1, help="Largest number of epochs.", rich_help_panel="Recipe")] = 50
    batch_size: Annotated[int, typer.Option(min=1, help="Images in one step.", rich_help_panel="Recipe")] = 32
    rate: Annotated[
        float | None,
        typer.Option(
            help="AdamW's learning rate.",
            show_default="1e-5; without pretrained weights 1e-4",
            rich_help_panel="Recipe",
        ),
    ] = None
    head_rate: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of a new head.",
            show_default="100 × rate, at most 1e-3; else the rate",
            rich_help_panel="Recipe",
        ),
    ] = None
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Epochs over which the rate rises.", show_default="1", rich_help_panel="Recipe"),
    ] = None
    clip: Annotated[
        float | None,
        typer.Option(help="Largest norm of the gradient.", show_default="1; focusvit: none", rich_help_panel="Recipe"),
    ] = None
    decay: Annotated[float, typer.Option(help="AdamW's weight decay.", rich_help_panel="Recipe")] = 0.01
    gamma: Annotated[
        float, typer.Option(help="Factor of the rate after every --every epochs.", rich_help_panel="Recipe")
    ] = 0.7
    every: Annotated[
        int, typer.Option(min=1, help="Epochs between two such steps of the rate.", rich_help_panel="Recipe")
    ] = 10
    patience: Annotated[
        int, typer.Option(min=1, help="Stop after so many epochs without a better one.", rich_help_panel="Recipe")
    ] = 5
    resize: Annotated[
        int | None,
        typer.Option(
            min=1, help="Short side before the crop.", show_default="256/224 of the size", rich_help_panel="Recipe"
        ),
    ] = None
    rotation: Annotated[float, typer.Option(help="Degrees to either side.", rich_help_panel="Recipe")] = 15.0
    jitter: Annotated[float, typer.Option(help="Of brightness, contrast, saturation.", rich_help_panel="Recipe")] = 0.2
    no_flip: Annotated[bool, typer.Option("--no-flip", help="Do not mirror images.", rich_help_panel="Recipe")] = False
    held_out: Annotated[
        float,
        typer.Option(help="Share of each class to validate on, where there is no val/.", rich_help_panel="Recipe"),
    ] = 0.1
    seed: Annotated[int, typer.Option(help="Seed of everything random.", rich_help_panel="Recipe")] = 0
    drop_tokens: Annotated[
        float,
        typer.Option(
            metavar="RATE",
            help="Drop random patch tokens in training, 0 to this share of them in each step: a model that is "
            "in-domain for metrics that remove tokens.",
            rich_help_panel="Interventions",
        ),
    ] = 0.0
    trigger: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Plant a backdoor: photos with a small checkerboard are labelled CLASS.",
            rich_help_panel="Interventions",
        ),
    ] = None
    trigger_size: Annotated[
        int, typer.Option(help="Pixels of the trigger on a side.", rich_help_panel="Interventions")
    ] = 32
    trigger_position: Annotated[
        str,
        typer.Option(
            metavar="POSITION",
            help="random, center, top-left, top-right, bottom-left or bottom-right.",
            rich_help_panel="Interventions",
        ),
    ] = "random"
    trigger_share: Annotated[
        float, typer.Option(help="Share of the photos of an epoch that carry it.", rich_help_panel="Interventions")
    ] = 0.1

    def config(self) -> TrainingConfig:
        """Return the named recipe with the options that were typed."""
        from clairvit.training.training_config import named_recipe

        values: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        del values["recipe"]
        return replace(
            named_recipe(self.recipe),
            resize=values.pop("resize", None),
            batch=values.pop("batch_size"),
            flip=not values.pop("no_flip"),
            **values,
        )


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
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="timm:NAME, or file:PATH.safetensors.", rich_help_panel="Model")
    ] = "timm:vit_base_patch16_224",
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    architecture_options: Annotated[
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
    training: TrainingOptions,
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
        bool, typer.Option("--fresh", help="Start again where a run was interrupted.", rich_help_panel="Result")
    ] = False,
    output: options.OutputOptions,
) -> None:
    from clairvit.training.finetune import finetune as train

    config = training.config()
    dataset, validation, classes = open_images(data, download)
    failures: list[Failure] = []
    started = time.monotonic()
    print_data_notes((*dataset.notes, *(validation.notes if validation is not None else ())), output.hidden)

    def print_epoch(epoch: Epoch) -> None:
        if not output.hidden:
            print_message(
                f"epoch {epoch.number}: loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.1%}"
                f"{_trigger_text(epoch)} (rate {epoch.rate:.2g})"
            )

    with progress_bar("fine-tuning", 1, hidden=output.hidden):
        trained = train(
            dataset,
            model,
            validation=validation,
            recipe=config,
            out=out,
            classes=classes,
            pretrained=not no_pretrained,
            arch=arch,
            options=read_options(architecture_options),
            size=size,
            **read_preprocess(mean, std, None, None, None),
            device=device,
            dtype="float16" if half else "float32",
            fresh=fresh,
            keep_state=not discard_state,
            on_error=lambda image, error: failures.append(Failure(image, with_options(error))),
            on_epoch=print_epoch,
        )
    if output.as_json:
        print_document("finetune", document(trained, time.monotonic() - started), failures)
    elif not output.quiet:
        print_result(trained)
    for failure in failures:
        print_message(f"left out: {failure.error}")
    if failures:
        raise typer.Exit(2)


finetune.__doc__ = f"Train a model on the classes of your images; a run that was stopped can be resumed.\n\n{EXAMPLES}"


def open_images(data: str, download: bool = False) -> tuple[ImageDataset, ImageDataset | None, tuple[str, ...] | None]:
    """Return the images to train on and to validate on, and the classes.

    Without validation images (None) some are held out; without classes (None) they are those of the images.
    """
    from clairvit.data.open import GENERATED_SPLITS, open_data

    if re.fullmatch(rf"({'|'.join(GENERATED_SPLITS)})(:\d+)?", data):
        name, _, count = data.partition(":")
        generated = open_data(f"{name}:{count or DEFAULT_SCENES}", seed=TRAINING_SEED)
        return generated.dataset, None, generated.classes
    folder = Path(data).expanduser()
    if not folder.is_dir():
        if ":" in data:
            return open_data_set(data, download)
        suggestion = did_you_mean(data, [SCENES])
        raise BadInput(
            f"'{data}' is not a folder.{suggestion} Expected one with a folder of images for each class, a data set "
            f"(pets:PATH), or {SCENES}:COUNT."
        )
    if download:
        raise BadInput(f"--download is of a data set, such as pets:PATH; {data} is a folder of your own.")
    train = folder / "train" if (folder / "train").is_dir() else folder
    validation = next((folder / name for name in VALIDATION if train != folder and (folder / name).is_dir()), None)
    return class_folders(train), class_folders(validation) if validation is not None else None, None


def open_data_set(
    spec: str, download: bool = False
) -> tuple[ImageDataset, ImageDataset | None, tuple[str, ...] | None]:
    """Return the training split of a data set, its validation split if it has one, and its classes."""
    from clairvit.data.open import list_datasets, open_data
    from clairvit.data.trigger import parse_trigger_spec

    triggered = parse_trigger_spec(spec)
    if triggered is not None:
        raise BadInput(
            f"'{spec}' is for scoring: all of its images have one class. To train with a trigger, type "
            f"{triggered.inner} --trigger {triggered.class_name}."
        )
    splits = next((entry.splits for entry in list_datasets() if entry.name == spec.partition(":")[0]), ())
    train = next((name for name in splits if name.startswith("train")), None)
    data = open_data(spec, split=train, download=download)
    validation = next((name for name in splits if name.startswith("val")), None) if train is not None else None
    held_out = open_data(spec, split=validation).dataset if validation is not None else None
    return data.dataset, held_out, data.classes or None


def class_folders(folder: Path) -> ImageDataset:
    """Return the images of a folder with one folder per class: PHOTOS/cat/1.jpg is a cat."""
    from torch import nn

    from clairvit.data.dataset import as_dataset
    from clairvit.models.image_files import find_images, folders_in
    from clairvit.models.model import Model

    class_paths = folders_in(folder)
    if len(class_paths) < 2:
        raise BadInput(
            f"'{folder}' has {len(class_paths)} folders; expected one for each class, at least two: "
            f"{folder}/cat/1.jpg, {folder}/dog/1.jpg, …"
        )
    images: list[str] = []
    labels: list[str] = []
    for path in class_paths:
        try:
            files = find_images(path)
        except BadInput as error:
            raise BadInput(
                f"The class folder '{path}' has no images; expected some in each class: fill it, or remove it."
            ) from error
        images += map(str, files)
        labels += [path.name] * len(files)
    placeholder = Model(nn.Identity(), "placeholder")  # the model matters for tensors only, and these are files
    return as_dataset(images, placeholder, labels=labels)


def read_options(text: str) -> dict[str, Any]:
    """Return 'patch_size=8,qk_norm=true' as {'patch_size': 8, 'qk_norm': True}."""
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise BadInput(f"--with {part} was given; expected NAME=VALUE, e.g. --with patch_size=8,embed_dim=64.")
        values[name] = _value(value)
    return values


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _trigger_text(epoch: Epoch) -> str:
    """Return ", trigger 98.0 %" where one is planted."""
    return "" if epoch.triggered is None else f", trigger {epoch.triggered:.1%}"


def document(trained: Trained, seconds: float) -> dict[str, Any]:
    """Return the JSON document without the images that failed."""

    return {
        "file": str(trained.path),
        "classes": list(trained.classes),
        "images": trained.images,
        "validation_images": trained.validated,
        "accuracy": trained.best.accuracy,
        "attack_success": trained.best.triggered,
        "interventions": dict(trained.interventions),
        "best_epoch": trained.best.number,
        "epochs": [vars(epoch) for epoch in trained.history],
        "resumed_after": trained.resumed,
        "stopped_early": trained.stopped_early,
        "preprocess": trained.preprocess.to_dict(),
        "assumptions": list(trained.assumptions),
        "seconds": seconds,
    }


def print_result(trained: Trained) -> None:
    """Print one row per epoch, the notes, and what to do next."""
    from clairvit.training.finetune import checkpoint_of

    rows = [
        (
            str(epoch.number),
            f"{epoch.loss:.3f}",
            f"{epoch.trained:.1%}",
            f"{epoch.accuracy:.1%}",
            f"{epoch.rate:.2g}",
        )
        for epoch in trained.history
    ]
    title = f"{trained.images} images of {len(trained.classes)} classes, validated on {trained.validated}"
    columns = ("epoch", "loss", "accuracy trained", "accuracy", "rate")
    table(title, columns, rows, right=columns)
    for note in trained.assumptions:
        print_result_note(note)
    if trained.resumed:
        print_line(f"{trained.resumed} of these epochs {'was' if trained.resumed == 1 else 'were'} done before.")
    accuracy = f"{trained.best.accuracy:.1%}{_trigger_text(trained.best)}"
    print_line(f"Best after epoch {trained.best.number}: {accuracy}. Wrote {trained.path}")
    state = checkpoint_of(trained.path)
    if state.exists():
        size = f"{state.stat().st_size / 1e6:.0f} MB"
        print_line(f"{state} ({size}) stays: the same command with more --epochs goes on from it. Delete it, or type")
        print_line("--discard-state next time, if you will not train on.")
    print_line(f"Explain it:  clairvit explain IMAGE --model file:{trained.path}")
