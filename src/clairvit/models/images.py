"""Images: from paths, pictures, arrays and tensors to one batch of pixels, in the form the model was trained on."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from clairvit.errors import BadInput, ClairWarning, did_you_mean
from clairvit.models.folders import as_path, files_below, refuse_url, stands_for_many
from clairvit.models.folders import find_images as find_images
from clairvit.models.model import Model, Preprocess, check_materialised

ImageLike = str | Path | Image.Image | NDArray[Any] | Tensor
DEMO = "demo"
ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MOST_PIXELS = 100_000_000  # of a resized image; only absurdly narrow ones come near


@dataclass(frozen=True, eq=False)
class Batch:
    """What the model sees. `single`: one image was given, not a list of one, so a list of targets is for that image."""

    pixels: Tensor  # [B, 3, H, W], normalised, on the model's device and in its dtype
    names: tuple[str, ...]
    single: bool = False
    notes: tuple[str, ...] = ()  # what was assumed to preprocess them, and what looks wrong

    def __len__(self) -> int:
        return len(self.names)


def prepare(images: ImageLike | Batch | Sequence[ImageLike], model: Model) -> Batch:
    """A path, folder, pattern, PIL image, uint8 array, a list of these, or a float tensor that is preprocessed."""
    check_materialised(model.module, model.name)
    if isinstance(images, Batch):
        return replace(images, pixels=images.pixels.to(model.device, model.dtype))
    whole = _whole_batch(images)
    if whole is not None:
        notes = _check_tensor(whole, "", model)
        names = tuple(f"image {i + 1}" for i in range(len(whole)))
        single = isinstance(images, Tensor) and images.ndim == 3
        return Batch(whole.detach().to(model.device, model.dtype), names, single, notes)
    items, single = expanded(images)
    notes = model.assumptions if any(not is_preprocessed(item) for item in items) else ()
    pixels: list[Tensor] = []
    for i, item in enumerate(items):
        seen, more = _pixels(item, model, "" if single else f" (image {i + 1})")
        pixels.append(seen)
        notes = (*notes, *more)
    shapes = sorted({tuple(p.shape[-2:]) for p in pixels})
    if len(shapes) > 1:
        raise BadInput(
            f"The tensors in one batch have different sizes: {shapes}; make them equal or explain one by one."
        )
    names = tuple(name_of(item, i) for i, item in enumerate(items))
    return Batch(torch.stack(pixels).to(model.device, model.dtype), names, single, notes)


def expanded(images: Any) -> tuple[list[Any], bool]:
    """Return the images one by one, folders and patterns by their files, and whether it is a single image."""
    from clairvit.models.coerce import LabelledImages, as_images

    images = as_images(images)
    several = isinstance(images, list | tuple | LabelledImages) or getattr(images, "ndim", 0) == 4
    given: list[Any] = list(images) if several else [images]
    if not given:
        raise BadInput("No images were given; expected at least one: a path, a PIL image, a uint8 array or a tensor.")
    items: list[Any] = []
    for item in given:
        many = isinstance(item, str | Path) and stands_for_many(item)
        items += find_images(item) if many else [item]
        several = several or many
    return items, not several


def open_image(source: Any, **options: Any) -> Image.Image:
    """Return Pillow's lazily opened image, without its warning about size.

    Pillow warns above 89 million pixels, which cameras of phones reach, and refuses from twice as many on, which
    `read_image` says in our words. `warnings.catch_warnings` would make the process forget which warnings were shown.
    """
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    ignore = ("ignore", None, Image.DecompressionBombWarning, None, 0)
    filters.insert(0, ignore)
    try:
        return Image.open(source, **options)
    finally:
        filters.remove(ignore)


def read_image(source: str | Path | Image.Image | NDArray[Any]) -> Image.Image:
    """Any picture as an upright 8-bit RGB image; transparency becomes white. "demo" is scikit-image's cat."""
    if isinstance(source, Image.Image):
        return _rgb(source, "the PIL image")
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if not isinstance(source, str | Path):
        raise BadInput(
            f"An image was given as {type(source).__name__}; expected a path, a PIL image, a uint8 array [H, W, 3] or "
            "a preprocessed float tensor [3, H, W]."
        )
    refuse_url(source)
    path = as_path(source)
    if str(source) == DEMO and not path.exists():
        from skimage import data

        return Image.fromarray(data.chelsea())
    check_file(path)
    try:
        with open_image(path) as image:
            return _rgb(image, f"'{path}'")
    except BadInput:  # a ValueError too, and in our words already
        raise
    except Image.DecompressionBombError as error:
        raise BadInput(
            f"'{path}' is too large to decode safely ({error}); make a smaller copy first, for instance with "
            f"ImageMagick: convert '{path.name}' -resize 2000x2000 small.png."
        ) from error
    except UnidentifiedImageError as error:
        raise BadInput(
            f"'{path}' is not an image, whatever its name says (it starts with {_first_bytes(path)!r}); expected JPEG, "
            "PNG, WebP, TIFF, GIF or BMP."
        ) from error
    except OSError as error:
        raise BadInput(f"'{path}' cannot be opened ({error.strerror or error}); give an image you may read.") from error
    except (ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, struct.error) as error:  # by its header
        raise BadInput(f"'{path}' is damaged ({error}); expected a whole image: save or download it again.") from error


