"""Rows: results and batches that declare, field by field, how rows are taken and joined.

    class Explanation(RowSequence):
        maps: Tensor = per_row()
        layers: Tensor | None = per_row(axis=1, default=None)
        notes: tuple[str, ...] = union(default=())
        cost: Cost = joined(Cost.of_batches)
        model: str = same()

`len`, `take`, `concat` and, in a `RowSequence`, indices, slices, masks and iteration follow from the declarations.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Self, dataclass_transform

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clairvit.errors import BadInput

TakeRows = Callable[[Any, list[int]], Any]  # the value of a field, rows -> its value for these rows
JoinValues = Callable[[Sequence[Any]], Any]  # the values of a field in all parts -> its value for all their rows
Indices = int | slice | Sequence[int] | Sequence[bool] | Tensor | NDArray[Any]
_RULE = "rows"  # the key in a field's metadata


@dataclass(frozen=True)
class _Rule:
    """How the value of a field is taken and joined."""

    take: TakeRows
    join: JoinValues | None  # None: all parts have the same value
    axis: int | None = None  # of the rows; None: the field is about all rows together


def per_row(*, axis: int = 0, take: TakeRows | None = None, join: JoinValues | None = None, **options: Any) -> Any:
    """Declare a field with a value per row: a tensor or array, a tuple, `Rows`, or a mapping of these.

    None, and an empty tuple where that is the default, mean that there are no values; joined with others they stay so.

    Args:
        axis: The axis of the rows in a tensor.
        take: Another way to take rows.
        join: Another way to join values.
        **options: As in `dataclasses.field`.
    """
    is_tuple = options.get("default", MISSING) == ()

    def take_values(value: Any, rows: list[int]) -> Any:
        return () if is_tuple and not value else take_rows(value, rows, axis)

    def join_values(values: Sequence[Any]) -> Any:
        return () if is_tuple and not all(values) else join_rows(values, axis)

    return _declared(_Rule(take or take_values, join or join_values, axis), options)


def union(**options: Any) -> Any:
    """Declare a tuple about all rows, such as notes; joined it has each entry once, in the order of the parts."""
    return joined(lambda values: tuple(dict.fromkeys(entry for value in values for entry in value)), **options)


def same(**options: Any) -> Any:
    """Declare a field that must be equal in all parts; `concat` raises BadInput where it differs."""
    return _declared(_Rule(_keep, None), options)


def first(**options: Any) -> Any:
    """Declare a field about all rows, of which the first part's value is kept."""
    return joined(lambda values: values[0], **options)


def joined(join: JoinValues, **options: Any) -> Any:
    """Declare a field about all rows whose values are joined by a function of the values of all parts."""
    return _declared(_Rule(_keep, join), options)


def _keep(value: Any, rows: list[int]) -> Any:
    return value


def _declared(rule: _Rule, options: dict[str, Any]) -> Any:
    return field(**options, metadata={_RULE: rule})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(per_row, union, same, first, joined))
class Rows:
    """A frozen dataclass with rows; every field says what happens to it when rows are taken or joined.

    A field that does not say so is a TypeError when the class is made. Subclasses need no decorator.
    """

    _rules: ClassVar[Mapping[str, _Rule]] = {}
    row_axes: ClassVar[Mapping[str, int]] = {}  # field with a value per row -> the axis of the rows in its tensor

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name, annotation in inspect.get_annotations(cls).items():
            declaration = getattr(cls.__dict__.get(name), "metadata", {})
            if _RULE not in declaration and not str(annotation).startswith("ClassVar"):
                raise TypeError(
                    f"{cls.__name__}.{name} does not say how rows are taken and joined; expected one of per_row(), "
                    "union(), same(), first() and joined(f)."
                )
        dataclass(frozen=True, eq=False)(cls)
        cls._rules = {entry.name: entry.metadata[_RULE] for entry in fields(cls)}  # type: ignore[arg-type]
        cls.row_axes = {name: rule.axis for name, rule in cls._rules.items() if rule.axis is not None}

    def __len__(self) -> int:
        name, axis = next(iter(self.row_axes.items()))
        return row_count(getattr(self, name), axis) or 0

    def take(self, rows: Sequence[int]) -> Self:
        """Return chosen rows, in this order, repeated as often as named."""
        chosen = list(rows)
        return type(self)(**{name: rule.take(getattr(self, name), chosen) for name, rule in self._rules.items()})

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """Return all rows of several parts, in their order; raise BadInput where parts do not fit together."""
        listed = list(parts)
        if not listed:
            raise BadInput(f"Nothing was given to join; expected at least one {cls.__name__}.")
        values = {name: [getattr(part, name) for part in listed] for name in cls._rules}
        return cls(
            **{
                name: _same_value(cls.__name__, name, values[name]) if rule.join is None else rule.join(values[name])
                for name, rule in cls._rules.items()
            }
        )


