"""Fine-tune a timm model on an album with labels, so that it can be stopped at any moment and go on exactly.

Every choice of an epoch (order, crops, colours) is drawn from seed and epoch, and dropout from a generator whose state
is in the checkpoint, so a run that was killed ends with the same bytes as one that was not (on one device, one torch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clairvit.data.dataset import Failed, ImageDataset
from clairvit.errors import BadInput, ClairError
from clairvit.models.load import DTYPES, usable_device
from clairvit.models.model import first_scores
from clairvit.models.preprocess import Preprocess, Size, preprocess_options, rows_columns
from clairvit.models.sources import weights_header
from clairvit.perturbation.progress import report_progress
from clairvit.training.augment import batches, centred, draws, order, shaken
from clairvit.training.base_model import Wanted, begin
from clairvit.training.checkpoint import (
    Epoch,
    Progress,
    check_place,
    read_progress,
    restore,
    save_checkpoint,
    write_tensors,
)
from clairvit.training.image_cache import Pictures, class_names, numbered, read_pictures, split
from clairvit.training.training_config import TrainingConfig

Told = Callable[[Epoch], None]


@dataclass(frozen=True)
class Trained:
    """What came out; `path` holds the weights of the best epoch, for cv.load(f"file:{path}")."""

    path: Path
    classes: tuple[str, ...]
    history: tuple[Epoch, ...]
    best: Epoch
    images: int  # trained on
    validated: int
    resumed: int  # epochs that an earlier run had done
    stopped_early: bool
    preprocess: Preprocess  # what the images were trained with, also in the file's header
    assumptions: tuple[str, ...] = ()  # about it


@dataclass(frozen=True, eq=False)
class _Room:
    """What the loops need: the model, where it runs, what it sees."""

    module: nn.Module
    seen: Preprocess
    recipe: TrainingConfig
    device: torch.device

    def normalised(self, pictures: Tensor) -> Tensor:
        mean, std = (torch.tensor(v, device=pictures.device)[:, None, None] for v in (self.seen.mean, self.seen.std))
        return (pictures - mean) / std

    def scores(self, pictures: Tensor) -> Tensor:
        """[B, 3, H, W] in 0..1 -> [B, classes] float32; in bfloat16 inside, on a GPU."""
        rougher = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with rougher:
            found = first_scores(self.module(self.normalised(pictures)))
        return found.float()


@dataclass(frozen=True, eq=False)
class _Set:
    pictures: Pictures
    rows: Tensor  # of `pictures`
    numbers: Tensor  # class number of each row in `rows`

    def __len__(self) -> int:
        return len(self.rows)


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
    size: Size | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    device: str | torch.device | None = None,
    dtype: str = "float32",
    fresh: bool = False,
    keep_state: bool = True,
    failed: Failed | None = None,
    told: Told | None = None,
) -> Trained:
    """Train `model` (timm:NAME or file:PATH) to name the album's classes; the best weights are written to `out`.

    A run that was interrupted goes on where it was, from the checkpoint beside `out`; `fresh` begins anew. Without
    `validation`, a share of each class is held out. `options` are timm's (embed_dim=64, …), `classes` the names in
    class order, `mean` and `std` what images are normalised by (the model's own unless given), `dtype` what is written
    ("float16": half the size). `failed` is told of images that cannot be read.
    The checkpoint (weights and two moments of each, three times the size) stays when training is complete, so that more
    epochs go on exactly; `keep_state=False` removes it then.
    """
    recipe, path = recipe or TrainingConfig(), Path(out).expanduser()
    if path.suffix != ".safetensors":
        raise BadInput(f"'{path}' ends in '{path.suffix}'; expected a name for weights that ends in .safetensors.")
    if dtype not in DTYPES:
        raise BadInput(f"dtype={dtype!r} was given for the weights; expected one of {', '.join(DTYPES)}.")
    place = usable_device(device)
    wanted = Wanted(model, pretrained, arch, options, rows_columns(size), preprocess_options(mean, std))
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        done = _finetune(dataset, validation, wanted, recipe, path, classes, place, dtype, fresh, failed, told)
    if not keep_state:
        checkpoint_of(path).unlink(missing_ok=True)
    return done


def _finetune(
    dataset: ImageDataset,
    validation: ImageDataset | None,
    wanted: Wanted,
    recipe: TrainingConfig,
    path: Path,
    classes: Sequence[str] | None,
    device: torch.device,
    dtype: str,
    fresh: bool,
    failed: Failed | None,
    told: Told | None,
) -> Trained:
    # which images it takes is asked first, of a model without weights; the classes are known when they are read
    own = begin(dataclasses.replace(wanted, pretrained=False), ("", ""), recipe.seed).own
    box = recipe.box(own.size)
    pictures = read_pictures(dataset, box, own.interpolation, failed, tuple(classes or ()))
    names = tuple(classes) if classes is not None else class_names(pictures.labels)
    if len(names) < 2:
        raise BadInput(f"All images are of class '{names[0]}'; expected at least two classes to tell apart.")
    trained, kept = _sets(pictures, validation, names, box, own.interpolation, recipe, failed)
    start = begin(wanted, names, recipe.seed)
    resize: int | tuple[int, int] = box[0] if box[0] == box[1] else box
    seen = dataclasses.replace(own, resize=resize, keep_ratio=True)
    recipe = recipe.settled(start.pretrained, start.new_head)
    room = _Room(start.module.to(device).float(), seen, recipe, device)
    check_place(path)
    settings = _settings(wanted, recipe, names, trained, kept, dtype)
    said = weights_header.write(start.arch, start.options, names, seen)

    def write() -> None:
        state = room.module.state_dict()
        kind = DTYPES[dtype]
        write_tensors({k: v.to(kind) if v.is_floating_point() else v for k, v in state.items()}, said, path)

    progress, resumed = _train(room, trained, kept, Progress(settings), path, write, fresh, told)
    early = progress.over(recipe.patience)
    counts = len(trained), len(kept)
    return Trained(path, names, progress.history, progress.best, *counts, resumed, early, seen, start.assumptions)


def checkpoint_of(path: Path) -> Path:
    """'dogs.safetensors' -> 'dogs.training.safetensors'"""
    return path.with_name(f"{path.stem}.training.safetensors")


def _sets(
    pictures: Pictures,
    validation: ImageDataset | None,
    names: tuple[str, ...],
    box: tuple[int, int],
    interpolation: str,
    recipe: TrainingConfig,
    failed: Failed | None,
) -> tuple[_Set, _Set]:
    numbers = numbered(pictures.labels, names)
    if validation is None:
        rows, held = split(numbers, recipe.held_out, recipe.seed)
        return _Set(pictures, rows, numbers[rows]), _Set(pictures, held, numbers[held])
    others = read_pictures(validation, box, interpolation, failed, names)
    every, each = torch.arange(len(pictures)), torch.arange(len(others))
    return _Set(pictures, every, numbers), _Set(others, each, numbered(others.labels, names))


def _settings(
    wanted: Wanted, recipe: TrainingConfig, names: tuple[str, ...], trained: _Set, kept: _Set, dtype: str
) -> dict[str, Any]:
    """What must be the same for a run to go on; it may be longer or more patient than it was meant to be."""
    how = {key: value for key, value in vars(recipe).items() if key not in ("epochs", "patience")}
    return {
        "model": wanted.spec,
        "pretrained": wanted.pretrained,
        "arch": wanted.arch,
        "options": dict(wanted.options or {}),
        "size": list(wanted.size) if wanted.size else None,
        "mean": list(wanted.preprocessing.mean) if wanted.preprocessing.mean else None,
        "std": list(wanted.preprocessing.std) if wanted.preprocessing.std else None,
        **how,
        "classes": list(names),
        "images": trained.pictures.mark,
        "validation": kept.pictures.mark,
        "dtype": dtype,
    }


def _train(
    room: _Room,
    trained: _Set,
    kept: _Set,
    progress: Progress,
    path: Path,
    write: Callable[[], None],
    fresh: bool,
    told: Told | None,
) -> tuple[Progress, int]:
    recipe, checkpoint = room.recipe, checkpoint_of(path)
    optimiser = torch.optim.AdamW(_groups(room.module, recipe), weight_decay=recipe.decay)
    steps = len(batches(order(len(trained), recipe.seed, 1), recipe.batch))  # of an epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: recipe.factor(step, steps))
    if checkpoint.exists() and not fresh:
        progress = _resumable(checkpoint, progress.settings, path)
        restore(checkpoint, room.module, optimiser, schedule, room.device)
    resumed = len(progress.history)
    while len(progress.history) < recipe.epochs and not progress.over(recipe.patience):
        number = len(progress.history) + 1
        best = f", best {progress.best.accuracy:.1%}" if progress.history else ""
        what = f"epoch {number} of {recipe.epochs}{best}"
        loss, right, rate = _epoch(room, trained, optimiser, schedule, number, what)
        done = Epoch(number, loss, right, _accuracy(room, kept), rate)
        progress = dataclasses.replace(progress, history=(*progress.history, done))
        if progress.best is done:
            write()  # before the checkpoint: killed in between, this epoch is done again, with the same result
        save_checkpoint(checkpoint, progress, room.module, optimiser, schedule, room.device)
        if told is not None:
            told(done)
    return progress, resumed


def _resumable(checkpoint: Path, settings: Mapping[str, Any], path: Path) -> Progress:
    progress = read_progress(checkpoint)
    other = [key for key in settings if progress.settings.get(key) != settings[key]]
    if other:
        changes = ", ".join(_change(key, progress.settings.get(key), settings[key]) for key in other)
        raise BadInput(
            f"'{checkpoint}' is of another training ({changes}); expected the same settings to go on. Pass fresh=True "
            "to begin anew, or choose another out=.",
            parameters={"fresh": "True", "out": "PATH"},
        )
    if not path.exists():
        raise BadInput(
            f"'{checkpoint}' is there, but the best weights so far, '{path}', are gone; put them back, or pass "
            "fresh=True to begin anew.",
            parameters={"fresh": "True"},
        )
    return progress


def _change(key: str, before: Any, now: Any) -> str:
    if key in ("images", "validation", "classes"):
        return f"other {key}"
    return f"{key} was {before}, now {now}"


def _groups(module: nn.Module, recipe: TrainingConfig) -> list[dict[str, Any]]:
    """Return the parameters in two groups with rates of their own: all but the head, and the head (it may be empty)."""
    classifier: Any = getattr(module, "get_classifier", None)
    heads = [one for one in [classifier() if classifier else None] if isinstance(one, nn.Module)]
    head = {id(parameter) for one in heads for parameter in one.parameters()}
    groups = [
        {"params": [p for p in module.parameters() if id(p) not in head], "lr": recipe.rate},
        {"params": [p for p in module.parameters() if id(p) in head], "lr": recipe.head_rate},
    ]
    return [group for group in groups if group["params"]]


def _epoch(
    room: _Room,
    trained: _Set,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    number: int,
    what: str,
) -> tuple[float, float, float]:
    """One pass over the images; mean loss, accuracy, and the rate of the last step."""
    recipe = room.recipe
    sequence, lots = order(len(trained), recipe.seed, number), draws(len(trained), recipe.seed, number)
    total, right, rate = 0.0, 0, 0.0
    room.module.train()
    with report_progress(what, len(trained)) as tell:
        for chosen in batches(sequence, recipe.batch):
            pictures = trained.pictures.some(trained.rows[chosen]).to(room.device)
            truth = trained.numbers[chosen].to(room.device)
            scores = room.scores(shaken(pictures, room.seen.size, recipe, lots[chosen]))
            loss = F.cross_entropy(scores, truth)
            if not bool(loss.isfinite()):
                peak = float(optimiser.param_groups[0]["initial_lr"])
                raise ClairError(
                    f"The loss is {float(loss.detach())} in epoch {number}: training has come apart. Try a lower rate "
                    f"than {peak:g}, with fresh=True.",
                    parameters={"rate": f"{peak / 10:g}", "fresh": "True"},
                )
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(room.module.parameters(), recipe.clip)
            rate = float(schedule.get_last_lr()[0])
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
            right += int((scores.argmax(1) == truth).sum())
            tell(len(chosen))
    return total / len(trained), right / len(trained), rate


@torch.no_grad()
def _accuracy(room: _Room, kept: _Set) -> float:
    room.module.eval()
    right = 0
    for chosen in batches(torch.arange(len(kept)), max(room.recipe.batch, 64)):
        pictures = centred(kept.pictures.some(kept.rows[chosen]).to(room.device), room.seen.size)
        right += int((room.scores(pictures).argmax(1).cpu() == kept.numbers[chosen]).sum())
    return right / len(kept)
