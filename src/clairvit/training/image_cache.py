"""Pictures: an album read once, as bytes at the size training cuts from, with a class number for each."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clairvit.data.dataset import Failed, ImageDataset
from clairvit.data.hashing import digest
from clairvit.errors import BadInput, ClairError, did_you_mean
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.perturbation.progress import report_progress
from clairvit.perturbation.rng import make_generator

IN_MEMORY = 4 << 30  # bytes; larger sets lie in a temporary file that the system reads and forgets as needed
_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Pictures:
    """A set to train or validate on."""

    bytes: NDArray[np.uint8]  # [N, 3, R, C]
    labels: tuple[int | str, ...]
    mark: str  # a hash of all images and labels

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, rows: Tensor) -> Tensor:
        """uint8 [len(rows), 3, R, C]"""
        return torch.from_numpy(self.bytes[rows.numpy()])


def read_pictures(
    dataset: ImageDataset,
    box: tuple[int, int],
    interpolation: str,
    failed: Failed | None = None,
    classes: tuple[str, ...] = (),
) -> Pictures:
    """All pages of an album; `failed` is told of those that cannot be read, and without it the first one raises.

    Albums of data sets number an image's class by the names a model has for them, which are `classes`.
    """
    if not dataset.has_labels:
        raise BadInput("The images to train on have no classes; expected an album with labels, e.g. class folders.")
    shape = (len(dataset), 3, *box)
    large = int(np.prod(shape, dtype=np.int64)) > IN_MEMORY
    kept = _on_disk(shape) if large else np.empty(shape, np.uint8)
    # as bytes between 0 and 1: the middle of each picture, resized just enough to cover the box
    plain = Preprocess(box, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), interpolation=interpolation)
    reader = Model(nn.Identity(), "reader", plain, classes)

    def page(row: int) -> tuple[Tensor, int | str, str] | ClairError:
        try:
            found = dataset.read(row, reader)
            if found.label is None:
                raise BadInput(f"'{dataset.names[row]}' has no class; expected one for each image.")
            if found.pixels.shape != shape[1:]:
                raise BadInput(
                    f"'{dataset.names[row]}' is a tensor of shape {list(found.pixels.shape)}, which is taken as it is; "
                    f"training crops pictures itself and expected {list(shape[1:])}. Pass paths or PIL images."
                )
            return (found.pixels * 255).round().to(torch.uint8), found.label, dataset.content_hash(row)
        except ClairError as error:
            return error

    labels: list[int | str] = []
    marks: list[str] = []
    with report_progress("reading images", len(dataset)) as tell, ThreadPoolExecutor() as threads:
        for start in range(0, len(dataset), _AT_ONCE):
            rows = range(start, min(start + _AT_ONCE, len(dataset)))
            for row, found in zip(rows, threads.map(page, rows), strict=True):
                if isinstance(found, ClairError):
                    if failed is None:
                        raise found
                    failed(dataset.names[row], found)
                    continue
                picture, label, mark = found
                kept[len(labels)] = picture.numpy()
                labels.append(label)
                marks.append(mark)
            tell(len(rows))
    if not labels:
        raise BadInput(f"None of the {len(dataset)} images can be read; expected images to train on.")
    return Pictures(kept[: len(labels)], tuple(labels), digest(*marks))


def _on_disk(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An array in a file without a name, which is gone when the array is."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)


def class_names(labels: Sequence[int | str]) -> tuple[str, ...]:
    """In the order of their numbers, or of their names."""
    if all(isinstance(label, int) for label in labels):
        return tuple(str(number) for number in range(max(int(label) for label in labels) + 1))
    return tuple(sorted({str(label) for label in labels}))


def numbered(labels: Sequence[int | str], classes: Sequence[str]) -> Tensor:
    """[N] class numbers; a label that is a number is one already."""
    places: dict[int | str, int] = {name: place for place, name in enumerate(classes)}
    places |= {place: place for place in range(len(classes))}
    for label in dict.fromkeys(labels):
        if label not in places:
            near = did_you_mean(str(label), classes)
            raise BadInput(f"An image is of class '{label}', which is none of the {len(classes)} trained on.{near}")
    return torch.tensor([places[label] for label in labels])


def split(numbers: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to validate on: that share of each class, at least one; one image is trained on."""
    trained: list[Tensor] = []
    kept: list[Tensor] = []
    for number in sorted(set(numbers.tolist())):
        rows = (numbers == number).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=make_generator(seed, -1 - number))]
        count = min(max(round(share * len(rows)), 1), len(rows) - 1)
        kept.append(rows[:count])
        trained.append(rows[count:])
    if not sum(map(len, kept)):
        raise BadInput(
            "Every class has a single image, so none is left to validate on; expected at least two images of a class."
        )
    return torch.cat(trained).sort().values, torch.cat(kept).sort().values
