"""What the user asked `load` for, already checked, so that every source reads the same small record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from clairvit.errors import BadInput
from clairvit.models.activation import Activation

Labels = str | Path | Sequence[str]
Size = int | tuple[int, int]


@dataclass(frozen=True)
class Request:
    """`spec` is what was typed ("timm:vit_tiny_patch16_224"), `rest` what follows the source's colon."""

    spec: str
    rest: str
    pretrained: bool = True
    arch: str | None = None
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    activation: Activation | None = None  # None: what the model states

    @property
    def name(self) -> str:
        """The name results carry: nobody should mistake random weights for the real model."""
        return self.spec if self.pretrained else f"{self.spec} (random weights)"


def rows_columns(size: Size | None) -> tuple[int, int] | None:
    """224 -> (224, 224); (224, 320) stays."""
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or not all(isinstance(s, int) and s > 0 for s in sides):
        raise BadInput(f"size={size!r} is not an image size; give one number (size=224) or (rows, columns).")
    return int(sides[0]), int(sides[1])


def read_labels(labels: Labels | None) -> tuple[str, ...] | None:
    """A list of names as it is, or the list in a JSON file (also {"0": "cat", …})."""
    if labels is None:
        return None
    if not isinstance(labels, str | Path | Iterable):
        raise BadInput(f"labels={labels!r} was given; expected a list of class names, or a JSON file of them.")
    if not isinstance(labels, str | Path):
        return tuple(str(label) for label in labels)
    path = Path(labels).expanduser()
    if not path.is_file():
        raise BadInput(
            f"There is no label file '{labels}'; give the path of a JSON list of class names, or the names themselves: "
            'labels=["cat", "dog"].'
        )
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(names, dict):
            names = [names[str(i)] for i in range(len(names))]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it holds something else")
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(
            f"The label file '{labels}' cannot be used ({error}); expected a JSON list of class names in class order, "
            'like ["cat", "dog"].'
        ) from error
    return tuple(names)


def fit_labels(given: tuple[str, ...] | None, own: Callable[[], Sequence[str]], classes: int) -> tuple[str, ...]:
    """The user's labels if there are any (their number must be right), else the source's own."""
    if given is None:
        names = tuple(own())
        return names if len(names) == classes else ()
    if len(given) != classes:
        raise BadInput(f"{len(given)} labels were given for a model with {classes} classes; give exactly {classes}.")
    return given


@contextmanager
def seeded() -> Iterator[None]:
    """Random weights are the same every time, and the user's own random numbers are not disturbed."""
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU, so only its generator is touched
        torch.default_generator.manual_seed(0)
        yield
