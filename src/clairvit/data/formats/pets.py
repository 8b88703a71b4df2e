"""Oxford-IIIT Pet: 37 breeds of cats and dogs, with trimaps."""

from __future__ import annotations

from pathlib import Path

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Size, entry, lines_of, of_kept
from clairvit.data.formats.registry import DataRequest, dataset
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


@dataset(
    "pets",
    "Oxford-IIIT Pet",
    has=("masks", "labels"),
    splits=("test", "trainval"),
    tree=TREE,
    needs=("images", "annotations", "annotations/{split}.txt", "annotations/trimaps"),
    inside=("oxford-iiit-pet",),
    fetch=fetch,
)
def pets(asked: DataRequest) -> DatasetIndex:
    """'american_bulldog_10 2 2 1' is an 'American Bulldog', which is class 1: names as torchvision makes them."""
    listed = asked.root / "annotations" / f"{asked.split}.txt"
    names: dict[int, str] = {}
    entries: list[Entry] = []
    for line in lines_of(listed):
        parts = line.split()
        if line.startswith("#"):
            continue
        if len(parts) != 4 or not parts[1].isdecimal() or int(parts[1]) < 1:
            raise BadInput(f"'{listed}' has the line '{line}'; expected a name and three numbers from 1 on.")
        label = int(parts[1]) - 1
        names[label] = " ".join(word.title() for word in parts[0].rsplit("_", 1)[0].split("_"))
        entries.append(_pet(asked.root, parts[0], label))
    classes = tuple(names.get(number, f"class {number}") for number in range(max(names, default=-1) + 1))
    return DatasetIndex(tuple(entries), classes, has_masks=True)


def _pet(root: Path, name: str, label: int) -> Entry:
    image, trimap = root / "images" / f"{name}.jpg", root / "annotations" / "trimaps" / f"{name}.png"

    def known(size: Size) -> Annotation:
        if not trimap.exists():
            return Annotation(label, masked=False)
        return of_kept(label, read_mask(trimap, size, "trimap"))

    return entry(root, image, label, known, trimap)
