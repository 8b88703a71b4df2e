"""Images: paths, pictures, arrays and tensors as one batch of pixels, preprocessed as the model was trained."""

from __future__ import annotations

import glob
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from clairvit.errors import BadInput, ClairWarning, user_stacklevel
from clairvit.models.image_files import (
    Picture,
    as_path,
    find_images,
    read_picture,
    read_with_notes,
)
from clairvit.models.model import Model, check_traceable
from clairvit.models.preprocess import Preprocess
from clairvit.models.readout import unwrap_readout

ImageLike = str | Path | Image.Image | NDArray[Any] | Tensor
_MAX_PIXELS = 100_000_000  # of a resized image; only extremely narrow ones come near
MOST_NAMED = 5  # images in a note


@dataclass(frozen=True)
class UnusualRange:
    """The range of a float tensor that cannot be that of (x - mean) / std of a picture."""

    kind: Literal["large", "0..1"]
    low: float
    high: float
    row: int | None = None  # of the batch; None: the range of all of its images


@dataclass(frozen=True, eq=False)
class Batch:
    """Images as the model takes them."""

    pixels: Tensor  # [B, C, H, W], or clips [B, C, T, H, W], normalised, on the model's device and in its dtype
    names: tuple[str, ...]
    single: bool = False  # one image was given, not a list of one: a list of targets is for that image
    notes: tuple[str, ...] = ()  # preprocessing that was assumed, and values that look wrong
    unusual: tuple[UnusualRange, ...] = ()  # values that look wrong and are in no note yet

    def __len__(self) -> int:
        return len(self.names)


def to_device(pixels: Tensor, model: Model) -> Tensor:
    """Return pixels on the model's device and in its dtype.

    To a GPU they go through pinned memory and without waiting: the copy overlaps with what the GPU computes.
    """
    if model.device.type == "cuda" and pixels.device.type == "cpu":
        return pixels.pin_memory().to(model.device, non_blocking=True).to(model.dtype)
    return pixels.to(model.device, model.dtype)


def prepare(images: ImageLike | Batch | Sequence[ImageLike], model: Model, *, warn: bool = True) -> Batch:
    """Return images as one batch on the model's device.

    Args:
        images: A path, folder, pattern, PIL image, uint8 array or tensor, or a list of these, which are preprocessed
            here; or a float tensor [B, C, H, W] or [C, H, W], which is taken as preprocessed. For a model of clips
            as in `_prepare_clips`.
        model: Gives preprocessing, the number of channels C, device and dtype.
        warn: Note values that look wrong, and warn of them; False: that is done once for all parts (`unusual_notes`).

    Raises:
        BadInput: An image cannot be read, or a tensor has the wrong shape, type or values.
    """
    check_traceable(model.module, model.name)
    channels = model.preprocess.channels
    if isinstance(images, Batch):
        batch = replace(images, pixels=to_device(images.pixels, model))
    elif model.preprocess.frames is not None:
        batch = _prepare_clips(images, model)
    elif isinstance(images, Tensor) and (images.ndim not in (3, 4) or images.shape[-3] != channels):
        raise BadInput(
            f"The image tensor has shape {list(images.shape)}; expected [B, {channels}, H, W] or [{channels}, H, W]"
            f"{_shape_advice(images, channels)}."
        )
    elif isinstance(images, Tensor) and is_preprocessed(images):
        tensor = images if images.ndim == 4 else images[None]
        unusual = _check_tensor(tensor, "", model)
        names = tuple(f"image {i + 1}" for i in range(len(tensor)))
        shown = (model.preprocess.display_note,) if model.preprocess.display_note else ()
        batch = Batch(to_device(tensor.detach(), model), names, images.ndim == 3, shown, unusual)
    else:  # files, pictures, raw pixels
        items, single = list_images(images)
        batch = decode(items, model, single=single)
        batch = replace(batch, pixels=to_device(batch.pixels, model))
    if not warn or not batch.unusual:
        return batch
    if getattr(unwrap_readout(model.module), "takes_tokens", False):  # of a sub-network: any range is usual
        return replace(batch, unusual=())
    notes = unusual_notes([(item, batch.names) for item in batch.unusual], len(batch), model.preprocess)
    return replace(batch, notes=(*batch.notes, *notes), unusual=())


