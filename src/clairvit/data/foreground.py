"""Foreground masks for images without annotations: the objects that Mask R-CNN, trained on COCO, detects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from clairvit.data.detector import Detector as Detector
from clairvit.data.detector import load_detector as load_detector
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.models.image_files import read_image

MAX_SIDE = 1333  # pixels of the longer side: the detector's training size, to which it shrinks larger pictures
Pictures = list[Image.Image] | tuple[Image.Image, ...]
_PLACEHOLDERS = ("__background__", "N/A")  # torchvision's names for label 0 and for the numbers that COCO left out


@dataclass(frozen=True, eq=False)
class Foreground:
    """The mask of all detected objects, and their classes, which may not be the object that you mean.

    COCO has no monastery: in a picture of one, the detected object may be a person in front of it.

    Attributes:
        mask: Of the upright picture's size, 255 on any object and 0 elsewhere, ready for `data.masks.prepare_mask`.
        classes: Names and scores of the objects, highest first.
    """

    mask: Image.Image
    classes: tuple[tuple[str, float], ...]

    @property
    def empty(self) -> bool:
        """Return whether nothing was detected: scores by masks are then undefined (NaN), not 0."""
        return self.mask.getbbox() is None


@overload
def foreground(
    detector: Detector,
    picture: Image.Image,
    score: float = 0.5,
    mask: float = 0.5,
    classes: str | Collection[str] | None = None,
) -> Foreground: ...
@overload
def foreground(
    detector: Detector,
    picture: Pictures,
    score: float = 0.5,
    mask: float = 0.5,
    classes: str | Collection[str] | None = None,
) -> tuple[Foreground, ...]: ...
def foreground(
    detector: Detector,
    picture: Image.Image | Pictures,
    score: float = 0.5,
    mask: float = 0.5,
    classes: str | Collection[str] | None = None,
) -> Foreground | tuple[Foreground, ...]:
    """Return the union of all objects scored `score` or more, each where its probability is `mask` or more.

    Args:
        detector: Of `load_detector`.
        picture: A whole picture, not the model's crop of it, or several.
        score: The smallest detection score.
        mask: The smallest probability of a pixel.
        classes: The COCO names that count; None is all.
    """
    if not 0 <= score <= 1:
        raise BadInput(f"score={score} is not a detector's score; expected 0 to 1, 0.5 by default.")
    if not 0 < mask <= 1:  # outside its box an object has probability 0: a threshold of 0 would be the whole picture
        raise BadInput(f"mask={mask} is not a threshold for probabilities; expected more than 0 and at most 1.")
    labels = _label_numbers(detector, classes)
    if isinstance(picture, list | tuple):
        # one by one: torchvision pads a batch to the largest picture, which changes the detections
        return tuple(_detect_foreground(detector, item, score, mask, labels) for item in picture)
    return _detect_foreground(detector, picture, score, mask, labels)


def _detect_foreground(
    detector: Detector, picture: Image.Image, score: float, mask: float, labels: Tensor | None
) -> Foreground:
    """Return the foreground of one picture, detected on a copy of at most MAX_SIDE pixels."""
    upright = read_image(picture)
    small = upright.copy()
    # the detector would shrink it too, but returns each object's mask at the size of its input
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    foreground = _unite(_detect(detector, small, score), detector, score, mask, labels)
    return replace(foreground, mask=foreground.mask.resize(upright.size, Image.Resampling.NEAREST))


def _detect(detector: Detector, picture: Image.Image, score: float) -> Mapping[str, Tensor]:
    """Return boxes [N, 4], labels [N], scores [N] and masks [N, 1, rows, columns] of an upright picture."""
    from torchvision.transforms.functional import pil_to_tensor

    pixels = pil_to_tensor(picture).to(detector.device).float().div(255)  # the module normalises
    detections: Mapping[str, Tensor]
    with torch.no_grad(), _score_threshold(detector.module, score):
        (detections,) = detector.module([pixels])
    return detections


def _unite(
    detections: Mapping[str, Tensor], detector: Detector, score: float, mask: float, labels: Tensor | None
) -> Foreground:
    """Return the union of the detections that count."""
    keep = detections["scores"] >= score
    if labels is not None:
        keep &= torch.isin(detections["labels"], labels)
    union = (detections["masks"][keep, 0] >= mask).any(0)  # [rows, columns]; all False without objects
    scores, order = detections["scores"][keep].sort(descending=True, stable=True)
    names = [detector.categories[label] for label in detections["labels"][keep][order].tolist()]
    picture = Image.fromarray(union.cpu().numpy().astype(np.uint8) * 255)
    return Foreground(picture, tuple(zip(names, scores.tolist(), strict=True)))


@contextmanager
def _score_threshold(module: nn.Module, score: float) -> Iterator[None]:
    """Set the detector's score threshold inside the block and restore it afterwards.

    Each detection costs a mask of the picture's size, and torchvision's default (0.05) would hide weaker ones. Its
    comparison is strict, so the threshold is a little lower than `score`. Weaker objects never suppress stronger ones:
    the other detections do not change.
    """
    heads: Any = module.roi_heads
    before = heads.score_thresh
    heads.score_thresh = score - 1e-6
    try:
        yield
    finally:
        heads.score_thresh = before


def _label_numbers(detector: Detector, classes: str | Collection[str] | None) -> Tensor | None:
    """Return the label numbers of class names; None is every class."""
    if classes is None:
        return None
    names = [classes] if isinstance(classes, str) else list(classes)
    available = [name for name in detector.categories if name not in _PLACEHOLDERS]
    if not names:
        raise BadInput("classes names no class, so nothing could be foreground; leave it out for all of COCO's.")
    for name in names:
        if name not in available:
            raise UnknownName(
                f"COCO has no class '{name}'.{did_you_mean(name, available)} Its 80 classes are "
                f"{', '.join(available[:4])}, … {available[-1]}; leave classes out for all."
            )
    return torch.tensor([detector.categories.index(name) for name in names], device=detector.device)
