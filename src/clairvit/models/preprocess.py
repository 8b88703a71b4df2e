"""Preprocess: resize, crop and normalisation of images; what a user states about it, and what had to be assumed."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clairvit.errors import Argument, BadInput, Message, did_you_mean

INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers
Channels = tuple[float, ...]  # one number per channel: red, green, blue
Size = int | tuple[int, int]  # one side of a square, or (rows, columns)
FITS = ("crop", "squash")  # how a picture of another shape gets to the model's: cut off, or distorted


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop to `size`, then (x - mean) / std with x in 0..1.

    Attributes:
        size: Rows and columns of the crop, which the model takes.
        mean, std: One number per channel (red, green, blue), for pixels in 0..1; their count is that of the channels.
        resize: The short side before the crop, or a box (rows, columns) that the image is made to cover, or to fill
            exactly if `keep_ratio` is False; None is just enough to cover `size`.
        interpolation: One of `INTERPOLATIONS`.
        keep_ratio: False: the image is squashed to the box, as SigLIP and most transformers models do.
        display: Indices of the channels that pictures show as red, green and blue, or of the one shown in grey; None:
            the first three, or the only one.
        frames: The number of frames of a clip, 0 for any number; None: the model takes images.
        mask_grid: Rows and columns of patches that masks are reduced to (`data.masks.prepare_mask`); None: masks stay
            as fine as the image. It says nothing about images.

    Example:
        >>> import clairvit as cv
        >>> cv.models.Preprocess(size=(96, 96)).resize is None
        True
        >>> cv.models.Preprocess(mean=(0.5,) * 4, std=(0.5,) * 4).channels
        4
    """

    size: tuple[int, int] = (224, 224)
    mean: Channels = (0.485, 0.456, 0.406)
    std: Channels = (0.229, 0.224, 0.225)
    resize: int | tuple[int, int] | None = None
    interpolation: str = "bicubic"
    keep_ratio: bool = True
    display: tuple[int, ...] | None = None
    frames: int | None = None
    mask_grid: tuple[int, int] | None = dataclasses.field(default=None, repr=False)  # no part of a model's hash

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise BadInput(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}; expected one of each per channel."
            )
        if self.display is not None:
            object.__setattr__(self, "display", _check_display(self.display, self.channels))

    def to_dict(self) -> dict[str, Any]:
        """Return all values as JSON values."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "mask_grid"]  # of masks only
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """Return the preprocessing that `to_dict` described."""
        fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        return cls(**fields)

    @functools.cached_property
    def channels(self) -> int:
        """Return the number of channels of an image."""
        return len(self.mean)

    @functools.cached_property
    def displayed_channels(self) -> tuple[int, ...]:
        """Return the indices of the channels that a picture shows: one in grey, two or three as red, green and blue."""
        return tuple(range(min(self.channels, 3))) if self.display is None else self.display

    @functools.cached_property
    def display_note(self) -> str:
        """Return how pictures show images that are not plain RGB; "" for three channels in their order."""
        shown = self.displayed_channels
        if self.channels == 3 and shown == (0, 1, 2):
            return ""
        colours = "in grey" if len(shown) == 1 else "as red and green" if len(shown) == 2 else "as red, green and blue"
        which = f"channel{'' if len(shown) == 1 else 's'} {_join_words([str(index) for index in shown], 'and')}"
        scaled = "scaled" if len(shown) == 1 else "each scaled"
        return (
            f"pictures show {which} of {self.channels} {colours}, {scaled} from its lowest to its highest value; "
            "display= chooses others."
        )


@dataclass(frozen=True)
class PreprocessOptions:
    """Preprocessing given to `load` or `wrap`; None leaves a value to the model's source."""

    mean: Channels | None = None
    std: Channels | None = None
    resize: int | tuple[int, int] | None = None
    interpolation: str | None = None
    display: tuple[int, ...] | None = None
    fit: str | None = None  # one of `FITS`

    def applied_to(self, preprocess: Preprocess) -> Preprocess:
        """Return `preprocess` with the given values in place of its own; one number stands for all channels."""
        changes = {name: value for name, value in vars(self).items() if value is not None and name != "fit"}
        for name in ("mean", "std"):
            if name in changes:
                changes[name] = per_channel(name, changes[name], preprocess.channels)
        if self.resize is not None:
            changes["keep_ratio"] = True
            sides = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
            if sides[0] < preprocess.size[0] or sides[1] < preprocess.size[1]:
                raise BadInput(
                    f"resize={self.resize} is smaller than the {_format_size(preprocess.size)} pixels that the model "
                    f"takes, so the crop would have black borders; expected at least {max(preprocess.size)}."
                )
        if self.fit == "crop":
            changes["keep_ratio"] = True
        elif self.fit == "squash":  # unless a box is stated, the whole picture becomes the image: nothing is cropped
            box = preprocess.size if self.resize is None else self.resize
            changes |= {"keep_ratio": False, "resize": (box, box) if isinstance(box, int) else box}
        return dataclasses.replace(preprocess, **changes)

    def missing(self) -> tuple[str, ...]:
        """Return the names of the values that were not given."""
        stated = ("display", "fit", "resize") if self.fit == "squash" else ("display", "fit")
        return tuple(name for name, value in vars(self).items() if value is None and name not in stated)


