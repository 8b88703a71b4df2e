"""Any folder of images: its subfolders are classes if every image is in one; masks are in another folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from clairvit.data.formats.encoded import encoded_entries, index_labels
from clairvit.data.formats.entry import (
    Annotation,
    DatasetIndex,
    Size,
    annotation_from_mask,
    folders_in,
    labelled_entry,
    quoted_list,
)
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.locations import files_below
from clairvit.data.masks import masks_for, read_mask
from clairvit.errors import BadInput
from clairvit.models.image_files import SUFFIXES, find_images

TREE = """
cat/                          folders are classes, if every image is in one
  1.jpg …
dog/
  2.jpg …
and, where masks=DIR is given, DIR/cat/1.png or DIR/1.png for cat/1.jpg
"""


@dataset_format(
    "folder",
    "a folder of images",
    has=("labels", "masks"),
    tree=TREE,
    why_no_download="it is your own",
    accepts="folder or URL",
)
def folder(request: DataRequest) -> DatasetIndex:
    """Index the images below a folder."""
    if request.location:
        return _index_url(request)
    root = request.root
    if not root.is_dir():
        raise BadInput(f"'{root}' is not a folder; expected one with images: folder:PATH.")
    mask_folder = request.masks.resolve() if request.masks is not None else None
    if mask_folder == root.resolve():
        raise BadInput(f"Masks and images are both looked for in '{root}'; expected masks in another folder.")
    images = [path for path in find_images(root) if mask_folder is None or mask_folder not in path.resolve().parents]
    if not images:
        raise BadInput(f"There are no images in '{root}' outside the folder of masks; expected some.")
    labels, classes, notes = _classes(root, images, mask_folder)
    masks, mask_notes = _match_masks(root, images, request.masks) if request.masks is not None else ({}, ())
    entries = []
    for image, label in zip(images, labels, strict=True):
        mask, kind = masks.get(image), request.mask_kind
        annotation = None if mask is None else partial(_annotation, label, mask, kind)
        entries.append(labelled_entry(root, image, label, annotation, mask, kind))
    return DatasetIndex(
        tuple(entries),
        classes,
        has_masks=request.masks is not None,
        has_labels=bool(classes),
        numbering="names",
        notes=(*notes, *mask_notes),
    )


def _index_url(request: DataRequest) -> DatasetIndex:
    """Index the images below a folder at a URL; its folders are classes if every image is in one."""
    base = request.location.rstrip("/")
    if request.masks is not None:
        raise BadInput(f"masks={request.masks} was given with {base}; at a URL name the masks in a manifest: csv:PATH.")
    images = files_below(base, SUFFIXES)
    if not images:
        raise BadInput(f"There are no images below '{base}'; looked for files ending in {', '.join(SUFFIXES)}.")
    names = [_relative(image, base) for image in images]
    in_folders = all("/" in name for name in names)
    labels = index_labels([name.partition("/")[0] if in_folders else None for name in names])
    entries = encoded_entries(names, images, labels)
    return DatasetIndex(entries, labels.classes, has_labels=labels.has_labels, numbering=labels.numbering)


def _relative(image: str, base: str) -> str:
    """Return the path of an image below a URL, whose own spelling may differ in slashes (memory:///a, memory://a)."""
    path, folder = (url.partition("://")[2].lstrip("/") for url in (image, base))
    return path.removeprefix(folder).lstrip("/")


def _classes(
    root: Path, images: list[Path], mask_folder: Path | None
) -> tuple[list[int | None], tuple[str, ...], tuple[str, ...]]:
    """Return the class of each image, the class names, and notes."""
    folders = [path for path in folders_in(root) if path.resolve() != mask_folder]
    if not folders:
        return [None] * len(images), (), ()
    loose = [image.name for image in images if image.parent == root]
    if loose:
        note = f"{quoted_list(loose)} lie next to the folders of '{root}', so these are not taken for classes."
        return [None] * len(images), (), (note,)
    numbers = {path.name: number for number, path in enumerate(folders)}
    labels: list[int | None] = [numbers[image.relative_to(root).parts[0]] for image in images]
    empty = [name for name, number in numbers.items() if number not in labels]
    notes = (f"No images are in the class folder {quoted_list(empty)}.",) if empty else ()
    return labels, tuple(numbers), notes


def _match_masks(root: Path, images: list[Path], folder: Path) -> tuple[dict[Path, Path], tuple[str, ...]]:
    """Return the mask of each image that has one, and notes about the others."""
    masks, unused = masks_for(images, folder, root)
    unmasked = [image.relative_to(root).as_posix() for image in images if image not in masks]
    notes = []
    if unmasked:
        notes.append(f"{len(unmasked)} of {len(images)} images have no mask in '{folder}': {quoted_list(unmasked)}.")
    if unused:
        names = [file.relative_to(folder).as_posix() for file in unused]
        notes.append(
            f"{len(unused)} of {len(unused) + len(masks)} masks in '{folder}' belong to no image: {quoted_list(names)}."
        )
    return masks, tuple(notes)


def _annotation(label: int | None, mask: Path, kind: str, size: Size) -> Annotation:
    """Return the annotation of an image that has a mask."""
    return annotation_from_mask(label, read_mask(mask, size, kind))
