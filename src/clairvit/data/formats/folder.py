"""Any folder of images; the folders in it are classes if every image is in one, and masks may lie elsewhere."""

from __future__ import annotations

from pathlib import Path

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Size, entry, folders_in, of_kept, some
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.data.masks import masks_for, read_mask
from clairvit.errors import BadInput
from clairvit.models.image_files import find_images

TREE = """
cat/                          folders are classes, if every image is in one
  1.jpg …
dog/
  2.jpg …
and, where masks=DIR is given, DIR/cat/1.png or DIR/1.png for cat/1.jpg
"""


@dataset("folder", "a folder of images", has=("labels", "masks"), tree=TREE, why_no_download="it is your own")
def folder(asked: DataRequest) -> DatasetIndex:
    root = asked.root
    if not root.is_dir():
        raise BadInput(f"'{root}' is not a folder; expected one with images: folder:PATH.")
    own = asked.masks.resolve() if asked.masks is not None else None
    if own == root.resolve():
        raise BadInput(f"Masks and images are both looked for in '{root}'; expected masks in another folder.")
    images = [one for one in find_images(root) if own is None or own not in one.resolve().parents]
    if not images:
        raise BadInput(f"There are no images in '{root}' outside the folder of masks; expected some.")
    labels, classes, notes = _classes(root, images, own)
    masks, more = _masks(root, images, asked.masks) if asked.masks is not None else ({}, ())
    entries = tuple(
        _photo(root, image, label, masks.get(image), asked.mask_kind)
        for image, label in zip(images, labels, strict=True)
    )
    return DatasetIndex(
        entries,
        classes,
        has_masks=asked.masks is not None,
        has_labels=bool(classes),
        numbering="names",
        notes=(*notes, *more),
    )


def _classes(
    root: Path, images: list[Path], masks: Path | None
) -> tuple[list[int | None], tuple[str, ...], tuple[str, ...]]:
    """The number of each image's folder, the folders, and what is odd about them."""
    folders = [one for one in folders_in(root) if one.resolve() != masks]
    if not folders:
        return [None] * len(images), (), ()
    loose = [image.name for image in images if image.parent == root]
    if loose:
        note = f"{some(loose)} lie beside the folders of '{root}', so these are not taken for classes."
        return [None] * len(images), (), (note,)
    numbers = {one.name: number for number, one in enumerate(folders)}
    labels: list[int | None] = [numbers[image.relative_to(root).parts[0]] for image in images]
    empty = [one.name for one in folders if numbers[one.name] not in labels]
    notes = (f"No images are in the class folder {some(empty)}.",) if empty else ()
    return labels, tuple(numbers), notes


def _masks(root: Path, images: list[Path], folder: Path) -> tuple[dict[Path, Path], tuple[str, ...]]:
    """Whose mask is which file, and who has none."""
    found, spare = masks_for(images, folder, root)
    bare = [image.relative_to(root).as_posix() for image in images if image not in found]
    notes = []
    if bare:
        notes.append(f"{len(bare)} of {len(images)} images have no mask in '{folder}': {some(bare)}.")
    if spare:
        names = [file.relative_to(folder).as_posix() for file in spare]
        notes.append(
            f"{len(spare)} of {len(spare) + len(found)} masks in '{folder}' belong to no image: {some(names)}."
        )
    return found, tuple(notes)


def _photo(root: Path, image: Path, label: int | None, mask: Path | None, kind: str) -> Entry:
    def known(size: Size) -> Annotation:
        return Annotation(label, masked=False) if mask is None else of_kept(label, read_mask(mask, size, kind))

    return entry(root, image, label, known, mask, kind)
