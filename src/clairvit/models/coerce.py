"""Accept what users have: a model as name, module or `Model`; images as files, tensors, a data set or a DataLoader."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clairvit.errors import BadInput, ClairWarning, WrongType, user_stacklevel
from clairvit.models.image_files import open_image
from clairvit.models.images import Batch, image_name, is_clip, is_preprocessed
from clairvit.models.load import load
from clairvit.models.model import Model
from clairvit.models.wrap import Pipeline, is_pipeline, wrap

ModelLike = Model | nn.Module | Pipeline | str
IMAGE_KEYS = ("image", "images", "pixel_values", "img")  # of the dicts that Hugging Face data sets yield
PROCESSED = ("pixel_values", "pixel_values_videos")  # of what a processor of transformers returns
LABEL_KEYS = ("label", "labels", "target")
_ONE_OR_MORE_IMAGES = (str, bytes, Path, Image.Image, np.ndarray, Tensor, Batch)


def as_model(model: ModelLike, images: Any = None) -> Model:
    """Return the `Model` of a name, a module or a `Model`; a module is not changed.

    A bare module whose preprocessing is stated nowhere gets ImageNet's: one ClairWarning says so, unless `images` are
    preprocessed already, and the notes of an explanation do.
    """
    if torch.get_default_device().type == "meta":
        raise BadInput(
            "torch's default device is 'meta', where tensors have shapes and no numbers; expected a device that "
            "computes. Leave the block of torch.device('meta'), or call torch.set_default_device('cpu')."
        )
    if isinstance(model, Model):
        return model
    if isinstance(model, str):
        return load(model)
    if not isinstance(model, nn.Module) and not is_pipeline(model):
        raise WrongType(
            f"The model is a {type(model).__name__}; expected a cv.Model, a torch.nn.Module or a name such as 'pets'."
        )
    wrapped = wrap(model)
    if wrapped.assumptions and not all_preprocessed(images):
        advice = "Do so with cv.wrap(module, mean=…, std=…, size=…), and pass what it returns."
        warnings.warn(
            f"{wrapped.name}: {' '.join(wrapped.assumptions)} {advice}", ClairWarning, stacklevel=user_stacklevel()
        )
    return wrapped


def model_and_images(model: ModelLike, images: Any, inputs: Mapping[str, Any] | None = None) -> tuple[Model, Any]:
    """Return the model, bound to inputs besides the images, and the images.

    Images may be a mapping of all inputs, as a processor of transformers returns it: {"pixel_values": …, …}.
    """
    others = dict(inputs or {})
    name = next((key for key in PROCESSED if isinstance(images, Mapping) and key in images), None)
    if name is not None:
        others |= {key: value for key, value in images.items() if key != name and key not in LABEL_KEYS}
        images = images[name]
    images = as_images(images)
    model = as_model(model, images)
    return model.with_inputs(**others) if others else model, images


class LabelledImages(Sequence[Any]):
    """The images of a data set, read one at a time when they are asked for, and their labels.

    Args:
        read: Return item i of the data set: an image, (image, label, …) or {"image": …, "label": …}.
        count: The number of items.
    """

    def __init__(self, read: Callable[[int], Any], count: int) -> None:
        self._read = read
        self._count = count
        self._last: tuple[int, Any, int | str | None] | None = None  # so that image and label are of the same reading

    def _pair(self, index: int) -> tuple[Any, int | str | None]:
        position = range(len(self))[index]
        if self._last is None or self._last[0] != position:
            self._last = (position, *_image_and_label(self._read(position)))
        return self._last[1], self._last[2]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one image, or a list of them."""
        if isinstance(index, slice):
            return [self._pair(i)[0] for i in range(len(self))[index]]
        return self._pair(index)[0]

    def label(self, index: int) -> int | str | None:
        """Return the label of one image; None where it has none."""
        return self._pair(index)[1]

    @property
    def first(self) -> Any:
        """Return the first image; None where there is none."""
        return self[0] if self._count else None

    @property
    def labelled(self) -> bool:
        """Return whether the first item has a label."""
        return len(self) > 0 and self.label(0) is not None

    @property
    def labels(self) -> Sequence[int | str | None] | None:
        """Return the labels, read when they are asked for; None where the first item has none."""
        return _Labels(self) if self.labelled else None

    @property
    def names(self) -> tuple[str, ...]:
        """Return a name per image: its number, because the files of a data set are not known before it is read."""
        return tuple(f"image {i + 1}" for i in range(len(self)))

    def chunks(self, size: int) -> Iterator[tuple[list[Any], tuple[str, ...]]]:
        """Yield `size` images at a time, with their names."""
        for start in range(0, self._count, size):
            images = self[start : start + size]
            yield images, tuple(image_name(image, start + i) for i, image in enumerate(images))


