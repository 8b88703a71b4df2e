"""COCO 2017: 80 kinds of objects, several in an image, each with its outline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Mask
from clairvit.data.formats.registry import DataRequest, dataset
from clairvit.data.formats.shapes import segmented
from clairvit.errors import BadInput

TREE = """
val2017/  (train2017/)
  000000000139.jpg …
annotations/
  instances_val2017.json  (instances_train2017.json)
"""


@dataset(
    "coco",
    "COCO 2017",
    has=("masks", "labels", "others"),
    splits=("val2017", "train2017"),
    tree=TREE,
    needs=("{split}", "annotations/instances_{split}.json"),
    inside=("coco", "COCO"),
    why_no_download="torchvision has no downloader for it; val2017.zip and the annotations are on cocodataset.org",
)
def coco(asked: DataRequest) -> DatasetIndex:
    """True class: the one with the largest area in what the model sees; the next one is the other."""
    listed = asked.root / "annotations" / f"instances_{asked.split}.json"
    try:
        content = json.loads(listed.read_text(encoding="utf-8"))
        kinds = sorted(content["categories"], key=lambda kind: int(kind["id"]))
        places = {int(kind["id"]): place for place, kind in enumerate(kinds)}  # COCO's ids have gaps
        drawn: dict[int, list[dict[str, Any]]] = {int(image["id"]): [] for image in content["images"]}
        for one in content["annotations"]:
            drawn[int(one["image_id"])].append({**one, "class": places[int(one["category_id"])]})
        entries = tuple(_photo(asked.root, asked.split, image, drawn[int(image["id"])]) for image in content["images"])
        classes = tuple(str(kind["name"]) for kind in kinds)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"'{listed}' cannot be read ({type(error).__name__}: {error}); expected COCO's JSON with images, "
            "annotations and categories."
        ) from error
    empty = sum(not one for one in drawn.values())
    notes = (f"{empty} of {len(entries)} images have no object: no mask and no true class.",) if empty else ()
    return DatasetIndex(entries, classes, has_masks=True, has_others=True, notes=notes)


def _photo(root: Path, split: str, image: dict[str, Any], drawn: list[dict[str, Any]]) -> Entry:
    size = (int(image["height"]), int(image["width"]))
    name = f"{split}/{image['file_name']}"

    def known(_: tuple[int, int]) -> Annotation:
        objects: dict[int, Mask] = {}
        for one in drawn:
            try:
                mask = segmented(one["segmentation"], size)
            except BadInput:
                raise
            except (KeyError, ValueError, TypeError) as error:
                raise BadInput(
                    f"An object of '{name}' has no outline that can be read ({type(error).__name__}: {error}); "
                    "expected polygons or run lengths."
                ) from error
            objects[one["class"]] = objects.get(one["class"], np.zeros(size, dtype=bool)) | mask
        return Annotation(None, objects, masked=bool(drawn))

    def largest() -> int | None:
        """By COCO's own areas: a sample of thousands is drawn without drawing their outlines."""
        areas: dict[int, float] = {}
        for one in drawn:
            areas[one["class"]] = areas.get(one["class"], 0.0) + float(one.get("area", 0))
        return max(sorted(areas), key=lambda number: areas[number], default=None)

    return Entry(
        name=name,
        image=root / split / str(image["file_name"]),
        known=known,
        behind=lambda: (json.dumps([size, drawn], sort_keys=True),),
        group=largest,
    )
