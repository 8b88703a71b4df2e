"""Register metrics under a name, list them, and resolve strings such as "deletion(preset=rise)" to a MetricSpec."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

from clairvit import _presets
from clairvit._cost import Cost
from clairvit._facts import facts_of
from clairvit._presets import moved_option, preset_decorator, with_preset
from clairvit._registry import Registry
from clairvit._spec import (
    ParsedSpec,
    Registered,
    Spec,
    check_choice,
    check_function,
    check_is_free,
    check_name,
    is_built_in,
    settled_options,
)
from clairvit.errors import BadInput, UnknownName
from clairvit.methods.parsing import parse_spec
from clairvit.metrics.confidence_intervals import EVERYWHERE
from clairvit.option_types import Option, options_of
from clairvit.plugins import load_entry_points

Better = Literal["higher", "lower"]
Span = tuple[float, float]  # smallest and largest possible value
UNBOUNDED_TARGET = "target_score"  # the setting of a score that is not the probability of one class: what it is of
Need = Literal["masks", "others", "parts", "methods"]
F = TypeVar("F", bound=Callable[..., Any])
FAMILIES = ("faithfulness", "robustness", "complexity", "randomisation", "localisation", "parts")
_PRESET_MODULES = ("quantus", "chefer", "skipplus", "coporan", "others")  # of compat: they add presets


@dataclass(frozen=True, kw_only=True)
class Metric(Registered):
    """A registered metric, as `cv.list_metrics()` lists it.

    Its function takes an EvalContext or a DatasetContext and options, and returns a MetricOutput or values [M, B].
    """

    better: Better
    span: Span  # with the default options
    # "masks", "others" (classes of other objects), "parts" (removable ones), "methods" (it explains other inputs)
    needs: tuple[str, ...] = ()
    scope: Literal["image", "set"] = "image"  # a function of an EvalContext, or of a DatasetContext
    rank_only: bool = False  # it depends on the order of the patches only, which is random for a constant map
    cost: Callable[..., Cost] | None = field(default=None, repr=False)  # (patches, options) -> passes for one map
    discrepancies: str = ""
    flipped_by: tuple[tuple[str, Any], ...] = ()  # option values that flip which direction is better
    in_score: bool = False  # its values are in the unit of the score, which an option chooses
    span_with: Callable[..., Span | None] | None = field(default=None, repr=False)  # options -> span; None: the usual
    undefined: str = ""  # why it is NaN on whole kinds of images, in words
    whole_set: bool = False  # the value of an image depends on the others: `MetricOutput.criterion` chooses over them

    @property
    def needs_whole_set(self) -> bool:
        """Whether all images of a set must be scored together."""
        return self.scope == "set" or self.whole_set

    @property
    def summary(self) -> str:
        """The first line of its docstring as a sentence, without "Return the"."""
        line = self.first_line.removeprefix("Return ").removeprefix("the ")
        return line[:1].upper() + line[1:] if line.partition(" ")[0].isalpha() else line

    @property
    def option_list(self) -> tuple[Option, ...]:
        """Every option: the parameters of its function after the first one, which is the context."""
        return tuple(options_of(self.function).values())[1:]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MetricSpec(Spec):
    """A metric with its options settled; `str(spec)` is its canonical text.

    `cv.parse_metric` makes one, and every verb accepts it in place of a metric string.

    Args:
        metric: The registered metric: name, family, direction, paper, default options.
        options: Every option with its value.
        canonical: Name and the options that are not the default.

    Example:
        >>> import clairvit as cv
        >>> spec = cv.parse_metric("deletion", removal="mean")
        >>> print(spec, spec.better)
        deletion(removal=mean) lower
    """

    metric: Metric

    def __reduce__(self) -> tuple[Callable[..., MetricSpec], tuple[Any, ...]]:
        return resolve_parsed, (self.canonical,)

    @property
    def registered(self) -> Metric:
        """The registered metric."""
        return self.metric

    @property
    def better(self) -> str:
        """Which direction is better with these options, "higher" or "lower"."""
        flipped = sum(pair in self.options for pair in self.metric.flipped_by) % 2
        return {"higher": "lower", "lower": "higher"}[self.metric.better] if flipped else self.metric.better

    @property
    def span(self) -> Span:
        """The smallest and largest possible value with these options, for the probability of a class."""
        return self.span_with({})

    def span_with(self, settings: Mapping[str, Any]) -> Span:
        """Return the smallest and largest possible value with these settings of a score.

        A raw score that was normalised has no bounds, nor has a target that is not the probability of one class
        (`UNBOUNDED_TARGET` in the settings), whatever the option `score` says.
        """
        if "normalised_by" in settings:
            return EVERYWHERE
        options = dict(self.options)
        if UNBOUNDED_TARGET in settings and "score" in options:
            options["score"] = settings[UNBOUNDED_TARGET]
        chosen = None if self.metric.span_with is None else self.metric.span_with(**options)
        if chosen is not None:
            return chosen
        if not self.metric.in_score:
            return self.metric.span
        if options.get("score") in ("prob", "accuracy"):
            return self.metric.span
        return (-1, 1) if options.get("score") == "drop" else EVERYWHERE

    def __call__(self, context: Any) -> Any:
        """Return the MetricOutput, or the values [M, B], of a context."""
        return self.metric.function(context, **dict(self.options))


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
        criterion: [M, B, S]; the values of a method are its y at the x where the set's mean criterion is highest.
        chooses: The option that the criterion settles, for the settings of the score.

    Example:
        >>> import clairvit as cv, torch
        >>> cv.extend.MetricOutput(values=torch.zeros(2, 3)).values.shape
        torch.Size([2, 3])
    """

    values: Tensor  # [M, B]
    x: Tensor | None = None  # [S]
    y: Tensor | None = None  # [M, B, S]
    meaning: str = ""  # of y
    across: str = "part of the image"  # the meaning of x
    counts: Tensor | None = None  # [M, B, K, 2] parts and wholes; the set scores mean_k (Σ_b parts / Σ_b wholes)
    criterion: Tensor | None = None  # [M, B, S]
    chooses: str = ""


