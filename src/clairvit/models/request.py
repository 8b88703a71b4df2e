"""What the user asked `load` for, already checked, so that every source reads the same small record."""

from __future__ import annotations

import json
import numbers
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clairvit.errors import BadInput
from clairvit.models.activation import Activation
from clairvit.models.preprocess import NOT_GIVEN, PreprocessOptions

Labels = str | Path | Sequence[str] | Mapping[int, str] | Mapping[str, int] | Mapping[str, str]
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
    preprocessing: PreprocessOptions = NOT_GIVEN

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
    """Return class names in class order, from what `label_names` takes or a JSON file of it."""
    if labels is None:
        return None
    if not isinstance(labels, str | Path):
        return label_names(labels)
    path = Path(labels).expanduser()
    if not path.is_file():
        raise BadInput(
            f"There is no label file '{labels}'; give the path of a JSON list of class names, or the names themselves: "
            'labels=["cat", "dog"].'
        )
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(names, dict) and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
            raise ValueError("it holds something else")
        return label_names(names)
    except (ValueError, OSError, BadInput) as error:
        raise BadInput(
            f"The label file '{labels}' cannot be used ({str(error).rstrip('.')}); expected a JSON list of class names "
            'in class order, like ["cat", "dog"], or {"0": "cat", "1": "dog"}.'
        ) from error


def label_names(labels: Any) -> tuple[str, ...]:
    """Return class names in class order.

    Args:
        labels: Names in class order, {0: "ant", …} (keys may be text, as in JSON), or {"ant": 0, …} (label2id).

    Example:
        >>> label_names({"dog": 1, "ant": 0})
        ('ant', 'dog')
    """
    if isinstance(labels, Set):
        raise BadInput(f"labels is a {type(labels).__name__}, which has no order; expected a list in class order.")
    if isinstance(labels, Mapping):
        return _names_by_id(labels)
    if not isinstance(labels, Iterable) or isinstance(labels, str | bytes):
        raise BadInput(f"labels={labels!r} was given; expected a list of class names, or a JSON file of them.")
    return tuple(str(label) for label in labels)


def _names_by_id(labels: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the names of an id → name or a name → id dict, by id."""
    keys, values = list(labels.keys()), list(labels.values())
    if not keys:
        raise BadInput("labels is an empty dict; expected a name for each class.")
    expected = 'expected {0: "ant", 1: "bee", …} or {"ant": 0, "bee": 1, …}'
    if all(map(_is_integer, values)) and all(isinstance(key, str) for key in keys):
        pairs = [(int(value), key) for key, value in labels.items()]
    elif all(isinstance(value, str) for value in values) and all(map(_is_integer, keys)):
        pairs = [(int(key), value) for key, value in labels.items()]
    elif all(isinstance(one, str) for one in (*keys, *values)):
        key_ids, value_ids = all(map(str.isdecimal, keys)), all(map(str.isdecimal, values))
        if key_ids == value_ids:
            seen = "both keys and values are numbers" if key_ids else "neither keys nor values are numbers"
            raise BadInput(f"labels is a dict of which {seen}, so the ids are not clear; {expected}.")
        pairs = [(int(key), value) if key_ids else (int(value), key) for key, value in labels.items()]
    else:
        raise BadInput(f"labels is a dict with keys such as {keys[0]!r} and values such as {values[0]!r}; {expected}.")
    ids = [number for number, _ in pairs]
    wrong = sorted(set(range(len(ids))) ^ set(ids)) or sorted(number for number in set(ids) if ids.count(number) > 1)
    if wrong:
        listed = ", ".join(map(str, wrong[:6])) + (", …" if len(wrong) > 6 else "")
        raise BadInput(
            f"labels is a dict of {len(ids)} names whose ids are not 0 to {len(ids) - 1}, each once (wrong, missing or "
            f"repeated: {listed}); {expected}."
        )
    return tuple(name for _, name in sorted(pairs))


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def fit_labels(given: tuple[str, ...] | None, own: Callable[[], Sequence[str]], classes: int) -> tuple[str, ...]:
    """The user's labels if there are any (their number must be right), else the source's own."""
    if given is None:
        names = tuple(own())
        return names if len(names) == classes else ()
    if len(given) != classes:
        raise BadInput(f"{len(given)} labels were given for a model with {classes} classes; give exactly {classes}.")
    return given


_generator_in_use = threading.RLock()


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Random weights are the same every time, and the user's own random numbers are not disturbed.

    There is one generator for all threads, so one thread at a time may seed it and put it back.
    """
    with _generator_in_use, torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU: only its generator
        torch.default_generator.manual_seed(seed)  # manual_seed of torch itself would seed other devices too
        yield
