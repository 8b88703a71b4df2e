"""Album: images with what is known of them (mask, true class, another class), each read when its turn comes.

Memory does not grow with the number of images, and one that cannot be read costs only itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clairvit.data.hashing import digest
from clairvit.data.masks import check_kind, prepare_mask, read_mask
from clairvit.errors import BadInput, ClairError
from clairvit.models.coerce import LabelledImages, as_images
from clairvit.models.images import Batch, expanded, name_of, prepare, read_image
from clairvit.models.model import Model

Failed = Callable[[str, ClairError], None]
Finder = Callable[[str, Image.Image], Image.Image]  # name, picture -> its mask, 0 and 255


@dataclass(frozen=True, eq=False)
class Sample:
    """One image as the model sees it."""

    pixels: Tensor  # [3, H, W]
    mask: Tensor | None = None  # bool [H, W]; None: nobody knows where the object is
    void: Tensor | None = None  # bool [H, W]: pixels that count nowhere
    label: int | str | None = None  # the true class
    other: int | str | None = None  # a class of another object in the image


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Names, and how to read what is behind each of them."""

    names: tuple[str, ...]
    read: Callable[[int, Model], Sample]
    mark: Callable[[int], str]  # a hash of all that is behind a name, so that what was computed is known again
    has_masks: bool = False
    has_labels: bool = False
    has_others: bool = False
    notes: tuple[str, ...] = ()  # what the user should know of where they lie: masks of nobody, empty class folders

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: Sequence[int]) -> ImageDataset:
        """Some of the images, in this order."""
        own = tuple(rows)
        return replace(
            self,
            names=tuple(self.names[row] for row in own),
            read=lambda row, model: self.read(own[row], model),
            mark=lambda row: self.mark(own[row]),
        )


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """Some pages of an album, together."""

    rows: tuple[int, ...]  # in the album
    names: tuple[str, ...]
    pixels: Tensor  # [B, 3, H, W]
    masks: Tensor | None  # bool [B, H, W]; without any object where nobody knows
    void: Tensor | None  # bool [B, H, W]
    unmasked: tuple[str, ...]
    labels: tuple[int | str | None, ...] | None
    others: tuple[int | str | None, ...] | None


def void_as_object(dataset: ImageDataset) -> ImageDataset:
    """Pixels of which the masks say nothing count as object (Coporan)."""

    def read(row: int, model: Model) -> Sample:
        page = dataset.read(row, model)
        if page.mask is None or page.void is None:
            return page
        return replace(page, mask=page.mask | page.void, void=None)

    return replace(dataset, read=read, mark=lambda row: digest(dataset.mark(row), b"void is object"))


def parts(dataset: ImageDataset, model: Model, size: int, failed: Failed | None = None) -> Iterator[SampleBatch]:
    """So many images at a time; `failed` is told of those that cannot be read, and without it the first one raises."""
    for start in range(0, len(dataset), size):
        pages: dict[int, Sample] = {}
        for row in range(start, min(start + size, len(dataset))):
            try:
                pages[row] = dataset.read(row, model)
            except ClairError as error:
                if failed is None:
                    raise
                failed(dataset.names[row], error)
        if pages:
            yield _together(dataset, pages, model)


def _together(dataset: ImageDataset, pages: dict[int, Sample], model: Model) -> SampleBatch:
    shapes = sorted({tuple(page.pixels.shape[-2:]) for page in pages.values()})
    if len(shapes) > 1:
        raise BadInput(f"The tensors in one batch have different sizes: {shapes}; expected equal ones.")
    pixels = torch.stack([page.pixels for page in pages.values()]).to(model.device, model.dtype)
    nothing = torch.zeros(pixels.shape[-2:], dtype=torch.bool)
    masks = [nothing if page.mask is None else page.mask for page in pages.values()]
    void = [nothing if page.void is None else page.void for page in pages.values()]
    some_void = any(bool(one.any()) for one in void)
    return SampleBatch(
        rows=tuple(pages),
        names=tuple(dataset.names[row] for row in pages),
        pixels=pixels,
        masks=torch.stack(masks).to(pixels.device) if dataset.has_masks else None,
        void=torch.stack(void).to(pixels.device) if some_void else None,
        unmasked=tuple(dataset.names[row] for row, page in pages.items() if dataset.has_masks and page.mask is None),
        labels=tuple(page.label for page in pages.values()) if dataset.has_labels else None,
        others=tuple(page.other for page in pages.values()) if dataset.has_others else None,
    )


