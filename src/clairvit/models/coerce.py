"""Accept what users have: a model as name, module or `Model`; images as files, tensors, a data set or a DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clairvit.errors import BadInput, ClairWarning, WrongType, user_stacklevel
from clairvit.models.images import Batch, image_name, is_preprocessed
from clairvit.models.load import load
from clairvit.models.model import Model
from clairvit.models.readout import IMAGE_INPUTS
from clairvit.models.wrap import wrap

ModelLike = Model | nn.Module | str
IMAGE_KEYS = ("image", "images", "pixel_values", "img")  # of the dicts that Hugging Face data sets yield
LABEL_KEYS = ("label", "labels", "target")
_ONE_OR_MORE_IMAGES = (str, bytes, Path, Image.Image, np.ndarray, Tensor, Batch)


def as_model(model: ModelLike, images: Any = None) -> Model:
    """Return the `Model` of a name, a module or a `Model`; a module is not changed.

    A bare module whose preprocessing is stated nowhere gets ImageNet's: one ClairWarning says so, unless `images` are
    preprocessed already, and the notes of an explanation do.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, str):
        return load(model)
    if not isinstance(model, nn.Module):
        raise WrongType(
            f"The model is a {type(model).__name__}; expected a cv.Model, a torch.nn.Module or a name such as 'pets'."
        )
    wrapped = wrap(model)
    if wrapped.assumptions and not _all_preprocessed(images):
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
    if isinstance(images, Mapping):
        name = next((key for key in (*IMAGE_INPUTS, *IMAGE_KEYS) if key in images), None)
        if name is None:
            raise BadInput(
                f"The images are a dict with {', '.join(map(str, images))}; expected one of "
                f"{', '.join(dict.fromkeys((*IMAGE_INPUTS, *IMAGE_KEYS)))} in it."
            )
        others |= {key: value for key, value in images.items() if key != name}
        images = images[name]
    images = as_images(images)
    return as_model(model, images).with_inputs(**others), images


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
        position = range(self._count)[index]
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
            return [self._pair(i)[0] for i in range(self._count)[index]]
        return self._pair(index)[0]

    def label(self, index: int) -> int | str | None:
        """Return the label of one image; None where it has none."""
        return self._pair(index)[1]

    @property
    def labelled(self) -> bool:
        """Return whether the first item has a label."""
        return self._count > 0 and self.label(0) is not None

    @property
    def labels(self) -> Sequence[int | str | None] | None:
        """Return the labels, read when they are asked for; None where the first item has none."""
        return _Labels(self) if self.labelled else None

    @property
    def names(self) -> tuple[str, ...]:
        """Return a name per image: its number, because the files of a data set are not known before it is read."""
        return tuple(f"image {i + 1}" for i in range(self._count))

    def chunks(self, size: int) -> Iterator[tuple[list[Any], tuple[str, ...]]]:
        """Yield `size` images at a time, with their names."""
        for start in range(0, self._count, size):
            images = self[start : start + size]
            yield images, tuple(image_name(image, start + i) for i, image in enumerate(images))


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
    """Return a data set, DataLoader, iterator or list of (image, label) as `LabelledImages`; anything else as it is."""
    if isinstance(images, (LabelledImages, *_ONE_OR_MORE_IMAGES)):
        return images
    if isinstance(images, list | tuple):
        pairs = images and all(isinstance(item, tuple | list | Mapping) for item in images)
        return LabelledImages(images.__getitem__, len(images)) if pairs else images
    if isinstance(images, DataLoader):
        return _eager(pair for batch in images for pair in _pairs_of_batch(batch))
    if hasattr(images, "__getitem__") and hasattr(images, "__len__") and not isinstance(images, Mapping):
        return LabelledImages(images.__getitem__, len(images))
    if isinstance(images, Iterable) and not isinstance(images, Mapping):
        return _eager(images)
    return images


def _eager(items: Iterable[Any]) -> LabelledImages:
    """Return all items read at once: an iterator can be read only once."""
    listed = list(items)
    return LabelledImages(listed.__getitem__, len(listed))


def _image_and_label(item: Any) -> tuple[Any, int | str | None]:
    """Return the image and the label of an item of a data set: image, (image, label, …) or {"image": …, "label": …}."""
    if isinstance(item, Mapping):
        image = next((item[key] for key in IMAGE_KEYS if key in item), None)
        if image is None:
            raise BadInput(
                f"An item of the data set is a dict with {', '.join(map(str, item))}; expected one of "
                f"{', '.join(IMAGE_KEYS)} in it."
            )
        return image, _label(next((item[key] for key in LABEL_KEYS if key in item), None))
    if isinstance(item, tuple | list):
        if not item:
            raise BadInput("An item of the data set is empty; expected an image or (image, label).")
        return item[0], _label(item[1] if len(item) > 1 else None)
    return item, None


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
    elif isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].ndim == 4:
        images, labels = batch[0], batch[1] if len(batch) > 1 else None
    has_labels = isinstance(labels, Tensor | np.ndarray | list | tuple) and len(labels) == len(images)
    for i, image in enumerate(images):
        if labels is None and isinstance(image, tuple | list | Mapping):  # collate_fn=list: one pair per image
            yield _image_and_label(image)
        else:
            yield image, labels[i] if has_labels and labels is not None else None


def _all_preprocessed(images: Any) -> bool:
    """Return whether images are float tensors, which are taken as they are."""
    if isinstance(images, Batch):
        return True
    if isinstance(images, LabelledImages | list | tuple) and len(images):
        return is_preprocessed(images[0])
    return is_preprocessed(images)
