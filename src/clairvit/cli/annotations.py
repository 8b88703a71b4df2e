"""What is known of the images on the command line: where the objects are, and of which classes they are."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli.image_job import Failure, find
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from PIL import Image

    from clairvit.data.dataset import ImageDataset, Sample
    from clairvit.metrics.registry import MetricSpec
    from clairvit.models.model import Model

MASK_RCNN = "mask-rcnn"
FOLDERS = "folders"
DETECTION: dict[str, Any] = {"score": int | float, "mask": int | float, "classes": str}


@dataclass(frozen=True)
class AnnotatedImages:
    """Images with what is known of them; `detected` fills while they are read."""

    images: ImageDataset
    detected: dict[str, list[tuple[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Annotations:
    """The options as they were typed."""

    masks: str | None
    mask_kind: str
    weights: str | None
    truth: str | None

    @property
    def detects(self) -> bool:
        """Objects are to be found by Mask R-CNN."""
        return self.masks is not None and self.masks.split("(")[0] == MASK_RCNN

    def check(self, metrics: Sequence[MetricSpec], target: str | None) -> None:
        """Refuse what cannot be done before a model is loaded."""
        from clairvit.data.masks import check_kind

        check_kind(self.mask_kind)
        for asked in metrics:
            if "masks" in asked.metric.needs and self.masks is None:
                raise BadInput(
                    f"'{asked.metric.name}' compares maps with masks, and none were given; expected a folder with a "
                    f"mask for each image: --masks DIR, or --masks {MASK_RCNN}."
                )
            if "others" in asked.metric.needs and self.truth in (None, FOLDERS):
                raise BadInput(
                    f"'{asked.metric.name}' compares two objects in an image, and their classes were not given; "
                    "expected --truth FILE, a CSV with the columns image, class and other."
                )
        if self.detects:
            detection_options(str(self.masks))
        if self.masks is not None and not self.detects and not Path(self.masks).is_dir():
            raise BadInput(
                f"--masks {self.masks} is not a folder; expected one with 'cat.png' for the image 'cat.jpg', or "
                f"{MASK_RCNN}."
            )
        if self.weights is not None and not self.detects:
            raise BadInput(f"--weights {self.weights} are Mask R-CNN's; expected --masks {MASK_RCNN} with them.")
        if target == "label" and self.truth is None:
            raise BadInput(f"--target label needs the true classes; expected --truth FILE, or --truth {FOLDERS}.")
        if self.truth not in (None, FOLDERS) and not Path(str(self.truth)).is_file():
            raise BadInput(
                f"--truth {self.truth} is not a file; expected a CSV with the columns image and class, or the word "
                f"{FOLDERS}."
            )

    def dataset(self, images: Sequence[str], model: Model, by_label: bool = False) -> AnnotatedImages:
        """The images, read when their turn comes; `by_label`: one without a true class cannot be used."""
        from clairvit.data.dataset import album_of

        detected: dict[str, list[tuple[str, float]]] = {}
        masks: Any = None
        if self.detects:
            from clairvit.data.foreground import foreground, load_detector

            detector = load_detector(self.weights, device=str(model.device))
            how = detection_options(str(self.masks))

            def look(name: str, picture: Image.Image) -> Image.Image:
                found = foreground(detector, picture, **how)
                detected[name] = list(found.classes)
                return found.mask

            masks = look
        elif self.masks is not None:
            masks = mask_files([Path(image) for image in images], Path(self.masks))
        labels, others = self._classes(images)
        dataset = album_of(list(images), model, masks=masks, mask_kind=self.mask_kind, labels=labels, others=others)
        if labels is None or not by_label:
            return AnnotatedImages(dataset, detected)
        known = labels

        def read(row: int, net: Model) -> Sample:
            if known[row] is None:
                raise BadInput(
                    f"There is no class for '{images[row]}' in --truth {self.truth}; expected a line with it."
                )
            return dataset.read(row, net)

        return AnnotatedImages(replace(dataset, read=read), detected)

    def _classes(self, images: Sequence[str]) -> tuple[list[str | None] | None, list[str | None] | None]:
        if self.truth is None:
            return None, None
        if self.truth == FOLDERS:
            return [Path(image).resolve().parent.name for image in images], None
        rows = read_truth(Path(self.truth))
        found = [_row(rows, image) for image in images]
        labels = [one.get("class") or None for one in found]
        others = [one.get("other") or None for one in found]
        return labels, others if any("other" in row for row in rows.values()) else None


def fetch(spec: str, split: str | None = None) -> None:
    """--download: what is there already is not fetched again."""
    from clairvit.data.open import open_data

    open_data(spec, split=split, download=True)


@dataclass(frozen=True)
class ImageSource:
    """Images of the command line, or one data set with what it knows; opened once the model is there."""

    paths: Sequence[str]
    dataset: str | None
    annotations: Annotations
    split: str | None
    limit: int | None
    seed: int

    @property
    def is_empty(self) -> bool:
        """None of the images that were named is there."""
        return self.dataset is None and not self.paths

    def open(self, model: Model, by_label: bool) -> AnnotatedImages:
        """Return the images, read when their turn comes; `by_label`: those without a true class cannot be used."""
        if self.dataset is None:
            return self.annotations.dataset(self.paths, model, by_label)
        from clairvit.bench.plan import DataConfig

        return AnnotatedImages(DataConfig(self.dataset, self.split, self.limit).open(self.seed))


def image_source(
    images: list[str],
    annotations: Annotations,
    metrics: Sequence[MetricSpec],
    target: str | None,
    split: str | None,
    limit: int | None,
    download: bool,
    seed: int,
) -> tuple[ImageSource, list[Failure]]:
    """Find the images (files, folders, globs, or one data set such as pets:PATH) and those that are not there.

    Everything that can be refused without a model is refused here.
    """
    dataset = data_set(images)
    if dataset is not None:
        if annotations.masks is not None or annotations.truth is not None:
            raise BadInput(
                f"{dataset} has its own masks and classes; expected --masks and --truth with folders of images."
            )
        if download:
            fetch(dataset, split)
        return ImageSource((), dataset, annotations, split, limit, seed), []
    annotations.check(metrics, target)
    if split is not None or download:
        typed = "--download" if split is None else f"--split {split}"
        raise BadInput(f"{typed} is of a data set, such as pets:PATH; {images[0]} is none.")
    paths, failures = find(images)
    kept = paths if limit is None else sampled(paths, limit, seed)
    return ImageSource(kept, None, annotations, split, limit, seed), failures


def data_set(images: list[str]) -> str | None:
    """Return the data set that is named, such as 'pets:PATH'; a file that is called so is none."""
    named = (one for one in images if ":" in one and "://" not in one)  # an address is refused where images are found
    marked = [one for one in named if not Path(one).exists() and not Path(one).drive]
    if marked and len(images) > 1:
        raise BadInput(f"{marked[0]} and {len(images) - 1} more were given; expected one data set, or images.")
    return marked[0] if marked else None


def sampled(images: list[str], limit: int, seed: int) -> list[str]:
    """Return `limit` of the images, drawn by the seed, in their order."""
    import numpy as np

    kept = np.random.default_rng(seed).permutation(len(images))[:limit]
    return [images[place] for place in sorted(kept.tolist())]


def mask_files(images: Sequence[Path], folder: Path) -> list[Path | None]:
    """The mask of each image: folders below the one that all images share have masks in folders of the same names."""
    from clairvit.data.masks import masks_for

    whole = [image.absolute() for image in images]
    found, _ = masks_for(whole, folder, Path(os.path.commonpath([image.parent for image in whole])))
    return [found.get(image) for image in whole]


def detection_options(text: str) -> dict[str, Any]:
    """'mask-rcnn(score=0.7,classes=dog)' -> how objects are found."""
    from clairvit.methods.parsing import parse_spec

    given = dict(parse_spec(text).options)
    for name, value in given.items():
        if name not in DETECTION or not isinstance(value, DETECTION[name]):
            raise BadInput(
                f"--masks {text} sets {name}={value}; expected score= and mask= (thresholds from 0 to 1) or classes= "
                f"(a COCO class), such as {MASK_RCNN}(score=0.7,classes=dog)."
            )
    return given


def read_truth(path: Path) -> dict[str, dict[str, str]]:
    """image -> its line of the file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns, lines = tuple(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"--truth {path} cannot be read ({error}); expected a CSV in UTF-8.") from error
    if not lines or not {"image", "class"} <= set(columns):
        seen = f"the columns {', '.join(columns)}" if lines else "no lines below its first"
        raise BadInput(
            f"--truth {path} has {seen}; expected image and class (and other) in its first line, and a line an image."
        )
    longer = next((line["image"] for line in lines if None in line), None)  # csv's key for what is beyond the columns
    if longer is not None:
        raise BadInput(
            f"--truth {path} has more than {len(columns)} cells in the line of '{longer}'; expected a class with a "
            'comma in quotes: "husky, Siberian".'
        )
    counts = Counter(line["image"] for line in lines)
    twice = next((image for image, count in counts.items() if count > 1), None)
    if twice is not None:
        raise BadInput(
            f"--truth {path} has {counts[twice]} lines for '{twice}'; expected one, with its second class as other."
        )
    return {line["image"]: line for line in lines}


def _row(rows: dict[str, dict[str, str]], image: str) -> dict[str, str]:
    """By the whole path, the file's name or its stem."""
    path = Path(image)
    return next((rows[key] for key in (image, path.name, path.stem) if key in rows), {})