def decode(items: Sequence[Any], model: Model, *, single: bool = False) -> Batch:
    """Return images that are not clips as one batch on the CPU, in float32 where they are decoded here.

    It may be called in several threads; `prepare` moves the batch to the model's device.
    """
    shown = (model.preprocess.display_note,) if model.preprocess.display_note else ()
    notes = (*shown, *(model.assumptions if any(not is_preprocessed(item) for item in items) else ()))
    channels = model.preprocess.channels
    pixels: list[Tensor] = []
    unusual: list[UnusualRange] = []
    for i, item in enumerate(items):
        where = "" if single else f" (image {i + 1})"
        if is_preprocessed(item):
            if item.ndim != 3:
                raise BadInput(
                    f"A tensor in the list{where} has shape {list(item.shape)}; expected [{channels}, H, W]."
                )
            unusual += [replace(part, row=i) for part in _check_tensor(item[None], where, model)]
            pixels.append(item.detach())
            continue
        source = item
        if isinstance(item, Tensor):
            if item.ndim != 3 or item.shape[0] != channels:
                raise BadInput(f"A uint8 tensor{where} has shape {list(item.shape)}; expected [{channels}, H, W].")
            _check_storage(item, where)
            source = item.detach().cpu().permute(1, 2, 0).numpy()
        picture, reading_notes = read_with_notes(source, channels)
        pixels.append(to_pixels(picture, model.preprocess))
        notes = (*notes, *reading_notes)
    shapes = sorted({tuple(p.shape[-2:]) for p in pixels})
    if len(shapes) > 1:
        raise BadInput(
            f"The tensors in one batch have different sizes: {shapes}; make them equal or explain one by one."
        )
    names = tuple(image_name(item, i) for i, item in enumerate(items))
    return Batch(torch.stack(pixels), names, single, notes, tuple(unusual))


def _prepare_clips(images: Any, model: Model) -> Batch:
    """Return clips as one batch [B, C, T, H, W] on the model's device.

    Args:
        images: A float tensor [B, T, C, H, W] or [B, C, T, H, W], or one clip of it; a list of T frames (paths, PIL
            images, uint8 arrays), or a list of such lists.
        model: Gives preprocessing, channels and number of frames.
    """
    shown = (model.preprocess.display_note,) if model.preprocess.display_note else ()
    single = is_clip(images)
    several = images.ndim == 5 if isinstance(images, Tensor) else _is_list(images)
    clips = [images] if single or not several else list(images)
    pixels = [_clip_pixels(clip, model, f" (clip {i + 1})" if len(clips) > 1 else "") for i, clip in enumerate(clips)]
    if not pixels or len({tuple(clip.shape) for clip in pixels}) > 1:
        shapes = sorted({tuple(clip.shape) for clip in pixels})
        raise BadInput(f"The clips have shapes {shapes}; expected one or more of the same [C, T, H, W].")
    batch = torch.stack(pixels)
    names = tuple(f"clip {i + 1}" for i in range(len(batch)))
    raw = any(not is_preprocessed(clip) for clip in clips)
    notes = (*shown, *(model.assumptions if raw else ()))
    unusual = () if raw else _check_tensor(batch, "", model)
    return Batch(batch.to(model.device, model.dtype), names, single, notes, unusual)


def list_clips(images: Any, model: Model) -> Sequence[Any]:
    """Return clips one by one, as `prepare` takes them; tensors are checked and come with their frames first."""
    if is_clip(images):
        return [images]
    if isinstance(images, Batch | Tensor):
        return list(prepare(images, model).pixels.transpose(1, 2))
    return images if _is_list(images) else [images]


def _is_list(images: Any) -> bool:
    return isinstance(images, Sequence) and not isinstance(images, str)


