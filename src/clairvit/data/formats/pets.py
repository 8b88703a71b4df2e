"""Oxford-IIIT Pet: 37 breeds of cats and dogs with trimaps."""

from __future__ import annotations

from pathlib import Path

from clairvit.data.formats.entry import (
    Annotation,
    DatasetIndex,
    Entry,
    Size,
    annotation_from_mask,
    labelled_entry,
    read_lines,
)
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.masks import read_mask
from clairvit.errors import BadInput

TREE = """
images/
  Abyssinian_1.jpg …
annotations/
  test.txt  trainval.txt      lines: NAME CLASS SPECIES BREED
  trimaps/
    Abyssinian_1.png …        1 animal, 2 background, 3 border
"""


def fetch(folder: Path) -> None:
    from torchvision.datasets import OxfordIIITPet

    OxfordIIITPet(folder, split="test", download=True)


@dataset_format(
    "pets",
    "Oxford-IIIT Pet",
    has=("masks", "labels"),
    splits=("test", "trainval"),
    tree=TREE,
    required_paths=("images", "annotations", "annotations/{split}.txt", "annotations/trimaps"),
    archive_folders=("oxford-iiit-pet",),
    fetch=fetch,
)
def pets(request: DataRequest) -> DatasetIndex:
    """Index the listed images; 'american_bulldog_10 2 2 1' is class 1, 'American Bulldog', as torchvision names it."""
    list_file = request.root / "annotations" / f"{request.split}.txt"
    names: dict[int, str] = {}
    entries: list[Entry] = []
    for line in read_lines(list_file):
        parts = line.split()
        if line.startswith("#"):
            continue
        if len(parts) != 4 or not parts[1].isdecimal() or int(parts[1]) < 1:
            raise BadInput(f"'{list_file}' has the line '{line}'; expected a name and three numbers from 1 on.")
        label = int(parts[1]) - 1
        names[label] = " ".join(word.title() for word in parts[0].rsplit("_", 1)[0].split("_"))
        entries.append(_entry(request.root, parts[0], label))
    classes = tuple(names.get(number, f"class {number}") for number in range(max(names, default=-1) + 1))
    return DatasetIndex(tuple(entries), classes, has_masks=True)


def _entry(root: Path, name: str, label: int) -> Entry:
    image, trimap = root / "images" / f"{name}.jpg", root / "annotations" / "trimaps" / f"{name}.png"

    def annotation(size: Size) -> Annotation:
        if not trimap.exists():
            return Annotation(label, masked=False)
        return annotation_from_mask(label, read_mask(trimap, size, "trimap"))

    return labelled_entry(root, image, label, annotation, trimap)
