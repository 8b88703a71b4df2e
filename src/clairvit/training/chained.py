"""Chained: fine-tune a model on the images of an experiment that are not scored, then go on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clairvit.bench.config import DataConfig, ModelConfig
from clairvit.data.dataset import ImageDataset
from clairvit.data.open import OpenedDataset, list_datasets, open_data, stratified_sample
from clairvit.errors import Argument, BadInput
from clairvit.models.model import Model
from clairvit.papers.setup import LoadedData, ReproductionConfig
from clairvit.papers.split import Portion, check_portion, portion_size, split_off
from clairvit.training.finetune import EpochCallback, Trained, finetune
from clairvit.training.training_config import TrainingConfig, named_recipe

SHARE = 0.6  # of the images that are trained on, where the data has one split only
WITHOUT_MEANING = ("labels", "activation", "resize", "interpolation", "fit")  # of a model that gets a new head


@dataclass(frozen=True, eq=False)
class TrainingParts:
    """Images to train on, and those of the same data that are scored."""

    training: ImageDataset
    validation: ImageDataset | None  # None: a share of each class of `training` is held out
    classes: tuple[str, ...]
    opened: OpenedDataset  # where the scored images are from
    scored: tuple[int, ...]  # rows of it
    untrained: int  # images of it that are not trained on, before the limit
    description: str  # of what is trained on
    shared: bool = False  # trained on a part of the split that is scored

    def load(self, config: DataConfig, model: Model) -> LoadedData:
        """Return the images that are scored."""
        opened, rows = self.opened, self.scored
        words = f"{opened.title}, split {opened.split}, {len(rows)} of the {self.untrained} images not trained on"
        classes = tuple(opened.class_of(row) for row in rows)
        return LoadedData(
            opened.dataset.take(rows),
            words,
            config.masks or "",
            opened.notes,
            unknown_classes=opened.unknown_classes(model),
            classes=classes,
        )


@dataclass(frozen=True, eq=False)
class FinetunedModel:
    """A model that was fine-tuned for an experiment."""

    config: ReproductionConfig  # with the fine-tuned model
    parts: TrainingParts
    trained: Trained
    recipe: str
    failed: tuple[str, ...] = ()  # images that could not be read

    @property
    def sentence(self) -> str:
        """Return what was trained on what, and how well."""
        trained, best = self.trained, self.trained.best
        stopped = ", then training stopped early" if trained.stopped_early else ""
        return (
            f"The model was fine-tuned by the recipe '{self.recipe}' on {trained.images} images, and validated on "
            f"{trained.validated} ({self.parts.description}): {best.accuracy:.1%} after epoch {best.number} of "
            f"{len(trained.history)}{stopped}."
        )

    def as_document(self) -> Mapping[str, Any]:
        """Return the training as JSON values."""
        trained = self.trained
        return {
            "recipe": self.recipe,
            "trained_on": self.parts.description,
            "images": trained.images,
            "validation_images": trained.validated,
            "classes": len(trained.classes),
            "accuracy": trained.best.accuracy,
            "best_epoch": trained.best.number,
            "stopped_early": trained.stopped_early,
            "epochs": [vars(epoch) for epoch in trained.history],
            "preprocess": trained.preprocess.to_dict(),
        }


def finetune_for(
    config: ReproductionConfig,
    folder: Path,
    *,
    portion: Portion | None = None,
    epochs: int | None = None,
    device: str | None = None,
    on_epoch: EpochCallback | None = None,
) -> FinetunedModel:
    """Fine-tune the model of an experiment on images that are not scored; a run that was stopped goes on.

    Args:
        config: The experiment. The training split of its data is trained on; where that is not there, or there is one
            split only, a seeded part of the split that is scored.
        folder: Where the weights are kept, NAME-model.safetensors.
        portion: How many images, or which share, are trained on; None: the training split, or `SHARE` of the only one.
        epochs: Most epochs; None: the recipe's.
        device: Where to train.
        on_epoch: Called after each epoch.

    Raises:
        BadInput: The data has no classes, or nothing would be left to score.
    """
    if portion is not None:
        check_portion(portion, "training")
    model, paper = config.model, config.paper
    for name in WITHOUT_MEANING:
        if getattr(model, name) is not None:
            raise BadInput(
                Argument(name, getattr(model, name)),
                " was given with fine-tuning, which sets head and preprocessing of the model itself; leave it out.",
            )
    parts = training_parts(config.data, portion, config.seed)
    recipe: TrainingConfig = replace(named_recipe(paper.recipe), seed=config.seed)
    if epochs is not None:
        recipe = replace(recipe, epochs=epochs)
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    trained = finetune(
        parts.training,
        model.spec,
        validation=parts.validation,
        recipe=recipe,
        out=folder / f"{paper.name}-model.safetensors",
        classes=parts.classes or None,
        pretrained=model.pretrained,
        arch=model.arch,
        size=model.crop,
        mean=model.mean,
        std=model.std,
        device=device,
        on_error=lambda image, error: failed.append(f"{image}: {error}"),
        on_epoch=on_epoch,
    )
    data = replace(config.data, limit=None) if parts.shared else config.data  # the limit is of what was left over
    chained = replace(config, model=ModelConfig(f"file:{trained.path}"), data=data)
    return FinetunedModel(chained, parts, trained, paper.recipe, tuple(failed))


def training_parts(config: DataConfig, portion: Portion | None, seed: int) -> TrainingParts:
    """Return the images to train on, and those to score.

    Args:
        config: The data; its split and limit are those of the scored images.
        portion: How many images, or which share, are trained on; None: all of the training split, or `SHARE`.
        seed: Of the samples.

    Raises:
        BadInput: The data has no classes, or no images would be left to score.
    """
    opened = open_data(config.spec, config.split, None, seed, masks=config.masks, mask_kind=config.mask_kind)
    if not opened.dataset.has_labels:
        raise BadInput(
            f"{config.spec} has no classes, so no model can be fine-tuned on it; expected data with classes, such as a "
            "folder with a folder of images for each class, or pets:PATH."
        )
    training = _training_split(config, opened, seed)
    if training is None:
        return _parts_of_one_split(config, opened, SHARE if portion is None else portion, seed)
    count = len(training) if portion is None else portion_size(portion, len(training))
    strata = [training.class_of(row) for row in range(len(training))]
    rows = split_off(strata, count, seed, "papers/training")[0] if count < len(training) else range(len(training))
    return TrainingParts(
        training.dataset.take(rows),
        _validation_split(config, seed),
        opened.classes,
        opened,
        _limited(opened, range(len(opened)), config.limit, seed),
        len(opened),
        f"{len(rows)} of {len(training)} images of the split {training.split}",
    )


def _training_split(config: DataConfig, scored: OpenedDataset, seed: int) -> OpenedDataset | None:
    """Return the training split of the data; None if it has none, or it is not there, or is scored itself."""
    name = _split_named("train", config.spec)
    if name is None or name == scored.split:
        return None
    try:
        return open_data(config.spec, name, None, seed)
    except BadInput:
        return None  # the sentence of `_parts_of_one_split` says that it is not there


def _validation_split(config: DataConfig, seed: int) -> ImageDataset | None:
    """Return the validation split that comes with a training split; None if there is none."""
    name = _split_named("val", config.spec)
    if name is None or name == config.split:
        return None
    try:
        return open_data(config.spec, name, None, seed).dataset
    except BadInput:
        return None  # then a part of the training split is held out


def _split_named(beginning: str, spec: str) -> str | None:
    """Return the split of a data set whose name begins so."""
    splits = next((entry.splits for entry in list_datasets() if entry.name == spec.partition(":")[0]), ())
    return next((name for name in splits if name.startswith(beginning)), None)


def _parts_of_one_split(config: DataConfig, opened: OpenedDataset, portion: Portion, seed: int) -> TrainingParts:
    """Return a seeded part of a split to train on, and the rest of it."""
    total = len(opened)
    count = portion_size(portion, total)
    if not 1 < count < total:
        raise BadInput(
            f"{count} of {total} images of {config.spec} were to be trained on; expected at least two, and some left "
            "to score: ",
            Argument("training", SHARE),
            ".",
        )
    rows, others = split_off([opened.class_of(row) for row in range(total)], count, seed, "papers/training")
    missing = _split_named("train", config.spec)
    absent = f"; the split {missing} is not there" if missing not in (None, opened.split) else ""
    return TrainingParts(
        opened.dataset.take(rows),
        None,
        opened.classes,
        opened,
        _limited(opened, others, config.limit, seed),
        len(others),
        f"{count} of the {total} images of the split {opened.split}, the scored ones not among them{absent}",
        shared=True,
    )


def _limited(opened: OpenedDataset, rows: Sequence[int], limit: int | None, seed: int) -> tuple[int, ...]:
    """Return the rows, at most `limit` of them, sampled from all classes."""
    if limit is None:
        return tuple(rows)
    return tuple(rows[index] for index in stratified_sample([opened.class_of(row) for row in rows], limit, seed))
