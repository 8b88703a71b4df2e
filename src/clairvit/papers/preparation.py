"""Preparation: which images a paper takes, how they get to the model's size, and how fine maps and masks are compared.

A paper's file states them, options of a run may state others, and `remarks` says what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clairvit.data.dataset import ImageDataset, iter_batches
from clairvit.data.formats.registry import FORMATS
from clairvit.data.open import GENERATED_SPLITS, open_data
from clairvit.errors import BadInput
from clairvit.models.model import Model
from clairvit.tracing.structure import model_structure

if TYPE_CHECKING:
    from clairvit.bench.plan import DataConfig, ModelConfig
    from clairvit.papers.setup import ReproductionConfig

DEFAULT_MODEL = "pets"  # of a paper that names none
_STRICT: Any = {"extra": "forbid"}  # pydantic: an unknown key is an error


@dataclass(frozen=True)
class ImageSet:
    """The images of a paper, where they are known: by the names of their files, without the ending."""

    __pydantic_config__ = _STRICT

    names: tuple[str, ...]
    split: str | None = None  # of the paper's data set, that holds all of them


@dataclass(frozen=True)
class Preparation:
    """How a paper gets pictures to the model's size, and how fine it compares maps with masks."""

    __pydantic_config__ = _STRICT

    fit: Literal["crop", "squash"] | None = None  # None: as the model was trained
    size: int | None = None  # pixels of a side
    interpolation: str | None = None  # of the resize; None: as the model was trained
    resolution: Literal["pixel", "patch"] = "pixel"  # patch: masks are reduced to the model's grid of patches
    grid: int | None = None  # patches of a side, in the paper


def default_model(paper_model: str | None, data: str) -> str:
    """Return the model where none is named: the paper's, but for generated images the built-in one."""
    return paper_model if paper_model and data.partition(":")[0] not in GENERATED_SPLITS else DEFAULT_MODEL


def prepared(config: ReproductionConfig) -> ReproductionConfig:
    """Return a configuration that takes the paper's images, if the data has them all, and fits them as the paper does.

    What is stated of the model (its fit, resize, crop or interpolation) wins. A limit asks for a sample of the data, in
    place of the paper's images.
    """
    preparation, image_set = config.paper.preparation, config.paper.image_set
    model = _fitted(config.model, preparation)
    data = config.data
    if image_set is not None and data.limit is None and not data.names:
        data = _with_paper_images(data, image_set, config.seed)
    return replace(config, model=model, data=data)


def _fitted(model: ModelConfig, preparation: Preparation) -> ModelConfig:
    if not (model.fit is None and model.resize is None and model.crop is None):
        return model
    return replace(model, fit=preparation.fit, interpolation=model.interpolation or preparation.interpolation)


def _with_paper_images(data: DataConfig, image_set: ImageSet, seed: int) -> DataConfig:
    """Return the data with the paper's images only, where all of them are there; else as it is."""
    name = data.spec.partition(":")[0]
    known = name in FORMATS and image_set.split in FORMATS.resolve(name).splits
    split = image_set.split if data.split is None and known else data.split
    try:
        opened = open_data(data.spec, split, masks=data.masks if _is_folder(data) else None, mask_kind=data.mask_kind)
    except BadInput:
        return data  # the split or the folder is not there: opening the data raises the error
    rows = opened.rows_of(image_set.names)
    if len(rows) != len(image_set.names):
        return data
    return replace(data, split=split, names=image_set.names)


def _is_folder(data: DataConfig) -> bool:
    """Return whether the masks are a folder's, and not found by a detector."""
    return data.masks is not None and not data.masks.startswith("mask-rcnn")


def patch_grid(model: Model, dataset: ImageDataset) -> tuple[int, int] | None:
    """Return rows and columns of the model's patches, seen on the first image that can be read; None without any."""
    batch = next(iter_batches(dataset, model, 1, on_error=lambda image, error: None), None)  # the study reports errors
    if batch is None:
        return None
    structure = model_structure(model, batch.pixels)
    if structure.layout is not None:
        return structure.layout.plane
    return structure.stages[-1].grid if structure.stages else None


def remarks(
    config: ReproductionConfig, model: Model, names: Sequence[str], grid: tuple[int, int] | None
) -> Iterator[tuple[str, str]]:
    """Yield topic and sentence: which of the paper's images are scored, and how they were prepared.

    Args:
        config: The experiment.
        model: The loaded model.
        names: Of the images that are scored.
        grid: The patches that masks were reduced to; None: they were not.
    """
    preparation = config.paper.preparation
    if config.paper.image_set is not None:
        yield "images", _image_remark(config, config.paper.image_set, names)
    if preparation.fit is not None:
        yield "preparation", _fit_remark(preparation, preparation.fit, model)
    if preparation.resolution == "patch":
        yield "preparation", _resolution_remark(preparation, grid)


def _image_remark(config: ReproductionConfig, image_set: ImageSet, names: Sequence[str]) -> str:
    total, scored = len(image_set.names), len(names)
    listed = f"{image_set.names[0]} … {image_set.names[-1]}"
    if config.data.names == image_set.names:
        some = "" if scored == total else f" {scored} of them are scored here."
        return f"These are the paper's {total} images, by their names ({listed}).{some}"
    among = len({Path(name).stem for name in names} & set(image_set.names))
    others = f"here {scored} images, {among} of them among these" if among else f"here are {scored} others"
    why = " --limit takes a sample of the data, not the paper's images." if config.data.limit is not None else ""
    return f"The paper has its numbers for {total} images ({listed}); {others}.{why}"


def _fit_remark(preparation: Preparation, fit: str, model: Model) -> str:
    preprocess, size = model.preprocess, preparation.size
    done = {"crop": "resized and cropped", "squash": "squashed"}
    actual = "crop" if preprocess.keep_ratio else "squash"
    here = f"Images are {done[actual]} to {preprocess.size[0]} × {preprocess.size[1]}"
    if actual == fit and (size is None or preprocess.size == (size, size)):
        return f"{here}, as in the paper."
    return f"{here}; in the paper {done[fit]}{'' if size is None else f' to {size} × {size}'}."


def _resolution_remark(preparation: Preparation, grid: tuple[int, int] | None) -> str:
    side = "" if preparation.grid is None else f" ({preparation.grid} × {preparation.grid} in the paper)"
    if grid is None:
        return f"Masks stay as fine as the image; in the paper they are reduced to the model's patches{side}."
    return f"Masks are reduced to the {grid[0]} × {grid[1]} patches{side} and compared with the maps there."