def is_clip(images: Any) -> bool:
    """Return whether these are the frames of one clip: a tensor of four axes, or a list of pictures."""
    if isinstance(images, Tensor):
        return images.ndim == 4
    return isinstance(images, list) and len(images) > 1 and all(_is_picture(frame) for frame in images)


def _is_picture(item: Any) -> bool:
    return isinstance(item, str | Path | Image.Image | np.ndarray)


def _clip_pixels(clip: Any, model: Model, where: str) -> Tensor:
    """Return the pixels [C, T, H, W] of one clip; a tensor may have its frames first."""
    preprocess = model.preprocess
    channels, expected = preprocess.channels, preprocess.frames or "T"
    if is_preprocessed(clip) and clip.ndim == 4 and channels in clip.shape[:2]:
        frames_first = clip.shape[1] == channels  # also if there are as many frames as channels, as transformers does
        pixels: Tensor = clip.detach().transpose(0, 1) if frames_first else clip.detach()
    elif is_clip(clip) and not isinstance(clip, Tensor):
        pixels = torch.stack([to_pixels(read_picture(frame, channels), preprocess) for frame in clip], 1)
    else:
        shape = f"a tensor of shape {list(clip.shape)}" if isinstance(clip, Tensor) else f"a {type(clip).__name__}"
        raise BadInput(
            f"{model.name} takes clips of {expected} frames, and {shape} was given{where}; expected a float tensor "
            f"[B, {expected}, {channels}, H, W] or [B, {channels}, {expected}, H, W], or a list of frames per clip."
        )
    if preprocess.frames and pixels.shape[1] != preprocess.frames:
        raise BadInput(
            f"A clip of {pixels.shape[1]} frames was given{where}, and {model.name} takes {preprocess.frames}; "
            f"expected {preprocess.frames} frames, sampled evenly from the video."
        )
    return pixels


def list_images(images: Any) -> tuple[list[Any], bool]:
    """Return a list of images, folders and patterns replaced by their files, and whether it is a single image."""
    from clairvit.models.coerce import LabelledImages, as_images

    images = as_images(images)
    several = isinstance(images, list | tuple | LabelledImages) or getattr(images, "ndim", 0) == 4
    inputs: list[Any] = list(images) if several else [images]
    if not inputs:
        raise BadInput("No images were given; expected at least one: a path, a PIL image, a uint8 array or a tensor.")
    items: list[Any] = []
    for item in inputs:
        path = as_path(item) if isinstance(item, str | Path) else None
        stands_for_files = path is not None and (path.is_dir() or (glob.has_magic(str(path)) and not path.exists()))
        items += find_images(item) if stands_for_files else [item]
        several = several or stands_for_files
    return items, not several


def to_pixels(image: Picture, preprocess: Preprocess) -> Tensor:
    """Return a picture as normalised pixels [C, rows, columns], exactly as timm and torchvision compute them."""
    from torchvision.transforms.functional import pil_to_tensor

    if isinstance(image, Image.Image):
        planes, white = [image], 255
    else:  # channel by channel: Pillow has no image of any number of channels
        planes = [Image.fromarray(np.ascontiguousarray(image[..., i])) for i in range(image.shape[-1])]
        planes = [plane if plane.mode == "L" else plane.convert("F") for plane in planes]  # 16 bits
        white = np.iinfo(image.dtype).max
    cropped = [resize_and_crop(plane, preprocess, preprocess.interpolation) for plane in planes]
    pixels = torch.cat([pil_to_tensor(plane).float() for plane in cropped]).div(white)
    mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)
    return (pixels - mean[:, None, None]) / std[:, None, None]