def _no_random_access(index: int) -> Any:
    raise NotImplementedError("an iterator is read in order")


class StreamedImages(LabelledImages):
    """The images of an iterator, read once: chunk by chunk with `chunks`, or all when one is asked for by its number.

    Args:
        items: Yields an image, (image, label, …) or {"image": …, "label": …}.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__(_no_random_access, 0)
        self._items = iter(items)
        self._buffer: list[Any] = []  # read and not yet handed out
        self._handed_out = 0

    def _fill(self, count: int | None) -> None:
        """Read until the buffer has `count` items, or to the end for None."""
        missing = None if count is None else max(count - len(self._buffer), 0)
        self._buffer += itertools.islice(self._items, missing)

    def _pair(self, index: int) -> tuple[Any, int | str | None]:
        position = range(len(self))[index]
        if position < self._handed_out:
            raise self._read_already()
        return _image_and_label(self._buffer[position - self._handed_out])

    def _read_already(self) -> BadInput:
        return BadInput(
            f"The iterator of images was read already, up to image {self._handed_out}; expected a new one, or a list "
            "or data set, which can be read again."
        )

    def __len__(self) -> int:
        self._fill(None)
        return self._handed_out + len(self._buffer)

    @property
    def first(self) -> Any:
        """Return the first image, which stays the next one to be read; None where there is none."""
        self._fill(1)
        return _image_and_label(self._buffer[0])[0] if self._buffer else None

    def chunks(self, size: int) -> Iterator[tuple[list[Any], tuple[str, ...]]]:
        """Yield `size` images at a time, with their names; a chunk is let go when the next one is asked for."""
        if self._handed_out:
            raise self._read_already()
        self._fill(size)
        while self._buffer:
            images = [_image_and_label(item)[0] for item in self._buffer[:size]]
            yield images, tuple(image_name(image, self._handed_out + i) for i, image in enumerate(images))
            self._handed_out += len(images)
            del self._buffer[: len(images)]
            self._fill(size)


class _Labels(Sequence[int | str | None]):
    """The labels of `LabelledImages`, read when they are asked for."""

    def __init__(self, images: LabelledImages) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    @overload
    def __getitem__(self, index: int) -> int | str | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[int | str | None]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._images.label(i) for i in range(len(self))[index]]
        return self._images.label(index)


def as_images(images: Any) -> Any:
    """Return a data set, DataLoader, iterator, row or list of (image, label) as `LabelledImages`; the rest as it is."""
    if isinstance(images, Model | nn.Module):
        raise WrongType(
            f"The images are a {type(images).__name__}; expected the model first, then the images, such as "
            "cv.explain(model, 'photo.jpg')."
        )
    if isinstance(images, (LabelledImages, *_ONE_OR_MORE_IMAGES)):
        return images
    if isinstance(images, list | tuple):
        if images and all(is_clip(item) for item in images):
            return images  # lists of frames
        pairs = images and all(isinstance(item, tuple | list | Mapping) for item in images)
        return LabelledImages(images.__getitem__, len(images)) if pairs else images
    if isinstance(images, DataLoader):
        return StreamedImages(pair for batch in images for pair in _pairs_of_batch(batch))
    if isinstance(images, Mapping):
        return _images_of_row(images)
    if hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        return LabelledImages(images.__getitem__, len(images))
    if isinstance(images, Iterable):
        return StreamedImages(images)
    return images


def _images_of_row(row: Mapping[Any, Any]) -> Any:
    """Return the image of a row {"image": …}, or the images of several rows as columns {"image": […], "label": […]}."""
    if row and all(hasattr(part, "__getitem__") and hasattr(part, "column_names") for part in row.values()):
        raise BadInput(
            f"A dict of data sets was given ({', '.join(map(str, row))}); expected one of them, such as "
            f"data[{next(iter(row))!r}]."
        )
    image, label = _image_and_label(row)
    if not isinstance(image, list | tuple):
        return image
    columns: Any = next((row[key] for key in LABEL_KEYS if key in row), None)
    if not isinstance(columns, list | tuple) or len(columns) != len(image):
        columns = [label] * len(image)
    pairs = list(zip(image, columns, strict=True))
    return LabelledImages(pairs.__getitem__, len(pairs))


def _image_and_label(item: Any) -> tuple[Any, int | str | None]:
    """Return the image and the label of an item of a data set: image, (image, label, …) or {"image": …, "label": …}."""
    if isinstance(item, Mapping):
        image = next((item[key] for key in IMAGE_KEYS if key in item), None)
        pictures = [value for value in item.values() if isinstance(value, Image.Image)]
        if image is None and len(pictures) == 1:  # a column of another name
            image = pictures[0]
        if image is None:
            raise BadInput(
                f"An item of the data set is a dict with {', '.join(map(str, item))}; expected one of "
                f"{', '.join(IMAGE_KEYS)} in it."
            )
        return _decoded(image), _label(next((item[key] for key in LABEL_KEYS if key in item), None))
    if isinstance(item, tuple | list):
        if not item:
            raise BadInput("An item of the data set is empty; expected an image or (image, label).")
        return item[0], _label(item[1] if len(item) > 1 else None)
    return item, None


def _decoded(image: Any) -> Any:
    """Return the picture of {"bytes": …, "path": …}, as Hugging Face stores images; others as they are."""
    if not isinstance(image, Mapping) or not {"bytes", "path"} & set(image):
        return image
    if image.get("bytes") is None:
        return image.get("path")
    try:
        return open_image(io.BytesIO(image["bytes"]))
    except (OSError, TypeError) as error:
        raise BadInput(
            f"An item of the data set has bytes that are no image ({error}); expected those of an image file."
        ) from error


def _label(value: Any) -> int | str | None:
    """Return a class as number or name; None for annotations of another kind (boxes, masks)."""
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _pairs_of_batch(batch: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (image, label) of a batch that a DataLoader collated."""
    images, labels = batch, None
    if isinstance(batch, Mapping):
        images = next((batch[key] for key in IMAGE_KEYS if key in batch), None)
        labels = next((batch[key] for key in LABEL_KEYS if key in batch), None)
        if images is None:
            raise BadInput(
                f"A batch of the DataLoader is a dict with {', '.join(map(str, batch))}; expected one of "
                f"{', '.join(IMAGE_KEYS)} in it."
            )
    elif isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].ndim in (4, 5):
        images, labels = batch[0], batch[1] if len(batch) > 1 else None
    has_labels = isinstance(labels, Tensor | np.ndarray | list | tuple) and len(labels) == len(images)
    for i, image in enumerate(images):
        if labels is None and isinstance(image, tuple | list | Mapping):  # collate_fn=list: one pair per image
            yield _image_and_label(image)
        else:
            yield image, labels[i] if has_labels and labels is not None else None


def all_preprocessed(images: Any) -> bool:
    """Return whether images are float tensors, which are taken as they are."""
    if isinstance(images, Batch):
        return True
    if isinstance(images, LabelledImages):
        return is_preprocessed(images.first)
    if isinstance(images, list | tuple) and len(images):
        return is_preprocessed(images[0])
    return is_preprocessed(images)
