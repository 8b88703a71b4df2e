"""ImageDataset: images with what is known about them (mask, true class, class of another object), read lazily.

Memory does not grow with the number of images, and an image that cannot be read does not stop the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clairvit._rows import Rows, per_row, same, union
from clairvit.data.hashing import digest
from clairvit.data.masks import check_kind, prepare_mask, read_mask
from clairvit.data.parts import RemovableParts
from clairvit.data.pipeline import decode_workers, read_ahead
from clairvit.errors import BadInput, ClairError, ClairWarning, NotApplicable, user_stacklevel
from clairvit.models.coerce import LabelledImages, as_images
from clairvit.models.image_files import picture_size, read_picture
from clairvit.models.images import (
    Batch,
    UnusualRange,
    decode,
    image_name,
    list_clips,
    list_images,
    prepare,
    to_device,
    to_pixels,
)
from clairvit.models.model import Model, check_traceable

ErrorHandler = Callable[[str, ClairError], None]  # called with the name of an image and why it cannot be read
TENSORS_NOT_NORMALISED = (
    "Image tensors look like pixels in 0..1 or 0..255 that were not normalised, and float tensors are taken as they "
    "are; pass PIL images or uint8 arrays, or (x - mean) / std of pixels in 0..1."
)


@dataclass(frozen=True, eq=False)
class Sample:
    """One image as the model takes it, with its annotations."""

    pixels: Tensor  # [3, H, W]
    mask: Tensor | None = None  # bool [H, W]; None: not annotated
    void: Tensor | None = None  # bool [H, W]: pixels that are not evaluated
    label: int | str | None = None  # the true class
    other: int | str | None = None  # a class of another object in the image
    parts: RemovableParts | None = None  # what can be removed from the image
    notes: tuple[str, ...] = ()  # preprocessing that was assumed, and how the file was read


def _renumbered(function: Callable[..., Any], rows: list[int]) -> Callable[..., Any]:
    """Return a function of a row, and of more, for chosen rows."""
    return lambda row, *arguments: function(rows[row], *arguments)


class ImageDataset(Rows):
    """Names of images, and functions that read and hash the image of a row."""

    names: tuple[str, ...] = per_row()
    read: Callable[[int, Model], Sample] = per_row(take=_renumbered)
    content_hash: Callable[[int], str] = per_row(
        take=_renumbered
    )  # of image and annotations: stored results are reused
    has_masks: bool = same(default=False)
    has_labels: bool = same(default=False)
    has_others: bool = same(default=False)
    notes: tuple[str, ...] = union(default=())  # for the user: masks without an image, empty class folders, …
    has_parts: bool = same(default=False)  # every image has `RemovableParts`
    concurrent: bool = same(default=False)  # `read` and `content_hash` may be called in several threads at once


def _take_unusual(ranges: tuple[UnusualRange, ...], rows: list[int]) -> tuple[UnusualRange, ...]:
    """Return the ranges of chosen rows, under their new numbers; a range of all images stays."""
    chosen = [replace(item, row=rows.index(item.row)) for item in ranges if item.row in rows]
    return (*(item for item in ranges if item.row is None), *chosen)


class SampleBatch(Rows):
    """Some images as the model takes them, stacked, with what is known about them."""

    rows: tuple[int, ...] = per_row()  # among all images
    names: tuple[str, ...] = per_row()
    pixels: Tensor = per_row()  # [B, 3, H, W]
    masks: Tensor | None = per_row(default=None)  # bool [B, H, W]; all False where there is no annotation
    void: Tensor | None = per_row(default=None)  # bool [B, H, W]
    lacks_mask: tuple[bool, ...] = per_row(default=())  # True for an image without a mask where others have one
    labels: tuple[int | str | None, ...] | None = per_row(default=None)
    others: tuple[int | str | None, ...] | None = per_row(default=None)
    parts: tuple[RemovableParts, ...] | None = per_row(default=None)
    notes: tuple[str, ...] = union(default=())  # preprocessing that was assumed, and values that look wrong
    unusual: tuple[UnusualRange, ...] = per_row(default=(), take=_take_unusual)  # values that are in no note yet

    @property
    def unmasked(self) -> tuple[str, ...]:
        """Return the names of images without a mask."""
        return tuple(name for name, lacks in zip(self.names, self.lacks_mask, strict=False) if lacks)


ImageSource = Batch | LabelledImages | ImageDataset  # what `iter_batches` reads


def void_as_object(dataset: ImageDataset) -> ImageDataset:
    """Return the dataset with void pixels counted as object (Coporan)."""

    def read(row: int, model: Model) -> Sample:
        sample = dataset.read(row, model)
        if sample.mask is None or sample.void is None:
            return sample
        return replace(sample, mask=sample.mask | sample.void, void=None)

    return replace(dataset, read=read, content_hash=lambda row: digest(dataset.content_hash(row), b"void is object"))


def masks_on_patches(dataset: ImageDataset, grid: tuple[int, int]) -> ImageDataset:
    """Return the dataset with each mask reduced to a grid of patches, rows × columns (`prepare_mask`)."""

    def read(row: int, model: Model) -> Sample:
        return dataset.read(row, replace(model, preprocess=replace(model.preprocess, mask_grid=grid)))

    mark = f"masks on {grid[0]} x {grid[1]} patches".encode()
    return replace(dataset, read=read, content_hash=lambda row: digest(dataset.content_hash(row), mark))


def iter_batches(
    images: ImageSource,
    model: Model,
    size: int | None,
    on_error: ErrorHandler | None = None,
    workers: int | None = None,
) -> Generator[SampleBatch, None, None]:
    """Yield batches of at most `size` images; the images of the next batch are decoded while the caller works on one.

    Close the generator (`contextlib.closing`) where its consumer may raise: only then its threads end at once.

    Args:
        images: A data set, images that are read as they are asked for, or a batch that is prepared already.
        model: Gives preprocessing, device and dtype.
        size: Images per batch; None, for a prepared batch, is all of them.
        on_error: Called for each image of a data set that cannot be read; without it the first one raises.
        workers: Threads that decode; 0 decodes in this one, None chooses. A dataset that is not `concurrent` has none.
    """
    if isinstance(images, Batch):
        count = len(images.names)
        for start in range(0, count, size or count):
            rows = range(start, min(start + (size or count), count))
            part = slice(rows.start, rows.stop)
            yield SampleBatch(
                tuple(rows), images.names[part], images.pixels[part], notes=images.notes, unusual=images.unusual
            )
        return
    assert size is not None
    if isinstance(images, LabelledImages):
        if images.first is None:
            raise BadInput("The data set has no images; expected at least one.")
        start = 0
        for items, names in images.chunks(size):
            read = prepare(items, model, warn=False)
            rows = range(start, start + len(items))
            yield SampleBatch(tuple(rows), names, read.pixels, notes=read.notes, unusual=read.unusual)
            start = rows.stop
        return
    yield from _iter_dataset(images, model, size, on_error, workers)


def _iter_dataset(
    dataset: ImageDataset, model: Model, size: int, on_error: ErrorHandler | None, workers: int | None
) -> Generator[SampleBatch, None, None]:
    """Yield batches of a data set; images that cannot be read are left out where `on_error` takes their errors."""
    check_traceable(model.module, model.name)
    threads = decode_workers() if workers is None else workers
    threads = min(threads, len(dataset)) if dataset.concurrent and len(dataset) > 1 else 0
    with read_ahead(
        lambda row: dataset.read(row, model), range(len(dataset)), workers=threads, ahead=max(size, threads)
    ) as reads:
        for start in range(0, len(dataset), size):
            samples: dict[int, Sample] = {}
            for row in range(start, min(start + size, len(dataset))):
                read = next(reads)
                try:
                    samples[row] = read()
                except ClairError as error:
                    if on_error is None:
                        raise
                    on_error(dataset.names[row], error)
            if samples:
                yield _stack(dataset, samples, model)


def _stack(dataset: ImageDataset, samples: dict[int, Sample], model: Model) -> SampleBatch:
    """Return samples by row as one batch on the model's device."""
    shapes = sorted({tuple(sample.pixels.shape[-2:]) for sample in samples.values()})
    if len(shapes) > 1:
        raise BadInput(f"The tensors in one batch have different sizes: {shapes}; expected equal ones.")
    pixels = to_device(torch.stack([sample.pixels for sample in samples.values()]), model)
    empty = torch.zeros(pixels.shape[-2:], dtype=torch.bool)
    masks = [empty if sample.mask is None else sample.mask for sample in samples.values()]
    void = [empty if sample.void is None else sample.void for sample in samples.values()]
    has_void = any(bool(pixel_mask.any()) for pixel_mask in void)
    return SampleBatch(
        rows=tuple(samples),
        names=tuple(dataset.names[row] for row in samples),
        pixels=pixels,
        masks=torch.stack(masks).to(pixels.device) if dataset.has_masks else None,
        void=torch.stack(void).to(pixels.device) if has_void else None,
        lacks_mask=tuple(dataset.has_masks and sample.mask is None for sample in samples.values()),
        labels=tuple(sample.label for sample in samples.values()) if dataset.has_labels else None,
        others=tuple(sample.other for sample in samples.values()) if dataset.has_others else None,
        parts=_stack_parts(dataset, samples) if dataset.has_parts else None,
        notes=tuple(dict.fromkeys(note for sample in samples.values() for note in sample.notes)),
    )


