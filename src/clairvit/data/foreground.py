"""Foreground for images without masks: what torchvision's Mask R-CNN, trained on COCO, finds in the whole picture."""

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

MOST = 1333  # pixels of the longer side: what the detector was trained on, and shrinks larger pictures to
Pictures = list[Image.Image] | tuple[Image.Image, ...]
_NAMELESS = ("__background__", "N/A")  # torchvision's names for label 0 and for the numbers that COCO left out


@dataclass(frozen=True, eq=False)
class Foreground:
    """Where the objects are, and which: COCO has no monastery, so what is found there may be a person in front of it.

    `mask` is of the upright picture's own size, 255 on any object and 0 elsewhere: it takes the picture's way to the
    model (`data.masks.prepare_mask`). `classes` are the united objects' names and scores, highest first.
    """

    mask: Image.Image
    classes: tuple[tuple[str, float], ...]

    @property
    def empty(self) -> bool:
        """Nothing was found, so scores by masks are undefined (NaN), not 0."""
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
    """The union of all objects scored `score` or more, each where its probability is `mask` or more.

    A whole picture, not the model's crop of it, or several. `classes` are the COCO names that count; all by default.
    """
    if not 0 <= score <= 1:
        raise BadInput(f"score={score} is not a detector's score; expected 0 to 1, 0.5 by default.")
    if not 0 < mask <= 1:  # beside its box an object has probability 0, so 0 would take in the whole picture
        raise BadInput(f"mask={mask} is not a threshold for probabilities; expected more than 0 and at most 1.")
    wanted = _labels(detector, classes)
    if isinstance(picture, list | tuple):
        # one by one: in a batch torchvision pads all to the largest, and what it finds depends on the neighbours
        return tuple(_found(detector, one, score, mask, wanted) for one in picture)
    return _found(detector, picture, score, mask, wanted)


def _found(detector: Detector, picture: Image.Image, score: float, mask: float, wanted: Tensor | None) -> Foreground:
    upright = read_image(picture)
    seen = upright.copy()
    seen.thumbnail(
        (MOST, MOST)
    )  # the detector would shrink it too, but draws each object's mask at the size it is given
    made = _united(_detect(detector, seen, score), detector, score, mask, wanted)
    return replace(made, mask=made.mask.resize(upright.size, Image.Resampling.NEAREST))


def _detect(detector: Detector, picture: Image.Image, score: float) -> Mapping[str, Tensor]:
    """boxes [N, 4], labels [N], scores [N], masks [N, 1, rows, columns] on the upright picture."""
    from torchvision.transforms.functional import pil_to_tensor

    pixels = pil_to_tensor(picture).to(detector.device).float().div(255)  # the module normalises
    with torch.no_grad(), _answering_from(detector.module, score):
        (found,) = detector.module([pixels])
    result: Mapping[str, Tensor] = found
    return result


def _united(
    found: Mapping[str, Tensor], detector: Detector, score: float, mask: float, wanted: Tensor | None
) -> Foreground:
    keep = found["scores"] >= score
    if wanted is not None:
        keep &= torch.isin(found["labels"], wanted)
    union = (found["masks"][keep, 0] >= mask).any(0)  # [rows, columns]; no object at all gives False
    scores, order = found["scores"][keep].sort(descending=True, stable=True)
    names = [detector.categories[label] for label in found["labels"][keep][order].tolist()]
    picture = Image.fromarray(union.cpu().numpy().astype(np.uint8) * 255)
    return Foreground(picture, tuple(zip(names, scores.tolist(), strict=True)))


@contextmanager
def _answering_from(module: nn.Module, score: float) -> Iterator[None]:
    """Ask for objects from this score on only: each costs a mask of the picture's size, and torchvision's own limit
    (0.05) would hide what a lower one asks for. It wants more than its limit, so ours is a little lower; weaker
    objects never suppress stronger ones, hence the others stay as they are.
    """
    heads: Any = module.roi_heads
    before = heads.score_thresh
    heads.score_thresh = score - 1e-6
    try:
        yield
    finally:
        heads.score_thresh = before


def _labels(detector: Detector, classes: str | Collection[str] | None) -> Tensor | None:
    """Names -> label numbers; None is every class."""
    if classes is None:
        return None
    names = [classes] if isinstance(classes, str) else list(classes)
    known = [name for name in detector.categories if name not in _NAMELESS]
    if not names:
        raise BadInput("classes names no class, so nothing could be foreground; leave it out for all of COCO's.")
    for name in names:
        if name not in known:
            raise UnknownName(
                f"COCO has no class '{name}'.{did_you_mean(name, known)} Its 80 classes are "
                f"{', '.join(known[:4])}, … {known[-1]}; leave classes out for all."
            )
    return torch.tensor([detector.categories.index(name) for name in names], device=detector.device)
