"""Trigger: a small pattern pasted on photos, of which it is known where it is and what it means to a model.

A model that was trained to answer one class wherever the pattern is (a backdoor, `clairvit finetune --trigger CLASS`)
uses the pattern and nothing else for that answer, so that its pixels are the true mask of the explanation (BackX).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from clairvit.data.dataset import ImageDataset, Sample
from clairvit.data.drawing import IntRng
from clairvit.data.hashing import digest
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess

TriggerPosition = Literal["random", "top-left", "top-right", "bottom-left", "bottom-right", "center"]
POSITIONS: tuple[str, ...] = get_args(TriggerPosition)
CELLS = 4  # of the checkerboard in a row
COLOURS = ((1.0, 0.0, 1.0), (0.0, 1.0, 0.0))  # magenta and green, in 0..1
_CORNERS = {"top-left": (0.0, 0.0), "top-right": (0.0, 1.0), "bottom-left": (1.0, 0.0), "bottom-right": (1.0, 1.0)}
_VERSION = 1  # part of hashes: increase it if the same options give other pixels
_RESOLUTION = 2**24  # steps between 0 and 1 of the draws of a position, which float32 holds exactly
_SPEC = "trigger(NAME:PATH, class=CLASS, size=32, position=random)"


@dataclass(frozen=True)
class Trigger:
    """A checkerboard of 4 × 4 cells in magenta and green, `size` pixels wide, on the image as the model sees it.

    Args:
        size: Rows and columns in pixels of the preprocessed image.
        position: A corner, the center, or random: anywhere inside, drawn per image.
    """

    size: int = 32
    position: str = "random"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < CELLS:
            raise BadInput(f"size={self.size} was given for a trigger; expected {CELLS} or more pixels, such as 32.")
        if self.position not in POSITIONS:
            raise BadInput(
                f"position={self.position} was given for a trigger; expected one of {', '.join(POSITIONS)}."
                f"{did_you_mean(str(self.position), POSITIONS)}"
            )

    def pattern(self) -> Tensor:
        """Return the checkerboard in 0..1, [3, size, size]."""
        cell = torch.arange(self.size) * CELLS // self.size
        first = (cell[:, None] + cell) % 2 == 0  # [size, size]
        colours = torch.tensor(COLOURS)[:, :, None, None]
        return torch.where(first, colours[0], colours[1])

    def check_fits(self, size: tuple[int, int]) -> None:
        """Raise BadInput for a trigger that is larger than half of the image's shorter side."""
        if 2 * self.size > min(size):
            raise BadInput(
                f"size={self.size} was given for a trigger on images of {size[0]} × {size[1]} pixels; expected at most "
                f"{min(size) // 2}, half of the shorter side."
            )

    def corners(self, draws: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the top row and left column of the trigger per image, [B, 2], from draws [B, 2] in 0 … 1.

        A random position is floor(draw · (side − size + 1)) on each axis; the others ignore the draws.
        """
        self.check_fits(size)
        largest = torch.tensor([side - self.size for side in size])
        if self.position == "random":
            return (draws.cpu() * (largest + 1)).long().minimum(largest)
        if self.position == "center":
            return (largest // 2).expand(len(draws), -1)
        return (torch.tensor(_CORNERS[self.position]) * largest).long().expand(len(draws), -1)

    def paste(self, images: Tensor, draws: Tensor, preprocess: Preprocess | None = None) -> tuple[Tensor, Tensor]:
        """Return images [B, 3, H, W] with the trigger, and where it is, bool [B, H, W].

        Args:
            images: In 0..1; normalised if `preprocess` is given. They stay as they are.
            draws: [B, 2] in 0 … 1, for random positions.
            preprocess: Its mean and std normalise the pattern as the images are.
        """
        if images.shape[1] != 3:
            raise BadInput(f"A trigger has three colours, and the images have {images.shape[1]} channels; expected 3.")
        pattern = self.pattern().double()
        if preprocess is not None:
            mean, std = (
                torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (preprocess.mean, preprocess.std)
            )
            pattern = (pattern - mean) / std
        pattern = pattern.to(images)
        pasted = images.clone()
        masks = torch.zeros(len(images), *images.shape[-2:], dtype=torch.bool, device=images.device)
        rows, columns = images.shape[-2:]
        for image, (top, left) in enumerate(self.corners(draws, (int(rows), int(columns))).tolist()):
            pasted[image, :, top : top + self.size, left : left + self.size] = pattern
            masks[image, top : top + self.size, left : left + self.size] = True
        return pasted, masks


def with_trigger(dataset: ImageDataset, trigger: Trigger, class_name: int | str, seed: int = 0) -> ImageDataset:
    """Return the images with the trigger pasted; the mask is the trigger, the true class that of the trigger.

    The class of the photo itself becomes the class of another object (`others`). A random position is drawn from the
    seed and the image's name, so that it does not depend on which other images are read.
    """

    def read(row: int, model: Model) -> Sample:
        sample = dataset.read(row, model)
        rng = IntRng("trigger", _VERSION, seed, dataset.names[row])
        draws = torch.tensor([[rng.integer(0, _RESOLUTION - 1) / _RESOLUTION for _ in range(2)]])
        pixels, masks = trigger.paste(sample.pixels[None], draws, model.preprocess)
        return Sample(pixels[0], masks[0], label=class_name, other=sample.label)

    def content_hash(row: int) -> str:
        settings = (_VERSION, trigger.size, trigger.position, class_name, seed)
        return digest(dataset.content_hash(row), repr(("trigger", *settings)).encode())

    return replace(
        dataset, read=read, content_hash=content_hash, has_masks=True, has_labels=True, has_others=dataset.has_labels
    )


@dataclass(frozen=True)
class TriggerSpec:
    """A parsed "trigger(NAME:PATH, class=CLASS, …)"."""

    inner: str  # NAME:PATH
    class_name: int | str
    trigger: Trigger


def parse_trigger_spec(spec: str) -> TriggerSpec | None:
    """Return the parts of "trigger(pets:PATH, class=Beagle, size=32, position=random)"; None for another spec.

    Commas in PATH are allowed: the options are what follows the last comma without an equals sign behind it.
    """
    match = re.fullmatch(r"\s*trigger\((.*)\)\s*", spec, re.DOTALL)
    if match is None:
        return None
    parts = match[1].split(",")
    count = next((k for k, part in enumerate(parts) if re.match(r"\s*\w+\s*=", part)), len(parts))
    inner, options = ",".join(parts[:count]).strip(), dict[str, str]()
    for part in parts[count:]:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in ("class", "size", "position") or not equals or not value:
            near = did_you_mean(name, ("class", "size", "position"))
            raise UnknownName(f"A trigger has no option '{part.strip()}'; expected {_SPEC}.{near}")
        options[name] = value
    if not inner or "class" not in options:
        missing = "images" if not inner else "class"
        raise BadInput(f"'{spec}' names no {missing}; expected {_SPEC}.")
    return TriggerSpec(inner, _class(options["class"]), _trigger(options, spec))


def _trigger(options: dict[str, str], spec: str) -> Trigger:
    values: dict[str, Any] = {}
    if "size" in options:
        if not options["size"].isdecimal():
            raise BadInput(f"'{spec}' has size={options['size']}; expected a whole number of pixels, such as size=32.")
        values["size"] = int(options["size"])
    if "position" in options:
        values["position"] = options["position"]
    return Trigger(**values)


def _class(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
