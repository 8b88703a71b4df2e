"""Dimensions: choices of a protocol that published experiments make differently, as data.

`dimensions.toml` has those that any paper's measures may have; a paper's file adds its own, `[[dimensions]]`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from pydantic import TypeAdapter

from clairvit.methods.spec import resolve_method
from clairvit.metrics.registry import resolve_metric

Fit = Literal["crop", "squash"]
Resolution = Literal["pixel", "patch"]
Value = str | int | float | bool
_STRICT: Any = {"extra": "forbid"}  # pydantic: an unknown key is an error


@dataclass(frozen=True)
class Alternative:
    """One way to choose: what it changes of methods, metrics, images and masks; nothing is what the paper does."""

    __pydantic_config__ = _STRICT

    name: str
    methods: Mapping[str, str] = field(default_factory=dict)  # the paper's name of a method -> our method
    metric: Mapping[str, Value] = field(default_factory=dict)  # options of measures that have all of them
    fit: Fit | None = None  # how pictures get to the model's size
    resolution: Resolution | None = None  # how fine masks are compared


@dataclass(frozen=True)
class Dimension:
    """A choice with its alternatives, or an option of metrics with the values that are in use."""

    __pydantic_config__ = _STRICT

    name: str
    alternatives: tuple[Alternative, ...] = ()
    option: str | None = None
    values: tuple[Value, ...] = ()
    metrics: tuple[str, ...] = ()  # names of metrics that it is about; (): of all that have the option

    def of_metric(self, metric: str) -> tuple[Alternative, ...]:
        """Return the alternatives for a measure by this metric; none where the metric has no such choice."""
        spec = resolve_metric(metric)
        if self.metrics and spec.metric.name.partition("(")[0] not in self.metrics:
            return ()
        options = dict(spec.options)
        if self.option is None:
            return tuple(entry for entry in self.alternatives if set(entry.metric) <= set(options))
        if self.option not in options:
            return ()
        values = dict.fromkeys((options[self.option], *self.values))
        return tuple(Alternative(str(value), metric={self.option: value}) for value in values)

    @property
    def is_of_methods(self) -> bool:
        return any(entry.methods for entry in self.alternatives)

    @property
    def is_of_masks(self) -> bool:
        return any(entry.resolution for entry in self.alternatives)


def problems(dimension: Dimension, methods: set[str]) -> list[str]:
    """Return what does not fit together in a dimension; `methods` are the paper's names."""
    if bool(dimension.alternatives) == (dimension.option is not None):
        return [f"the dimension '{dimension.name}' has alternatives and option, or neither; expected one of them"]
    if dimension.option is not None and not dimension.values:
        return [f"the dimension '{dimension.name}' has an option without values"]
    names = [name for entry in dimension.alternatives for name in entry.methods]
    for method in (method for entry in dimension.alternatives for method in entry.methods.values()):
        resolve_method(method)
    return [
        f"the dimension '{dimension.name}' names '{name}', which the paper does not have"
        for name in names
        if name not in methods
    ]


@functools.cache
def general_dimensions() -> tuple[Dimension, ...]:
    """Return the dimensions that are no paper's own."""
    text = (resources.files(__package__) / "dimensions.toml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Dimension, ...]).validate_python(tomllib.loads(text)["dimensions"])
