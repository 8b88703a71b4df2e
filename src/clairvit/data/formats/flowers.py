"""Flowers-102: 102 kinds of flowers, with the authors' segmentations if they were unpacked too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Size, entry, mat_of
from clairvit.data.formats.registry import DataRequest, dataset
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
_NEAR = 60  # JPEG smears the edge; no petal is so pure a blue: a channel off by less than this is background


def fetch(folder: Path) -> None:
    from torchvision.datasets import Flowers102

    Flowers102(folder, split="test", download=True)


@dataset(
    "flowers",
    "Flowers-102",
    has=("masks", "labels"),
    splits=("test", "train", "val"),
    tree=TREE,
    needs=("jpg", "imagelabels.mat", "setid.mat"),
    inside=("flowers-102",),
    fetch=fetch,
)
def flowers(asked: DataRequest) -> DatasetIndex:
    from torchvision.datasets import Flowers102

    root = asked.root
    (labels,) = mat_of(root / "imagelabels.mat", "labels")
    (chosen,) = mat_of(root / "setid.mat", _LISTS[asked.split])
    if not ((chosen >= 1) & (chosen <= len(labels))).all():
        raise BadInput(
            f"'{root}/setid.mat' names image {int(chosen.max())}, and imagelabels.mat has {len(labels)} classes of "
            "images; expected files that belong together."
        )
    masked = (root / "segmim").is_dir()
    notes = () if masked else ("Without segmim/ (102segmentations.tgz of the data set's site) flowers have no masks.",)
    entries = tuple(_flower(root, int(number), int(labels[number - 1]) - 1) for number in chosen)
    return DatasetIndex(entries, tuple(Flowers102.classes), has_masks=masked, notes=notes)


def _flower(root: Path, number: int, label: int) -> Entry:
    segmented = root / "segmim" / f"segmim_{number:05d}.jpg"

    def known(_: Size) -> Annotation:
        if not segmented.exists():
            return Annotation(label, masked=False)
        far = np.abs(np.asarray(read_image(segmented)).astype(int) - _BLUE).max(-1)  # [rows, columns]
        return Annotation(label, {label: far > _NEAR})

    return entry(root, root / "jpg" / f"image_{number:05d}.jpg", label, known, segmented)
