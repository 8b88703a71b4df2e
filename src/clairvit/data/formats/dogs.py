"""Stanford Dogs: 120 breeds, with boxes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Size, entry, folders_in, mat_of
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.data.formats.shapes import boxes
from clairvit.errors import BadInput

TREE = """
Images/
  n02085620-Chihuahua/
    n02085620_10074.jpg …
Annotation/
  n02085620-Chihuahua/
    n02085620_10074 …         XML with boxes, without a suffix
train_list.mat  test_list.mat file_list, labels (from lists.tar; may lie in lists/)
"""


@dataset(
    "dogs",
    "Stanford Dogs",
    has=("boxes", "labels"),
    splits=("test", "train"),
    tree=TREE,
    needs=("Images", "Annotation", "{split}_list.mat|lists/{split}_list.mat"),
    inside=("stanford-dogs", "StanfordDogs"),
    why_no_download="torchvision has no downloader for it; the three archives are on the authors' page",
)
def dogs(asked: DataRequest) -> DatasetIndex:
    """'n02085782-Japanese_spaniel' is a 'Japanese spaniel'. The mask is what lies in the boxes."""
    name = f"{asked.split}_list.mat"
    listed = next(path for path in (asked.root / name, asked.root / "lists" / name) if path.exists())
    files, labels = mat_of(listed, "file_list", "labels")
    if len(files) != len(labels):
        raise BadInput(f"'{listed}' lists {len(files)} files and {len(labels)} labels; expected one for each.")
    breeds = {int(label) - 1: _breed(str(file).split("/")[0]) for file, label in zip(files, labels, strict=True)}
    folders = [_breed(folder.name) for folder in folders_in(asked.root / "Images")]
    count = max(len(folders), max(breeds, default=-1) + 1)
    # the list numbers the breeds, in the order of the folders; those not listed are known from their folder
    classes = [breeds.get(i, folders[i] if i < len(folders) else f"class {i}") for i in range(count)]
    entries = tuple(_dog(asked.root, str(file), int(label) - 1) for file, label in zip(files, labels, strict=True))
    return DatasetIndex(entries, tuple(classes), has_masks=True)


def _breed(folder: str) -> str:
    return folder.split("-", 1)[-1].replace("_", " ")


def _dog(root: Path, file: str, label: int) -> Entry:
    drawn = (root / "Annotation" / file).with_suffix("")

    def known(_: Size) -> Annotation:
        if not drawn.exists():
            return Annotation(label, masked=False)
        try:
            tree = ElementTree.parse(drawn).getroot()
            rows, columns = (int(tree.findtext(f"size/{side}", "")) for side in ("height", "width"))
            found = [
                tuple(float(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax"))
                for box in tree.iterfind("object/bndbox")
            ]
        except (ElementTree.ParseError, ValueError) as error:
            raise BadInput(
                f"The boxes '{drawn}' cannot be read ({error}); expected XML with size and object/bndbox."
            ) from error
        corners = [(left, top, right, bottom) for left, top, right, bottom in found]
        return Annotation(label, {label: boxes(corners, (rows, columns))})

    return entry(root, root / "Images" / file, label, known, drawn)
