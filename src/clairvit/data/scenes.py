"""Scenes: pictures generated from a seed, of which the pixels that determine the class are known exactly.

An object is a body of any shape, colour and texture with a marker on it. Pattern and ink of the marker are the class;
everything else (body, position, size, background, distractors) is independent of the class. Bodies with a blank marker
are drawn too: neither body nor marker carries information, only the ink does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
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
    disc,
    offsets,
    textured_background,
)
from clairvit.data.hashing import digest
from clairvit.data.masks import BACKGROUND, OBJECT, prepare_mask
from clairvit.errors import BadInput
from clairvit.models.images import prepare
from clairvit.models.model import Model

CLASSES = tuple(CLASS_PATTERNS)
SIZE = 96  # 12 × 12 patches of 8 pixels
MIN_SIZE = 48
_VERSION = 1  # part of seeds and hashes: increase it if the same seed gives other pixels
_MARGIN = 2  # pixels between an object and the edge, and twice those between the areas of two objects

SceneMask = Literal["object", "part"]


@dataclass(frozen=True)
class ClassMarker:
    """A disc on a body; its pattern is the class. Lengths are in units of 1/8 pixel."""

    x: int
    y: int
    radius: int
    plate: Colour  # colour of the disc
    tint: Colour  # added to the ink of any class
    class_name: str | None  # None: blank


@dataclass(frozen=True)
class SceneObject:
    """A body with a marker, or a distractor: without a marker, or with a blank one. Lengths are in 1/8 pixel."""

    shape: str
    x: int
    y: int
    radius: int
    colour: Colour
    grain: int  # amplitude of the surface noise
    marker: ClassMarker | None = None


@dataclass(frozen=True)
class ScenePlan:
    """All that a scene is drawn from; change or remove an object to see which pixels change."""

    seed: int
    number: int
    size: int
    distractors: tuple[SceneObject, ...]
    objects: tuple[SceneObject, ...]


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture with exact masks of its one or two objects."""

    picture: Image.Image  # RGB
    mask: NDArray[np.bool_]  # [rows, columns]: the object, its part included
    part: NDArray[np.bool_]  # the marker, which determines the class
    class_name: str
    other_mask: NDArray[np.bool_] | None = None  # the second object
    other_part: NDArray[np.bool_] | None = None
    other_class_name: str | None = None


def scene(seed: int, number: int, objects: int = 1, size: int = SIZE) -> Scene:
    """Return the scene of that number; it does not depend on which others are drawn."""
    return draw(plan(seed, number, objects, size))


def plan(seed: int, number: int, objects: int = 1, size: int = SIZE) -> ScenePlan:
    """Return what a scene consists of. Among len(CLASSES) scenes in a row every class occurs once."""
    _check(objects, size)
    rng = IntRng("scene", _VERSION, seed, number, objects, size)
    names = _class_names(seed, number, objects)
    distractors = [_draw_distractor(rng, size) for _ in range(rng.integer(2, 5))]
    distractors.sort(key=lambda item: item.marker is not None)  # no shape may look like ink on a blank marker
    side_by_side = bool(rng.integer(0, 1))
    first_half = rng.integer(0, 1)  # of the picture, for the first of two objects
    placed = tuple(
        _draw_object(rng, size, name, None if objects == 1 else (first_half + index) % 2, side_by_side)
        for index, name in enumerate(names)
    )
    return ScenePlan(seed, number, size, tuple(distractors), placed)


def draw(planned: ScenePlan) -> Scene:
    """Return the picture: background, distractors, objects. No object is hidden, and no two objects touch."""
    canvas = textured_background(IntRng("background", planned.seed, planned.number), planned.size)
    for index, item in enumerate(planned.distractors):
        _paint(canvas, item, IntRng("stray", planned.seed, planned.number, index))
    masks = [
        _paint(canvas, item, IntRng("object", planned.seed, planned.number, index))
        for index, item in enumerate(planned.objects)
    ]
    picture = Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
    empty = np.zeros((planned.size, planned.size), bool)
    (mask, part), *second = masks or [(empty, empty)]
    names = [_class_name(item) for item in planned.objects] or [""]
    if not second:
        return Scene(picture, mask, part, names[0])
    return Scene(picture, mask, part, names[0], *second[0], names[1])


def with_class(planned: ScenePlan, class_name: str, index: int = 0) -> ScenePlan:
    """Return the same scene with another pattern on the marker of one object."""
    if class_name not in CLASS_PATTERNS:
        raise BadInput(f"There is no class '{class_name}' of scenes; expected one of {', '.join(CLASSES)}.")
    objects = list(planned.objects)
    marker = objects[index].marker
    assert marker is not None
    objects[index] = replace(objects[index], marker=replace(marker, class_name=class_name))
    return replace(planned, objects=tuple(objects))


