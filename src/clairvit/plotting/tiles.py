"""Parts that figures of explanations share: labels, photos, colour scales, and the largest number of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath

import numpy as np

from clairvit._io import printable
from clairvit.errors import Argument, BadInput
from clairvit.methods.explanation import Explanation
from clairvit.plotting.labels import class_label, format_number
from clairvit.plotting.overlay import Array, Scale, denormalised_photo, overlay, scale_of, to_numpy
from clairvit.plotting.style import PlotStyle
from clairvit.targets.base import CUSTOM_SCORE

FOOT = 0.24  # inches, the line under a figure
MOST_ROWS = 40  # of tiles; a taller figure cannot be read
WIDEST_FIGURE = 16.0  # inches
SCREEN = 1.6  # width / height of a screen
SURE_ERRORS = 2.0  # standard errors from 0 where the sign of a patch is sure


def same_image(explanation: Explanation) -> list[list[int]]:
    """Return the items of each image: neighbours with the same name and the same pixels, which share a row."""
    groups: list[list[int]] = []
    for item, name in enumerate(explanation.names):
        previous = groups[-1][-1] if groups else None
        if (
            previous is not None
            and explanation.names[previous] == name
            and bool((explanation.pixels[previous] == explanation.pixels[item]).all())
        ):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def item_scales(explanation: Explanation, style: PlotStyle) -> list[Scale]:
    """Return the colour scale of each map: by default the maps of several classes of one image share theirs.

    Maps of other targets (words, contrasts, neurons) may have other units, so they share a scale only on request.
    """
    maps = to_numpy(explanation.maps)
    if style.shared is not None:
        return map_scales(explanation, maps, style)
    scales: list[Scale] = []
    for group in same_image(explanation):
        shared = all(explanation.classes[item] is not None for item in group)
        scales += map_scales(explanation, maps[group], replace(style, shared=shared))
    return scales


def map_scales(explanation: Explanation, maps: Array, style: PlotStyle) -> list[Scale]:
    """Return one scale per map, or the same for all of them."""
    if style.shared:
        return [map_scale(explanation, maps, style)] * len(maps)
    return [map_scale(explanation, values, style) for values in maps]


def map_scale(explanation: Explanation, values: Array, style: PlotStyle) -> Scale:
    """Return the scale of one map, or of several that share it."""
    return scale_of(values, explanation.signed, style)


def explanation_photo(explanation: Explanation, item: int) -> Array:
    """Return the photo of one map, [H, W, 3] from 0 to 1."""
    return denormalised_photo(explanation.pixels[item], explanation.preprocess)


def map_picture(explanation: Explanation, item: int, scale: Scale, style: PlotStyle) -> Array:
    """Return the photo of one map coloured by it, [H, W, 3]."""
    values = to_numpy(explanation.maps[item])
    if style.sure and explanation.standard_error is not None:
        unsure = np.abs(values) < SURE_ERRORS * to_numpy(explanation.standard_error[item])
        values = np.where(unsure, scale.neutral, values)
    return overlay(explanation_photo(explanation, item), values, scale, style.opacity, style.smooth and not style.sure)


def target_label(explanation: Explanation, item: int) -> str:
    """Return the target of one map with its probability or score."""
    score = explanation.class_scores[item] if explanation.classifier else None
    return printable(class_label(explanation.targets[item], explanation.probabilities[item], score))


def method_label(explanation: Explanation, item: int) -> str:
    """Return the method of one map and, of a target that is no class, its value: 'attnlrp · cosine 0.271'."""
    value = None if explanation.classifier else explanation.target_scores[item]
    if value is None:
        return explanation.method
    return f"{explanation.method} · {score_label(explanation)} {format_number(value)}"


def score_label(explanation: Explanation) -> str:
    """Return the kind of score that is explained in words."""
    words = {"prob": "probability", "logprob": "log probability", CUSTOM_SCORE: "score"}
    if explanation.refinement is not None and explanation.activation != "raw" and None not in explanation.classes:
        return "log-odds"  # what the passes of a refined map are of, whatever the map of one pass was
    if explanation.activation == "raw" and explanation.classifier:
        words["logit"] = "score"  # a raw score is no logit: no probability belongs to it
    return words.get(explanation.score, explanation.score)


def short_name(explanation: Explanation, item: int) -> str:
    """Return the name of the image without its folders."""
    return PurePath(explanation.names[item]).name or explanation.names[item]


def source_line(explanation: Explanation, style: PlotStyle | None = None) -> tuple[str, str, str]:
    """Return method, model, what is explained, and what is left out; the model's name may be shortened."""
    explained = (
        f"explains the {score_label(explanation)}"
        if explanation.class_specific
        else "∀ one map for all classes, evidence for none"
    )
    drawn = ""
    if style is not None and style.sure:
        drawn = f" · drawn: patches {SURE_ERRORS:.0f} standard errors or more from 0"
        drawn = " · the method has no standard errors" if explanation.standard_error is None else drawn
    return f"{explanation.method} · ", explanation.model, f" · {explained}{drawn}"


def aspect_ratio(explanation: Explanation) -> float:
    """Return height / width of the images."""
    height, width = explanation.pixels.shape[-2:]
    return float(height / width)


def check_rows(rows: int) -> None:
    """Raise BadInput for a figure of too many rows."""
    if rows > MOST_ROWS:
        raise BadInput(
            f"A figure of {rows} rows is too large to read (at most {MOST_ROWS}); write one file per image.",
            advice=[Argument("out", "DIR")],
        )


def screen_columns(cells: int, most: int, size: Callable[[int], tuple[float, float]]) -> int:
    """Return the columns that bring a grid nearest to a screen's shape, with few empty places in the last row.

    Args:
        cells: The number of cells.
        most: The largest number of columns.
        size: A function of a number of columns to the width and height of a cell.
    """

    def distance(columns: int) -> float:
        """Return |ln(shape / screen)| + empty places / cells."""
        width, height = size(columns)
        rows = math.ceil(cells / columns)
        return abs(math.log(columns * width / (rows * height) / SCREEN)) + (rows * columns - cells) / cells

    return min(range(1, min(cells, most) + 1), key=distance)


def fold_columns(blocks: int, width: float, height: float) -> int:
    """Return in how many columns to set equal blocks: one, unless it would be higher than a screen set upright."""
    if blocks * height <= SCREEN * width:
        return 1
    return screen_columns(blocks, max(1, int(WIDEST_FIGURE // width)), lambda _: (width, height))
