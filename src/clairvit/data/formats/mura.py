"""MURA: radiographs of arms and hands, with or without a finding."""

from __future__ import annotations

from clairvit.data.formats.entry import DatasetIndex, entry, files_in
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.errors import BadInput

TREE = """
valid/  (train/)
  XR_ELBOW/ …
    patient11186/
      study1_positive/        or study1_negative
        image1.png …
"""
CLASSES = ("negative", "positive")


@dataset(
    "mura",
    "MURA v1.1",
    has=("labels",),
    splits=("valid", "train"),
    tree=TREE,
    needs=("{split}",),
    inside=("MURA-v1.1",),
    why_no_download="its owners ask you to sign an agreement; they send the link",
)
def mura(asked: DataRequest) -> DatasetIndex:
    entries = []
    for image in files_in(asked.root / asked.split, ".png"):
        word = image.parent.name.rsplit("_", 1)[-1]
        if word not in CLASSES:
            raise BadInput(
                f"'{image}' is in the study '{image.parent.name}'; expected its name to end in _positive or _negative."
            )
        entries.append(entry(asked.root, image, CLASSES.index(word), None))
    return DatasetIndex(tuple(entries), CLASSES)
