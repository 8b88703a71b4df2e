"""Fine-tune a timm model on labelled images; a run that was stopped continues exactly.

Every choice of an epoch (order, crops, colours) is drawn from seed and epoch, and dropout from a generator whose state
is in the checkpoint, so a run that was killed ends with the same bytes as one that was not (on one device, one torch).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clairvit._io import check_writable
from clairvit._progress import report_progress
from clairvit.data.dataset import ErrorHandler, ImageDataset
from clairvit.errors import Argument, BadInput, ClairError
from clairvit.models.load import DTYPES, usable_device
from clairvit.models.preprocess import Preprocess, parse_size, preprocess_options
from clairvit.models.scores import extract_scores
from clairvit.models.sources import weights_header
from clairvit.training.augment import augment, batches, center_crop, draw_augmentations, epoch_order
from clairvit.training.base_model import ModelRequest, load_base_model
from clairvit.training.checkpoint import (
    Epoch,
    Progress,
    read_progress,
    restore,
    save_checkpoint,
    write_tensors,
)
from clairvit.training.image_cache import ImageCache, cache_images, class_indices, class_names, stratified_split
from clairvit.training.poisoning import Poisoning, draw_poisoned, draw_validation, poison
from clairvit.training.token_dropout import TokenDropout, epoch_generator, token_dropout
from clairvit.training.training_config import TrainingConfig

EpochCallback = Callable[[Epoch], None]
# Stored where they are in use only, so that checkpoints from before they existed can be resumed.
_INTERVENTIONS = ("drop_tokens", "trigger", "trigger_size", "trigger_position", "trigger_share")


@dataclass(frozen=True)
class Trained:
    """The result of `finetune`; `path` has the weights of the best epoch, for cv.load(f"file:{path}")."""

    path: Path
    classes: tuple[str, ...]
    history: tuple[Epoch, ...]
    best: Epoch
    images: int  # trained on
    validated: int
    resumed: int  # epochs that an earlier run had done
    stopped_early: bool
    preprocess: Preprocess  # of the training images, also in the file's header
    assumptions: tuple[str, ...] = ()  # about it
    interventions: Mapping[str, Any] = field(default_factory=dict)  # dropped tokens and trigger; in the header too


@dataclass(frozen=True, eq=False)
class _Trainer:
    """The model that is trained, on which device, with which preprocessing and configuration."""

    module: nn.Module
    preprocess: Preprocess
    config: TrainingConfig
    device: torch.device
    poisoning: Poisoning | None = None
    dropout: TokenDropout | None = None

    def normalise(self, images: Tensor) -> Tensor:
        channels = (self.preprocess.mean, self.preprocess.std)
        mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in channels)
        return (images - mean) / std

    def logits(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] in float32 of images [B, 3, H, W] in 0..1; computed in bfloat16 on a GPU."""
        precision = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with precision:
            logits = extract_scores(self.module(self.normalise(images)))
        return logits.float()

    def dropping_tokens(self, images: int, generator: torch.Generator) -> AbstractContextManager[None]:
        """Return the context of a training step: random tokens are dropped where the configuration says so."""
        if self.dropout is None:
            return nullcontext()
        return self.dropout.dropping(self.dropout.draw(images, generator))


@dataclass(frozen=True, eq=False)
class _Split:
    """Some rows of an image cache, with the class index of each."""

    cache: ImageCache
    rows: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, batch: Tensor, device: torch.device) -> Tensor:
        return self.cache.batch(self.rows[batch]).to(device)


