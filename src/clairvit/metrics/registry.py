"""Register metrics under a name, list them, and resolve strings such as "deletion(preset=rise)" to a MetricSpec."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from clairvit._cost import Cost
from clairvit._facts import facts_of
from clairvit._registry import Registry
from clairvit._spec import ParsedSpec, Registered, Spec, changed_options, with_preset
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.methods.parsing import parse_spec
from clairvit.metrics.confidence_intervals import EVERYWHERE
from clairvit.option_types import Option, options_of
from clairvit.plugins import load_entry_points

Better = Literal["higher", "lower"]
Span = tuple[float, float]  # smallest and largest possible value
UNBOUNDED_TARGET = "target_score"  # the setting of a score that is not the probability of one class: what it is of
FAMILIES = ("faithfulness", "robustness", "complexity", "randomisation", "localisation", "parts")


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
        direction = dict(self.options).get("direction")
        if direction is not None:
            return str(direction)
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
        if options.get("auc") == "steps":  # a sum over steps, not a mean
            return EVERYWHERE
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
        >>> cv.MetricOutput(values=torch.zeros(2, 3)).values.shape
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
    modules=["clairvit.compat.quantus"],
    load_others=functools.partial(load_entry_points, "clairvit.metrics"),
    advice="`clairvit metrics` (or cv.list_metrics()) lists all of them.",
)
_added_presets: dict[str, dict[str, Mapping[str, Any]]] = {}  # of metrics whose module may not be imported yet


def metric(
    name: str, *, family: str, better: Better, span: Span, paper: str, **fields: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a metric; `fields` are those of `Metric`, and `flipped_by` is one pair, or several."""
    flips = fields.pop("flipped_by", ())
    fields["flipped_by"] = (flips,) if flips and isinstance(flips[0], str) else flips
    fields["presets"] = {**fields.get("presets", {}), **_added_presets.get(name, {})}

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        facts = facts_of(name, function.__module__)
        stated = {"discrepancies": facts.discrepancies, **fields}
        registered = Metric(
            name=name, family=family, better=better, span=span, paper=paper, function=function, facts=facts, **stated
        )
        METRICS.register(name, registered, module=function.__module__)
        return function

    return register


def add_presets(name: str, **presets: Mapping[str, Any]) -> None:
    """Add presets, preset name -> options, to the metric of this name, whether it is registered already or later."""
    _added_presets.setdefault(name, {}).update(presets)
    registered = METRICS.registered(name)
    if registered is not None:
        METRICS.register(name, replace(registered, presets={**registered.presets, **presets}))


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
    metric = find_metric(parsed.name)
    options = {option.name: option for option in metric.option_list}
    defaults = metric.options
    values = dict(defaults)
    for key, value in with_preset(parsed.options, metric.preset).items():
        if key not in options:
            listed = ", ".join(options) or "none"
            raise UnknownName(f"'{metric.name}' has no option '{key}'; it has {listed}.{did_you_mean(key, options)}")
        values[key] = options[key].checked(value)
    canonical = ParsedSpec(metric.name, (), changed_options(values, defaults))
    return MetricSpec(metric=metric, options=tuple(sorted(values.items())), canonical=canonical)
