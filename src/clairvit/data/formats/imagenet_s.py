"""ImageNet-S: images of ImageNet with every pixel of 50, 300 or 919 classes labelled."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, folders_in, list_files, quoted_list, read_lines
from clairvit.data.formats.imagenet import class_indices, class_names
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.masks import decode_mask
from clairvit.errors import BadInput

TREE = """
validation/
  n01440764/
    ILSVRC2012_val_00000293.JPEG …
validation-segmentation/
  n01440764/
    ILSVRC2012_val_00000293.png …   class = R + 256 · G; 0 is other, 1000 is ignored
ImageNetS_categories_im919.txt      needed if class folders were taken out (or …im300, …im50)
"""
_SIZES = (50, 300, 919)
_OTHER, _IGNORED = 0, 1000


@dataset_format(
    "imagenet-s",
    "ImageNet-S",
    has=("masks", "labels", "others"),
    splits=("validation", "train-semi"),
    tree=TREE,
    required_paths=("{split}", "{split}-segmentation"),
    archive_folders=("ImageNetS919", "ImageNetS300", "ImageNetS50"),
    why_no_download="its images are ImageNet's, for which you register; its masks are on the authors' page",
)
def imagenet_s(request: DataRequest) -> DatasetIndex:
    """Index the images; the true class has the largest area in the model's crop."""
    root, images = request.root, request.root / request.split
    wnids = _read_wnids(root, images)
    indices = class_indices()
    unknown = [wnid for wnid in wnids if wnid not in indices]
    if unknown:
        raise BadInput(f"'{root}' has the classes {quoted_list(unknown)}; expected ImageNet's ids, like n01440764.")
    classes = {position + 1: indices[wnid] for position, wnid in enumerate(wnids)}
    entries = tuple(
        _entry(root, image, request.split, indices.get(folder.name), classes)
        for folder in folders_in(images)
        for image in list_files(folder, ".jpeg", ".jpg")
    )
    return DatasetIndex(entries, class_names(), has_masks=True, has_others=True, numbering="imagenet")


def _read_wnids(root: Path, images: Path) -> list[str]:
    """Return the sorted WordNet ids; the k-th, from 1, is class k of the masks."""
    listed = [path for size in _SIZES if (path := root / f"ImageNetS_categories_im{size}.txt").exists()]
    if len(listed) > 1:
        raise BadInput(
            f"'{root}' has {quoted_list([path.name for path in listed])}; expected the one list of its masks."
        )
    if listed:
        return sorted(read_lines(listed[0]))
    names = [folder.name for folder in folders_in(images)]
    if len(names) not in _SIZES:
        raise BadInput(
            f"'{images}' has {len(names)} class folders; expected 50, 300 or 919, whose order numbers the classes of "
            f"the masks. If some were taken out, put ImageNetS_categories_im919.txt (or im300, im50) into '{root}'."
        )
    return names


def _entry(root: Path, image: Path, split: str, folder: int | None, classes: dict[int, int]) -> Entry:
    relative = image.relative_to(root / split)
    mask_file = (root / f"{split}-segmentation" / relative).with_suffix(".png")
    return Entry(
        name=image.relative_to(root).as_posix(),
        image=image,
        annotation=lambda _: _read_annotation(mask_file, folder, classes),
        hash_inputs=lambda: (mask_file if mask_file.exists() else None, repr((folder, sorted(classes.items())))),
        stratum=lambda: folder,
    )


def _read_annotation(mask_file: Path, folder: int | None, classes: dict[int, int]) -> Annotation:
    if not mask_file.exists():
        return Annotation(folder, masked=False)
    picture = decode_mask(mask_file, f"The mask '{mask_file}'")
    colours = np.asarray(picture.convert("RGB")).astype(int)  # [rows, columns, 3]
    values = colours[..., 0] + 256 * colours[..., 1]
    present = [int(value) for value in np.flatnonzero(np.bincount(values.ravel())) if value not in (_OTHER, _IGNORED)]
    unknown = [value for value in present if value not in classes]
    if unknown:
        raise BadInput(
            f"The mask '{mask_file}' has the class {unknown[0]}; expected 1 to {len(classes)}, 0 or 1000 "
            "(R + 256 · G): do image and mask folders belong to the same ImageNet-S?"
        )
    return Annotation(None, {classes[value]: values == value for value in present}, values == _IGNORED)
