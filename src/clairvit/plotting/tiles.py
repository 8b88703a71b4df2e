"""What the figures share: titles, photos, colour scales, and how tall a figure may be."""

from __future__ import annotations

from pathlib import PurePath

from clairvit.errors import BadInput
from clairvit.methods.explanation import Explanation
from clairvit.plotting.colour import Array, Scale, scale_of
from clairvit.plotting.labels import named
from clairvit.plotting.overlay import photo_of
from clairvit.plotting.style import PlotStyle

FOOT = 0.24  # inches, the line under a figure
MOST_ROWS = 40  # a taller picture is no figure any more


def same_image(explanation: Explanation) -> list[list[int]]:
    """Maps of the same image, which stand in one row: neighbours with the same name and the same pixels."""
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


def scales_for(explanation: Explanation, maps: Array, style: PlotStyle) -> list[Scale]:
    """One scale for each map, or the same for all of them."""
    if style.shared:
        return [scale_for(explanation, maps, style)] * len(maps)
    return [scale_for(explanation, values, style) for values in maps]


def scale_for(explanation: Explanation, values: Array, style: PlotStyle) -> Scale:
    return scale_of(values, explanation.signed, style)


def photo_in(explanation: Explanation, item: int) -> Array:
    return photo_of(explanation.pixels[item], explanation.preprocess)


def titled(explanation: Explanation, item: int) -> str:
    score = explanation.class_scores[item] if explanation.classifier else None
    return named(explanation.targets[item], explanation.probabilities[item], score)


def short_name(explanation: Explanation, item: int) -> str:
    """The file without its folders."""
    return PurePath(explanation.names[item]).name or explanation.names[item]


def source_line(explanation: Explanation) -> tuple[str, str, str]:
    """Return method, model and what is explained; the model's name is what may be shortened."""
    words = {"prob": "probability", "logprob": "log probability"}
    if explanation.activation == "raw":
        words["logit"] = "score"  # a raw score is no logit: no probability belongs to it
    score = words.get(explanation.score, explanation.score)
    explained = (
        f"explains the {score}" if explanation.class_specific else "∀ one map for all classes, evidence for none"
    )
    return f"{explanation.method} · ", explanation.model, f" · {explained}"


def aspect_of(explanation: Explanation) -> float:
    height, width = explanation.pixels.shape[-2:]
    return float(height / width)


def check_rows(rows: int) -> None:
    if rows > MOST_ROWS:
        raise BadInput(
            f"A figure of {rows} rows is too tall to read (at most {MOST_ROWS}); write one file an image.",
            parameters={"out": "DIR"},
        )
