"""Entry: one image of a data set, and how to find out what its files say of it when its turn comes."""

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
from clairvit.models.image_files import files_below
from clairvit.models.image_files import folders_in as folders_in

Mask = NDArray[np.bool_]  # [rows, columns] of the whole image
Source = Path | Callable[[], Image.Image]
Size = tuple[int, int]  # columns, rows of the image, upright
# How the numbers of a data set's classes relate to a model's:
#   own       as published, so a model without class names counts them in the same order
#   imagenet  ImageNet's thousand, in the order of every ImageNet-1k model, whatever it calls them
#   names     nobody knows: only names count
Numbering = Literal["own", "imagenet", "names"]


@dataclass(frozen=True, eq=False)
class Annotation:
    """What the files say of one image, by the data set's own class numbers."""

    label: int | None = None  # None: the class of the largest object in what the model sees
    objects: Mapping[int, Mask] = field(default_factory=dict)  # class -> where it is
    void: Mask | None = None
    masked: bool = True  # False: nobody knows where the object is


@dataclass(frozen=True, eq=False)
class Entry:
    """One image. Nothing is read before `known` and `image` are asked."""

    name: str  # the file, below the data set's folder
    image: Source
    known: Callable[[Size], Annotation]
    behind: Callable[[], tuple[Any, ...]]  # all that `known` reads, for the image's mark: files, arrays, text
    group: Callable[[], int | None]  # the class by which a sample is drawn: the true one, or near enough


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """What a layout's function hands back."""

    entries: tuple[Entry, ...]
    classes: tuple[str, ...]
    has_masks: bool = False
    has_labels: bool = True
    has_others: bool = False
    whole: bool = False  # the mask is of all objects together, not of the true class's
    numbering: Numbering = "own"
    notes: tuple[str, ...] = ()


def entry(
    root: Path, image: Path, label: int | None, masked: Callable[[Size], Annotation] | None, *behind: Any
) -> Entry:
    """An image whose class is known from the start; `masked` adds where it is, `behind` is what that reads."""
    return Entry(
        name=image.relative_to(root).as_posix(),
        image=image,
        known=masked or (lambda _: Annotation(label, masked=False)),
        behind=lambda: tuple(None if isinstance(one, Path) and not one.exists() else one for one in behind),
        group=lambda: label,
    )


def of_kept(label: int | None, kept: Image.Image) -> Annotation:
    """From a mask as `read_mask` keeps it; without a class the object still has its place."""
    values = np.asarray(kept)
    return Annotation(label, {-1 if label is None else label: values == OBJECT}, values == VOID)


def lines_of(path: Path) -> list[str]:
    """The lines of a list, without the empty ones."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The list '{path}' cannot be read ({error}); expected text, as the data set has it.") from error


def mat_of(path: Path, *wanted: str) -> list[NDArray[Any]]:
    """Variables of a .mat file (up to version 7), each with at least one dimension."""
    from scipy.io import loadmat

    try:
        found = loadmat(path, squeeze_me=True)
    except Exception as error:  # scipy raises half a dozen kinds on broken bytes
        raise BadInput(
            f"'{path}' cannot be read ({error}); expected a MATLAB file, as the data set has it: unpack it again."
        ) from error
    for name in wanted:
        if name not in found:
            seen = ", ".join(key for key in found if not key.startswith("__")) or "nothing"
            raise BadInput(f"'{path}' holds {seen}; expected '{name}' in it.")
    return [np.atleast_1d(found[name]) for name in wanted]


def files_in(path: Path, *suffixes: str) -> list[Path]:
    """Return the images below a folder in the order of their names; hidden files and folders are skipped."""
    return sorted(files_below(path, suffixes))


def some(names: list[str]) -> str:
    """'a', 'b', 'c' and 4 more"""
    listed = ", ".join(f"'{name}'" for name in names[:3])
    return listed + (f" and {len(names) - 3} more" if len(names) > 3 else "")
