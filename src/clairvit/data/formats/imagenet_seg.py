"""ImageNet-Segmentation (Guillaumin et al.): 4276 images of ImageNet with foreground masks, in one MATLAB file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry
from clairvit.data.formats.imagenet import class_indices, class_names
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.errors import BadInput, importing

FILE = "gtsegs_ijcv.mat"
TREE = """
gtsegs_ijcv.mat               HDF5: value/img, value/gt, value/target
"""


@dataset_format(
    "imagenet-seg",
    "ImageNet-Segmentation",
    has=("masks", "labels"),
    tree=TREE,
    required_paths=(FILE,),
    why_no_download=f"torchvision has no downloader for it; {FILE} is on the authors' page",
)
def imagenet_seg(request: DataRequest) -> DatasetIndex:
    """Index the images; their class is a WordNet id, and some of the 445 are not in ImageNet-1k."""
    path = request.root / FILE
    with _open_hdf5(path) as file:
        value = file["value"]
        count = value["img"].shape[0]
        wnids = (
            [_decode_text(_dereference(file, value["target"], row)) for row in range(count)]
            if "target" in value
            else None
        )
    notes = []
    if wnids is None:
        notes.append(f"'{path}' has no value/target: no true classes.")
    entries = tuple(_entry(path, row, None if wnids is None else wnids[row]) for row in range(count))
    outside = sum(wnid not in class_indices() for wnid in wnids or ())
    if outside:
        notes.append(f"{outside} of {count} images are of classes that ImageNet-1k does not have: no true class.")
    return DatasetIndex(
        entries,
        class_names(),
        has_masks=True,
        has_labels=wnids is not None,
        numbering="imagenet",
        notes=tuple(notes),
    )


def _entry(path: Path, row: int, wnid: str | None) -> Entry:
    label = None if wnid is None else class_indices().get(wnid)

    def read_array(name: str) -> NDArray[Any]:
        with _open_hdf5(path) as file:
            return _dereference(file, file["value"][name], row)

    def annotation(_: tuple[int, int]) -> Annotation:
        truth = read_array("gt").T.astype(int)  # [rows, columns]: 1 object, 0 background, below 0 void
        return Annotation(label, {-1 if label is None else label: truth > 0}, truth < 0)

    return Entry(
        name=f"{FILE}/{row + 1:04d}",
        image=lambda: Image.fromarray(np.ascontiguousarray(read_array("img").T)),  # MATLAB's [3, columns, rows]
        annotation=annotation,
        hash_inputs=lambda: (read_array("gt"), wnid),
        stratum=lambda: label,
    )


@contextmanager
def _open_hdf5(path: Path) -> Iterator[Any]:
    """Open a MATLAB 7.3 file; raise BadInput if h5py is missing or the file is broken."""
    with importing(f"'{path}', an HDF5 file (MATLAB 7.3),", packages="h5py", error=BadInput):
        h5py = importlib.import_module("h5py")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, AttributeError, IndexError) as error:
        raise BadInput(
            f"'{path}' cannot be read ({error}); expected the whole file, with value/img and value/gt: fetch it again."
        ) from error


def _dereference(file: Any, cells: Any, row: int) -> NDArray[Any]:
    """Return the array that a cell of a cell array refers to, through nested cells."""
    array = file[cells[row, 0]]
    while array.dtype.kind == "O":
        array = file[array[0, 0]]
    return np.asarray(array)


def _decode_text(codes: NDArray[Any]) -> str:
    return "".join(chr(code) for code in codes.flatten())
