"""Preprocessing as a user states it, checked, and the note about what had to be assumed."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clairvit.errors import BadInput, did_you_mean
from clairvit.models.model import Preprocess

INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers
Channels = tuple[float, float, float]


@dataclass(frozen=True)
class PreprocessOptions:
    """Preprocessing given to `load` or `wrap`; None leaves a value to the model's source."""

    mean: Channels | None = None
    std: Channels | None = None
    resize: int | tuple[int, int] | None = None
    interpolation: str | None = None

    def applied_to(self, preprocess: Preprocess) -> Preprocess:
        """Return `preprocess` with the given values in place of its own."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if self.resize is not None:
            given["keep_ratio"] = True
            sides = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
            if sides[0] < preprocess.size[0] or sides[1] < preprocess.size[1]:
                raise BadInput(
                    f"resize={self.resize} is smaller than the {_sides(preprocess.size)} pixels that the model takes, "
                    f"so the crop would have black borders; expected at least {max(preprocess.size)}."
                )
        return dataclasses.replace(preprocess, **given)

    def missing(self) -> tuple[str, ...]:
        """Return the names for which nothing was given."""
        return tuple(name for name, value in vars(self).items() if value is None)


NOT_GIVEN = PreprocessOptions()


def preprocess_options(
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    resize: int | tuple[int, int] | None = None,
    interpolation: str | None = None,
) -> PreprocessOptions:
    """Check what a user gave and return it as numbers.

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
    return PreprocessOptions(_channels("mean", mean), _channels("std", std), _resize(resize), interpolation)


def for_size(preprocess: Preprocess, size: tuple[int, int]) -> Preprocess:
    """Return the preprocessing for another crop; the resize is scaled with it, rounded down as timm does."""
    box = preprocess.resize
    if box is None or size == preprocess.size:
        return dataclasses.replace(preprocess, size=size)
    sides = (box, box) if isinstance(box, int) else box
    rows, columns = (side * now // then for side, now, then in zip(sides, size, preprocess.size, strict=True))
    resize = rows if isinstance(box, int) and rows == columns else (rows, columns)
    return dataclasses.replace(preprocess, size=size, resize=resize)


def assumption(names: Sequence[str], preprocess: Preprocess, source: str) -> tuple[str, ...]:
    """Return the note that these values were assumed from `source`; no note for no names."""
    if not names:
        return ()
    values = {
        "mean": f"mean {_numbers(preprocess.mean)}",
        "std": f"std {_numbers(preprocess.std)}",
        "resize": f"resize {_resized(preprocess)}",
        "interpolation": preprocess.interpolation,
    }
    listed = "; ".join(values[name] for name in names)
    note = (
        f"{_listed(names, 'and')} {'were' if len(names) > 1 else 'was'} assumed: {source} ({listed}). If the model was "
        f"trained otherwise, give {_listed([f'{name}=' for name in names], 'or')}."
    )
    return (note,)


def _resize(resize: Any) -> int | tuple[int, int] | None:
    if resize is None:
        return None
    sides = tuple(resize) if isinstance(resize, Iterable) else (resize,)
    whole = all(isinstance(side, numbers.Integral) and not isinstance(side, bool) for side in sides)
    if len(sides) not in (1, 2) or not whole or min(sides) <= 0:
        raise BadInput(f"resize={resize!r} is not a size; give the short side (resize=256) or (rows, columns).")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _channels(name: str, values: Any) -> Channels | None:
    """Return three numbers in 0..1; a standard deviation is above 0."""
    if values is None:
        return None
    if isinstance(values, numbers.Real) and not isinstance(values, bool):
        values = (values,) * 3
    wanted = "three positive numbers" if name == "std" else "three numbers"
    expected = f"expected {wanted}, one for each of red, green and blue, for pixels in 0..1"
    try:
        red, green, blue = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name}={values!r}; {expected}.") from error
    three = (red, green, blue)
    if not all(map(math.isfinite, three)) or min(three) < 0 or (name == "std" and min(three) == 0):
        raise BadInput(f"{name}={values!r}; {expected}.")
    if max(three) > 1:
        scaled = tuple(round(value / 255, 4) for value in three)
        advice = f": divide by 255, {name}={scaled}" if max(three) <= 255 and min(scaled) > 0 else ""
        raise BadInput(f"{name}={values!r} is for pixels in 0..255; {expected}{advice}.")
    return three


def _numbers(values: Channels) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _resized(preprocess: Preprocess) -> str:
    sides = preprocess.size if preprocess.resize is None else preprocess.resize
    return str(sides) if isinstance(sides, int) else _sides(sides)


def _sides(sides: tuple[int, int]) -> str:
    return str(sides[0]) if sides[0] == sides[1] else f"{sides[0]} x {sides[1]}"


def _listed(words: Sequence[str], last: str) -> str:
    """'mean, std and resize'"""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