def finetune(
    dataset: ImageDataset,
    model: str = "timm:vit_base_patch16_224",
    *,
    validation: ImageDataset | None = None,
    recipe: TrainingConfig | None = None,
    out: str | Path = "model.safetensors",
    classes: Sequence[str] | None = None,
    pretrained: bool = True,
    arch: str | None = None,
    options: Mapping[str, Any] | None = None,
    size: int | Sequence[int] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    device: str | torch.device | None = None,
    dtype: str = "float32",
    fresh: bool = False,
    keep_state: bool = True,
    on_error: ErrorHandler | None = None,
    on_epoch: EpochCallback | None = None,
) -> Trained:
    """Train a model to classify a data set, and write the weights of the best epoch.

    A run that was interrupted continues from the checkpoint next to `out`.

    Args:
        dataset: Images with labels.
        model: timm:NAME, file:PATH or a built-in model.
        validation: Images to validate on; None holds out a share of each class.
        recipe: How to train; None is `TrainingConfig()`.
        out: Where the weights are written, a name that ends in .safetensors.
        classes: Names in class order; None takes the labels.
        pretrained: Start from pretrained weights.
        arch: timm's architecture of a file that does not name it.
        options: Of timm's model (embed_dim=64, …).
        size: Of the input images; None is the model's own.
        mean: Subtracted from pixels in 0..1; None is the model's own.
        std: Divides them afterwards; None is the model's own.
        device: Where to train; None chooses.
        dtype: Of the written weights ("float16": half the size).
        fresh: Start anew, even if there is a checkpoint.
        keep_state: Keep the checkpoint (three times the size of the weights) when training is complete, so that more
            epochs continue exactly.
        on_error: Called with each image that cannot be read; None raises the first error.
        on_epoch: Called after each epoch.
    """
    config, path = recipe or TrainingConfig(), Path(out).expanduser()
    if path.suffix != ".safetensors":
        raise BadInput(f"'{path}' ends in '{path.suffix}'; expected a name for weights that ends in .safetensors.")
    if dtype not in DTYPES:
        raise BadInput(f"dtype={dtype!r} was given for the weights; expected one of {', '.join(DTYPES)}.")
    request = ModelRequest(model, pretrained, arch, options, parse_size(size), preprocess_options(mean, std))
    torch_device = usable_device(device)
    with torch.random.fork_rng([torch_device] if torch_device.type == "cuda" else []):
        result = _finetune(
            dataset, validation, request, config, path, classes, torch_device, dtype, fresh, on_error, on_epoch
        )
    if not keep_state:
        checkpoint_of(path).unlink(missing_ok=True)
    return result


