"""Class names as users give them: a list, a dict in either direction, or a JSON file of either."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from clairvit._io import parse_json
from clairvit.errors import BadInput

Labels = str | Path | Sequence[str] | Mapping[int, str] | Mapping[str, int] | Mapping[str, str]


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
        names = parse_json(path.read_text(encoding="utf-8"))
        if not is_dict_or_names(names):
            raise ValueError("it holds something else")
        return label_names(names)
    except (ValueError, OSError, BadInput) as error:
        raise BadInput(
            f"The label file '{labels}' cannot be used ({str(error).rstrip('.')}); expected a JSON list of class names "
            'in class order, like ["cat", "dog"], or {"0": "cat", "1": "dog"}.'
        ) from error


def is_dict_or_names(value: Any) -> bool:
    """Return whether a JSON value can hold labels: a dict, or a list of strings."""
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


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
    elif all(isinstance(item, str) for item in (*keys, *values)):
        key_ids, value_ids = all(map(str.isdecimal, keys)), all(map(str.isdecimal, values))
        if key_ids == value_ids:
            problem = "both keys and values are numbers" if key_ids else "neither keys nor values are numbers"
            raise BadInput(f"labels is a dict of which {problem}, so the ids are not clear; {expected}.")
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


def fit_labels(labels: tuple[str, ...] | None, default: Callable[[], Sequence[str]], classes: int) -> tuple[str, ...]:
    """Return the user's labels if there are any (their number must be right), else the source's default labels."""
    if labels is None:
        names = tuple(default())
        return names if len(names) == classes else ()
    if len(labels) != classes:
        raise BadInput(f"{len(labels)} labels were given for a model with {classes} classes; give exactly {classes}.")
    return labels
