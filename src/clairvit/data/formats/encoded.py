"""Entries of images that are no files of their own, and class labels of any kind as indices: what tables, archives and
Hugging Face data sets share."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image

from clairvit.data.formats.entry import Annotation, Entry, Numbering, Size, Source, annotation_from_mask
from clairvit.data.formats.imagenet import class_indices, class_names
from clairvit.data.locations import is_url, read_bytes
from clairvit.data.masks import read_mask
from clairvit.errors import BadInput
from clairvit.models.image_files import EncodedImage, open_image

Label = int | str | None
IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class ClassLabels:
    """The class of each image as an index, and the names of the classes."""

    indices: tuple[int | None, ...]
    classes: tuple[str, ...]
    numbering: Numbering

    @property
    def has_labels(self) -> bool:
        """Return whether any image has a class."""
        return any(index is not None for index in self.indices)


def index_labels(labels: Sequence[Label], names: Sequence[str] = ()) -> ClassLabels:
    """Return labels as class indices.

    Numbers are the model's own indices, or count in `names`; a number below 0 is no class. Texts that are WordNet ids
    of ImageNet-1k are its classes; other texts are names of classes.
    """
    values = [int(label) if isinstance(label, str) and label.strip().isdecimal() else label for label in labels]
    numbers = [value for value in values if isinstance(value, int)]
    texts = {value.strip() for value in values if isinstance(value, str)}
    if not texts:
        indices = tuple(value if isinstance(value, int) and value >= 0 else None for value in values)
        if names:
            in_order = len(names) == IMAGENET_CLASSES and _same_classes(names, class_names())
            return ClassLabels(indices, tuple(names), "imagenet" if in_order else "own")
        return ClassLabels(indices, tuple(str(number) for number in range(max(numbers, default=-1) + 1)), "names")
    if not numbers and all(text in class_indices() for text in texts):
        ids = tuple(None if value is None else class_indices()[str(value).strip()] for value in values)
        return ClassLabels(ids, class_names(), "imagenet")
    classes = tuple(sorted({str(value).strip() for value in values if value is not None}))
    positions = {name: index for index, name in enumerate(classes)}
    return ClassLabels(
        tuple(None if value is None else positions[str(value).strip()] for value in values), classes, "names"
    )


def _same_classes(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether nearly all names share their first synonym: spellings of a few classes differ between lists."""
    first = [name.split(",")[0].strip().lower() for name in names]
    second = [name.split(",")[0].split(" (")[0].strip().lower() for name in others]
    same = sum(name == other for name, other in zip(first, second, strict=True))
    return same >= 0.9 * IMAGENET_CLASSES


def encoded_entries(
    names: Sequence[str],
    sources: Sequence[str | Callable[[], bytes]],
    labels: ClassLabels,
    masks: Sequence[str | None] = (),
    mask_kind: str = "nonzero",
) -> tuple[Entry, ...]:
    """Return entries of images that are read when they are needed; a content hash is that of a file of the same bytes.

    Args:
        names: The images' unique names.
        sources: The path or URL of each image, or a function that returns the bytes of its file.
        labels: Their classes.
        masks: The path or URL of the mask of each image that has one; none at all if it is empty.
        mask_kind: How masks are read.
    """
    return tuple(
        _entry(name, source, label, mask, mask_kind, () if labels.numbering == "names" else (label,))
        for name, source, label, mask in zip(names, sources, labels.indices, masks or (None,) * len(names), strict=True)
    )


def _entry(
    name: str,
    source: str | Callable[[], bytes],
    label: int | None,
    mask: str | None,
    mask_kind: str,
    label_hash: tuple[int | None, ...],
) -> Entry:
    image: Source
    if isinstance(source, str) and not is_url(source):
        image = Path(source).expanduser()
    else:
        read = partial(read_bytes, source) if isinstance(source, str) else source

        def image() -> EncodedImage:
            return EncodedImage(name, read())

    return Entry(
        name=name,
        image=image,
        annotation=_annotation(label, mask, mask_kind),
        hash_inputs=lambda: (None if mask is None else read_bytes(mask), mask_kind, *label_hash),
        stratum=lambda: label,
    )


def _annotation(label: int | None, mask: str | None, kind: str) -> Callable[[Size], Annotation]:
    def annotation(size: Size) -> Annotation:
        if mask is None:
            return Annotation(label, masked=False)
        return annotation_from_mask(label, read_mask(_mask_picture(mask) if is_url(mask) else mask, size, kind))

    return annotation


def _mask_picture(url: str) -> Image.Image:
    try:
        return open_image(io.BytesIO(read_bytes(url)))
    except OSError as error:
        raise BadInput(f"The mask '{url}' cannot be decoded ({error}); expected a picture, such as a PNG.") from error


def unique_names(names: Sequence[str], places: Sequence[str]) -> tuple[str, ...]:
    """Return the names, with its place ("file.parquet/17") instead of a name that is empty or not unique."""
    count = Counter(names)
    return tuple(name if name and count[name] == 1 else place for name, place in zip(names, places, strict=True))
