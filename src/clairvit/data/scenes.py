"""Scenes: pictures made from a seed, in which we know which pixels decide the class, because we put them there.

An object is a body of any shape, colour and texture with a badge on it. Pattern and ink of the badge are the class; all
else (body, place, size, background, strays) is drawn without looking at the class. Bodies with a blank badge stand
about too, so neither body nor badge says anything: only the ink does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clairvit.data.dataset import ImageDataset, Sample
from clairvit.data.drawing import BODIES, FINE, INKS, STRAYS, Colour, Grid, IntRng, Region, disc, noise, plane
from clairvit.data.hashing import digest
from clairvit.data.masks import GROUND, OBJECT, prepare_mask
from clairvit.errors import BadInput
from clairvit.models.images import prepare
from clairvit.models.model import Model

CLASSES = tuple(INKS)
SIZE = 96  # 12 × 12 patches of 8 pixels
SMALLEST = 48
_VERSION = 1  # other pixels for the same seed: another version, so that nothing stored is taken for the new
_MARGIN = 2  # pixels between an object and the edge, and half of that between two objects' halves of the picture

SceneClassesShown = Literal["object", "part"]


@dataclass(frozen=True)
class Badge:
    x: int  # in fine units, as all lengths here
    y: int
    radius: int
    plate: Colour
    tint: Colour  # added to the ink, whichever it is
    kind: str | None  # what is inked on it: the class; None: blank


@dataclass(frozen=True)
class Thing:
    """An object, or (without a badge, or with a blank one) a stray."""

    shape: str
    x: int
    y: int
    radius: int
    colour: Colour
    grain: int  # how rough its surface is
    badge: Badge | None = None


@dataclass(frozen=True)
class Plan:
    """All that a scene is drawn from: take out or change a thing, and see which pixels change."""

    seed: int
    number: int
    size: int
    strays: tuple[Thing, ...]
    objects: tuple[Thing, ...]


@dataclass(frozen=True, eq=False)
class Scene:
    picture: Image.Image  # RGB
    mask: NDArray[np.bool_]  # [rows, columns]: the object, its part included
    part: NDArray[np.bool_]  # the badge, which decides the class
    kind: str  # the class
    other_mask: NDArray[np.bool_] | None = None  # the second object
    other_part: NDArray[np.bool_] | None = None
    other_kind: str | None = None


def scene(seed: int, number: int, objects: int = 1, size: int = SIZE) -> Scene:
    """The scene of that number; one is the same whatever others are drawn."""
    return draw(plan(seed, number, objects, size))


def plan(seed: int, number: int, objects: int = 1, size: int = SIZE) -> Plan:
    """What stands where. Of each len(CLASSES) scenes in a row every class is the class of one."""
    _check(objects, size)
    lots = IntRng("scene", _VERSION, seed, number, objects, size)
    kinds = _kinds(seed, number, objects)
    strays = [_stray(lots, size) for _ in range(lots.number(2, 5))]
    strays.sort(key=lambda thing: thing.badge is not None)  # nothing but a body lies on a blank badge: no false ink
    sideways = bool(lots.number(0, 1))
    first = lots.number(0, 1)  # in which half of the picture the first of two stands
    placed = tuple(
        _object(lots, size, kind, None if objects == 1 else (first + place) % 2, sideways)
        for place, kind in enumerate(kinds)
    )
    return Plan(seed, number, size, tuple(strays), placed)


def draw(planned: Plan) -> Scene:
    """Background, then strays, then objects: nothing hides a pixel of an object, and no two objects touch."""
    canvas = _background(planned)
    for place, thing in enumerate(planned.strays):
        _paint(canvas, thing, IntRng("stray", planned.seed, planned.number, place))
    masks = [
        _paint(canvas, thing, IntRng("object", planned.seed, planned.number, place))
        for place, thing in enumerate(planned.objects)
    ]
    picture = Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
    nothing = np.zeros((planned.size, planned.size), bool)
    (mask, part), *more = masks or [(nothing, nothing)]
    kinds = [_kind(thing) for thing in planned.objects] or [""]
    if not more:
        return Scene(picture, mask, part, kinds[0])
    return Scene(picture, mask, part, kinds[0], *more[0], kinds[1])


def with_class(planned: Plan, kind: str, place: int = 0) -> Plan:
    """The same scene with something else inked on an object's badge."""
    if kind not in INKS:
        raise BadInput(f"There is no class '{kind}' of scenes; expected one of {', '.join(CLASSES)}.")
    objects = list(planned.objects)
    badge = objects[place].badge
    assert badge is not None
    objects[place] = replace(objects[place], badge=replace(badge, kind=kind))
    return replace(planned, objects=tuple(objects))


def scenes(
    count: int, seed: int = 0, objects: int = 1, size: int = SIZE, mask: SceneClassesShown = "object"
) -> ImageDataset:
    """So many scenes, each drawn when its turn comes, with its class and, of two objects, the other's.

    `mask` is the whole object, or "part": the pixels that decide the class.
    """
    _check(objects, size)
    if count < 1:
        raise BadInput(f"{count} scenes were asked for; expected at least one.")
    if mask not in ("object", "part"):
        raise BadInput(f"mask={mask!r} was given for scenes; expected 'object' or 'part'.")
    names = tuple(f"scene {seed}-{number}" for number in range(count))

    def read(row: int, model: Model) -> Sample:
        found = scene(seed, row, objects, size)
        region = found.mask if mask == "object" else found.part
        where, _ = prepare_mask(Image.fromarray(np.where(region, OBJECT, GROUND).astype(np.uint8)), model.preprocess)
        pixels = prepare([found.picture], model).pixels[0]
        return Sample(pixels, where, label=found.kind, other=found.other_kind)

    def mark(row: int) -> str:
        return digest(repr(("scene", _VERSION, seed, row, objects, size, mask)).encode())

    return ImageDataset(names, read, mark, has_masks=True, has_labels=True, has_others=objects == 2)


