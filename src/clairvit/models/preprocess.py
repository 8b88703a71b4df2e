"""Preprocess: resize, crop and normalisation of images; what a user states about it, and what had to be assumed."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clairvit.errors import BadInput, did_you_mean

INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers
Channels = tuple[float, float, float]  # red, green, blue
Size = int | tuple[int, int]  # one side of a square, or (rows, columns)


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop to `size`, then (x - mean) / std with x in 0..1.

    Attributes:
        size: Rows and columns of the crop, which the model takes.
        mean, std: Of red, green and blue, for pixels in 0..1.
        resize: The short side before the crop, or a box (rows, columns) that the image is made to cover, or to fill
            exactly if `keep_ratio` is False; None is just enough to cover `size`.
        interpolation: One of `INTERPOLATIONS`.
        keep_ratio: False: the image is squashed to the box, as SigLIP and most transformers models do.

    Example:
        >>> import clairvit as cv
        >>> cv.Preprocess(size=(96, 96)).resize is None
        True
    """

    size: tuple[int, int] = (224, 224)
    mean: Channels = (0.485, 0.456, 0.406)
    std: Channels = (0.229, 0.224, 0.225)
    resize: int | tuple[int, int] | None = None
    interpolation: str = "bicubic"
    keep_ratio: bool = True


@dataclass(frozen=True)
class PreprocessOptions:
    """Preprocessing given to `load` or `wrap`; None leaves a value to the model's source."""

    mean: Channels | None = None
    std: Channels | None = None
    resize: int | tuple[int, int] | None = None
    interpolation: str | None = None

    def applied_to(self, preprocess: Preprocess) -> Preprocess:
        """Return `preprocess` with the given values in place of its own."""
        changes = {name: value for name, value in vars(self).items() if value is not None}
        if self.resize is not None:
            changes["keep_ratio"] = True
            sides = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
            if sides[0] < preprocess.size[0] or sides[1] < preprocess.size[1]:
                raise BadInput(
                    f"resize={self.resize} is smaller than the {_format_size(preprocess.size)} pixels that the model "
                    f"takes, so the crop would have black borders; expected at least {max(preprocess.size)}."
                )
        return dataclasses.replace(preprocess, **changes)

    def missing(self) -> tuple[str, ...]:
        """Return the names of the values that were not given."""
        return tuple(name for name, value in vars(self).items() if value is None)


NOT_GIVEN = PreprocessOptions()


def preprocess_options(
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    resize: Size | None = None,
    interpolation: str | None = None,
) -> PreprocessOptions:
    """Return what a user stated about preprocessing, checked.

    Args:
        mean, std: Three numbers for pixels in 0..1 (red, green, blue), or one for all channels.
        resize: Short side in pixels before the crop, or (rows, columns) that the image is made to cover.
        interpolation: One of `INTERPOLATIONS`.
    """
    if interpolation is not None and interpolation not in INTERPOLATIONS:
        near = did_you_mean(str(interpolation), INTERPOLATIONS)
        raise BadInput(
            f"interpolation={interpolation!r} is unknown.{near} Expected one of {', '.join(INTERPOLATIONS)}."
        )
    return PreprocessOptions(
        _check_channels("mean", mean), _check_channels("std", std), _check_resize(resize), interpolation
    )


def parse_size(size: Size | None) -> tuple[int, int] | None:
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
    note = (
        f"{_join_words(names, 'and')} {'were' if len(names) > 1 else 'was'} assumed: {source} ({listed}). If the model "
        f"was trained otherwise, give {_join_words([f'{name}=' for name in names], 'or')}."
    )
    return (note,)


def _check_resize(resize: Any) -> int | tuple[int, int] | None:
    if resize is None:
        return None
    sides = tuple(resize) if isinstance(resize, Iterable) else (resize,)
    are_integers = all(isinstance(side, numbers.Integral) and not isinstance(side, bool) for side in sides)
    if len(sides) not in (1, 2) or not are_integers or min(sides) <= 0:
        raise BadInput(f"resize={resize!r} is not a size; give the short side (resize=256) or (rows, columns).")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _check_channels(name: str, values: Any) -> Channels | None:
    """Return the three numbers in 0..1 of a mean, or in (0, 1] of a standard deviation."""
    if values is None:
        return None
    if isinstance(values, numbers.Real) and not isinstance(values, bool):
        values = (values,) * 3
    kind = "three positive numbers" if name == "std" else "three numbers"
    expected = f"expected {kind}, one for each of red, green and blue, for pixels in 0..1"
    try:
        red, green, blue = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name}={values!r}; {expected}.") from error
    channels = (red, green, blue)
    if not all(map(math.isfinite, channels)) or min(channels) < 0 or (name == "std" and min(channels) == 0):
        raise BadInput(f"{name}={values!r}; {expected}.")
    if max(channels) > 1:
        scaled = tuple(round(value / 255, 4) for value in channels)
        advice = f": divide by 255, {name}={scaled}" if max(channels) <= 255 and min(scaled) > 0 else ""
        raise BadInput(f"{name}={values!r} is for pixels in 0..255; {expected}{advice}.")
    return channels


def _format_channels(values: Channels) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _format_size(sides: Size) -> str:
    if isinstance(sides, int):
        return str(sides)
    return str(sides[0]) if sides[0] == sides[1] else f"{sides[0]} x {sides[1]}"


def _join_words(words: Sequence[str], last: str) -> str:
    """Return "mean, std and resize"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