def _finetune(
    dataset: ImageDataset,
    validation: ImageDataset | None,
    request: ModelRequest,
    config: TrainingConfig,
    path: Path,
    classes: Sequence[str] | None,
    device: torch.device,
    dtype: str,
    fresh: bool,
    on_error: ErrorHandler | None,
    on_epoch: EpochCallback | None,
) -> Trained:
    # the image size is that of the model without weights; the classes are known once the images are read
    preprocess = load_base_model(dataclasses.replace(request, pretrained=False), ("", ""), config.seed).preprocess
    cover = config.cover(preprocess.size)
    cache = cache_images(dataset, cover, preprocess.interpolation, on_error, tuple(classes or ()))
    names = tuple(classes) if classes is not None else class_names(cache.labels)
    if len(names) < 2:
        raise BadInput(f"All images are of class '{names[0]}'; expected at least two classes to tell apart.")
    validation_cache = (
        None if validation is None else cache_images(validation, cover, preprocess.interpolation, on_error, names)
    )
    training, held_out = _splits(cache, validation_cache, names, config)
    poisoning = config.poisoning(names)
    if poisoning is not None:
        poisoning.trigger.check_fits(preprocess.size)
    base = load_base_model(request, names, config.seed)
    resize: int | tuple[int, int] = cover[0] if cover[0] == cover[1] else cover
    preprocess = dataclasses.replace(preprocess, resize=resize, keep_ratio=True)
    config = config.resolved(base.pretrained, base.new_head)
    module = base.module.to(device).float()
    dropout = token_dropout(module, preprocess, config.drop_tokens, device) if config.drop_tokens else None
    trainer = _Trainer(module, preprocess, config, device, poisoning, dropout)
    check_writable(path)
    settings = _settings(request, config, names, training, held_out, dtype)
    metadata = weights_header.write(base.arch, base.options, names, preprocess, training=config.interventions)

    def write() -> None:
        state = trainer.module.state_dict()
        cast = {k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in state.items()}
        write_tensors(cast, metadata, path)

    progress, resumed = _train(trainer, training, held_out, Progress(settings), path, write, fresh, on_epoch)
    return Trained(
        path,
        names,
        progress.history,
        progress.best,
        len(training),
        len(held_out),
        resumed,
        progress.should_stop(config.patience),
        preprocess,
        base.assumptions,
        config.interventions,
    )


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint of a file of weights: dogs.safetensors -> dogs.training.safetensors."""
    return path.with_name(f"{path.stem}.training.safetensors")


def _splits(
    cache: ImageCache, validation: ImageCache | None, names: tuple[str, ...], config: TrainingConfig
) -> tuple[_Split, _Split]:
    """Return the images to train on and those to validate on."""
    labels = class_indices(cache.labels, names)
    if validation is None:
        rows, held_out = stratified_split(labels, config.held_out, config.seed)
        return _Split(cache, rows, labels[rows]), _Split(cache, held_out, labels[held_out])
    validation_labels = class_indices(validation.labels, names)
    return (
        _Split(cache, torch.arange(len(cache)), labels),
        _Split(validation, torch.arange(len(validation)), validation_labels),
    )


def _settings(
    request: ModelRequest,
    config: TrainingConfig,
    names: tuple[str, ...],
    training: _Split,
    held_out: _Split,
    dtype: str,
) -> dict[str, Any]:
    """Return what must be the same for a run to continue; epochs and patience may change."""
    return {
        "model": request.spec,
        "pretrained": request.pretrained,
        "arch": request.arch,
        "options": dict(request.options or {}),
        "size": list(request.size) if request.size else None,
        "mean": list(request.preprocessing.mean) if request.preprocessing.mean else None,
        "std": list(request.preprocessing.std) if request.preprocessing.std else None,
        **{key: value for key, value in vars(config).items() if key not in ("epochs", "patience", *_INTERVENTIONS)},
        **config.interventions,
        "classes": list(names),
        "images": training.cache.content_hash,
        "validation": held_out.cache.content_hash,
        "dtype": dtype,
    }


def _train(
    trainer: _Trainer,
    training: _Split,
    held_out: _Split,
    progress: Progress,
    path: Path,
    write: Callable[[], None],
    fresh: bool,
    on_epoch: EpochCallback | None,
) -> tuple[Progress, int]:
    """Train until the last epoch or early stopping; return the progress, and how many epochs were done before."""
    config, checkpoint = trainer.config, checkpoint_of(path)
    optimiser = torch.optim.AdamW(_parameter_groups(trainer.module, config), weight_decay=config.decay)
    steps = math.ceil(len(training) / config.batch)  # of an epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: config.factor(step, steps))
    if checkpoint.exists() and not fresh:
        progress = _resumable(checkpoint, progress.settings, path)
        restore(checkpoint, trainer.module, optimiser, schedule, trainer.device)
    resumed = len(progress.history)
    while len(progress.history) < config.epochs and not progress.should_stop(config.patience):
        number = len(progress.history) + 1
        best = f", best {progress.best.accuracy:.1%}" if progress.history else ""
        title = f"epoch {number} of {config.epochs}{best}"
        loss, accuracy, rate = _epoch(trainer, training, optimiser, schedule, number, title)
        triggered = None if trainer.poisoning is None else _attack_success(trainer, trainer.poisoning, held_out)
        epoch = Epoch(number, loss, accuracy, _accuracy(trainer, held_out), rate, triggered)
        progress = dataclasses.replace(progress, history=(*progress.history, epoch))
        if progress.best is epoch:
            write()  # before the checkpoint: killed in between, this epoch is done again, with the same result
        save_checkpoint(checkpoint, progress, trainer.module, optimiser, schedule, trainer.device)
        if on_epoch is not None:
            on_epoch(epoch)
    return progress, resumed


def _resumable(checkpoint: Path, settings: Mapping[str, Any], path: Path) -> Progress:
    """Return the progress of a checkpoint; raise `BadInput` if it is of another training."""
    progress = read_progress(checkpoint)
    every_key = dict.fromkeys((*progress.settings, *settings))
    changed = [key for key in every_key if progress.settings.get(key) != settings.get(key)]
    if changed:
        changes = ", ".join(_describe_change(key, progress.settings.get(key), settings.get(key)) for key in changed)
        raise BadInput(
            f"'{checkpoint}' is of another training ({changes}); expected the same settings to go on. Pass ",
            Argument("fresh", True),
            " to begin anew, or choose another ",
            Argument("out"),
            ".",
        )
    if not path.exists():
        raise BadInput(
            f"'{checkpoint}' is there, but the best weights so far, '{path}', are gone; put them back, or pass ",
            Argument("fresh", True),
            " to begin anew.",
        )
    return progress


def _describe_change(key: str, before: Any, now: Any) -> str:
    if key in ("images", "validation", "classes"):
        return f"other {key}"
    return f"{key} was {before}, now {now}"


def _parameter_groups(module: nn.Module, config: TrainingConfig) -> list[dict[str, Any]]:
    """Return the parameters of the backbone and of the head, each with its learning rate; empty groups are left out."""
    get_classifier: Any = getattr(module, "get_classifier", None)
    head = get_classifier() if get_classifier else None
    in_head = {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set()
    groups = [
        {"params": [p for p in module.parameters() if id(p) not in in_head], "lr": config.rate},
        {"params": [p for p in module.parameters() if id(p) in in_head], "lr": config.head_rate},
    ]
    return [group for group in groups if group["params"]]


def _epoch_inputs(trainer: _Trainer, training: _Split, number: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function of rows: their images in 0..1 [B, 3, H, W], augmented and poisoned, and labels [B]."""
    config, poisoning = trainer.config, trainer.poisoning
    draws = draw_augmentations(len(training), config.seed, number)
    poisoned = None if poisoning is None else draw_poisoned(poisoning, training.labels, config.seed, number)

    def inputs(batch: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = training.images(batch, trainer.device), training.labels[batch].to(trainer.device)
        images = augment(images, trainer.preprocess.size, config, draws[batch])
        if poisoning is None or poisoned is None:
            return images, labels
        return poison(poisoning, poisoned, batch, images, labels)

    return inputs


def _epoch(
    trainer: _Trainer,
    training: _Split,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    number: int,
    title: str,
) -> tuple[float, float, float]:
    """Train on each image once; return the mean loss, the accuracy, and the learning rate of the last step."""
    config, count = trainer.config, len(training)
    order = epoch_order(count, config.seed, number)
    inputs = _epoch_inputs(trainer, training, number)
    drop_tokens = epoch_generator(config.seed, number)
    total, correct, rate = 0.0, 0, 0.0
    trainer.module.train()
    with report_progress(title, count) as tell:
        for batch in batches(order, config.batch):
            images, labels = inputs(batch)
            with trainer.dropping_tokens(len(batch), drop_tokens):
                logits = trainer.logits(images)
            loss = F.cross_entropy(logits, labels)
            if not bool(loss.isfinite()):
                peak = float(optimiser.param_groups[0]["initial_lr"])
                raise ClairError(
                    f"The loss is {float(loss.detach())} in epoch {number}: training has diverged. Try a lower "
                    f"rate than {peak:g}, such as ",
                    Argument("rate", float(f"{peak / 10:g}")),
                    ", with ",
                    Argument("fresh", True),
                    ".",
                )
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            if config.clip is not None:
                nn.utils.clip_grad_norm_(trainer.module.parameters(), config.clip)
            rate = float(schedule.get_last_lr()[0])
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(batch)
            correct += int((logits.argmax(1) == labels).sum())
            tell(len(batch))
    return total / count, correct / count, rate


@torch.no_grad()
def _attack_success(trainer: _Trainer, poisoning: Poisoning, held_out: _Split) -> float:
    """Return the share of held-out images of other classes that get the trigger's class once they carry it."""
    trainer.module.eval()
    draws = draw_validation(poisoning, held_out.labels, trainer.config.seed)
    rows = draws.poisoned.nonzero().flatten()
    hits = 0
    for batch in batches(rows, max(trainer.config.batch, 64)):
        images = center_crop(held_out.images(batch, trainer.device), trainer.preprocess.size)
        images, labels = poison(poisoning, draws, batch, images, held_out.labels[batch].to(trainer.device))
        hits += int((trainer.logits(images).argmax(1) == labels).sum())
    return hits / len(rows)


@torch.no_grad()
def _accuracy(trainer: _Trainer, held_out: _Split) -> float:
    """Return the accuracy on the images that are held out."""
    trainer.module.eval()
    correct = 0
    for batch in batches(torch.arange(len(held_out)), max(trainer.config.batch, 64)):
        images = center_crop(held_out.images(batch, trainer.device), trainer.preprocess.size)
        correct += int((trainer.logits(images).argmax(1).cpu() == held_out.labels[batch]).sum())
    return correct / len(held_out)
