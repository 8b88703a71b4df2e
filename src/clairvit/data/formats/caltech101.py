"""Caltech-101: 101 kinds of objects, with hand-drawn outlines."""

from __future__ import annotations

from pathlib import Path

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Size, entry, files_in, folders_in, mat_of
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.data.formats.shapes import filled
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
# four folders of outlines have other names than their images
_OUTLINES = {
    "Faces": "Faces_2",
    "Faces_easy": "Faces_3",
    "Motorbikes": "Motorbikes_16",
    "airplanes": "Airplanes_Side_2",
}


def fetch(folder: Path) -> None:
    from torchvision.datasets import Caltech101

    Caltech101(folder, download=True)


@dataset(
    "caltech101",
    "Caltech-101",
    has=("masks", "labels"),
    tree=TREE,
    needs=("101_ObjectCategories",),
    inside=("caltech101", "caltech-101"),
    fetch=fetch,
)
def caltech101(asked: DataRequest) -> DatasetIndex:
    folders = [one for one in folders_in(asked.root / "101_ObjectCategories") if one.name != "BACKGROUND_Google"]
    masked = (asked.root / "Annotations").is_dir()
    notes = () if masked else ("Without Annotations/ (Annotations.tar) the objects have no masks.",)
    entries = tuple(
        _object(asked.root, image, label)
        for label, folder in enumerate(folders)
        for image in files_in(folder, ".jpg", ".jpeg")
    )
    return DatasetIndex(entries, tuple(folder.name for folder in folders), has_masks=masked, notes=notes)


def _object(root: Path, image: Path, label: int) -> Entry:
    kind = image.parent.name
    drawn = root / "Annotations" / _OUTLINES.get(kind, kind) / f"annotation_{image.stem.rsplit('_', 1)[-1]}.mat"

    def known(size: Size) -> Annotation:
        if not drawn.exists():
            return Annotation(label, masked=False)
        box, outline = mat_of(drawn, "box_coord", "obj_contour")  # top, bottom, left, right; x and y [2, points]
        if box.shape != (4,) or outline.ndim != 2 or len(outline) != 2:
            raise BadInput(
                f"'{drawn}' has box_coord of shape {list(box.shape)} and obj_contour of shape {list(outline.shape)}; "
                "expected [4] and [2, points]."
            )
        # the outline is drawn from the box's corner; MATLAB's first pixel has its centre at 1, ours at 0.5
        corner = box[[2, 0]].astype(float) - 0.5
        return Annotation(label, {label: filled(outline.T + corner, (size[1], size[0]))})

    return entry(root, image, label, known, drawn)
