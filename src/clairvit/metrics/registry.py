"""Metric: a number for each map, under a name. Once registered it is swept by the tests, listed, documented."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from torch import Tensor

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.methods.explanation import Cost
from clairvit.methods.parsing import parse_spec
from clairvit.methods.spec import checked

Better = Literal["higher", "lower"]
FAMILIES = ("faithfulness", "robustness", "complexity", "randomisation", "localisation")
_HOMES = (
    "curves",
    "faithfulness",
    "aopc",
    "road_irof",
    "robustness",
    "complexity",
    "randomisation",
    "localisation",
    "grid_pointing",
    "ranking",
    "pointing",
)


@dataclass(frozen=True)
class Metric:
    """What `cv.list_metrics()` lists."""

    name: str
    family: str
    better: Better
    span: tuple[float, float]
    paper: str
    function: Callable[..., Any] = field(repr=False)
    needs: tuple[str, ...] = ()  # "masks", "others" (classes of other objects), "methods" (it explains again)
    scope: Literal["image", "set"] = "image"  # a function of a case, or of a gallery: all images of a set
    orders: bool = False  # it uses the order of the patches only, so that a constant map is a lottery
    cost: Callable[..., Cost] | None = field(default=None, repr=False)  # (patches, options) -> passes for one map
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    discrepancies: str = ""
    turned_by: tuple[tuple[str, Any], ...] = ()  # options and values that turn round which direction is good
    in_score: bool = False  # its values are in the unit of the score, which an option chooses
    undefined: str = ""  # why it is NaN on whole kinds of images, in words

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @property
    def options(self) -> dict[str, Any]:
        return {name: p.default for name, p in _parameters(self.function).items()}


@dataclass(frozen=True)
class MetricSpec:
    """A metric with its options settled; `str(spec)` is its canonical text.

    `cv.parse_metric` makes one, and every verb accepts it in place of a metric string.

    Args:
        metric: The registered metric: name, family, direction, paper, default options.
        options: Every option with its value.
        text: The canonical text.

    Example:
        >>> import clairvit as cv
        >>> spec = cv.parse_metric("deletion", removal="mean")
        >>> print(spec, spec.better)
        deletion(removal=mean) lower
    """

    metric: Metric
    options: tuple[tuple[str, Any], ...]
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"MetricSpec({self.text!r})"

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def better(self) -> str:
        """Which direction is good, with these options."""
        given = dict(self.options).get("direction")
        if given is not None:
            return str(given)
        turned = sum(pair in self.options for pair in self.metric.turned_by) % 2
        return {"higher": "lower", "lower": "higher"}[self.metric.better] if turned else self.metric.better

    @property
    def span(self) -> tuple[float, float]:
        """Between which values a score lies, with these options."""
        chosen = dict(self.options)
        if not self.metric.in_score:
            return self.metric.span
        if chosen.get("score") in ("prob", "accuracy") and chosen.get("auc") != "steps":
            return self.metric.span
        bounded = chosen.get("score") == "drop" and chosen.get("auc") != "steps"
        return (-1, 1) if bounded else (-math.inf, math.inf)

    def span_with(self, settings: Mapping[str, Any]) -> tuple[float, float]:
        """Return between which values a score with these settings lies; a normalised raw score has no bounds."""
        return (-math.inf, math.inf) if "normalised_by" in settings else self.span

    def __call__(self, case: Any) -> Any:
        return self.metric.function(case, **dict(self.options))


@dataclass(frozen=True, eq=False)
class MetricOutput:
    """What a metric says of M methods on B images, and the lines it was read off.

    Args:
        values: [M, B], of M methods on B images.
        x: [S], the abscissa of the curves that the values were read off.
        y: [M, B, S], these curves.
        meaning: What y is.
        across: What x is.
        counts: [M, B, K, 2], numerators and denominators of a score of the set.

    Example:
        >>> import clairvit as cv, torch
        >>> cv.MetricOutput(values=torch.zeros(2, 3)).values.shape
        torch.Size([2, 3])
    """

    values: Tensor  # [M, B]
    x: Tensor | None = None  # [S]
    y: Tensor | None = None  # [M, B, S]
    meaning: str = ""  # of y
    across: str = "part of the image"  # the meaning of x
    counts: Tensor | None = None  # [M, B, K, 2]: of a set, mean_k (sum_b parts / sum_b wholes)


_registry: dict[str, Metric] = {}


def metric(
    name: str, *, family: str, better: Better, span: tuple[float, float], paper: str, **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function of a case a name and its place in the lists. `turned_by` is one pair, or several."""
    turned = more.pop("turned_by", ())
    more["turned_by"] = (turned,) if turned and isinstance(turned[0], str) else turned

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        _registry[name] = Metric(name, family, better, span, paper, function, **more)
        return function

    return enter


@functools.cache
def load_all() -> None:
    for home in _HOMES:
        importlib.import_module(f"clairvit.metrics.{home}")


def list_metrics() -> list[Metric]:
    """Every registered metric."""
    load_all()
    return list(_registry.values())


def find_metric(name: str) -> Metric:
    load_all()
    if name not in _registry:
        raise UnknownName(
            f"There is no metric '{name}'.{did_you_mean(name, _registry)} "
            "`clairvit metrics` (or cv.list_metrics()) lists all of them."
        )
    return _registry[name]


def resolve_metric(text: str | MetricSpec, **options: Any) -> MetricSpec:
    """Settle a metric string such as "deletion(preset=rise)"; keyword options come on top."""
    if isinstance(text, MetricSpec):
        if not options:
            return text
        text = text.text
    written = parse_spec(text)
    if written.inner or written.combinator:
        raise BadInput(
            f"'{text}' is not a metric; expected NAME or NAME(option=value), such as deletion(removal=mean)."
        )
    found = find_metric(written.name)
    given = written.options | options
    for word in ("preset", "compat"):
        if word in given:
            given = _preset(found, str(given.pop(word))) | given
    own = found.options
    hints = get_type_hints(found.function)
    for key, value in given.items():
        if key not in own:
            listed = ", ".join(own) or "none"
            raise UnknownName(f"'{found.name}' has no option '{key}'; it has {listed}.{did_you_mean(key, own)}")
        own[key] = checked(hints[key], key, value)
    changed = {key: value for key, value in own.items() if value != found.options[key]}
    inside = ",".join(f"{key}={value}" for key, value in sorted(changed.items()))
    return MetricSpec(found, tuple(sorted(own.items())), found.name + (f"({inside})" if inside else ""))


def _preset(found: Metric, name: str) -> dict[str, Any]:
    if name not in found.presets:
        known = ", ".join(found.presets) or "none"
        raise UnknownName(f"'{found.name}' has no preset '{name}'; it has {known}.{did_you_mean(name, found.presets)}")
    return dict(found.presets[name])


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the options of a metric's function: all parameters but the first, which is its context."""
    return dict([*inspect.signature(function).parameters.items()][1:])
