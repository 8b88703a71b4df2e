"""True classes of images: from a CSV file with the columns image, class and other, or from the folders' names."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clairvit.data.dataset import ImageDataset
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.data.dataset import Sample
    from clairvit.models.model import Model


def read_truth(path: Path, title: str | None = None) -> dict[str, dict[str, str]]:
    """Return the rows of a CSV file by image; `title` is what errors call the file."""
    title = title or f"The file of classes '{path}'"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns, lines = tuple(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{title} cannot be read ({error}); expected a CSV in UTF-8.") from error
    if not lines or not {"image", "class"} <= set(columns):
        content = f"the columns {', '.join(columns)}" if lines else "no lines below its first"
        raise BadInput(
            f"{title} has {content}; expected image and class (and other) in its first line, and a line per image."
        )
    too_long = next((line["image"] for line in lines if None in line), None)  # csv's key for cells beyond the columns
    if too_long is not None:
        raise BadInput(
            f"{title} has more than {len(columns)} cells in the line of '{too_long}'; expected a class with a comma in "
            'quotes: "husky, Siberian".'
        )
    counts = Counter(line["image"] for line in lines)
    repeated = next((image for image, count in counts.items() if count > 1), None)
    if repeated is not None:
        raise BadInput(
            f"{title} has {counts[repeated]} lines for '{repeated}'; expected one, with its second class as other."
        )
    return {line["image"]: line for line in lines}


def classes_of(
    images: Sequence[str], rows: Mapping[str, Mapping[str, str]]
) -> tuple[list[str | None], list[str | None] | None]:
    """Return the class of each image, and that of a second object in it (None without a column 'other').

    An image is found by its path, its file name or its stem.
    """
    listed = [
        next((rows[key] for key in (image, Path(image).name, Path(image).stem) if key in rows), {}) for image in images
    ]
    others = [row.get("other") or None for row in listed]
    return [row.get("class") or None for row in listed], others if any(
        "other" in row for row in rows.values()
    ) else None


def folder_classes(images: Sequence[str]) -> list[str | None]:
    """Return the name of each image's folder."""
    return [Path(image).resolve().parent.name for image in images]


def require_labels(dataset: ImageDataset, labels: Sequence[str | None], title: str) -> ImageDataset:
    """Return the data set such that reading an image without a true class raises BadInput."""

    def read(row: int, model: Model) -> Sample:
        if labels[row] is None:
            raise BadInput(f"There is no class for '{dataset.names[row]}' in {title}; expected a line with it.")
        return dataset.read(row, model)

    return replace(dataset, read=read)