NOT_GIVEN = PreprocessOptions()


def preprocess_options(
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    resize: Size | None = None,
    interpolation: str | None = None,
    display: Sequence[int] | None = None,
    fit: str | None = None,
) -> PreprocessOptions:
    """Return what a user stated about preprocessing, checked.

    Args:
        mean, std: One number per channel for pixels in 0..1 (red, green, blue), or one for all channels.
        resize: Short side in pixels before the crop, or (rows, columns) that the image is made to cover.
        interpolation: One of `INTERPOLATIONS`.
        display: Indices of the channels that pictures show: (red, green, blue), or one, shown in grey.
        fit: "squash" distorts the whole picture to the size that the model takes (or to `resize`), "crop" keeps its
            shape and cuts off what is outside the centre.
    """
    if fit is not None and fit not in FITS:
        raise BadInput(f"fit={fit!r} is unknown.{did_you_mean(str(fit), FITS)} Expected one of {', '.join(FITS)}.")
    if interpolation is not None and interpolation not in INTERPOLATIONS:
        near = did_you_mean(str(interpolation), INTERPOLATIONS)
        raise BadInput(
            f"interpolation={interpolation!r} is unknown.{near} Expected one of {', '.join(INTERPOLATIONS)}."
        )
    return PreprocessOptions(
        _check_channels("mean", mean),
        _check_channels("std", std),
        _check_resize(resize),
        interpolation,
        None if display is None else _check_display(display, None),
        fit,
    )


