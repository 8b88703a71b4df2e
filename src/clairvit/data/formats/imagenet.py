"""ImageNet (ILSVRC 2012): a thousand classes; class folders or, as published for validation, one folder of images."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from clairvit.data.formats.entry import (
    DatasetIndex,
    folders_in,
    labelled_entry,
    list_files,
    quoted_list,
    read_lines,
    read_mat,
)
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.errors import BadInput
from clairvit.models.image_files import files_below

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


@dataset_format(
    "imagenet",
    "ImageNet",
    has=("labels",),
    splits=("val", "train"),
    tree=TREE,
    required_paths=("{split}",),
    archive_folders=("imagenet", "ILSVRC2012"),
    why_no_download="its owners ask you to register; image-net.org then lets you download it",
)
def imagenet(request: DataRequest) -> DatasetIndex:
    """Index class folders, or the single folder of the validation images."""
    folder = request.root / request.split
    if folders_in(folder):
        return _index_class_folders(request.root, folder)
    return _index_single_folder(request.root, folder)


def _index_class_folders(root: Path, folder: Path) -> DatasetIndex:
    indices, notes = class_indices(), []
    folders = folders_in(folder)
    unknown = [path.name for path in folders if path.name not in indices]
    if len(unknown) == len(folders):
        raise BadInput(
            f"The folders of '{folder}' are {quoted_list(unknown)}; expected ImageNet's ids, like n01440764. For "
            f"folders named after classes type folder:{folder}."
        )
    if unknown:
        notes.append(f"{quoted_list(unknown)}: no class of ImageNet-1k, so these images have no true class.")
    entries = [
        labelled_entry(root, image, indices.get(path.name), None)
        for path in folders
        for image in list_files(path, ".jpeg", ".jpg", ".png")
    ]
    loose = files_below(folder, (".jpeg", ".jpg", ".png"), deep=False)
    if loose:
        notes.append(f"{len(loose)} images lie next to the class folders in '{folder}' and have no true class.")
        entries += [labelled_entry(root, image, None, None) for image in sorted(loose)]
    return DatasetIndex(tuple(entries), class_names(), numbering="imagenet", notes=tuple(notes))


def _index_single_folder(root: Path, folder: Path) -> DatasetIndex:
    images = list_files(folder, ".jpeg", ".jpg")
    devkits = (root / "ILSVRC2012_devkit_t12" / "data", root / "data")
    devkit = next((path for path in devkits if path.is_dir()), None)
    if devkit is None:
        note = f"The images lie in one folder and '{root}/ILSVRC2012_devkit_t12' is not there: no true classes."
        entries = tuple(labelled_entry(root, image, None, None) for image in images)
        return DatasetIndex(entries, class_names(), has_labels=False, numbering="imagenet", notes=(note,))
    truth = _read_ground_truth(devkit)
    labelled_entries = []
    for image in images:
        match = _NUMBER.search(image.stem)
        if match is None or not 1 <= int(match[1]) <= len(truth):
            raise BadInput(
                f"'{image.name}' has no line in {_TRUTH}, which has {len(truth)}; expected names like "
                "ILSVRC2012_val_00000001.JPEG."
            )
        labelled_entries.append(labelled_entry(root, image, truth[int(match[1]) - 1], None))
    return DatasetIndex(tuple(labelled_entries), class_names(), numbering="imagenet")


def _read_ground_truth(devkit: Path) -> list[int]:
    """Return the class of each validation image; the devkit has its own order of classes, stated in meta.mat."""
    (synsets,) = read_mat(devkit / "meta.mat", "synsets")
    wnids = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
    lines = read_lines(devkit / _TRUTH)
    try:
        return [class_indices()[wnids[int(line)]] for line in lines]
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"'{devkit / _TRUTH}' names the class {error}; expected a number of meta.mat's on each line."
        ) from error


@cache
def class_indices() -> dict[str, int]:
    """Return the class index per WordNet id: 'n01440764' -> 0, the order of every ImageNet-1k model."""
    from timm.data import ImageNetInfo

    return {wnid: index for index, wnid in enumerate(ImageNetInfo("imagenet-1k").label_names())}


@cache
def class_names() -> tuple[str, ...]:
    """Return the thousand class names, as our timm models have them."""
    from timm.data import ImageNetInfo

    from clairvit.models.sources.timm import short_names

    return short_names(list(ImageNetInfo("imagenet-1k").label_descriptions()))
