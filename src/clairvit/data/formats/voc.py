"""Pascal VOC 2012 segmentation: 20 object classes, every pixel labelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, read_lines
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.masks import decode_mask
from clairvit.errors import BadInput

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


@dataset_format(
    "voc",
    "Pascal VOC 2012 (all objects are the mask)",
    has=("masks", "labels"),
    splits=_SPLITS,
    tree=TREE,
    required_paths=_NEEDS,
    archive_folders=_INSIDE,
    fetch=fetch,
)
def voc(request: DataRequest) -> DatasetIndex:
    """Index the images; the mask is the union of all objects, so that there are no other classes."""
    return DatasetIndex(_entries(request), CLASSES, has_masks=True, all_objects=True)


@dataset_format(
    "voc-class",
    "Pascal VOC 2012 (the objects of the true class are the mask)",
    has=("masks", "labels", "others"),
    splits=_SPLITS,
    tree=TREE,
    required_paths=_NEEDS,
    archive_folders=_INSIDE,
    fetch=fetch,
)
def voc_class(request: DataRequest) -> DatasetIndex:
    """Index the images; the mask is that of the true class."""
    return DatasetIndex(_entries(request), CLASSES, has_masks=True, has_others=True)


def _entries(request: DataRequest) -> tuple[Entry, ...]:
    return tuple(
        _entry(request.root, name) for name in read_lines(request.root / _NEEDS[2].format(split=request.split))
    )


def _entry(root: Path, name: str) -> Entry:
    mask_file = root / "SegmentationClass" / f"{name}.png"

    def largest_class() -> int | None:
        areas = _areas(_values(mask_file)) if mask_file.exists() else {}
        return max(areas, key=lambda index: areas[index], default=None)

    return Entry(
        name=f"JPEGImages/{name}.jpg",
        image=root / "JPEGImages" / f"{name}.jpg",
        annotation=lambda _: _read_annotation(mask_file),
        hash_inputs=lambda: (mask_file if mask_file.exists() else None,),
        stratum=largest_class,
    )


def _read_annotation(mask_file: Path) -> Annotation:
    if not mask_file.exists():
        return Annotation(masked=False)
    values = _values(mask_file)
    return Annotation(None, {index: values == index + 1 for index in _areas(values)}, values == _VOID)


def _areas(values: NDArray[Any]) -> dict[int, int]:
    """Return the number of pixels per class, without absent classes."""
    counts = np.bincount(values.ravel(), minlength=_VOID + 1)[1 : len(CLASSES) + 1]
    return {index: int(count) for index, count in enumerate(counts) if count}


def _values(mask_file: Path) -> NDArray[Any]:
    """Return the mask values [rows, columns]: 0, 1 to 20, and 255."""
    values: NDArray[Any] = np.asarray(decode_mask(mask_file, f"The mask '{mask_file}'"))
    if values.ndim != 2 or ((values > len(CLASSES)) & (values != _VOID)).any():
        raise BadInput(
            f"The mask '{mask_file}' holds {values.ndim} dimensions with values up to {int(values.max())}; expected a "
            f"palette of 0 to {len(CLASSES)} and {_VOID}, as the data set has it."
        )
    return values