class RowSequence(Rows):
    """Rows that are a sequence of themselves: `x[0]`, `x[2:5]`, `x[[0, 3]]`, `x[mask]` and iteration."""

    def __iter__(self) -> Iterator[Self]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, items: Indices) -> Self:
        """Return some of the rows: one, a slice, a list of them, or those where a mask is true."""
        return self.take(row_numbers(items, len(self)))


def row_numbers(items: Indices, count: int) -> list[int]:
    """Return the rows from 0 that an index, slice, list or mask of `count` rows names.

    Raises:
        IndexError: There is no such row, or a mask has another length.
        TypeError: Something else was given.
    """
    if isinstance(items, slice):
        return list(range(count)[items])
    listed: Any = items.tolist() if isinstance(items, Tensor | np.ndarray | np.generic) else items
    if isinstance(listed, bool | str) or not isinstance(listed, Sequence):
        return [_row_number(listed, count)]
    if listed and all(isinstance(entry, bool | np.bool_) for entry in listed):
        if len(listed) != count:
            raise IndexError(f"A mask of {len(listed)} entries was given for {count} rows; expected one for each.")
        return [row for row, is_chosen in enumerate(listed) if is_chosen]
    return [_row_number(entry, count) for entry in listed]


def _row_number(item: Any, count: int) -> int:
    if isinstance(item, bool | np.bool_ | str) or not hasattr(item, "__index__"):
        raise TypeError(f"The rows {item!r} were asked for; expected an int, a slice, a list of ints or a mask.")
    row = operator.index(item)
    if not -count <= row < count:
        raise IndexError(f"Row {row} was asked for; there are {count}, counted from 0.")
    return row % count


def row_count(value: Any, axis: int = 0) -> int | None:
    """Return the number of rows of a field's value; None where there are none: None, (), or a function."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.shape[axis])
    return len(value) or None if isinstance(value, Rows | tuple) else None


def take_rows(value: Any, rows: list[int], axis: int = 0) -> Any:
    """Return chosen rows of a tensor, array, tuple, `Rows`, or of each entry of a mapping; None stays None."""
    if value is None:
        return None
    if isinstance(value, Tensor | np.ndarray):
        index: Any = (*(slice(None),) * axis, rows)
        return value[index] if axis else value[rows]
    if isinstance(value, Rows):
        return value.take(rows)
    if isinstance(value, Mapping):
        return {key: take_rows(entry, rows, axis) for key, entry in value.items()}
    return tuple(value[row] for row in rows)


def join_rows(values: Sequence[Any], axis: int = 0) -> Any:
    """Return tensors, arrays, tuples, `Rows`, or mappings of these, with the rows of all; None if one is missing."""
    if not values or any(value is None for value in values):
        return None
    kind = values[0]
    if isinstance(kind, Tensor):
        return torch.cat(list(values), axis)
    if isinstance(kind, np.ndarray):
        return np.concatenate(list(values), axis)
    if isinstance(kind, Rows):
        return type(kind).concat(values)
    if isinstance(kind, Mapping):
        return {key: join_rows([value[key] for value in values], axis) for key in kind if all(key in v for v in values)}
    if isinstance(kind, tuple):
        return tuple(entry for value in values for entry in value)
    raise BadInput(f"Rows of a {type(kind).__name__} cannot be joined; expected tensors, arrays or tuples.")


def _same_value(owner: str, name: str, values: Sequence[Any]) -> Any:
    """Return the value of all parts; raise BadInput where it differs."""
    for value in values[1:]:
        if not _is_equal(values[0], value):
            shown = f": {values[0]!r} and {value!r}" if isinstance(value, str | int | float | bool) else ""
            raise BadInput(f"{owner}s of different {name} were given to join{shown}; expected one {name} for all.")
    return values[0]


def _is_equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and bool(value == other)
