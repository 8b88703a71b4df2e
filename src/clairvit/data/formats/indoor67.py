"""MIT Indoor-67: 67 kinds of rooms."""

from __future__ import annotations

from clairvit.data.formats.entry import DatasetIndex, entry, folders_in, lines_of
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.errors import BadInput

TREE = """
Images/
  airport_inside/
    airport_inside_0001.jpg …
TestImages.txt  TrainImages.txt   lines: kitchen/int474.jpg
"""


@dataset(
    "indoor67",
    "MIT Indoor-67",
    has=("labels",),
    splits=("test", "train"),
    tree=TREE,
    needs=("Images", "{Split}Images.txt"),
    inside=("indoor67", "indoorCVPR_09"),
    why_no_download="torchvision has no downloader for it; the archive and the two lists are on the authors' page",
)
def indoor67(asked: DataRequest) -> DatasetIndex:
    listed = asked.root / f"{asked.split.title()}Images.txt"
    classes = tuple(folder.name for folder in folders_in(asked.root / "Images"))
    numbers = {name: number for number, name in enumerate(classes)}
    entries = []
    for line in lines_of(listed):
        room = line.split("/")[0]
        if room not in numbers:
            raise BadInput(f"'{listed}' has the line '{line}', and there is no folder 'Images/{room}'; expected one.")
        entries.append(entry(asked.root, asked.root / "Images" / line, numbers[room], None))
    return DatasetIndex(tuple(entries), classes)