def to_pixels(image: Image.Image, how: Preprocess) -> Tensor:
    """RGB image -> [3, rows, columns], exactly as timm and torchvision do it for the same numbers."""
    from torchvision.transforms import functional as transform

    mean, std = torch.tensor(how.mean), torch.tensor(how.std)
    pixels: Tensor = transform.pil_to_tensor(framed(image, how, how.interpolation)).float().div(255)
    return (pixels - mean[:, None, None]) / std[:, None, None]


def framed(image: Image.Image, how: Preprocess, interpolation: str) -> Image.Image:
    """The part of a picture that the model sees, at the size at which it sees it."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as transform

    size = _resized(image.size, how)
    if size[0] * size[1] > _MOST_PIXELS:
        raise BadInput(
            f"An image of {image.width} x {image.height} pixels is too narrow: resized for the model it would be "
            f"{size[1]} x {size[0]}; crop it first."
        )
    resized = transform.resize(image, list(size), InterpolationMode(interpolation))
    cut: Image.Image = transform.center_crop(resized, list(how.size))
    return cut


def _resized(size: tuple[int, int], how: Preprocess) -> tuple[int, int]:
    """(columns, rows) of a picture -> (rows, columns) after the resize, rounded as timm and torchvision round."""
    columns, rows = size
    box = how.size if how.resize is None else how.resize
    if not isinstance(box, int) and not how.keep_ratio:
        return box
    if not isinstance(box, int) and box[0] != box[1]:
        ratio = min(rows / box[0], columns / box[1])
        return round(rows / ratio), round(columns / ratio)
    short = box if isinstance(box, int) else box[0]
    if rows < columns:
        return short, int(short * columns / rows)
    return int(short * rows / columns), short


def is_preprocessed(item: Any) -> bool:
    """Return whether an image is a float tensor, which is taken as it is."""
    return isinstance(item, Tensor) and item.dtype != torch.uint8


def _pixels(item: Any, model: Model, where: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return [3, H, W] as the model takes it, and notes."""
    if is_preprocessed(item):
        if item.ndim != 3:
            raise BadInput(f"A tensor in the list{where} has shape {list(item.shape)}; expected [3, H, W].")
        return item.detach(), _check_tensor(item[None], where, model)
    if isinstance(item, Tensor):
        if item.ndim != 3 or item.shape[0] != 3:
            raise BadInput(f"A uint8 tensor{where} has shape {list(item.shape)}; expected [3, H, W].")
        _check_storage(item, where)
        item = item.detach().cpu().permute(1, 2, 0).numpy()
    return to_pixels(read_image(item), model.preprocess), ()


