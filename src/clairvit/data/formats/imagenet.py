"""ImageNet (ILSVRC 2012): a thousand classes; validation images in class folders or, as they are handed out, in one."""

from __future__ import annotations

import re
from pathlib import Path

from clairvit.data.formats import imagenet_classes as thousand
from clairvit.data.formats.entry import DatasetIndex, entry, files_in, folders_in, lines_of, mat_of, some
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.errors import BadInput
from clairvit.models.folders import files_below

TREE = """
val/  (train/)
  n01440764/
    ILSVRC2012_val_00000293.JPEG …
or, with all validation images in one folder:
val/
  ILSVRC2012_val_00000001.JPEG …
ILSVRC2012_devkit_t12/        for the classes of images in one folder
  data/
    ILSVRC2012_validation_ground_truth.txt
    meta.mat
"""
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_NUMBER = re.compile(r"_val_(\d{8})$")


@dataset(
    "imagenet",
    "ImageNet",
    has=("labels",),
    splits=("val", "train"),
    tree=TREE,
    needs=("{split}",),
    inside=("imagenet", "ILSVRC2012"),
    why_no_download="its owners ask you to register; image-net.org then lets you download it",
)
def imagenet(asked: DataRequest) -> DatasetIndex:
    folder = asked.root / asked.split
    if folders_in(folder):
        return _in_folders(asked.root, folder)
    return _in_one(asked.root, folder)


def _in_folders(root: Path, folder: Path) -> DatasetIndex:
    numbers, notes = thousand.numbers(), []
    kinds = folders_in(folder)
    strange = [one.name for one in kinds if one.name not in numbers]
    if len(strange) == len(kinds):
        raise BadInput(
            f"The folders of '{folder}' are {some(strange)}; expected ImageNet's ids, like n01440764. For folders "
            f"named after classes type folder:{folder}."
        )
    if strange:
        notes.append(f"{some(strange)}: no class of ImageNet-1k, so these images have no true class.")
    entries = [
        entry(root, image, numbers.get(kind.name), None)
        for kind in kinds
        for image in files_in(kind, ".jpeg", ".jpg", ".png")
    ]
    loose = files_below(folder, (".jpeg", ".jpg", ".png"), deep=False)
    if loose:
        notes.append(f"{len(loose)} images lie beside the class folders in '{folder}' and have no true class.")
        entries += [entry(root, image, None, None) for image in sorted(loose)]
    return DatasetIndex(tuple(entries), thousand.names(), numbering="imagenet", notes=tuple(notes))


def _in_one(root: Path, folder: Path) -> DatasetIndex:
    images = files_in(folder, ".jpeg", ".jpg")
    devkit = next((one for one in (root / "ILSVRC2012_devkit_t12" / "data", root / "data") if one.is_dir()), None)
    if devkit is None:
        note = f"The images lie in one folder and '{root}/ILSVRC2012_devkit_t12' is not there: no true classes."
        entries = tuple(entry(root, image, None, None) for image in images)
        return DatasetIndex(entries, thousand.names(), has_labels=False, numbering="imagenet", notes=(note,))
    truth = _truth(devkit)
    found = []
    for image in images:
        place = _NUMBER.search(image.stem)
        if place is None or not 1 <= int(place[1]) <= len(truth):
            raise BadInput(
                f"'{image.name}' has no line in {_TRUTH}, which has {len(truth)}; expected names like "
                "ILSVRC2012_val_00000001.JPEG."
            )
        found.append(entry(root, image, truth[int(place[1]) - 1], None))
    return DatasetIndex(tuple(found), thousand.names(), numbering="imagenet")


def _truth(devkit: Path) -> list[int]:
    """The class of each validation image. The devkit counts the classes in an order of its own; meta.mat has it."""
    (synsets,) = mat_of(devkit / "meta.mat", "synsets")
    wnids = {int(one["ILSVRC2012_ID"]): str(one["WNID"]) for one in synsets}
    lines = lines_of(devkit / _TRUTH)
    try:
        return [thousand.numbers()[wnids[int(line)]] for line in lines]
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"'{devkit / _TRUTH}' names the class {error}; expected a number of meta.mat's on each line."
        ) from error
