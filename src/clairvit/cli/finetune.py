"""`clairvit finetune`: train a model of timm on the classes of the user's images."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clairvit.cli import options
from clairvit.cli.arguments import read_preprocess
from clairvit.cli.command import Command
from clairvit.cli.console import print_line, print_message, print_result_note, table
from clairvit.cli.declare import argument, group, option
from clairvit.cli.finish import print_document
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
INTERVENTIONS = "Interventions"  # a heading of the help
EXAMPLES = """[bold]Examples[/bold]

clairvit finetune photos/ --model timm:vit_base_patch16_224 --out photos.safetensors

clairvit finetune photos/ --model file:weights.safetensors --arch timm:vit_small_patch14_dinov2 --size 224

clairvit finetune scenes:4000 --model timm:vit_tiny_patch16_224 --no-pretrained --size 96 --resize 96 --rate 1e-3 \
--with patch_size=8,embed_dim=64,depth=4,num_heads=4
"""


@group("Recipe")
class TrainingOptions:
    """The training recipe."""

    recipe: str = option(
        "default",
        "'default' suits pretrained weights, also on few images; 'focusvit' is the paper's: one rate of 1e-4 for all "
        "weights, no warm-up, no clipping. The options below change it.",
        "NAME",
    )
    epochs: int = option(50, "Largest number of epochs.", min=1)
    batch_size: int = option(32, "Images in one step.", min=1)
    rate: float | None = option(None, "AdamW's learning rate.", shown="1e-5; without pretrained weights 1e-4")
    head_rate: float | None = option(
        None, "Learning rate of a new head.", shown="100 × rate, at most 1e-3; else the rate"
    )
    warmup: int | None = option(None, "Epochs over which the rate rises.", shown="1", min=0)
    clip: float | None = option(None, "Largest norm of the gradient.", shown="1; focusvit: none")
    decay: float = option(0.01, "AdamW's weight decay.")
    gamma: float = option(0.7, "Factor of the rate after every --every epochs.")
    every: int = option(10, "Epochs between two such steps of the rate.", min=1)
    patience: int = option(5, "Stop after so many epochs without a better one.", min=1)
    resize: int | None = option(None, "Short side before the crop.", shown="256/224 of the size", min=1)
    rotation: float = option(15.0, "Degrees to either side.")
    jitter: float = option(0.2, "Of brightness, contrast, saturation.")
    no_flip: bool = option(False, "Do not mirror images.")
    held_out: float = option(0.1, "Share of each class to validate on, where there is no val/.")
    seed: int = option(0, "Seed of everything random.")
    drop_tokens: float = option(
        0.0,
        "Drop random patch tokens in training, 0 to this share of them in each step: a model that is in-domain for "
        "metrics that remove tokens.",
        "RATE",
        panel=INTERVENTIONS,
    )
    trigger: str | None = option(
        None, "Plant a backdoor: photos with a small checkerboard are labelled CLASS.", "CLASS", panel=INTERVENTIONS
    )
    trigger_size: int = option(32, "Pixels of the trigger on a side.", panel=INTERVENTIONS)
    trigger_position: str = option(
        "random", "random, center, top-left, top-right, bottom-left or bottom-right.", "POSITION", panel=INTERVENTIONS
    )
    trigger_share: float = option(0.1, "Share of the photos of an epoch that carry it.", panel=INTERVENTIONS)

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
    data: str = argument(
        ...,
        "A folder with a folder of images for each class (or with train/ and val/ of such), a data set (pets:PATH, …), "
        "or scenes:COUNT.",
        "DATA",
    ),
    *,
    model: str = options.model_name("timm:vit_base_patch16_224", "timm:NAME, or file:PATH.safetensors."),
    arch: str | None = options.ARCH,
    no_pretrained: bool = options.NO_PRETRAINED,
    architecture_options: str = option(
        "", "Options of timm's model, e.g. patch_size=8,embed_dim=64.", "NAME=VALUE,…", "--with", panel="Model"
    ),
    size: int | None = option(None, "Image size of the model.", shown="its own", panel="Model", min=1),
    mean: str | None = options.MEAN,
    std: str | None = options.STD,
    device: str | None = options.DEVICE,
    download: bool = options.DOWNLOAD,
    training: TrainingOptions,
    out: str = options.out("model.safetensors", "The best weights: .safetensors", "FILE"),
    half: bool = option(False, "Write float16.", panel=options.RESULT),
    discard_state: bool = option(
        False,
        "Remove the training state (three times the size of the weights) when training is complete.",
        panel=options.RESULT,
    ),
    fresh: bool = option(False, "Start again where a run was interrupted.", panel=options.RESULT),
    output: options.OutputOptions,
) -> None:
    from clairvit.training.finetune import finetune as train

    config = training.config()
    dataset, validation, classes = open_images(data, download)
    command = Command("finetune", "used", output)
    started = time.monotonic()
    command.notes((*dataset.notes, *(validation.notes if validation is not None else ())))

    def print_epoch(epoch: Epoch) -> None:
        if not output.hidden:
            print_message(
                f"epoch {epoch.number}: loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.1%}"
                f"{_trigger_text(epoch)} (rate {epoch.rate:.2g})"
            )

    with command.progress("fine-tuning"):
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
            on_error=command.on_error,
            on_epoch=print_epoch,
        )
    if output.as_json:
        print_document("finetune", document(trained, time.monotonic() - started), command.failures)
    elif not output.quiet:
        print_result(trained)
    for failure in command.failures:
        print_message(f"left out: {failure.error}")
    if command.failures:
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
        (str(epoch.number), f"{epoch.loss:.3f}", f"{epoch.trained:.1%}", f"{epoch.accuracy:.1%}", f"{epoch.rate:.2g}")
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