def displayed(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """Return what a picture shows of normalised pixels [C, H, W]: red, green and blue in 0..1, [3, H, W] in float64.

    Three channels in their order are denormalised, x · std + mean, and clipped. Any others are denormalised, and each
    displayed channel is scaled from its lowest to its highest value; one channel is grey, of two the blue is 0.
    """
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (preprocess.mean, preprocess.std))
    values = torch.nan_to_num(pixels.detach().cpu().double() * std + mean)
    shown = list(preprocess.displayed_channels)
    if preprocess.channels == 3 and shown == [0, 1, 2]:
        return values.clamp(0, 1)
    values = values[shown]
    low, high = (edge[:, None, None] for edge in (values.flatten(1).amin(1), values.flatten(1).amax(1)))
    values = (values - low) / torch.where(high > low, high - low, torch.ones_like(high))
    if len(shown) == 1:
        return values.expand(3, -1, -1)
    return values if len(shown) == 3 else torch.cat([values, torch.zeros_like(values[:1])])


def resize_and_crop(image: Image.Image, preprocess: Preprocess, interpolation: str) -> Image.Image:
    """Return the part of a picture that the model takes, at the size that it takes, rounded as timm and torchvision do.

    The picture is squashed to a box, or made to cover it; a short side stands for a square box.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as transform

    size = resized_size(image.size, preprocess)
    resized = transform.resize(image, list(size), InterpolationMode(interpolation))
    crop: Image.Image = transform.center_crop(resized, list(preprocess.size))
    return crop


def resized_size(picture: tuple[int, int], preprocess: Preprocess) -> tuple[int, int]:
    """Return the rows and columns of a picture, given as columns and rows, before the crop."""
    columns, rows = picture
    box = preprocess.size if preprocess.resize is None else preprocess.resize
    if not isinstance(box, int) and not preprocess.keep_ratio:
        size = box
    elif not isinstance(box, int) and box[0] != box[1]:
        ratio = min(rows / box[0], columns / box[1])
        size = round(rows / ratio), round(columns / ratio)
    else:
        short = box if isinstance(box, int) else box[0]
        size = (short, int(short * columns / rows)) if rows < columns else (int(short * rows / columns), short)
    if size[0] * size[1] > _MAX_PIXELS:
        raise BadInput(
            f"An image of {columns} x {rows} pixels is too narrow: resized for the model it would be "
            f"{size[1]} x {size[0]}; crop it first."
        )
    return size


def visible_box(picture: tuple[int, int], preprocess: Preprocess) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of what the model sees of a picture, in the picture's own pixels."""
    columns, rows = picture
    size = resized_size(picture, preprocess)
    top, left = (round((whole - part) / 2) for whole, part in zip(size, preprocess.size, strict=True))
    bottom, right = top + preprocess.size[0], left + preprocess.size[1]
    down, across = rows / size[0], columns / size[1]
    return max(0.0, left * across), max(0.0, top * down), min(columns, right * across), min(rows, bottom * down)


def is_preprocessed(item: Any) -> bool:
    """Return whether an image is a float tensor, which is taken as it is."""
    return isinstance(item, Tensor) and item.dtype != torch.uint8


def _shape_advice(images: Tensor, channels: int) -> str:
    """Return what to do about a tensor of the wrong shape; "" where nothing is known."""
    if images.ndim not in (3, 4):
        return ""
    if images.shape[-1] == channels:
        return "; move the channels first: .permute(2, 0, 1)"
    return (
        f": the model takes {channels} channel{'' if channels == 1 else 's'}, and {images.shape[-3]} were given. If "
        f"the module takes {images.shape[-3]}, say so: cv.wrap(module, channels={images.shape[-3]})"
    )