def _stack_parts(dataset: ImageDataset, samples: dict[int, Sample]) -> tuple[RemovableParts, ...]:
    """Return the removable parts of each sample; raise BadInput if one has none."""
    parts = {row: sample.parts for row, sample in samples.items()}
    for row, removable in parts.items():
        if removable is None:
            raise BadInput(f"'{dataset.names[row]}' has no removable parts; expected some, as the data set has parts.")
    return tuple(removable for removable in parts.values() if removable is not None)


def as_dataset(
    images: Any,
    model: Model,
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    others: Sequence[int | str | None] | None = None,
) -> ImageDataset:
    """Return images as a dataset.

    Args:
        images: Images as `cv.explain` takes them, or a dataset, which is returned as it is.
        model: Gives the preprocessing.
        masks: A bool tensor [N, H, W] of the preprocessed images; or a list with a path, picture or array of the whole
            image (or None) per image; or a function of name and picture that returns the mask.
        mask_kind: How masks are read: one of `MASK_KINDS`.
        labels: The true class per image.
        others: A class of another object per image.
    """
    if isinstance(images, ImageDataset):
        return images
    check_kind(mask_kind)
    images = as_images(images)
    if isinstance(images, LabelledImages) and labels is None:
        labels = images.labels
    items = _list_items(images, model)
    _check_count("labels", labels, len(items))
    _check_count("others", others, len(items))
    _check_count("masks", None if callable(masks) else masks, len(items))
    names = (
        images.names
        if isinstance(images, Batch | LabelledImages)
        else tuple(image_name(item, i) for i, item in enumerate(items))
    )

    def read(row: int, model: Model) -> Sample:
        mask: Any = masks if masks is None or callable(masks) else masks[row]
        return Sample(
            *_read_pixels_and_mask(items[row], mask, mask_kind, names[row], model),
            None if labels is None else labels[row],
            None if others is None else others[row],
        )

    def content_hash(row: int) -> str:
        mask = None if masks is None or callable(masks) else masks[row]
        annotation = (mask_kind, None if labels is None else labels[row], None if others is None else others[row])
        return digest(items[row], mask, repr(annotation).encode())

    return ImageDataset(
        names,
        read,
        content_hash,
        masks is not None,
        labels is not None,
        others is not None,
        concurrent=not callable(masks) and isinstance(items, list) and all(isinstance(i, str | Path) for i in items),
    )


