"""Images of commands that score, with their annotations: masks, and true classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli import options
from clairvit.cli.declare import group
from clairvit.cli.image_job import Failure, find_image_files
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from PIL import Image

    from clairvit.data.dataset import ImageDataset
    from clairvit.metrics.registry import MetricSpec
    from clairvit.models.model import Model

MASK_RCNN = "mask-rcnn"
FOLDERS = "folders"
DETECTION: dict[str, Any] = {"score": int | float, "mask": int | float, "classes": str}
Detections = dict[str, list[tuple[str, float]]]  # image -> classes of its objects, with their scores


@dataclass(frozen=True)
class AnnotatedImages:
    """Images with their annotations; `detected` fills while they are read."""

    images: ImageDataset
    detected: Detections = field(default_factory=dict)


@group("Annotations")
class Annotations:
    """Where masks and true classes come from."""

    masks: str | None = options.MASKS
    mask_kind: str = options.mask_kind("nonzero")
    weights: str | None = options.WEIGHTS
    truth: str | None = options.TRUTH

    @property
    def detects(self) -> bool:
        """Return whether Mask R-CNN finds the objects."""
        return self.masks is not None and self.masks.split("(")[0] == MASK_RCNN

    def check(self, metrics: Sequence[MetricSpec], target: str | None) -> None:
        """Raise BadInput for options that cannot work together, before a model is loaded."""
        self._check_metrics(metrics)
        self._check_masks()
        if target == "label" and self.truth is None:
            raise BadInput(f"--target label needs the true classes; expected --truth FILE, or --truth {FOLDERS}.")
        if self.truth not in (None, FOLDERS) and not Path(str(self.truth)).is_file():
            raise BadInput(
                f"--truth {self.truth} is not a file; expected a CSV with the columns image and class, or the word "
                f"{FOLDERS}."
            )

    def _check_metrics(self, metrics: Sequence[MetricSpec]) -> None:
        from clairvit.data.masks import check_kind

        check_kind(self.mask_kind)
        for spec in metrics:
            if "masks" in spec.metric.needs and self.masks is None:
                raise BadInput(
                    f"'{spec.metric.name}' compares maps with masks, and none were given; expected a folder with a "
                    f"mask for each image: --masks DIR, or --masks {MASK_RCNN}."
                )
            if "parts" in spec.metric.needs:
                raise BadInput(
                    f"'{spec.metric.name}' removes parts of an object from the images, and theirs are not known; "
                    "expected a data set with removable parts: --data parts:200 --model parts."
                )
            if "others" in spec.metric.needs and self.truth in (None, FOLDERS):
                raise BadInput(
                    f"'{spec.metric.name}' compares two objects in an image, and their classes were not given; "
                    "expected --truth FILE, a CSV with the columns image, class and other."
                )

    def _check_masks(self) -> None:
        if self.detects:
            detection_options(str(self.masks))
        if self.masks is not None and not self.detects and not Path(self.masks).is_dir():
            raise BadInput(
                f"--masks {self.masks} is not a folder; expected one with 'cat.png' for the image 'cat.jpg', or "
                f"{MASK_RCNN}."
            )
        if self.weights is not None and not self.detects:
            raise BadInput(f"--weights {self.weights} are Mask R-CNN's; expected --masks {MASK_RCNN} with them.")

    def dataset(self, images: Sequence[str], model: Model, by_label: bool = False) -> AnnotatedImages:
        """Return the images, read one at a time; with `by_label` an image without a true class raises BadInput."""
        from clairvit.data.dataset import as_dataset
        from clairvit.data.masks import masks_in
        from clairvit.data.truth import require_labels

        detected: Detections = {}
        masks: Any = None
        if self.detects:
            masks = self._detector(model, detected)
        elif self.masks is not None:
            masks = masks_in(Path(self.masks), [Path(image) for image in images])
        labels, others = self._classes(images)
        dataset = as_dataset(list(images), model, masks=masks, mask_kind=self.mask_kind, labels=labels, others=others)
        if labels is not None and by_label:
            dataset = require_labels(dataset, labels, f"--truth {self.truth}")
        return AnnotatedImages(dataset, detected)

    def _detector(self, model: Model, detected: Detections) -> Callable[[str, Image.Image], Image.Image]:
        """Return the function that finds the mask of an image and stores its classes in `detected`."""
        from clairvit.data.foreground import foreground, load_detector

        detector = load_detector(self.weights, device=str(model.device))
        settings = detection_options(str(self.masks))

        def find_mask(name: str, picture: Image.Image) -> Image.Image:
            objects = foreground(detector, picture, **settings)
            detected[name] = list(objects.classes)
            return objects.mask

        return find_mask

    def _classes(self, images: Sequence[str]) -> tuple[list[str | None] | None, list[str | None] | None]:
        """Return the true class of each image, and the class of a second object in it."""
        from clairvit.data.truth import classes_of, folder_classes, read_truth

        if self.truth is None:
            return None, None
        if self.truth == FOLDERS:
            return folder_classes(images), None
        return classes_of(images, read_truth(Path(self.truth), f"--truth {self.truth}"))


def download_data(spec: str, split: str | None = None) -> None:
    """Download a data set; files that are there already are not fetched again."""
    from clairvit.data.open import open_data

    open_data(spec, split=split, download=True)


@dataclass(frozen=True)
class ImageSource:
    """Images of the command line, or one data set with its annotations; opened once the model is loaded."""

    paths: Sequence[str]
    dataset: str | None
    annotations: Annotations
    split: str | None
    limit: int | None
    seed: int

    @property
    def is_empty(self) -> bool:
        """Return whether none of the images that were named exists."""
        return self.dataset is None and not self.paths

    def open(self, model: Model, by_label: bool) -> AnnotatedImages:
        """Return the images, read one at a time; with `by_label` an image without a true class raises BadInput."""
        if self.dataset is None:
            return self.annotations.dataset(self.paths, model, by_label)
        from clairvit.bench.plan import DataConfig

        annotations = self.annotations
        config = DataConfig(self.dataset, self.split, self.limit, annotations.masks, annotations.mask_kind)
        return AnnotatedImages(config.open(self.seed))


def image_source(
    images: Sequence[str] | None,
    data: options.DataOptions,
    annotations: Annotations,
    metrics: Sequence[MetricSpec],
    target: str | None,
    seed: int,
) -> tuple[ImageSource, list[Failure]]:
    """Return the images (files, folders, globs, or one data set such as pets:PATH) and those that do not exist.

    Everything that can be refused without a model is refused here.
    """
    spec = data.single_spec()
    if spec is not None and images:
        raise BadInput(f"--data {spec} was given with {images[0]}; expected images or a data set, not both.")
    if spec is None and not images:
        raise BadInput("Which images? Expected files, folders or globs, or --data NAME:PATH.")
    paths = list(images or [])
    dataset = spec if spec is not None else data_set(paths)
    if dataset is not None:
        _check_data_set(dataset, annotations)
        if data.download:
            download_data(dataset, data.split)
        return ImageSource((), dataset, annotations, data.split, data.limit, seed), []
    annotations.check(metrics, target)
    if data.split is not None or data.download:
        typed = "--download" if data.split is None else f"--split {data.split}"
        raise BadInput(f"{typed} is of a data set, such as pets:PATH; {paths[0]} is none.")
    files, failures = find_image_files(paths)
    sampled = files if data.limit is None else sample_images(files, data.limit, seed)
    return ImageSource(sampled, None, annotations, data.split, data.limit, seed), failures


def _check_data_set(spec: str, annotations: Annotations) -> None:
    """Raise BadInput for annotations that a data set has itself; folder:PATH has no masks."""
    is_folder = spec.partition(":")[0] == "folder"
    if annotations.truth is not None or annotations.detects or (annotations.masks is not None and not is_folder):
        raise BadInput(f"{spec} has its own masks and classes; expected --masks and --truth with folders of images.")


def data_set(images: Sequence[str]) -> str | None:
    """Return the data set that is named, such as 'pets:PATH'; a file with such a name is none."""
    # URLs are refused where images are found
    candidates = (text for text in images if ":" in text and "://" not in text)
    specs = [text for text in candidates if not Path(text).exists() and not Path(text).drive]
    if specs and len(images) > 1:
        raise BadInput(f"{specs[0]} and {len(images) - 1} more were given; expected one data set, or images.")
    return specs[0] if specs else None


def sample_images(images: list[str], limit: int, seed: int) -> list[str]:
    """Return a random sample of `limit` images, in their order."""
    import numpy as np

    rows = np.random.default_rng(seed).permutation(len(images))[:limit]
    return [images[row] for row in sorted(rows.tolist())]


def detection_options(text: str) -> dict[str, Any]:
    """Return the detector's options in 'mask-rcnn(score=0.7,classes=dog)'."""
    from clairvit.methods.parsing import parse_spec

    settings = dict(parse_spec(text).options)
    for name, value in settings.items():
        if name not in DETECTION or not isinstance(value, DETECTION[name]):
            raise BadInput(
                f"--masks {text} sets {name}={value}; expected score= and mask= (thresholds from 0 to 1) or classes= "
                f"(a COCO class), such as {MASK_RCNN}(score=0.7,classes=dog)."
            )
    return settings
