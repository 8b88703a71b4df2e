"""Datasets with class labels and no masks: MIT Indoor-67 (67 kinds of rooms) and MURA (radiographs of arms)."""

from __future__ import annotations

from clairvit.data.formats.entry import DatasetIndex, folders_in, labelled_entry, list_files, read_lines
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.errors import BadInput

INDOOR67_TREE = """
Images/
  airport_inside/
    airport_inside_0001.jpg …
TestImages.txt  TrainImages.txt   lines: kitchen/int474.jpg
"""


@dataset_format(
    "indoor67",
    "MIT Indoor-67",
    has=("labels",),
    splits=("test", "train"),
    tree=INDOOR67_TREE,
    required_paths=("Images", "{Split}Images.txt"),
    archive_folders=("indoor67", "indoorCVPR_09"),
    why_no_download="torchvision has no downloader for it; the archive and the two lists are on the authors' page",
)
def indoor67(request: DataRequest) -> DatasetIndex:
    """Index the listed images; folders are classes."""
    list_file = request.root / f"{request.split.title()}Images.txt"
    classes = tuple(folder.name for folder in folders_in(request.root / "Images"))
    indices = {name: index for index, name in enumerate(classes)}
    entries = []
    for line in read_lines(list_file):
        name = line.split("/")[0]
        if name not in indices:
            raise BadInput(
                f"'{list_file}' has the line '{line}', and there is no folder 'Images/{name}'; expected one."
            )
        entries.append(labelled_entry(request.root, request.root / "Images" / line, indices[name], None))
    return DatasetIndex(tuple(entries), classes)


MURA_TREE = """
valid/  (train/)
  XR_ELBOW/ …
    patient11186/
      study1_positive/        or study1_negative
        image1.png …
"""
MURA_CLASSES = ("negative", "positive")


@dataset_format(
    "mura",
    "MURA v1.1",
    has=("labels",),
    splits=("valid", "train"),
    tree=MURA_TREE,
    required_paths=("{split}",),
    archive_folders=("MURA-v1.1",),
    why_no_download="its owners ask you to sign an agreement; they send the link",
)
def mura(request: DataRequest) -> DatasetIndex:
    """Index the radiographs; the class is the end of the study's folder name."""
    entries = []
    for image in list_files(request.root / request.split, ".png"):
        word = image.parent.name.rsplit("_", 1)[-1]
        if word not in MURA_CLASSES:
            raise BadInput(
                f"'{image}' is in the study '{image.parent.name}'; expected its name to end in _positive or _negative."
            )
        entries.append(labelled_entry(request.root, image, MURA_CLASSES.index(word), None))
    return DatasetIndex(tuple(entries), MURA_CLASSES)