def photo_dataset(paths: Sequence[str], model: Model) -> ImageDataset:
    """Return image files without annotations, with the notes that `prepare` makes; each is a photo of its own.

    Args:
        paths: Files, which are also the names of the images.
        model: A model of clips takes no single photos: each is then refused when it is read.
    """
    read_photo = prepare if model.preprocess.frames is not None else decode

    def read(row: int, model: Model) -> Sample:
        photo = read_photo([paths[row]], model)
        return Sample(photo.pixels[0], notes=photo.notes)

    return ImageDataset(tuple(paths), read, lambda row: digest(Path(paths[row])), concurrent=True)


def _list_items(images: Any, model: Model) -> Sequence[Any]:
    """Return the images, or clips, one by one; a batch or a float tensor is checked and split."""
    if model.preprocess.frames is not None:
        return list_clips(images, model)
    if isinstance(images, Batch) or (isinstance(images, Tensor) and images.is_floating_point()):
        return list(prepare(images, model).pixels)
    return images if isinstance(images, LabelledImages) else list_images(images)[0]


def _check_count(name: str, values: Any, count: int) -> None:
    """Raise BadInput unless the values are None or a list with one value per image."""
    is_list = hasattr(values, "__len__") and hasattr(values, "__getitem__") and not isinstance(values, Mapping)
    if values is not None and (not is_list or getattr(values, "ndim", 1) == 0):
        raise BadInput(
            f"{name} were given as a {type(values).__name__}; expected a list of {count}, one for each image."
        )
    if values is not None and len(values) != count:
        raise BadInput(f"{len(values)} {name} were given for {count} images; expected one for each.")


