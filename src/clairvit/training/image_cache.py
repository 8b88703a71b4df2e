"""Image cache: a data set read once, as bytes at the size that training crops from, with a label for each image."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clairvit._progress import report_progress
from clairvit._rng import make_generator
from clairvit.data.dataset import ErrorHandler, ImageDataset
from clairvit.data.hashing import digest
from clairvit.errors import BadInput, ClairError, did_you_mean
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess

IN_MEMORY = 4 << 30  # bytes; larger sets are in a temporary file, which the operating system pages
_CHUNK = 64  # images that are read before progress is reported


@dataclass(frozen=True, eq=False)
class ImageCache:
    """Images to train or validate on."""

    bytes: NDArray[np.uint8]  # [N, 3, R, C]
    labels: tuple[int | str, ...]
    content_hash: str  # of all images and labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor) -> Tensor:
        """Return images as uint8 [len(rows), 3, R, C]."""
        return torch.from_numpy(self.bytes[rows.numpy()])


_Image = tuple[Tensor, int | str, str]  # uint8 [3, R, C], label, hash


def cache_images(
    dataset: ImageDataset,
    cover: tuple[int, int],
    interpolation: str,
    on_error: ErrorHandler | None = None,
    classes: tuple[str, ...] = (),
) -> ImageCache:
    """Read all images of a data set with labels.

    Args:
        dataset: The images.
        cover: (rows, columns) that each image is resized to cover, then cropped to.
        interpolation: Of the resizing.
        on_error: Called with each image that cannot be read; None raises the first error.
        classes: The names by which a data set numbers its classes.
    """
    if not dataset.has_labels:
        raise BadInput("The images to train on have no classes; expected a data set with labels, e.g. class folders.")
    shape = (len(dataset), 3, *cover)
    large = int(np.prod(shape, dtype=np.int64)) > IN_MEMORY
    values = _memory_map(shape) if large else np.empty(shape, np.uint8)
    labels: list[int | str] = []
    hashes: list[str] = []
    with closing(_read_images(dataset, cover, interpolation, classes)) as images:
        for row, image in enumerate(images):
            if isinstance(image, ClairError):
                if on_error is None:
                    raise image
                on_error(dataset.names[row], image)
                continue
            pixels, label, content_hash = image
            values[len(labels)] = pixels.numpy()
            labels.append(label)
            hashes.append(content_hash)
    if not labels:
        raise BadInput(f"None of the {len(dataset)} images can be read; expected images to train on.")
    return ImageCache(values[: len(labels)], tuple(labels), digest(*hashes))


def _read_images(
    dataset: ImageDataset, cover: tuple[int, int], interpolation: str, classes: tuple[str, ...]
) -> Generator[_Image | ClairError, None, None]:
    """Yield each image, or the error with which it was read, in the order of the data set."""
    # no normalisation: the middle of each image in 0..1, resized just enough to cover the crop
    preprocess = Preprocess(cover, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), interpolation=interpolation)
    reader = Model(nn.Identity(), "reader", preprocess, classes)

    def read(row: int) -> _Image | ClairError:
        try:
            sample = dataset.read(row, reader)
            if sample.label is None:
                raise BadInput(f"'{dataset.names[row]}' has no class; expected one for each image.")
            if sample.pixels.shape != (3, *cover):
                raise BadInput(
                    f"'{dataset.names[row]}' is a tensor of shape {list(sample.pixels.shape)}, which is taken as it "
                    f"is; training crops pictures itself and expected {[3, *cover]}. Pass paths or PIL images."
                )
            return (sample.pixels * 255).round().to(torch.uint8), sample.label, dataset.content_hash(row)
        except ClairError as error:
            return error

    with report_progress("reading images", len(dataset)) as tell, ThreadPoolExecutor() as threads:
        for start in range(0, len(dataset), _CHUNK):
            rows = range(start, min(start + _CHUNK, len(dataset)))
            yield from threads.map(read, rows)
            tell(len(rows))


def _memory_map(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return an array in a file without a name, which is removed with the array."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)


def class_names(labels: Sequence[int | str]) -> tuple[str, ...]:
    """Return the names of classes: numbers from 0 to the largest label, or the labels sorted."""
    if all(isinstance(label, int) for label in labels):
        return tuple(str(number) for number in range(max(int(label) for label in labels) + 1))
    return tuple(sorted({str(label) for label in labels}))


def class_indices(labels: Sequence[int | str], classes: Sequence[str]) -> Tensor:
    """Return the class index of each label, [N]; a label that is a number is one already."""
    indices: dict[int | str, int] = {name: index for index, name in enumerate(classes)}
    indices |= {index: index for index in range(len(classes))}
    for label in dict.fromkeys(labels):
        if label not in indices:
            near = did_you_mean(str(label), classes)
            raise BadInput(f"An image is of class '{label}', which is none of the {len(classes)} trained on.{near}")
    return torch.tensor([indices[label] for label in labels])


def stratified_split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return rows to train on and rows to validate on: that share of each class, at least one.

    A class with a single image is trained on.
    """
    trained: list[Tensor] = []
    held_out: list[Tensor] = []
    for label in sorted(set(labels.tolist())):
        rows = (labels == label).nonzero().flatten()
        rows = rows[
            torch.randperm(len(rows), generator=make_generator(seed, "training/validation rows", -label), device="cpu")
        ]
        count = min(max(round(share * len(rows)), 1), len(rows) - 1)
        held_out.append(rows[:count])
        trained.append(rows[count:])
    if not sum(map(len, held_out)):
        raise BadInput(
            "Every class has a single image, so none is left to validate on; expected at least two images of a class."
        )
    return torch.cat(trained).sort().values, torch.cat(held_out).sort().values
