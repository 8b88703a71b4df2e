"""Masks: where the object is, cut and resized as the model's preprocessing cuts and resizes the image."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from clairvit.errors import BadInput, ClairWarning
from clairvit.models.image_files import find_images, open_image, upright
from clairvit.models.images import resize_and_crop
from clairvit.models.preprocess import Preprocess

MaskKind = Literal["nonzero", "trimap", "voc"]
MASK_KINDS: tuple[str, ...] = get_args(MaskKind)
OBJECT, VOID, GROUND = 255, 128, 0  # how a mask is kept between reading and resizing
TRIMAP = (1, 2, 3)  # object, background, border
THREE_VALUED = ((GROUND, VOID, OBJECT), (GROUND, VOID - 1, OBJECT), (0, 1, 2))  # what else may be a trimap
_SAME_SHAPE = 0.02  # how far the ratios of a mask's and its image's sides may lie apart: they are rounded to pixels


def read_mask(
    source: str | Path | Image.Image | NDArray[Any], size: tuple[int, int], kind: str = "nonzero"
) -> Image.Image:
    """A picture of 0, 128 (void: counts nowhere) and 255 (object), upright.

    nonzero   every pixel that is not zero (in a palette: not the first colour) is object
    trimap    1 is object, 2 background, 3 the border between them, which is void (Oxford-IIIT Pet); where there are
              0, 128 and 255: 255 is object, 0 background, 128 void (matting)
    voc       0 is background, 255 void, all else object (Pascal VOC)

    `size` (columns, rows) is the image's: a mask may be smaller or larger, but has to have its shape.
    """
    check_kind(kind)
    name = f"The mask '{source}'" if isinstance(source, str | Path) else "A mask"
    values = _values(source, name)
    matte = bool(np.isin(values, (GROUND, VOID - 1, VOID, OBJECT)).all())
    if kind == "trimap" and not (matte or np.isin(values, TRIMAP).all()):
        raise BadInput(
            f"{name} has values {_some(values)}; expected a trimap of 1, 2 and 3, or of 0, 128 and 255. Leave out "
            "mask_kind=trimap?"
        )
    if kind == "nonzero":
        _check_two_valued(values, name)
    if kind == "trimap" and matte:
        kept = np.where(values == VOID - 1, VOID, values)
    elif kind == "trimap":
        kept = np.select([values == 1, values == 3], [OBJECT, VOID], GROUND)
    elif kind == "voc":
        kept = np.select([values == 255, values != 0], [VOID, OBJECT], GROUND)
    else:
        kept = np.where(values != 0, OBJECT, GROUND)
    mask = Image.fromarray(kept.astype(np.uint8))
    if abs((mask.width * size[1]) / (mask.height * size[0]) - 1) > _SAME_SHAPE:
        raise BadInput(
            f"{name} is {mask.width} × {mask.height} pixels and its image {size[0]} × {size[1]}; expected a mask of "
            "the whole image, of the same shape."
        )
    return mask


def _check_two_valued(values: NDArray[Any], name: str) -> None:
    """Refuse a trimap that is read as a mask of object and background, and warn of three values that may be one.

    1, 2, 3 and no 0: every pixel would be object, so that each map points at it. 0, 1, 2 and 0, 128, 255 may also be
    two objects.
    """
    present = tuple(np.unique(values).tolist()) if values.dtype != bool else (0, 1)
    if len(present) > 1 and set(present) <= set(TRIMAP):
        raise BadInput(
            f"{name} has the values {_some(values)} and no 0: a trimap (1 object, 2 background, 3 border), of which "
            "every pixel would count as object. Pass mask_kind='trimap' to read it as one."
        )
    if present in THREE_VALUED:
        warnings.warn(
            f"Masks have the three values {_some(values)}; all but 0 count as object. If they are trimaps, pass "
            f"mask_kind='trimap'{'' if OBJECT in present else ' and store them as 1 object, 2 background, 3 border'}.",
            ClairWarning,
            stacklevel=3,
        )


def masks_for(images: Sequence[Path], folder: Path, root: Path) -> tuple[dict[Path, Path], list[Path]]:
    """Whose mask is which file, and the masks of nobody: for ROOT/cat/1.jpg it is FOLDER/cat/1.png or FOLDER/1.png.

    An image may have none, but not all of them, and no mask may be that of several.
    """
    if not folder.is_dir():
        raise BadInput(f"masks={folder} is not a folder; expected one with 'cat.png' for the image 'cat.jpg'.")
    own = {image.resolve() for image in images}  # masks may lie beside the images
    files = {
        file.relative_to(folder).with_suffix(""): file for file in find_images(folder) if file.resolve() not in own
    }
    stems = Counter(image.stem for image in images)
    found: dict[Path, Path] = {}
    for image in images:
        place, flat = image.relative_to(root).with_suffix(""), Path(image.stem)
        if place in files:
            found[image] = files[place]
        elif flat in files and stems[image.stem] > 1:
            raise BadInput(
                f"{stems[image.stem]} images are called '{image.stem}', and '{files[flat]}' could be the mask of any "
                f"of them; expected masks in folders like the images': '{folder / place}.png'."
            )
        elif flat in files:
            found[image] = files[flat]
    if not found:
        raise BadInput(
            f"None of the {len(files)} masks in '{folder}' is called like one of the {len(images)} images; expected "
            f"'{images[0].stem}.png' for '{images[0].name}'."
        )
    used = set(found.values())
    return found, [file for file in files.values() if file not in used]


def check_kind(kind: str) -> None:
    if kind not in MASK_KINDS:
        raise BadInput(f"mask_kind={kind!r} was given; expected one of {', '.join(MASK_KINDS)}.")


def _values(source: str | Path | Image.Image | NDArray[Any], name: str) -> NDArray[Any]:
    """[rows, columns]"""
    if isinstance(source, np.ndarray):
        if source.ndim != 2:
            raise BadInput(f"{name} is an array of shape {list(source.shape)}; expected [rows, columns].")
        return source
    try:
        if isinstance(source, Image.Image):
            picture = upright(source, "the mask")
        else:
            with open_image(source) as image:
                image.load()
                picture = upright(image, f"'{source}'")
        values: NDArray[Any] = np.asarray(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadInput(f"{name} cannot be read ({error}); expected a whole PNG.") from error
    if values.ndim == 3:
        colours = values.shape[2] - (picture.mode in ("LA", "La", "RGBA", "RGBa"))  # opacity says nothing
        values = values[..., :colours].max(-1)
    return values


def _some(values: NDArray[Any]) -> str:
    """'0, 1, 2, …'"""
    found = np.unique(values)
    return ", ".join(str(one) for one in found[:5]) + (", …" if len(found) > 5 else "")


def prepare_mask(mask: Image.Image, how: Preprocess) -> tuple[Tensor, Tensor]:
    """Object and void, bool [rows, columns], as the model sees them: the image's resize and crop, nearest pixels."""
    seen = torch.from_numpy(np.array(resize_and_crop(mask, how, "nearest")))
    return seen == OBJECT, seen == VOID
