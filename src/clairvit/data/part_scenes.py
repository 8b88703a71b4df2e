"""Part scenes: generated pictures of an object of five parts; its class is a combination of part variants.

The questions of FunnyBirds (Hesse et al., ICCV 2023) need pictures from which a part, or an object of the background,
can be removed without a trace. Here components (parts and distractors) never overlap, nothing is smoothed, and what is
painted under a component does not depend on it: the picture without it differs in its pixels alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from clairvit.data.dataset import ImageDataset, Sample
from clairvit.data.drawing import (
    BODY_SHAPES,
    CLASS_PATTERNS,
    DISTRACTOR_SHAPES,
    UNITS_PER_PIXEL,
    Colour,
    Grid,
    IntRng,
    Region,
    Shape,
    disc,
    hexagon,
    offsets,
    slab,
    square,
    textured_background,
    triangle,
)
from clairvit.data.hashing import digest
from clairvit.data.masks import BACKGROUND, OBJECT, prepare_mask
from clairvit.data.parts import PartTable, RemovableParts
from clairvit.errors import BadInput
from clairvit.models.images import prepare
from clairvit.models.model import Model

SIZE = 112  # 14 × 14 patches of 8 pixels
MIN_SIZE = 64
MAX_DISTRACTORS = 6
_VERSION = 1  # part of seeds and hashes: increase it if the same seed gives other pixels
_MARGIN = 2  # pixels between the object and the edge, and between components that must not touch
_TRIES = 30  # positions that are tried for a distractor before it is left out
_REACH = (29, 16)  # radius of a circle around an object with all its parts / radius of its body

PARTS = ("crest", "emblem", "tail", "arm", "feet")
VARIANTS = "abcd"
_OUTLINES: dict[str, Shape] = {"crest": triangle, "emblem": disc, "tail": hexagon, "arm": square, "feet": slab}
_PLACES = {"crest": (0, -18), "emblem": (0, 0), "tail": (-18, 0), "arm": (18, 0), "feet": (0, 18)}  # / 16 body radius
# Colour and pattern of each variant, two signs of it, and in another order for each part: no colour stands for a class.
_COLOURS: tuple[Colour, ...] = ((205, 45, 45), (45, 160, 55), (60, 80, 215), (225, 185, 40))
_PATTERNS = ("dot", "bars", "cross", "posts")
_COLOUR_ORDER = {"crest": "0123", "emblem": "1230", "tail": "2301", "arm": "3012", "feet": "1032"}
_PATTERN_ORDER = {"crest": "0123", "emblem": "2031", "tail": "3210", "arm": "1302", "feet": "0312"}
# A class is named by the variants of its parts, in the order of PARTS. Any two differ in two parts or more, every
# variant is in three classes or more, and each class has contrast classes (`PartTable.contrast_classes`); otherwise
# they were drawn at random. Two or three parts are sufficient for a class, and most classes have several such sets.
CLASSES: tuple[str, ...] = (
    *("abbba", "abcdd", "abddc", "acbbd", "adcac", "baaad", "baadc", "babdd", "badab", "bccbc", "bcdcb", "bdbda"),
    *("bdcdb", "bddac", "cabca", "cbbbd", "ccdbc", "cdbbc", "dacba", "daddd", "ddabc", "ddbbd", "dddbb", "dddca"),
)
TABLE = PartTable(PARTS, CLASSES, tuple(tuple(VARIANTS.index(letter) for letter in name) for name in CLASSES))


@dataclass(frozen=True)
class Part:
    """One part of an object. Lengths are in units of 1/8 pixel."""

    kind: str
    variant: int
    x: int
    y: int
    radius: int
    tint: Colour  # added to the colour of the variant


@dataclass(frozen=True)
class Blob:
    """A plain shape: the body of the object, or a distractor. Lengths are in units of 1/8 pixel."""

    shape: str
    x: int
    y: int
    radius: int
    colour: Colour
    grain: int  # amplitude of the surface noise


@dataclass(frozen=True)
class PartScenePlan:
    """All that a part scene is drawn from; leave out a part or a distractor to see which pixels change."""

    seed: int
    number: int
    size: int
    class_name: str
    body: Blob
    parts: tuple[Part, ...]
    distractors: tuple[Blob, ...]


@dataclass(frozen=True, eq=False)
class PartScene:
    """A picture in two layers: with all components, and with none; `components` says which component a pixel is of."""

    full: NDArray[np.uint8]  # [size, size, 3]
    empty: NDArray[np.uint8]  # [size, size, 3]: background and body
    components: NDArray[np.uint8]  # [size, size]: 0 none, 1 … P the parts in the order of PARTS, then distractors
    body: Region  # [size, size]: the body, whether a part covers it or not
    class_name: str

    @property
    def count(self) -> int:
        """Return the number of components."""
        return int(self.components.max())

    def masks(self) -> NDArray[np.bool_]:
        """Return the pixels of each component, bool [K, size, size]."""
        return np.asarray(self.components[None] == np.arange(1, self.count + 1)[:, None, None])


def part_scene(seed: int, number: int, size: int = SIZE) -> PartScene:
    """Return the scene of that number; it does not depend on which others are drawn."""
    return draw(plan(seed, number, size))


def plan(seed: int, number: int, size: int = SIZE) -> PartScenePlan:
    """Return what a scene consists of. Among len(CLASSES) scenes in a row every class occurs once."""
    if size < MIN_SIZE:
        raise BadInput(f"size={size} was given; expected part scenes of at least {MIN_SIZE} pixels, {SIZE} by default.")
    rounds, position = divmod(number, len(CLASSES))
    class_index = IntRng("part classes", _VERSION, seed, rounds).permutation(len(CLASSES))[position]
    rng = IntRng("part scene", _VERSION, seed, number, size)
    side = size * UNITS_PER_PIXEL
    radius = rng.integer(side * 16 // 100, side * 195 // 1000)
    edge = radius * _REACH[0] // _REACH[1] + _MARGIN * UNITS_PER_PIXEL
    shapes = tuple(BODY_SHAPES)
    body = Blob(
        shapes[rng.integer(0, len(shapes) - 1)],
        rng.integer(edge, side - edge),
        rng.integer(edge, side - edge),
        radius,
        rng.colour(70, 200),
        rng.integer(10, 50),
    )
    variants = TABLE.variants[class_index]
    parts = tuple(_plan_part(rng, body, kind, variant) for kind, variant in zip(PARTS, variants, strict=True))
    return PartScenePlan(seed, number, size, CLASSES[class_index], body, parts, _plan_distractors(rng, size, body))


def _plan_part(rng: IntRng, body: Blob, kind: str, variant: int) -> Part:
    """Return a part at its place on the body; parts on the rim are shifted by up to 1/16 of the body's radius."""
    right, below = _PLACES[kind]
    slack = 0 if (right, below) == (0, 0) else body.radius // 16
    x = body.x + right * body.radius // 16 + rng.integer(-slack, slack)
    y = body.y + below * body.radius // 16 + rng.integer(-slack, slack)
    return Part(kind, variant, x, y, body.radius * 15 // 32, rng.colour(-25, 25))


def _plan_distractors(rng: IntRng, size: int, body: Blob) -> tuple[Blob, ...]:
    """Return up to MAX_DISTRACTORS shapes that touch neither the object nor each other; the edge may cut them off."""
    side, margin = size * UNITS_PER_PIXEL, _MARGIN * UNITS_PER_PIXEL
    taken = [(body.x, body.y, body.radius * _REACH[0] // _REACH[1])]
    blobs: list[Blob] = []
    shapes = tuple(DISTRACTOR_SHAPES)
    for _ in range(rng.integer(3, MAX_DISTRACTORS)):
        shape, colour = shapes[rng.integer(0, len(shapes) - 1)], rng.colour(20, 235)
        radius, grain = rng.integer(side * 4 // 100, side * 10 // 100), rng.integer(0, 40)
        reach = radius * 5 // 4 + margin  # the corners of a square are at 7/8 √2 of its radius
        for _ in range(_TRIES):
            x, y = rng.integer(0, side), rng.integer(0, side)
            if all((x - u) ** 2 + (y - v) ** 2 > (reach + other) ** 2 for u, v, other in taken):
                taken.append((x, y, reach))
                blobs.append(Blob(shape, x, y, radius, colour, grain))
                break
    return tuple(blobs)


def draw(planned: PartScenePlan) -> PartScene:
    """Return the picture with and without its components: background and body, then parts and distractors."""
    size = planned.size
    canvas = textured_background(IntRng("part background", planned.seed, planned.number), size)
    body = _paint_blob(canvas, planned.body, planned)
    empty = canvas.clip(0, 255).astype(np.uint8)
    components = np.zeros((size, size), np.uint8)
    for part in planned.parts:
        components[_paint_part(canvas, part)] = 1 + PARTS.index(part.kind)
    for index, blob in enumerate(planned.distractors):
        components[_paint_blob(canvas, blob, planned)] = 1 + len(PARTS) + index
    full = canvas.clip(0, 255).astype(np.uint8)
    return PartScene(full, empty, components, body, planned.class_name)


def _paint_blob(canvas: Grid, blob: Blob, planned: PartScenePlan) -> Region:
    """Draw a shape on the canvas in place; return its pixels. Its grain depends on its own place alone."""
    size = len(canvas)
    region = DISTRACTOR_SHAPES[blob.shape](*offsets(size, blob.x, blob.y), blob.radius)
    rng = IntRng("blob", planned.seed, planned.number, blob.x, blob.y)
    grain = rng.bytes(1, int(region.sum()))[0] * blob.grain // 255
    canvas[region] = np.asarray(blob.colour, np.int32) + grain[:, None] - blob.grain // 2
    return region


def _paint_part(canvas: Grid, part: Part) -> Region:
    """Draw a part on the canvas in place; return its pixels. Its pattern is inked in a third of its colour."""
    right, below = offsets(len(canvas), part.x, part.y)
    region = _OUTLINES[part.kind](right, below, part.radius)
    colour = np.asarray(_COLOURS[int(_COLOUR_ORDER[part.kind][part.variant])]) + np.asarray(part.tint)
    pattern, _ = CLASS_PATTERNS[_PATTERNS[int(_PATTERN_ORDER[part.kind][part.variant])]]
    canvas[region] = colour
    canvas[region & pattern(right, below, part.radius)] = colour // 3
    return region


def compose(scene: PartScene, keep: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the picture with the components of `keep`, bool [K], alone: [size, size, 3]."""
    shown = np.concatenate([[False], keep])[scene.components]
    return np.where(shown[..., None], scene.full, scene.empty)


def part_scenes(count: int, seed: int = 0, size: int = SIZE) -> ImageDataset:
    """Return generated part scenes as a dataset, each drawn when it is read; its mask is the object with its parts.

    Args:
        count: The number of scenes.
        seed: Of all scenes.
        size: Rows and columns in pixels.
    """
    if count < 1:
        raise BadInput(f"{count} part scenes were asked for; expected at least one.")
    plan(seed, 0, size)  # raises BadInput for a size that cannot be
    names = tuple(f"parts {seed}-{number}" for number in range(count))

    def read(row: int, model: Model) -> Sample:
        drawn = part_scene(seed, row, size)
        regions = [*drawn.masks(), drawn.body | ((drawn.components > 0) & (drawn.components <= len(PARTS)))]
        pictures = [Image.fromarray(np.where(region, OBJECT, BACKGROUND).astype(np.uint8)) for region in regions]
        *masks, whole = (prepare_mask(picture, model.preprocess)[0] for picture in pictures)
        full, empty = prepare([Image.fromarray(drawn.full), Image.fromarray(drawn.empty)], model).pixels
        parts = RemovableParts(full, empty, torch.stack(masks), TABLE)
        return Sample(full, whole, label=drawn.class_name, parts=parts)

    def content_hash(row: int) -> str:
        return digest(repr(("part scene", _VERSION, seed, row, size)).encode())

    return ImageDataset(names, read, content_hash, has_masks=True, has_labels=True, has_parts=True)
