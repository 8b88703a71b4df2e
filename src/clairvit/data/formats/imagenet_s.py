"""ImageNet-S: validation images of ImageNet with every pixel of 50, 300 or 919 classes named."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clairvit.data.formats import imagenet_classes as thousand
from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, files_in, folders_in, lines_of, some
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.errors import BadInput
from clairvit.models.image_files import open_image

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


@dataset(
    "imagenet-s",
    "ImageNet-S",
    has=("masks", "labels", "others"),
    splits=("validation", "train-semi"),
    tree=TREE,
    needs=("{split}", "{split}-segmentation"),
    inside=("ImageNetS919", "ImageNetS300", "ImageNetS50"),
    why_no_download="its images are ImageNet's, for which you register; its masks are on the authors' page",
)
def imagenet_s(asked: DataRequest) -> DatasetIndex:
    """True class: the one with the largest area in what the model sees."""
    root, images = asked.root, asked.root / asked.split
    wnids = _wnids(root, images)
    numbers = thousand.numbers()
    strange = [wnid for wnid in wnids if wnid not in numbers]
    if strange:
        raise BadInput(f"'{root}' has the classes {some(strange)}; expected ImageNet's ids, like n01440764.")
    classes = {place + 1: numbers[wnid] for place, wnid in enumerate(wnids)}
    entries = tuple(
        _photo(root, image, asked.split, numbers.get(folder.name), classes)
        for folder in folders_in(images)
        for image in files_in(folder, ".jpeg", ".jpg")
    )
    return DatasetIndex(entries, thousand.names(), has_masks=True, has_others=True, numbering="imagenet")


def _wnids(root: Path, images: Path) -> list[str]:
    """The k-th, from 1, is the class k of the masks: sorted by id."""
    listed = [path for size in _SIZES if (path := root / f"ImageNetS_categories_im{size}.txt").exists()]
    if len(listed) > 1:
        raise BadInput(f"'{root}' has {some([path.name for path in listed])}; expected the one list of its masks.")
    if listed:
        return sorted(lines_of(listed[0]))
    found = [folder.name for folder in folders_in(images)]
    if len(found) not in _SIZES:
        raise BadInput(
            f"'{images}' has {len(found)} class folders; expected 50, 300 or 919, whose order numbers the classes of "
            f"the masks. If some were taken out, put ImageNetS_categories_im919.txt (or im300, im50) into '{root}'."
        )
    return found


def _photo(root: Path, image: Path, split: str, folder: int | None, classes: dict[int, int]) -> Entry:
    within = image.relative_to(root / split)
    painted = (root / f"{split}-segmentation" / within).with_suffix(".png")
    return Entry(
        name=image.relative_to(root).as_posix(),
        image=image,
        known=lambda _: _regions(painted, folder, classes),
        behind=lambda: (painted if painted.exists() else None, repr((folder, sorted(classes.items())))),
        group=lambda: folder,
    )


def _regions(painted: Path, folder: int | None, classes: dict[int, int]) -> Annotation:
    if not painted.exists():
        return Annotation(folder, masked=False)
    try:
        with open_image(painted) as picture:
            colours = np.asarray(picture.convert("RGB")).astype(int)  # [rows, columns, 3]
    except (OSError, SyntaxError, ValueError) as error:
        raise BadInput(f"The mask '{painted}' cannot be read ({error}); expected a whole PNG.") from error
    values = colours[..., 0] + 256 * colours[..., 1]
    seen = [int(one) for one in np.flatnonzero(np.bincount(values.ravel())) if one not in (_OTHER, _IGNORED)]
    strange = [one for one in seen if one not in classes]
    if strange:
        raise BadInput(
            f"The mask '{painted}' has the class {strange[0]}; expected 1 to {len(classes)}, 0 or 1000 "
            "(R + 256 · G): do image and mask folders belong to the same ImageNet-S?"
        )
    return Annotation(None, {classes[one]: values == one for one in seen}, values == _IGNORED)
