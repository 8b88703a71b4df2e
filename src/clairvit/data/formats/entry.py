"""Entry: one image of a dataset with functions that read its annotation lazily; helpers to read a dataset's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clairvit.data.masks import OBJECT, VOID
from clairvit.errors import BadInput
from clairvit.models.image_files import EncodedImage, files_below
from clairvit.models.image_files import folders_in as folders_in

Mask = NDArray[np.bool_]  # [rows, columns] of the whole image
Source = Path | Callable[[], Image.Image | EncodedImage]
Size = tuple[int, int]  # columns, rows of the image, upright
# How class indices of a dataset relate to those of a model:
#   own       published order: a model without class names has the same
#   imagenet  the order of every ImageNet-1k model, whatever its class names are
#   names     no order: only names count
Numbering = Literal["own", "imagenet", "names"]


@dataclass(frozen=True, eq=False)
class Annotation:
    """Label and masks of one image, by the class indices of the dataset."""

    label: int | None = None  # None: the class of the largest object in the model's crop
    objects: Mapping[int, Mask] = field(default_factory=dict)  # class -> mask
    void: Mask | None = None
    masked: bool = True  # False: there is no mask


@dataclass(frozen=True, eq=False)
class Entry:
    """One image. Nothing is read before one of the functions is called."""

    name: str  # the file, relative to the dataset's folder
    image: Source
    annotation: Callable[[Size], Annotation]
    hash_inputs: Callable[[], tuple[Any, ...]]  # all that `annotation` reads: files, arrays, text
    stratum: Callable[[], int | None]  # the class for stratified sampling: the label or an estimate


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """All images of a dataset, and which annotations they have."""

    entries: tuple[Entry, ...]
    classes: tuple[str, ...]
    has_masks: bool = False
    has_labels: bool = True
    has_others: bool = False
    all_objects: bool = False  # the mask is the union of all objects, not of those of the true class
    numbering: Numbering = "own"
    notes: tuple[str, ...] = ()


def labelled_entry(
    root: Path, image: Path, label: int | None, annotation: Callable[[Size], Annotation] | None, *hash_inputs: Any
) -> Entry:
    """Return an entry whose class is known without reading files.

    Args:
        root: The dataset's folder.
        image: The image file.
        label: Its class.
        annotation: Reads the annotation with its mask; None if there is no mask.
        hash_inputs: What `annotation` reads; files that do not exist count as None.
    """
    return Entry(
        name=image.relative_to(root).as_posix(),
        image=image,
        annotation=annotation or (lambda _: Annotation(label, masked=False)),
        hash_inputs=lambda: tuple(
            None if isinstance(part, Path) and not part.exists() else part for part in hash_inputs
        ),
        stratum=lambda: label,
    )


def annotation_from_mask(label: int | None, mask: Image.Image) -> Annotation:
    """Return the annotation of a mask of `read_mask`; the object has class -1 without a label."""
    values = np.asarray(mask)
    return Annotation(label, {-1 if label is None else label: values == OBJECT}, values == VOID)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, stripped, without empty ones."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The list '{path}' cannot be read ({error}); expected text, as the data set has it.") from error


def read_mat(path: Path, *names: str) -> list[NDArray[Any]]:
    """Return variables of a .mat file (up to version 7), each with at least one dimension."""
    from scipy.io import loadmat

    try:
        variables = loadmat(path, squeeze_me=True)
    except Exception as error:  # scipy raises many types on broken files
        raise BadInput(
            f"'{path}' cannot be read ({error}); expected a MATLAB file, as the data set has it: unpack it again."
        ) from error
    for name in names:
        if name not in variables:
            listed = ", ".join(key for key in variables if not key.startswith("__")) or "nothing"
            raise BadInput(f"'{path}' holds {listed}; expected '{name}' in it.")
    return [np.atleast_1d(variables[name]) for name in names]


def list_files(path: Path, *suffixes: str) -> list[Path]:
    """Return the files below a folder with these suffixes, sorted by name; hidden ones are skipped."""
    return sorted(files_below(path, suffixes))


def quoted_list(names: list[str]) -> str:
    """Return "'a', 'b', 'c' and 4 more"."""
    listed = ", ".join(f"'{name}'" for name in names[:3])
    return listed + (f" and {len(names) - 3} more" if len(names) > 3 else "")