def album_of(
    images: Any,
    model: Model,
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    others: Sequence[int | str | None] | None = None,
) -> ImageDataset:
    """Images as `cv.explain` takes them, and for each, if they are given, a mask, its class and another class.

    `masks` are a tensor bool [N, H, W] as the model sees the images, or a list with a path, picture or array of the
    whole image (or None) for each, or a function of name and picture that finds them.
    """
    if isinstance(images, ImageDataset):
        return images
    check_kind(mask_kind)
    images = as_images(images)
    if isinstance(images, LabelledImages) and labels is None:
        labels = images.labels
    items = _items(images, model)
    _check_count("labels", labels, len(items))
    _check_count("others", others, len(items))
    _check_count("masks", None if callable(masks) else masks, len(items))
    names = (
        images.names
        if isinstance(images, Batch | LabelledImages)
        else tuple(name_of(item, i) for i, item in enumerate(items))
    )

    def read(row: int, net: Model) -> Sample:
        own: Any = masks if masks is None or callable(masks) else masks[row]
        pixels, mask, void = _seen(items[row], own, mask_kind, names[row], net)
        return Sample(
            pixels, mask, void, None if labels is None else labels[row], None if others is None else others[row]
        )

    def mark(row: int) -> str:
        mask = None if masks is None or callable(masks) else masks[row]
        known = (mask_kind, None if labels is None else labels[row], None if others is None else others[row])
        return digest(items[row], mask, repr(known).encode())

    return ImageDataset(names, read, mark, masks is not None, labels is not None, others is not None)


def _items(images: Any, model: Model) -> Sequence[Any]:
    """One by one; a tensor or a batch is there already."""
    if isinstance(images, Batch):
        return list(prepare(images, model).pixels)
    if isinstance(images, Tensor) and images.is_floating_point():
        return list(prepare(images, model).pixels)
    return images if isinstance(images, LabelledImages) else expanded(images)[0]


def _check_count(what: str, given: Any, count: int) -> None:
    listed = hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping)
    if given is not None and (not listed or getattr(given, "ndim", 1) == 0):
        raise BadInput(
            f"{what} were given as a {type(given).__name__}; expected a list of {count}, one for each image."
        )
    if given is not None and len(given) != count:
        raise BadInput(f"{len(given)} {what} were given for {count} images; expected one for each.")


def _seen(item: Any, mask: Any, kind: str, name: str, model: Model) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Pixels [3, H, W], object and void [H, W]."""
    if isinstance(item, Tensor) and item.is_floating_point():
        pixels = prepare(item, model).pixels[0]
        if callable(mask):
            raise BadInput("Masks are to be found on pictures, and a tensor was given; expected paths or pictures.")
        return pixels, *_as_seen(mask, pixels)
    picture = read_image(item)
    pixels = prepare([picture], model).pixels[0]
    if callable(mask):
        mask = mask(name, picture)
    if mask is None or isinstance(mask, Tensor):
        return pixels, *_as_seen(mask, pixels)
    return pixels, *prepare_mask(read_mask(mask, picture.size, kind), model.preprocess)


def _as_seen(mask: Any, pixels: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A mask of what the model sees."""
    if mask is None:
        return None, None
    expected = tuple(pixels.shape[-2:])
    values = mask if isinstance(mask, Tensor) else np.asarray(mask)
    numeric = not values.is_complex() if isinstance(values, Tensor) else values.dtype.kind in "biuf"
    if not numeric:
        raise BadInput(
            f"A mask was given as {type(mask).__name__} of {values.dtype}; expected numbers or bool {list(expected)}, "
            "not zero on the object."
        )
    found = torch.as_tensor(values > 0)
    if tuple(found.shape) != expected:
        raise BadInput(
            f"A mask has shape {list(found.shape)} for an image of {expected[0]} × {expected[1]} pixels as the model "
            f"sees it; expected {list(expected)}, resized and cropped as the image is, or a path or picture of the "
            "whole image's."
        )
    return found, None
