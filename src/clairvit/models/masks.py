"""Masks: where the object is, cut and resized as the model's preprocessing cuts and resizes the image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.models.images import framed, upright
from clairvit.models.model import Preprocess

_SAME_SHAPE = 0.02  # how far the ratios of a mask's and its image's sides may lie apart: they are rounded to pixels


def read_mask(path: Path, size: tuple[int, int]) -> Image.Image:
    """A picture of 0 and 255, upright: every pixel that is not zero (in a palette: not the first colour) is object.

    `size` (columns, rows) is the image's: a mask may be smaller or larger, but has to have its shape.
    """
    try:
        with Image.open(path) as image:
            image.load()
            picture = upright(image, f"'{path}'")
            values = np.asarray(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadInput(f"The mask '{path}' cannot be read ({error}); expected a whole PNG.") from error
    if values.ndim == 3:
        colours = values.shape[2] - (picture.mode in ("LA", "La", "RGBA", "RGBa"))  # opacity says nothing
        values = values[..., :colours].max(-1)
    mask = Image.fromarray(((values != 0) * 255).astype(np.uint8))
    if abs((mask.width * size[1]) / (mask.height * size[0]) - 1) > _SAME_SHAPE:
        raise BadInput(
            f"The mask '{path}' is {mask.width} × {mask.height} pixels and its image {size[0]} × {size[1]}; expected "
            "a mask of the whole image, of the same shape."
        )
    return mask


def prepare_mask(mask: Image.Image, how: Preprocess) -> Tensor:
    """bool [rows, columns] as the model sees it: the image's resize and crop, each pixel the nearest one's."""
    return torch.from_numpy(np.array(framed(mask, how, "nearest"))) > 0
