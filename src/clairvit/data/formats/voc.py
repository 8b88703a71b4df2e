"""Pascal VOC 2012, segmentation: 20 kinds of objects, every pixel named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, lines_of
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.errors import BadInput
from clairvit.models.image_files import open_image

TREE = """
JPEGImages/
  2007_000033.jpg …
SegmentationClass/
  2007_000033.png …           a palette: 0 background, 1 to 20 classes, 255 void
ImageSets/
  Segmentation/
    train.txt  trainval.txt  val.txt
"""
CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_VOID = 255
_SPLITS = ("val", "train", "trainval")
_NEEDS = ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation/{split}.txt")
_INSIDE = ("VOCdevkit/VOC2012", "VOC2012")


def fetch(folder: Path) -> None:
    from torchvision.datasets import VOCSegmentation

    VOCSegmentation(folder, year="2012", image_set="val", download=True)


@dataset(
    "voc",
    "Pascal VOC 2012 (all objects are the mask)",
    has=("masks", "labels"),
    splits=_SPLITS,
    tree=TREE,
    needs=_NEEDS,
    inside=_INSIDE,
    fetch=fetch,
)
def voc(asked: DataRequest) -> DatasetIndex:
    """The mask is of all objects together, so that second classes, which it covers too, are not named."""
    return DatasetIndex(_entries(asked), CLASSES, has_masks=True, whole=True)


@dataset(
    "voc-class",
    "Pascal VOC 2012 (the objects of the true class are the mask)",
    has=("masks", "labels", "others"),
    splits=_SPLITS,
    tree=TREE,
    needs=_NEEDS,
    inside=_INSIDE,
    fetch=fetch,
)
def voc_class(asked: DataRequest) -> DatasetIndex:
    return DatasetIndex(_entries(asked), CLASSES, has_masks=True, has_others=True)


def _entries(asked: DataRequest) -> tuple[Entry, ...]:
    return tuple(_photo(asked.root, name) for name in lines_of(asked.root / _NEEDS[2].format(split=asked.split)))


def _photo(root: Path, name: str) -> Entry:
    painted = root / "SegmentationClass" / f"{name}.png"

    def largest() -> int | None:
        areas = _areas(_values(painted)) if painted.exists() else {}
        return max(areas, key=lambda own: areas[own], default=None)

    return Entry(
        name=f"JPEGImages/{name}.jpg",
        image=root / "JPEGImages" / f"{name}.jpg",
        known=lambda _: _classes(painted),
        behind=lambda: (painted if painted.exists() else None,),
        group=largest,
    )


def _classes(painted: Path) -> Annotation:
    if not painted.exists():
        return Annotation(masked=False)
    values = _values(painted)
    return Annotation(None, {own: values == own + 1 for own in _areas(values)}, values == _VOID)


def _areas(values: NDArray[Any]) -> dict[int, int]:
    """class -> pixels, of those that are there"""
    counts = np.bincount(values.ravel(), minlength=_VOID + 1)[1 : len(CLASSES) + 1]
    return {own: int(count) for own, count in enumerate(counts) if count}


def _values(painted: Path) -> NDArray[Any]:
    """[rows, columns] of 0, 1 to 20, and 255"""
    try:
        with open_image(painted) as picture:
            values: NDArray[Any] = np.asarray(picture)
    except (OSError, SyntaxError, ValueError) as error:
        raise BadInput(f"The mask '{painted}' cannot be read ({error}); expected a whole PNG.") from error
    if values.ndim != 2 or ((values > len(CLASSES)) & (values != _VOID)).any():
        raise BadInput(
            f"The mask '{painted}' holds {values.ndim} dimensions with values up to {int(values.max())}; expected a "
            f"palette of 0 to {len(CLASSES)} and {_VOID}, as the data set has it."
        )
    return values
