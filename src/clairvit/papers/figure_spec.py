"""FigureSpec: one figure of a paper as its TOML file declares it, drawn again from the images at hand."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clairvit.errors import ClairError
from clairvit.methods.spec import resolve_method

FigureKind = Literal["grid", "classes", "layers", "starts", "radar", "curves"]
PICTURE_KINDS = ("grid", "classes", "layers")  # of photos and maps; the others draw the numbers of the run
_STRICT: Any = {"extra": "forbid"}  # pydantic: an unknown key is an error


@dataclass(frozen=True)
class FigureColumn:
    """A column that is no method of the paper: a method of ours, perhaps of a second model, such as a CNN."""

    __pydantic_config__ = _STRICT

    name: str
    method: str
    second: bool = False


@dataclass(frozen=True)
class FigureSpec:
    """A figure of a paper.

    Attributes:
        number: As the paper numbers it: "3", "3a", "13-27".
        kind: grid: photos by methods. classes: the same photo for several classes. layers: one method by layer. starts:
            curves over start layers, of the paper's sweep. radar: some methods on all measures. curves: the mean curve
            of a measure, such as deletion.
        title: What it shows.
        source: Page or section.
        columns: The paper's names of methods, or columns of their own; none: all methods of the paper.
        images: How many photos, where no ids are at hand.
        data: The data set that `ids` are of, such as "voc".
        split: The split of it.
        ids: The photos of the paper: positions in the data set, or names of files.
        classes: Of a figure of classes: their names.
        masks: Draw the mask of the object: "outline" on all pictures, "column" as a picture of its own.
        outcomes: Show as many wrong predictions as right ones.
        transposed: Photos are columns, and methods are rows.
        wrap: Methods in a line, where one photo fills the figure.
        measure: Of curves: the paper's name of the measure.
        printed: Of a radar: show that of the paper's own numbers next to it.
    """

    __pydantic_config__ = _STRICT

    number: str
    kind: FigureKind
    title: str
    source: str
    columns: tuple[str | FigureColumn, ...] = ()
    images: int = 3
    data: str = ""
    split: str | None = None
    ids: tuple[int | str, ...] = ()
    classes: tuple[str, ...] = ()
    masks: Literal["none", "outline", "column"] = "none"
    outcomes: bool = False
    transposed: bool = False
    wrap: int = 0
    measure: str = ""
    printed: bool = False

    @property
    def is_picture(self) -> bool:
        """Return whether it shows photos, and so needs the model."""
        return self.kind in PICTURE_KINDS

    @property
    def heading(self) -> str:
        """Return "Figure 3: …"."""
        label = f"Figure {self.number}" if self.number[:1].isdigit() else self.number
        return f"{label}: {self.title}"

    @property
    def slug(self) -> str:
        """Return the number as a part of a file name."""
        return re.sub(r"[^0-9A-Za-z]+", "-", self.number).strip("-").lower()


def figure_problems(
    figures: Sequence[FigureSpec], methods: Collection[str], measures: Collection[str]
) -> Iterator[str]:
    """Yield what is wrong with figures whose types are right, given the paper's names of methods and measures."""
    numbers = [figure.number for figure in figures]
    for figure in figures:
        place = f"figure '{figure.number}'"
        if numbers.count(figure.number) > 1:
            yield f"{place} is there {numbers.count(figure.number)} times"
        if not figure.slug:
            yield f"{place} has no letter or digit in its number"
        if figure.images < 1 or figure.wrap < 0:
            yield f"{place} shows {figure.images} images, {figure.wrap} methods in a line; expected 1 or more"
        if figure.kind == "classes" and len(figure.classes) < 2:
            yield f"{place} compares {len(figure.classes)} classes, expected two or more"
        if figure.kind == "layers" and len(figure.columns) != 1:
            yield f"{place} shows the layers of {len(figure.columns)} methods, expected one"
        if figure.ids and not figure.data:
            yield f"{place} has ids and not the data set that they are of"
        if figure.kind == "curves" and figure.measure not in measures:
            yield f"{place} draws the curves of '{figure.measure}', which the paper does not measure"
        yield from (f"{place} {problem}" for column in figure.columns for problem in _column_problems(column, methods))


def _column_problems(column: str | FigureColumn, methods: Collection[str]) -> Iterator[str]:
    if isinstance(column, str):
        if column not in methods:
            yield f"names '{column}', which the paper does not have"
        return
    try:
        resolve_method(column.method.replace("{layer}", "0"))
    except ClairError as error:
        yield f"has a column '{column.name}' whose method cannot be used: {str(error).rstrip('.')}"