def scenes(count: int, seed: int = 0, objects: int = 1, size: int = SIZE, mask: SceneMask = "object") -> ImageDataset:
    """Return generated scenes as a dataset, each drawn when it is read.

    Args:
        count: The number of scenes.
        seed: Of all scenes.
        objects: 1, or 2 of different classes.
        size: Rows and columns in pixels.
        mask: The whole object, or "part": the pixels that determine the class.
    """
    _check(objects, size)
    if count < 1:
        raise BadInput(f"{count} scenes were asked for; expected at least one.")
    if mask not in ("object", "part"):
        raise BadInput(f"mask={mask!r} was given for scenes; expected 'object' or 'part'.")
    names = tuple(f"scene {seed}-{number}" for number in range(count))

    def read(row: int, model: Model) -> Sample:
        drawn_scene = scene(seed, row, objects, size)
        region = drawn_scene.mask if mask == "object" else drawn_scene.part
        picture = Image.fromarray(np.where(region, OBJECT, BACKGROUND).astype(np.uint8))
        object_mask, _ = prepare_mask(picture, model.preprocess)
        pixels = prepare([drawn_scene.picture], model).pixels[0]
        return Sample(pixels, object_mask, label=drawn_scene.class_name, other=drawn_scene.other_class_name)

    def content_hash(row: int) -> str:
        return digest(repr(("scene", _VERSION, seed, row, objects, size, mask)).encode())

    return ImageDataset(names, read, content_hash, has_masks=True, has_labels=True, has_others=objects == 2)


def _check(objects: int, size: int) -> None:
    if objects not in (1, 2):
        raise BadInput(f"objects={objects} was given; expected 1 or 2 objects in a scene.")
    if size < MIN_SIZE:
        raise BadInput(f"size={size} was given; expected scenes of at least {MIN_SIZE} pixels, {SIZE} by default.")


def _class_names(seed: int, number: int, objects: int) -> list[str]:
    """Return the classes: the first goes through a permutation of all classes, the second is any other."""
    count = len(CLASSES)
    rounds, position = divmod(number, count)
    first = IntRng("classes", seed, rounds).permutation(count)[position]
    if objects == 1:
        return [CLASSES[first]]
    shift = IntRng("others", seed, rounds).integer(1, count - 1)  # one shift per round: second classes are balanced
    return [CLASSES[first], CLASSES[(first + shift) % count]]


def _class_name(item: SceneObject) -> str:
    assert item.marker is not None
    assert item.marker.class_name is not None
    return item.marker.class_name


def _draw_object(rng: IntRng, size: int, class_name: str, half: int | None, side_by_side: bool) -> SceneObject:
    """Return a body with a marker, entirely inside the picture or, of two objects, inside its half."""
    side = size * UNITS_PER_PIXEL
    radius = rng.integer(side * 16 // 100, side * 21 // 100)
    edge = radius + _MARGIN * UNITS_PER_PIXEL
    anywhere = rng.integer(edge, side - edge)
    if half is None:
        x, y = anywhere, rng.integer(edge, side - edge)
    else:
        inside_half = rng.integer(edge, side // 2 - radius - UNITS_PER_PIXEL) + half * (side // 2)
        x, y = (inside_half, anywhere) if side_by_side else (anywhere, inside_half)
    return _draw_body(rng, x, y, radius, class_name)


def _draw_body(rng: IntRng, x: int, y: int, radius: int, class_name: str | None) -> SceneObject:
    """Return a body with a marker inside it; None is a blank marker."""
    shapes = tuple(BODY_SHAPES)
    shape, colour = shapes[rng.integer(0, len(shapes) - 1)], rng.colour(40, 215)
    size = rng.integer(radius * 50 // 100, radius * 58 // 100)
    slack = radius * 13 // 16 - size  # every body holds a disc of 13/16 of its radius
    shift = slack * 11 // 16  # below slack / √2: the marker stays inside for any shift in x and y
    centre = x + rng.integer(-shift, shift), y + rng.integer(-shift, shift)
    marker = ClassMarker(*centre, size, rng.colour(200, 255), rng.colour(0, 50), class_name)
    return SceneObject(shape, x, y, radius, colour, rng.integer(10, 50), marker)


def _draw_distractor(rng: IntRng, size: int) -> SceneObject:
    """Return a shape of any kind, or a body with a blank marker; it may be cut off by the edge or partly hidden.

    Its colour is never as dark as ink, so that a ring-shaped distractor on a pale background is no "ring" marker.
    """
    side = size * UNITS_PER_PIXEL
    x, y = rng.integer(0, side), rng.integer(0, side)
    if rng.integer(0, 3) == 0:
        return _draw_body(rng, x, y, rng.integer(side * 14 // 100, side * 20 // 100), None)
    shapes = tuple(DISTRACTOR_SHAPES)
    shape = shapes[rng.integer(0, len(shapes) - 1)]
    radius = rng.integer(side * 5 // 100, side * 16 // 100)
    return SceneObject(shape, x, y, radius, rng.colour(90, 245), rng.integer(0, 40))


def _paint(canvas: Grid, item: SceneObject, rng: IntRng) -> tuple[Region, Region]:
    """Draw an object on the canvas in place; return the regions of the object and of its marker."""
    size = len(canvas)
    body = DISTRACTOR_SHAPES[item.shape](*offsets(size, item.x, item.y), item.radius)
    grain = rng.bytes(size, size)[body] * item.grain // 255
    canvas[body] = np.asarray(item.colour, np.int32) + grain[:, None] - item.grain // 2
    part = np.zeros_like(body)
    marker = item.marker
    if marker is not None:
        right, below = offsets(size, marker.x, marker.y)
        part = disc(right, below, marker.radius)
        canvas[part] = marker.plate
        if marker.class_name is not None:
            pattern, ink = CLASS_PATTERNS[marker.class_name]
            canvas[part & pattern(right, below, marker.radius)] = np.asarray(ink) + np.asarray(marker.tint)
    return body, part