METRICS: Registry[Metric] = Registry(
    "metric",
    package=__package__,
    modules=[f"clairvit.compat.{module}" for module in _PRESET_MODULES],
    load_others=functools.partial(load_entry_points, "clairvit.metrics"),
    advice="`clairvit metrics` (or cv.list_metrics()) lists all of them.",
)


def metric(
    name: str,
    *,
    better: Better,
    span: Span = EVERYWHERE,
    family: str = "custom",
    paper: str = "",
    needs: Sequence[Need] = (),
    scope: Literal["image", "set"] = "image",
    cost: Callable[..., Cost] | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    rank_only: bool = False,
    discrepancies: str = "",
    flipped_by: tuple[str, Any] | tuple[tuple[str, Any], ...] = (),
    in_score: bool = False,
    span_with: Callable[..., Span | None] | None = None,
    undefined: str = "",
    whole_set: bool = False,
    overwrite: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as a metric: this package's metrics and your own.

    The function takes an `EvalContext` with the maps of M methods on B images and returns values [M, B], or a
    `MetricOutput` with curves. Its keyword parameters with defaults become options.

    Args:
        name: What users type.
        better: "higher" or "lower".
        span: The lowest and the highest value. Values outside are noted, and intervals are then not cut.
        family: A heading in lists: one of the built-in ones, or "custom".
        paper: A reference.
        needs: What it reads next to the maps: "masks", "others" (classes of other objects), "parts" (removable
            ones), "methods" (it explains again).
        scope: "image", or "set" for a function of a whole `DatasetContext`.
        cost: A function of `patches` and the options that returns the passes for one map.
        presets: Published variants: name -> options.
        rank_only: It depends on the order of the patches only, which is random for a constant map.
        discrepancies: Where papers and public code disagree, and what is done here.
        flipped_by: An option and the value, or several such pairs, that flip which direction is better.
        in_score: Its values are in the unit of the score, which an option chooses.
        span_with: A function of the options that returns another span where they change it, or None.
        undefined: Why it is NaN on whole kinds of images, in words.
        whole_set: The value of an image depends on the others: `MetricOutput.criterion` chooses over them.
        overwrite: Replace a built-in metric of the same name.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        BadInput: A built-in name without `overwrite`, an unknown direction or family, a span that is none, or an option
            without annotation.

    Example:
        >>> import clairvit as cv
        >>> from torch import Tensor
        >>> @cv.metric("peak-share", better="higher", span=(0, 1))
        ... def peak_share(context: cv.extend.EvalContext, power: float = 1.0) -> Tensor:
        ...     maps = context.maps.flatten(2).abs() ** power  # [M, B, patches]
        ...     return maps.amax(-1) / maps.sum(-1)
        >>> cv.evaluate("pets", "demo", "legrad", "peak-share").n_valid
        1
    """
    check_name(name, "metric")
    check_choice(name, "better", better, ("higher", "lower"))
    check_choice(name, "family", family, (*FAMILIES, "custom"))
    check_choice(name, "scope", scope, ("image", "set"))
    for need in needs:
        check_choice(name, "needs", need, get_args(Need))
    if len(span) != 2 or not span[0] < span[1]:
        raise BadInput(f"span={span!r} was given for '{name}'; expected the lowest and the highest value: (0, 1).")

    def register(function: F) -> F:
        check_function(name, function)
        if not is_built_in(function) and not overwrite:
            check_is_free(name, "metric", METRICS.registered_so_far(name))
        facts = facts_of(name, function.__module__)
        registered = Metric(
            name=name,
            family=family,
            paper=paper,
            function=function,
            presets=presets or {},
            better=better,
            span=span,
            needs=tuple(needs),
            scope=scope,
            rank_only=rank_only,
            cost=cost,
            discrepancies=discrepancies or facts.discrepancies,
            facts=facts,
            flipped_by=(flipped_by,) if flipped_by and isinstance(flipped_by[0], str) else flipped_by,
            in_score=in_score,
            span_with=span_with,
            undefined=undefined,
            whole_set=whole_set,
        )
        METRICS.register(name, registered, module=function.__module__)
        return function

    return register


def preset(
    name: str, preset: str, *, moved: Sequence[str] = (), **fields: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a preset of a metric: a formula and options of its own, under the metric's name.

    Args:
        name: The metric.
        preset: The name of the preset.
        moved: Options of the metric in earlier versions, `name` or `name=value`, that are part of this preset now.
        **fields: Fields of `Metric` that differ from the metric's: better, span, cost, …
    """
    return preset_decorator(METRICS, name, preset, moved, fields)


def add_presets(name: str, **presets: Mapping[str, Any]) -> None:
    """Add presets, preset name -> options, to a metric."""
    _presets.add_presets(METRICS, name, presets)


def list_metrics() -> list[Metric]:
    """Return every registered metric."""
    return METRICS.values()


def find_metric(name: str) -> Metric:
    """Return the metric of this name; raise UnknownName if there is none."""
    return METRICS.resolve(name)


def resolve_metric(metric: str | MetricSpec, **options: Any) -> MetricSpec:
    """Return the MetricSpec of a string such as "deletion(preset=rise)", or of another spec.

    Keyword options override those inside it.
    """
    if isinstance(metric, MetricSpec):
        return resolve_parsed(metric.canonical.with_options(options)) if options else metric
    parsed = parse_spec(metric)
    if parsed.inner or parsed.combinator:
        raise BadInput(
            f"'{metric}' is not a metric; expected NAME or NAME(option=value), such as deletion(removal=mean)."
        )
    return resolve_parsed(parsed.with_options(options))


def resolve_parsed(parsed: ParsedSpec) -> MetricSpec:
    """Return the spec of a name and options."""
    metric, settings, typed = with_preset(METRICS.resolve(parsed.name), parsed.options)
    given = {**settings, **typed}
    for key, value in given.items():
        moved = moved_option(METRICS.resolve(metric.name), metric, key, value)
        if moved:
            raise UnknownName(moved)
    values, changed = settled_options(metric.name, metric.option_list, given)
    changed |= {"preset": metric.preset} if metric.preset else {}
    canonical = ParsedSpec(metric.name, (), changed)
    return MetricSpec(metric=metric, options=tuple(sorted(values.items())), canonical=canonical)
