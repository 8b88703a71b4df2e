"""Flowers-102: 102 flower classes, with the authors' segmentations if they were unpacked too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Size, labelled_entry, read_mat
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.errors import BadInput
from clairvit.models.image_files import read_image

TREE = """
jpg/
  image_00001.jpg …
imagelabels.mat               labels: the class of each image, from 1
setid.mat                     trnid, valid, tstid: numbers of images
segmim/                       optional, from 102segmentations.tgz
  segmim_00001.jpg …          the flower on blue
"""
_LISTS = {"test": "tstid", "train": "trnid", "val": "valid"}
_BLUE = np.array([0, 0, 254])
_MAX_DIFFERENCE = 60  # of a channel from pure blue that is still background: JPEG blurs the edge


def fetch(folder: Path) -> None:
    from torchvision.datasets import Flowers102

    Flowers102(folder, split="test", download=True)


@dataset_format(
    "flowers",
    "Flowers-102",
    has=("masks", "labels"),
    splits=("test", "train", "val"),
    tree=TREE,
    required_paths=("jpg", "imagelabels.mat", "setid.mat"),
    archive_folders=("flowers-102",),
    fetch=fetch,
)
def flowers(request: DataRequest) -> DatasetIndex:
    """Index the images of a split; segmentations are optional."""
    from torchvision.datasets import Flowers102

    root = request.root
    (labels,) = read_mat(root / "imagelabels.mat", "labels")
    (numbers,) = read_mat(root / "setid.mat", _LISTS[request.split])
    if not ((numbers >= 1) & (numbers <= len(labels))).all():
        raise BadInput(
            f"'{root}/setid.mat' names image {int(numbers.max())}, and imagelabels.mat has {len(labels)} classes of "
            "images; expected files that belong together."
        )
    masked = (root / "segmim").is_dir()
    notes = () if masked else ("Without segmim/ (102segmentations.tgz of the data set's site) flowers have no masks.",)
    entries = tuple(_entry(root, int(number), int(labels[number - 1]) - 1) for number in numbers)
    return DatasetIndex(entries, tuple(Flowers102.classes), has_masks=masked, notes=notes)


def _entry(root: Path, number: int, label: int) -> Entry:
    segmented = root / "segmim" / f"segmim_{number:05d}.jpg"

    def annotation(_: Size) -> Annotation:
        if not segmented.exists():
            return Annotation(label, masked=False)
        difference = np.abs(np.asarray(read_image(segmented)).astype(int) - _BLUE).max(-1)  # [rows, columns]
        return Annotation(label, {label: difference > _MAX_DIFFERENCE})

    return labelled_entry(root, root / "jpg" / f"image_{number:05d}.jpg", label, annotation, segmented)
