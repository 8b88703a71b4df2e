"""Stanford Dogs: 120 breeds with bounding boxes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Size, folders_in, labelled_entry, read_mat
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.formats.shapes import fill_boxes
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


@dataset_format(
    "dogs",
    "Stanford Dogs",
    has=("boxes", "labels"),
    splits=("test", "train"),
    tree=TREE,
    required_paths=("Images", "Annotation", "{split}_list.mat|lists/{split}_list.mat"),
    archive_folders=("stanford-dogs", "StanfordDogs"),
    why_no_download="torchvision has no downloader for it; the three archives are on the authors' page",
)
def dogs(request: DataRequest) -> DatasetIndex:
    """Index the listed images; 'n02085782-Japanese_spaniel' is class 'Japanese spaniel', the boxes are the mask."""
    name = f"{request.split}_list.mat"
    list_file = next(path for path in (request.root / name, request.root / "lists" / name) if path.exists())
    files, labels = read_mat(list_file, "file_list", "labels")
    if len(files) != len(labels):
        raise BadInput(f"'{list_file}' lists {len(files)} files and {len(labels)} labels; expected one for each.")
    breeds = {int(label) - 1: _breed(str(file).split("/")[0]) for file, label in zip(files, labels, strict=True)}
    folders = [_breed(folder.name) for folder in folders_in(request.root / "Images")]
    count = max(len(folders), max(breeds, default=-1) + 1)
    # the list numbers breeds in the order of the folders; those not listed are named by their folder
    classes = [breeds.get(i, folders[i] if i < len(folders) else f"class {i}") for i in range(count)]
    entries = tuple(_entry(request.root, str(file), int(label) - 1) for file, label in zip(files, labels, strict=True))
    return DatasetIndex(entries, tuple(classes), has_masks=True)


def _breed(folder: str) -> str:
    return folder.split("-", 1)[-1].replace("_", " ")


def _entry(root: Path, file: str, label: int) -> Entry:
    box_file = (root / "Annotation" / file).with_suffix("")

    def annotation(_: Size) -> Annotation:
        if not box_file.exists():
            return Annotation(label, masked=False)
        try:
            tree = ElementTree.parse(box_file).getroot()
            rows, columns = (int(tree.findtext(f"size/{side}", "")) for side in ("height", "width"))
            corners = [
                [float(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax")]
                for box in tree.iterfind("object/bndbox")
            ]
        except (ElementTree.ParseError, ValueError) as error:
            raise BadInput(
                f"The boxes '{box_file}' cannot be read ({error}); expected XML with size and object/bndbox."
            ) from error
        boxes = [(left, top, right, bottom) for left, top, right, bottom in corners]
        return Annotation(label, {label: fill_boxes(boxes, (rows, columns))})

    return labelled_entry(root, root / "Images" / file, label, annotation, box_file)
