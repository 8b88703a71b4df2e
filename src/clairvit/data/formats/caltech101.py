"""Caltech-101: 101 object classes with hand-drawn outlines."""

from __future__ import annotations

from pathlib import Path

from clairvit.data.formats.entry import (
    Annotation,
    DatasetIndex,
    Entry,
    Size,
    folders_in,
    labelled_entry,
    list_files,
    read_mat,
)
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.formats.shapes import fill_polygon
from clairvit.errors import BadInput

TREE = """
101_ObjectCategories/
  accordion/
    image_0001.jpg …
  …                           BACKGROUND_Google is no class
Annotations/                  optional
  accordion/
    annotation_0001.mat …     box_coord, obj_contour
"""
# four annotation folders have other names than the image folders
_ANNOTATION_FOLDERS = {
    "Faces": "Faces_2",
    "Faces_easy": "Faces_3",
    "Motorbikes": "Motorbikes_16",
    "airplanes": "Airplanes_Side_2",
}


def fetch(folder: Path) -> None:
    from torchvision.datasets import Caltech101

    Caltech101(folder, download=True)


@dataset_format(
    "caltech101",
    "Caltech-101",
    has=("masks", "labels"),
    tree=TREE,
    required_paths=("101_ObjectCategories",),
    archive_folders=("caltech101", "caltech-101"),
    fetch=fetch,
)
def caltech101(request: DataRequest) -> DatasetIndex:
    """Index the class folders; outlines are optional."""
    folders = [path for path in folders_in(request.root / "101_ObjectCategories") if path.name != "BACKGROUND_Google"]
    masked = (request.root / "Annotations").is_dir()
    notes = () if masked else ("Without Annotations/ (Annotations.tar) the objects have no masks.",)
    entries = tuple(
        _entry(request.root, image, label)
        for label, folder in enumerate(folders)
        for image in list_files(folder, ".jpg", ".jpeg")
    )
    return DatasetIndex(entries, tuple(folder.name for folder in folders), has_masks=masked, notes=notes)


def _entry(root: Path, image: Path, label: int) -> Entry:
    name = image.parent.name
    folder = root / "Annotations" / _ANNOTATION_FOLDERS.get(name, name)
    file = folder / f"annotation_{image.stem.rsplit('_', 1)[-1]}.mat"

    def annotation(size: Size) -> Annotation:
        if not file.exists():
            return Annotation(label, masked=False)
        box, outline = read_mat(file, "box_coord", "obj_contour")  # top, bottom, left, right; x and y [2, points]
        if box.shape != (4,) or outline.ndim != 2 or len(outline) != 2:
            raise BadInput(
                f"'{file}' has box_coord of shape {list(box.shape)} and obj_contour of shape {list(outline.shape)}; "
                "expected [4] and [2, points]."
            )
        # the outline is relative to the box's corner; MATLAB's first pixel has its centre at 1, ours at 0.5
        corner = box[[2, 0]].astype(float) - 0.5
        return Annotation(label, {label: fill_polygon(outline.T + corner, (size[1], size[0]))})

    return labelled_entry(root, image, label, annotation, file)
