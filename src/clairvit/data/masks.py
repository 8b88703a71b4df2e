"""Masks: where the object is, resized and cropped as the image is by the model's preprocessing."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from clairvit.errors import Argument, BadInput, ClairWarning, Message
from clairvit.models.image_files import find_images, load_pixels, open_image, upright
from clairvit.models.images import resize_and_crop, visible_box
from clairvit.models.preprocess import Preprocess

MaskKind = Literal["nonzero", "trimap", "voc"]
MASK_KINDS: tuple[str, ...] = get_args(MaskKind)
OBJECT, VOID, BACKGROUND = 255, 128, 0  # values of a mask between reading and resizing
TRIMAPS = Argument("mask_kind", "trimap")
TRIMAP = (1, 2, 3)  # object, background, border
THREE_VALUED = ((BACKGROUND, VOID, OBJECT), (BACKGROUND, VOID - 1, OBJECT), (0, 1, 2))  # masks that may also be trimaps
_RATIO_TOLERANCE = 0.02  # of the side ratios of a mask and its image, which are rounded to pixels


def read_mask(
    source: str | Path | Image.Image | NDArray[Any], size: tuple[int, int], kind: str = "nonzero"
) -> Image.Image:
    """Return a mask as an upright picture of 0 (background), 128 (void: not evaluated) and 255 (object).

    nonzero   every pixel that is not zero (in a palette: not the first colour) is object
    trimap    1 is object, 2 background, 3 the border between them, which is void (Oxford-IIIT Pet); where there are
              0, 128 and 255: 255 is object, 0 background, 128 void (matting)
    voc       0 is background, 255 void, all else object (Pascal VOC)

    `size` is (columns, rows) of the image: a mask may be smaller or larger, with the same ratio of sides.
    """
    check_kind(kind)
    name = f"The mask '{source}'" if isinstance(source, str | Path) else "A mask"
    values = _values(source, name)
    is_matte = bool(np.isin(values, (BACKGROUND, VOID - 1, VOID, OBJECT)).all())
    if kind == "trimap" and not (is_matte or np.isin(values, TRIMAP).all()):
        raise BadInput(
            f"{name} has values {_format_values(values)}; expected a trimap of 1, 2 and 3, or of 0, 128 and 255. Leave "
            "out ",
            TRIMAPS,
            "?",
        )
    if kind == "nonzero":
        _check_two_valued(values, name)
    if kind == "trimap" and is_matte:
        mask_values = np.where(values == VOID - 1, VOID, values)
    elif kind == "trimap":
        mask_values = np.select([values == 1, values == 3], [OBJECT, VOID], BACKGROUND)
    elif kind == "voc":
        mask_values = np.select([values == 255, values != 0], [VOID, OBJECT], BACKGROUND)
    else:
        mask_values = np.where(values != 0, OBJECT, BACKGROUND)
    mask = Image.fromarray(mask_values.astype(np.uint8))
    if abs((mask.width * size[1]) / (mask.height * size[0]) - 1) > _RATIO_TOLERANCE:
        raise BadInput(
            f"{name} is {mask.width} × {mask.height} pixels and its image {size[0]} × {size[1]}; expected a mask of "
            "the whole image, of the same shape."
        )
    return mask


def _check_two_valued(values: NDArray[Any], name: str) -> None:
    """Raise BadInput for a trimap that would be read as object and background; warn of three values that may be one.

    With 1, 2, 3 and no 0 every pixel would be object, and every map would be right. 0, 1, 2 and 0, 128, 255 may also
    be two objects.
    """
    present = tuple(np.unique(values).tolist()) if values.dtype != bool else (0, 1)
    if len(present) > 1 and set(present) <= set(TRIMAP):
        raise BadInput(
            f"{name} has the values {_format_values(values)} and no 0: a trimap (1 object, 2 background, 3 border), "
            "of which every pixel would count as object. Pass ",
            TRIMAPS,
            " to read it as one.",
        )
    if present in THREE_VALUED:
        advice = "" if OBJECT in present else " and store them as 1 object, 2 background, 3 border"
        seen = f"Masks have the three values {_format_values(values)}; all but 0 count as object. If they are trimaps, "
        warnings.warn(ClairWarning(Message(seen, "pass ", TRIMAPS, f"{advice}.")), stacklevel=3)


def masks_for(images: Sequence[Path], folder: Path, root: Path) -> tuple[dict[Path, Path], list[Path]]:
    """Return the mask file per image, and the masks without an image.

    The mask of ROOT/cat/1.jpg is FOLDER/cat/1.png or FOLDER/1.png. Some images may have none, but not all; no file may
    be the mask of several images.
    """
    if not folder.is_dir():
        raise BadInput(f"masks={folder} is not a folder; expected one with 'cat.png' for the image 'cat.jpg'.")
    image_files = {image.resolve() for image in images}  # masks may be in the folder of the images
    files = {
        file.relative_to(folder).with_suffix(""): file
        for file in find_images(folder)
        if file.resolve() not in image_files
    }
    stems = Counter(image.stem for image in images)
    masks: dict[Path, Path] = {}
    for image in images:
        nested, flat = image.relative_to(root).with_suffix(""), Path(image.stem)
        if nested in files:
            masks[image] = files[nested]
        elif flat in files and stems[image.stem] > 1:
            raise BadInput(
                f"{stems[image.stem]} images are called '{image.stem}', and '{files[flat]}' could be the mask of any "
                f"of them; expected masks in folders like the images': '{folder / nested}.png'."
            )
        elif flat in files:
            masks[image] = files[flat]
    if not masks:
        raise BadInput(
            f"None of the {len(files)} masks in '{folder}' is called like one of the {len(images)} images; expected "
            f"'{images[0].stem}.png' for '{images[0].name}'."
        )
    used = set(masks.values())
    return masks, [file for file in files.values() if file not in used]


def masks_in(folder: Path, images: Sequence[Path]) -> list[Path | None]:
    """Return the mask of each image; subfolders of the images have masks in subfolders of the same names."""
    paths = [image.absolute() for image in images]
    masks, _ = masks_for(paths, folder, Path(os.path.commonpath([path.parent for path in paths])))
    return [masks.get(path) for path in paths]


def check_kind(kind: str) -> None:
    """Raise BadInput unless the kind is one of `MASK_KINDS`."""
    if kind not in MASK_KINDS:
        raise BadInput(Argument("mask_kind", kind), f" was given; expected one of {', '.join(MASK_KINDS)}.")


def _values(source: str | Path | Image.Image | NDArray[Any], name: str) -> NDArray[Any]:
    """Return the values of a mask, [rows, columns]; of colours the largest channel."""
    if isinstance(source, np.ndarray):
        if source.ndim != 2:
            raise BadInput(f"{name} is an array of shape {list(source.shape)}; expected [rows, columns].")
        return source
    picture = upright(decode_mask(source, name), "the mask" if isinstance(source, Image.Image) else f"'{source}'")
    values: NDArray[Any] = np.asarray(picture)
    if values.ndim == 3:
        channels = values.shape[2] - (picture.mode in ("LA", "La", "RGBA", "RGBa"))  # without alpha
        values = values[..., :channels].max(-1)
    return values


def decode_mask(source: str | Path | Image.Image, name: str) -> Image.Image:
    """Return the picture of a mask as it is stored, decoded; raise BadInput with its `name` if it cannot be read."""
    try:
        if isinstance(source, Image.Image):
            load_pixels(source)
            return source
        with open_image(source) as image:
            load_pixels(image)
            return image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadInput(f"{name} cannot be read ({error}); expected a whole PNG.") from error


def _format_values(values: NDArray[Any]) -> str:
    """Return "0, 1, 2, …"."""
    unique = np.unique(values)
    return ", ".join(str(value) for value in unique[:5]) + (", …" if len(unique) > 5 else "")


def prepare_mask(mask: Image.Image, preprocess: Preprocess) -> tuple[Tensor, Tensor]:
    """Return object and void, bool [H, W], after the resize and crop of the image, with nearest interpolation.

    With `preprocess.mask_grid`, what the model sees of the mask is resized to that grid (bicubic, cut at a half), and
    each pixel has the value of its patch.
    """
    if preprocess.mask_grid is not None:
        return _prepare_on_patches(mask, preprocess, preprocess.mask_grid)
    values = torch.from_numpy(np.array(resize_and_crop(mask, preprocess, "nearest")))
    return values == OBJECT, values == VOID


def _prepare_on_patches(mask: Image.Image, preprocess: Preprocess, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return object and void, bool [H, W], equal on each patch of the grid.

    A patch is void by half or more of it, and else object by half or more of what is not void.
    """
    values, box = np.asarray(mask), visible_box(mask.size, preprocess)

    def share(pixels: NDArray[np.bool_]) -> NDArray[np.int64]:
        picture = Image.fromarray(np.where(pixels, OBJECT, BACKGROUND).astype(np.uint8))
        return np.asarray(picture.resize(grid[::-1], Image.Resampling.BICUBIC, box), dtype=np.int64)  # 0 … 255

    def enlarged(patches: NDArray[np.bool_]) -> Tensor:
        picture = torch.from_numpy(patches)[None, None].float()
        return F.interpolate(picture, preprocess.size, mode="nearest-exact")[0, 0] > 0

    objects, void = share(values == OBJECT), share(values == VOID)
    is_void = 2 * void > OBJECT
    return enlarged((2 * objects > OBJECT - void) & ~is_void), enlarged(is_void)