def _check_tensor(pixels: Tensor, where: str, model: Model) -> tuple[UnusualRange, ...]:
    """Raise BadInput unless these are finite floats [B, C, H, W]; return their range if they are not normalised."""
    _check_storage(pixels, where)
    channels = model.preprocess.channels  # of images [B, C, H, W] or clips [B, C, T, H, W]
    if pixels.shape[1] != channels or pixels.numel() == 0:
        advice = _shape_advice(pixels, channels) if pixels.shape[1] != channels else ""
        raise BadInput(
            f"The image tensor{where} has shape {list(pixels.shape)}; expected [B, {channels}, H, W], none of them 0"
            f"{advice}."
        )
    if not pixels.is_floating_point():
        raise BadInput(
            f"The image tensor{where} has dtype {pixels.dtype}; expected floats that are already normalised, or uint8 "
            "pixels (0..255), which are normalised here."
        )
    low, high = torch.stack(pixels.detach().aminmax()).tolist()  # NaN if one value is; one transfer
    if not (math.isfinite(low) and math.isfinite(high)):
        finite = pixels.detach().isfinite().flatten(1).all(1).tolist()
        broken = [number for number, is_finite in enumerate(finite, 1) if not is_finite]
        at = where or f" (image {', '.join(map(str, broken))} of {len(finite)})"
        raise BadInput(
            f"The image tensor has NaN or infinite values{at}; expected finite numbers: check your transform."
        )
    if max(-low, high) > 50:  # normalised values stay within a few units of 0
        return (UnusualRange("large", low, high),)
    # in 0..1 and over more than half of it, while (0 - mean) / std of a black pixel is negative: a normalised photo has
    # such a range only if all of it is bright and has little contrast
    if low >= 0 and high <= 1 and high - low > 0.5 and max(model.preprocess.mean) > 0:
        return (UnusualRange("0..1", low, high),)
    return ()


def _check_storage(tensor: Tensor, where: str) -> None:
    """Raise BadInput for sparse and quantised tensors and for those on the meta device."""
    kind = "has no values (device meta)" if tensor.is_meta else "is quantised" if tensor.is_quantized else "is sparse"
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        raise BadInput(f"The image tensor{where} {kind}; expected an ordinary tensor of floats or uint8 pixels.")


def unusual_notes(
    ranges: Sequence[tuple[UnusualRange, Sequence[str]]], count: int, preprocess: Preprocess
) -> tuple[str, ...]:
    """Return a note for each kind of values that look wrong, and warn of it: one for all images.

    Args:
        ranges: What looks wrong, each with the names of the images of its batch.
        count: The number of all images.
        preprocess: What the model expects.
    """
    notes = []
    for kind in dict.fromkeys(item.kind for item, _ in ranges):
        same = [(item, names) for item, names in ranges if item.kind == kind]
        low, high = min(item.low for item, _ in same), max(item.high for item, _ in same)
        rows = [names[item.row] for item, names in same if item.row is not None]
        notes.append(f"{_tensors_named(rows, count)} {_range_note(kind, low, high, preprocess)}")
    for note in notes:
        warnings.warn(note, ClairWarning, stacklevel=user_stacklevel())
    return tuple(notes)


def _tensors_named(names: Sequence[str], count: int) -> str:
    """Return 'The image tensor (image 3) has', or '12 of 30 image tensors (image 1, … and 7 more) have'."""
    if not names or count == 1:
        return "The image tensor has"
    if len(names) == 1:
        return f"The image tensor ({names[0]}) has"
    if len(names) == count:
        return f"All {count} image tensors have"
    return f"{len(names)} of {count} image tensors ({named_images(names)}) have"


def named_images(names: Sequence[str]) -> str:
    """Return 'image 1, image 2, … and 7 more'."""
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + rest


def _range_note(kind: str, low: float, high: float, preprocess: Preprocess) -> str:
    """Return what is wrong about such values, and what to pass instead."""
    if kind == "large":
        return (
            f"values up to {max(-low, high):.0f}, which do not look normalised; pass uint8 pixels or "
            "(x / 255 - mean) / std."
        )
    mean, std = ([round(value, 4) for value in values] for values in (preprocess.mean, preprocess.std))
    return (
        f"values from {low:.2g} to {high:.2g}, which look like pixels in 0..1 that were not normalised, and float "
        f"tensors are taken as they are; pass a PIL image or a uint8 array, or (x - mean) / std with mean {mean} and "
        f"std {std}."
    )


def image_name(item: Any, index: int) -> str:
    """Return the name of an image: its file, or its number."""
    if isinstance(item, str | Path):
        return str(item)
    return str(getattr(item, "filename", "") or f"image {index + 1}")