def _whole_batch(images: Any) -> Tensor | None:
    """A preprocessed tensor as [B, 3, H, W]; None for what has to be preprocessed here."""
    if not isinstance(images, Tensor):
        return None
    if images.ndim not in (3, 4) or images.shape[-3] != 3:
        hint = "; move the channels first: .permute(2, 0, 1)" if images.ndim >= 3 and images.shape[-1] == 3 else ""
        raise BadInput(f"The image tensor has shape {list(images.shape)}; expected [B, 3, H, W] or [3, H, W]{hint}.")
    if images.dtype == torch.uint8:
        return None  # raw pixels, so they go the way of every picture
    return images if images.ndim == 4 else images[None]


def _check_tensor(pixels: Tensor, where: str, model: Model) -> tuple[str, ...]:
    """Refuse all but finite floats [B, 3, H, W]; return a note, also a warning, if they do not look normalised."""
    _check_storage(pixels, where)
    if pixels.shape[1] != 3 or pixels.numel() == 0:
        raise BadInput(
            f"The image tensor{where} has shape {list(pixels.shape)}; expected [B, 3, H, W], none of them 0."
        )
    if not pixels.is_floating_point():
        raise BadInput(
            f"The image tensor{where} has dtype {pixels.dtype}; expected floats that are already normalised, or uint8 "
            "pixels (0..255), which are normalised here."
        )
    finite = pixels.detach().isfinite().flatten(1).all(1)
    if not bool(finite.all()):
        bad = [i + 1 for i in range(len(finite)) if not finite[i]]
        at = where or f" (image {', '.join(map(str, bad))} of {len(finite)})"
        raise BadInput(
            f"The image tensor has NaN or infinite values{at}; expected finite numbers: check your transform."
        )
    note = _not_normalised(float(pixels.detach().amin()), float(pixels.detach().amax()), where, model.preprocess)
    if note:
        warnings.warn(note, ClairWarning, stacklevel=4)
    return (note,) if note else ()


def _check_storage(tensor: Tensor, where: str) -> None:
    """Refuse tensors whose values are not there one by one: sparse, quantised, or on the meta device."""
    kind = "has no values (device meta)" if tensor.is_meta else "is quantised" if tensor.is_quantized else "is sparse"
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        raise BadInput(f"The image tensor{where} {kind}; expected an ordinary tensor of floats or uint8 pixels.")


def _not_normalised(low: float, high: float, where: str, preprocess: Preprocess) -> str:
    """Return what is odd about the range of a float tensor; '' if it can be (x - mean) / std of a picture."""
    if max(-low, high) > 50:  # normalised values stay within a few units of 0
        return (
            f"The image tensor{where} has values up to {max(-low, high):.0f}, so it does not look normalised; pass "
            "uint8 pixels or (x / 255 - mean) / std."
        )
    # in 0..1 and over more than half of it, while (0 - mean) / std of a black pixel is negative: a normalised photo has
    # such a range only if all of it is bright and has little contrast
    if low >= 0 and high <= 1 and high - low > 0.5 and max(preprocess.mean) > 0:
        mean, std = ([round(value, 4) for value in values] for values in (preprocess.mean, preprocess.std))
        return (
            f"The image tensor{where} has values from {low:.2g} to {high:.2g}, which look like pixels in 0..1 that "
            "were not normalised, and float tensors are taken as they are; pass a PIL image or a uint8 array, or "
            f"(x - mean) / std with mean {mean} and std {std}."
        )
    return ""


def name_of(item: Any, index: int) -> str:
    """What an image is called: its file, or its place."""
    if isinstance(item, str | Path):
        return str(item)
    return str(getattr(item, "filename", "") or f"image {index + 1}")


def check_file(path: Path) -> None:
    """Refuse a path at which there is no file, or a folder; "demo" needs none."""
    if str(path) == DEMO and not path.exists():
        return
    if path.is_dir():
        inside = files_below(path)
        advice = f"give one file in it, such as '{inside[0]}'" if inside else "give the path of an image"
        raise BadInput(f"'{path}' is a folder where an image was expected; {advice}.")
    if not path.exists():
        folder = path.parent
        near = did_you_mean(path.name, [p.name for p in folder.iterdir() if p.is_file()]) if folder.is_dir() else ""
        missing = "" if folder.is_dir() else f" (there is no folder '{folder}')"
        raise BadInput(
            f"There is no image '{path}'{missing}.{near} Give the path of an image, or 'demo' for the built-in cat."
        )


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(12)