def _read_pixels_and_mask(
    item: Any, mask: Any, kind: str, name: str, model: Model
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return pixels [C, H, W], object and void [H, W] of one image; of a clip [C, T, H, W], which has no mask."""
    if model.preprocess.frames is not None:
        if mask is not None:
            raise NotApplicable(f"Masks are those of images, and {model.name} takes clips; leave masks out.")
        return prepare([item], model).pixels[0], None, None
    if isinstance(item, Tensor) and item.is_floating_point():
        batch = prepare(item, model, warn=False)
        if batch.unusual:  # the same words for every image, so that Python shows them once
            warnings.warn(TENSORS_NOT_NORMALISED, ClairWarning, stacklevel=user_stacklevel())
        pixels = batch.pixels[0]
        if callable(mask):
            raise BadInput("Masks are to be found on pictures, and a tensor was given; expected paths or pictures.")
        return pixels, *_check_mask(mask, pixels)
    picture = read_picture(item, model.preprocess.channels)
    pixels = to_pixels(picture, model.preprocess)
    if callable(mask):
        mask = mask(name, picture)
    if mask is None or isinstance(mask, Tensor):
        return pixels, *_check_mask(mask, pixels)
    return pixels, *prepare_mask(read_mask(mask, picture_size(picture), kind), model.preprocess)


def _check_mask(mask: Any, pixels: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return object and void [H, W] of a mask of the preprocessed image; raise BadInput for another size."""
    if mask is None:
        return None, None
    expected = tuple(pixels.shape[-2:])
    values = mask if isinstance(mask, Tensor) else np.asarray(mask)
    is_numeric = not values.is_complex() if isinstance(values, Tensor) else values.dtype.kind in "biuf"
    if not is_numeric:
        raise BadInput(
            f"A mask was given as {type(mask).__name__} of {values.dtype}; expected numbers or bool {list(expected)}, "
            "not zero on the object."
        )
    objects = torch.as_tensor(values > 0)
    if tuple(objects.shape) != expected:
        raise BadInput(
            f"A mask has shape {list(objects.shape)} for an image of {expected[0]} × {expected[1]} pixels as the model "
            f"sees it; expected {list(expected)}, resized and cropped as the image is, or a path or picture of the "
            "whole image's."
        )
    return objects, None
