"""ImageNet-Segmentation (Guillaumin et al.): 4276 images of ImageNet with their foreground, in one MATLAB file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clairvit.data.formats import imagenet_classes as thousand
from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.errors import BadInput

FILE = "gtsegs_ijcv.mat"
TREE = """
gtsegs_ijcv.mat               HDF5: value/img, value/gt, value/target
"""


@dataset(
    "imagenet-seg",
    "ImageNet-Segmentation",
    has=("masks", "labels"),
    tree=TREE,
    needs=(FILE,),
    why_no_download=f"torchvision has no downloader for it; {FILE} is on the authors' page",
)
def imagenet_seg(asked: DataRequest) -> DatasetIndex:
    """The image's ImageNet id is its class; some of the 445 are none of ImageNet-1k's."""
    path = asked.root / FILE
    with _opened(path) as file:
        value = file["value"]
        count = value["img"].shape[0]
        wnids = [_text(_array(file, value["target"], row)) for row in range(count)] if "target" in value else None
    notes = []
    if wnids is None:
        notes.append(f"'{path}' has no value/target: no true classes.")
    entries = tuple(_photo(path, row, None if wnids is None else wnids[row]) for row in range(count))
    outside = sum(wnid not in thousand.numbers() for wnid in wnids or ())
    if outside:
        notes.append(f"{outside} of {count} images are of classes that ImageNet-1k does not have: no true class.")
    return DatasetIndex(
        entries,
        thousand.names(),
        has_masks=True,
        has_labels=wnids is not None,
        numbering="imagenet",
        notes=tuple(notes),
    )


def _photo(path: Path, row: int, wnid: str | None) -> Entry:
    label = None if wnid is None else thousand.numbers().get(wnid)

    def array(what: str) -> NDArray[Any]:
        with _opened(path) as file:
            return _array(file, file["value"][what], row)

    def known(_: tuple[int, int]) -> Annotation:
        truth = array("gt").T.astype(int)  # [rows, columns]: 1 the object, 0 the rest, below 0 nobody knows
        return Annotation(label, {-1 if label is None else label: truth > 0}, truth < 0)

    return Entry(
        name=f"{FILE}/{row + 1:04d}",
        image=lambda: Image.fromarray(np.ascontiguousarray(array("img").T)),  # MATLAB's [3, columns, rows]
        known=known,
        behind=lambda: (array("gt"), wnid),
        group=lambda: label,
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError as error:
        raise BadInput(
            f"'{path}' is an HDF5 file (MATLAB 7.3), and h5py, which reads it, is not installed; type: pip install h5py"
        ) from error
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, AttributeError, IndexError) as error:
        raise BadInput(
            f"'{path}' cannot be read ({error}); expected the whole file, with value/img and value/gt: fetch it again."
        ) from error


def _array(file: Any, cells: Any, row: int) -> NDArray[Any]:
    """What a cell of a cell array refers to, through cells within cells."""
    found = file[cells[row, 0]]
    while found.dtype.kind == "O":
        found = file[found[0, 0]]
    return np.asarray(found)


def _text(codes: NDArray[Any]) -> str:
    return "".join(chr(code) for code in codes.flatten())