def _check(objects: int, size: int) -> None:
    if objects not in (1, 2):
        raise BadInput(f"objects={objects} was given; expected 1 or 2 objects in a scene.")
    if size < SMALLEST:
        raise BadInput(f"size={size} was given; expected scenes of at least {SMALLEST} pixels, {SIZE} by default.")


def _kinds(seed: int, number: int, objects: int) -> list[str]:
    """The first object's class goes through a shuffled round of all; the second's is any other."""
    count = len(CLASSES)
    rounds, place = divmod(number, count)
    first = IntRng("classes", seed, rounds).order(count)[place]
    if objects == 1:
        return [CLASSES[first]]
    further = IntRng("others", seed, rounds).number(1, count - 1)  # the same step for a round: seconds are balanced too
    return [CLASSES[first], CLASSES[(first + further) % count]]


def _kind(thing: Thing) -> str:
    assert thing.badge is not None
    assert thing.badge.kind is not None
    return thing.badge.kind


def _object(lots: IntRng, size: int, kind: str, half: int | None, sideways: bool) -> Thing:
    """A body with a badge, whole in the picture, or in the half of it that is left to it."""
    unit = size * FINE  # the picture's side
    radius = lots.number(unit * 16 // 100, unit * 21 // 100)
    edge = radius + _MARGIN * FINE
    anywhere = lots.number(edge, unit - edge)
    if half is None:
        x, y = anywhere, lots.number(edge, unit - edge)
    else:
        within = lots.number(edge, unit // 2 - radius - FINE) + half * (unit // 2)
        x, y = (within, anywhere) if sideways else (anywhere, within)
    return _badged(lots, x, y, radius, kind)


def _badged(lots: IntRng, x: int, y: int, radius: int, kind: str | None) -> Thing:
    shapes = tuple(BODIES)
    shape, colour = shapes[lots.number(0, len(shapes) - 1)], lots.colour(40, 215)
    size = lots.number(radius * 50 // 100, radius * 58 // 100)
    room = radius * 13 // 16 - size  # every body holds a disc of 13/16 of its radius
    away = room * 11 // 16  # so that the corner of the square the middle is drawn from stays in it
    middle = x + lots.number(-away, away), y + lots.number(-away, away)
    badge = Badge(*middle, size, lots.colour(200, 255), lots.colour(0, 50), kind)
    return Thing(shape, x, y, radius, colour, lots.number(10, 50), badge)


def _stray(lots: IntRng, size: int) -> Thing:
    """A shape of any kind, or a body with a blank badge; it may be cut off by the edge, or half hidden.

    Its colour is never as dark as ink, so that a hoop on a pale background is no ring.
    """
    unit = size * FINE
    x, y = lots.number(0, unit), lots.number(0, unit)
    if lots.number(0, 3) == 0:
        return _badged(lots, x, y, lots.number(unit * 14 // 100, unit * 20 // 100), None)
    shapes = tuple(STRAYS)
    shape = shapes[lots.number(0, len(shapes) - 1)]
    radius = lots.number(unit * 5 // 100, unit * 16 // 100)
    return Thing(shape, x, y, radius, lots.colour(90, 245), lots.number(0, 40))


def _background(planned: Plan) -> Grid:
    """[size, size, 3]: two colours blended by coarse and fine noise, and grain on top."""
    lots = IntRng("background", planned.seed, planned.number)
    size = planned.size
    one, two = lots.colour(30, 225), lots.colour(30, 225)
    coarse, fine = noise(lots, size, size // 4), noise(lots, size, size // lots.number(8, 24))
    blend = (coarse * 2 + fine) // 3  # 0..255
    grain = lots.bytes(size, size) * lots.number(10, 60) // 255
    canvas: Grid = np.empty((size, size, 3), np.int32)
    for channel in range(3):
        canvas[..., channel] = (one[channel] * (255 - blend) + two[channel] * blend) // 255 + grain
    return canvas


def _paint(canvas: Grid, thing: Thing, lots: IntRng) -> tuple[Region, Region]:
    """Put a thing on the canvas; where it is, and where its badge is."""
    size = len(canvas)
    body = STRAYS[thing.shape](*plane(size, thing.x, thing.y), thing.radius)
    grain = lots.bytes(size, size)[body] * thing.grain // 255
    canvas[body] = np.asarray(thing.colour, np.int32) + grain[:, None] - thing.grain // 2
    part = np.zeros_like(body)
    badge = thing.badge
    if badge is not None:
        right, below = plane(size, badge.x, badge.y)
        part = disc(right, below, badge.radius)
        canvas[part] = badge.plate
        if badge.kind is not None:
            pattern, ink = INKS[badge.kind]
            canvas[part & pattern(right, below, badge.radius)] = np.asarray(ink) + np.asarray(badge.tint)
    return body, part
