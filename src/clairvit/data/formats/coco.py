"""COCO 2017: 80 object classes, several objects per image, each with its outline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from clairvit._io import parse_json
from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry, Mask
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.formats.shapes import decode_segmentation
from clairvit.errors import BadInput

TREE = """
val2017/  (train2017/)
  000000000139.jpg …
annotations/
  instances_val2017.json  (instances_train2017.json)
"""


@dataset_format(
    "coco",
    "COCO 2017",
    has=("masks", "labels", "others"),
    splits=("val2017", "train2017"),
    tree=TREE,
    required_paths=("{split}", "annotations/instances_{split}.json"),
    archive_folders=("coco", "COCO"),
    why_no_download="torchvision has no downloader for it; val2017.zip and the annotations are on cocodataset.org",
)
def coco(request: DataRequest) -> DatasetIndex:
    """Index the annotations; the true class has the largest area in the model's crop, the other class the second."""
    file = request.root / "annotations" / f"instances_{request.split}.json"
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        categories = sorted(content["categories"], key=lambda category: int(category["id"]))
        class_of = {int(category["id"]): index for index, category in enumerate(categories)}  # COCO's ids have gaps
        objects: dict[int, list[dict[str, Any]]] = {int(image["id"]): [] for image in content["images"]}
        for item in content["annotations"]:
            objects[int(item["image_id"])].append({**item, "class": class_of[int(item["category_id"])]})
        entries = tuple(
            _entry(request.root, request.split, image, objects[int(image["id"])]) for image in content["images"]
        )
        classes = tuple(str(category["name"]) for category in categories)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"'{file}' cannot be read ({type(error).__name__}: {error}); expected COCO's JSON with images, "
            "annotations and categories."
        ) from error
    empty = sum(not items for items in objects.values())
    notes = (f"{empty} of {len(entries)} images have no object: no mask and no true class.",) if empty else ()
    return DatasetIndex(entries, classes, has_masks=True, has_others=True, notes=notes)


def _entry(root: Path, split: str, image: dict[str, Any], objects: list[dict[str, Any]]) -> Entry:
    size = (int(image["height"]), int(image["width"]))
    name = f"{split}/{image['file_name']}"

    def annotation(_: tuple[int, int]) -> Annotation:
        masks: dict[int, Mask] = {}
        for item in objects:
            try:
                mask = decode_segmentation(item["segmentation"], size)
            except BadInput:  # a ValueError too
                raise
            except (KeyError, ValueError, TypeError) as error:
                raise BadInput(
                    f"An object of '{name}' has no outline that can be read ({type(error).__name__}: {error}); "
                    "expected polygons or run lengths."
                ) from error
            masks[item["class"]] = masks.get(item["class"], np.zeros(size, dtype=bool)) | mask
        return Annotation(None, masks, masked=bool(objects))

    def largest_class() -> int | None:
        """Return the class with the largest area by COCO's own numbers, which needs no rasterisation."""
        areas: dict[int, float] = {}
        for item in objects:
            areas[item["class"]] = areas.get(item["class"], 0.0) + float(item.get("area", 0))
        return max(sorted(areas), key=lambda index: areas[index], default=None)

    return Entry(
        name=name,
        image=root / split / str(image["file_name"]),
        annotation=annotation,
        hash_inputs=lambda: (json.dumps([size, objects], sort_keys=True),),
        stratum=largest_class,
    )