def _from_array(array: NDArray[Any]) -> Image.Image:
    grey_or_colour = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))
    if array.dtype != np.uint8 or not grey_or_colour or array.size == 0:
        raise BadInput(
            f"The image array has shape {list(array.shape)} and dtype {array.dtype}; expected uint8 [H, W, 3] or "
            f"[H, W]{_array_advice(array, grey_or_colour)}."
        )
    return _rgb(Image.fromarray(array[..., 0] if array.shape[-1] == 1 and array.ndim == 3 else array), "the array")


def _array_advice(array: NDArray[Any], grey_or_colour: bool) -> str:
    """Return the expression that makes a picture of the array `a`, by its shape and the range of its values."""
    if array.size == 0:
        return ""
    if not grey_or_colour:
        first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        return ": move the channels last, a.transpose(1, 2, 0)" if first else ""
    if array.dtype.kind not in "biuf":
        return ", and these are no real numbers"
    low, high = float(array.min()), float(array.max())
    if array.dtype == np.bool_:
        return ": convert it, a.astype('uint8') * 255"
    if not (math.isfinite(low) and math.isfinite(high)):
        return " of finite numbers"
    if array.dtype.kind == "f" and low >= 0 and high <= 1:
        return ": multiply by 255 and convert, (a * 255).round().astype('uint8')"
    if low >= 0 and high <= 255:
        return ": convert it, a.round().astype('uint8')"
    if array.dtype == np.uint16:
        return ": scale and convert it, (a // 257).astype('uint8')"
    if array.dtype.kind == "f" and array.ndim == 3 and array.shape[-1] == 3 and max(-low, high) <= 50:
        return "; if it is normalised already, pass it as a tensor: torch.from_numpy(a).permute(2, 0, 1)"
    return f" with values in 0..255, and these are from {low:.4g} to {high:.4g}"


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """Decode, set upright, and bring every colour mode to 8-bit RGB."""
    if 0 in image.size:
        raise BadInput(f"{name} is {image.width} x {image.height} pixels; expected at least one pixel.")
    try:
        image.load()
        return _eight_bit_rgb(upright(image, name), name)
    except BadInput:
        raise
    except Exception as error:  # Pillow's decoders raise a dozen kinds on broken bytes
        raise BadInput(
            f"{name} is damaged or of a kind that cannot be read ({error}); expected a whole image: save or download "
            "it again."
        ) from error


def upright(image: Image.Image, name: str) -> Image.Image:
    """Cameras store the picture as the sensor lay and note the rotation in EXIF."""
    try:
        turn = _UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except (SyntaxError, struct.error, ValueError, TypeError) as error:
        warnings.warn(f"The EXIF data of {name} cannot be read ({error}); used as it is.", ClairWarning, stacklevel=4)
        turn = None
    return image if turn is None else image.transpose(turn)


def _eight_bit_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode == "RGB":
        return image.copy()
    if image.mode == "F" or image.mode.startswith("I"):  # 16- and 32-bit grey: convert() would clip, not scale
        return Image.fromarray(_eight_bit(np.asarray(image), image.mode, name)).convert("RGB")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return image.convert("RGB")


def _eight_bit(grey: NDArray[Any], mode: str, name: str) -> NDArray[np.uint8]:
    """By the range that the values are in: 0..1, 0..255, 0..65535; anything else is stretched from its own extremes."""
    values = grey.astype(np.float64)
    if not np.isfinite(values).all():
        raise BadInput(f"{name} has NaN or infinite pixels; expected finite ones.")
    low, high = values.min(), values.max()
    if mode.startswith("I;16"):
        top = 65535.0
    elif low >= 0:
        top = next((t for t in (1.0, 255.0, 65535.0) if high <= t and (t > 1 or mode == "F")), high)
    else:
        values, top = values - low, (high - low) or 1.0
    return np.round(values * (255 / top)).astype(np.uint8)