def parse_size(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Return an image size as (rows, columns): 224 -> (224, 224), and (224, 320) stays."""
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise BadInput(f"size={size!r} is not an image size; give one number (size=224) or (rows, columns).")
    return int(sides[0]), int(sides[1])


def for_size(preprocess: Preprocess, size: tuple[int, int]) -> Preprocess:
    """Return the preprocessing for another crop; the resize is scaled with it, rounded down as timm does."""
    box = preprocess.resize
    if box is None or size == preprocess.size:
        return dataclasses.replace(preprocess, size=size)
    sides = (box, box) if isinstance(box, int) else box
    rows, columns = (side * new // old for side, new, old in zip(sides, size, preprocess.size, strict=True))
    resize = rows if isinstance(box, int) and rows == columns else (rows, columns)
    return dataclasses.replace(preprocess, size=size, resize=resize)


def for_channels(preprocess: Preprocess, channels: int) -> Preprocess:
    """Return the preprocessing for another number of channels: mean and std 0.5, because nothing states them."""
    if channels == preprocess.channels:
        return preprocess
    return dataclasses.replace(preprocess, mean=(0.5,) * channels, std=(0.5,) * channels, display=None)


def assumption(names: Sequence[str], preprocess: Preprocess, source: str) -> tuple[str, ...]:
    """Return the note that these values were assumed from `source`; no note for no names."""
    if not names:
        return ()
    values = {
        "mean": f"mean {_format_channels(preprocess.mean)}",
        "std": f"std {_format_channels(preprocess.std)}",
        "resize": f"resize {_format_size(preprocess.resize or preprocess.size)}",
        "interpolation": preprocess.interpolation,
    }
    listed = "; ".join(values[name] for name in names)
    were = "were" if len(names) > 1 else "was"
    seen = f"{_join_words(names, 'and')} {were} assumed: {source} ({listed}). If the model was trained otherwise, give "
    separators = ["", *[", "] * (len(names) - 2), " or "][: len(names)]
    parts = [part for separator, name in zip(separators, names, strict=True) for part in (separator, Argument(name))]
    return (Message(seen, *parts, "."),)


def _check_resize(resize: Any) -> int | tuple[int, int] | None:
    if resize is None:
        return None
    sides = tuple(resize) if isinstance(resize, Iterable) else (resize,)
    are_integers = all(isinstance(side, numbers.Integral) and not isinstance(side, bool) for side in sides)
    if len(sides) not in (1, 2) or not are_integers or min(sides) <= 0:
        raise BadInput(f"resize={resize!r} is not a size; give the short side (resize=256) or (rows, columns).")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _check_channels(name: str, values: Any) -> Channels | None:
    """Return the numbers in 0..1 of a mean, or in (0, 1] of a standard deviation: one, or one per channel."""
    if values is None:
        return None
    if isinstance(values, numbers.Real) and not isinstance(values, bool):
        values = (values,)
    kind = "one positive number" if name == "std" else "one number"
    expected = f"expected {kind} for each channel (red, green and blue), or one for all, for pixels in 0..1"
    try:
        channels = tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name}={values!r}; {expected}.") from error
    usable = bool(channels) and all(map(math.isfinite, channels)) and min(channels) >= 0
    if not usable or (name == "std" and min(channels) == 0):
        raise BadInput(f"{name}={values!r}; {expected}.")
    if max(channels) > 1:
        scaled = tuple(round(value / 255, 4) for value in channels)
        advice = f": divide by 255, {name}={scaled}" if max(channels) <= 255 and min(scaled) > 0 else ""
        raise BadInput(f"{name}={values!r} is for pixels in 0..255; {expected}{advice}.")
    return channels


def per_channel(name: str, values: Channels, channels: int) -> Channels:
    """Return one value per channel; raise BadInput for another number of values."""
    if len(values) not in (1, channels):
        raise BadInput(
            f"{name}={values!r} has {len(values)} numbers, and the model takes {channels} "
            f"channel{'' if channels == 1 else 's'}; expected one number for each channel, or one for all."
        )
    return values * channels if len(values) == 1 else values


def _check_display(indices: Any, channels: int | None) -> tuple[int, ...]:
    """Return the indices of displayed channels, checked against the number of channels where that is known."""
    listed = tuple(indices) if isinstance(indices, Iterable) and not isinstance(indices, str) else (indices,)
    are_indices = all(isinstance(i, numbers.Integral) and not isinstance(i, bool) and int(i) >= 0 for i in listed)
    outside = are_indices and channels is not None and any(i >= channels for i in listed)
    if len(listed) not in (1, 3) or not are_indices or outside:
        limit = "" if channels is None else f" in 0…{channels - 1}"
        raise BadInput(
            f"display={indices!r}; expected the indices{limit} of three channels, shown as red, green and blue, or of "
            "one, shown in grey."
        )
    return tuple(int(i) for i in listed)


def _format_channels(values: Channels) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _format_size(sides: Size) -> str:
    if isinstance(sides, int):
        return str(sides)
    return str(sides[0]) if sides[0] == sides[1] else f"{sides[0]} x {sides[1]}"


def _join_words(words: Sequence[str], last: str) -> str:
    """Return "mean, std and resize"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
