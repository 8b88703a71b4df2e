"""List, parse and register methods and metrics by name."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from clairvit._cost import Cost
from clairvit.errors import BadInput, did_you_mean
from clairvit.methods.aggregation import Aggregation
from clairvit.methods.registry import BACKWARD, FAMILIES, METHODS, ExtraCost, Method, Requires
from clairvit.methods.registry import list_methods as registered_methods
from clairvit.methods.registry import register as register_method
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.registry import FAMILIES as METRIC_FAMILIES
from clairvit.metrics.registry import METRICS, Better, Metric, MetricSpec, resolve_metric
from clairvit.metrics.registry import list_metrics as registered_metrics
from clairvit.metrics.registry import metric as register_metric
from clairvit.models.sources.registry import sources

Function = TypeVar("Function", bound=Callable[..., Any])
Filter = str | Sequence[str]

RESERVED = ("all", "smooth", "shift", "ensemble", "calibrated")  # these stand for other methods
# Registered by users: these may be registered again, as by a notebook cell that runs twice.
_user_methods: set[str] = set()
_user_metrics: set[str] = set()


def list_methods(filter: Filter = "*", *, family: str | None = None) -> list[str]:  # noqa: A002
    """Return the names of the registered methods.

    Args:
        filter: A name with wildcards (* ? [abc]), or a list of these, of which one must match.
        family: Only methods of this family, e.g. "attention" or "perturbation".

    Returns:
        Names, in the order of registration; `cv.parse_method(name).method` says more of each.

    Example:
        >>> import clairvit as cv
        >>> cv.list_methods(filter="attn*")
        ['attnlrp']
    """
    listed = [method for method in registered_methods() if family in (None, method.family)]
    return _matching((method.name for method in listed), filter)


def list_metrics(filter: Filter = "*", *, family: str | None = None) -> list[str]:  # noqa: A002
    """Return the names of the registered metrics.

    Args:
        filter: A name with wildcards (* ? [abc]), or a list of these, of which one must match.
        family: Only metrics of this family, e.g. "faithfulness".

    Returns:
        Names, in the order of registration; `cv.parse_metric(name).metric` says more of each.

    Example:
        >>> import clairvit as cv
        >>> cv.list_metrics("*insertion*")
        ['insertion', 'insertion-deletion']
    """
    listed = [metric for metric in registered_metrics() if family in (None, metric.family)]
    return _matching((metric.name for metric in listed), filter)


def list_models(filter: Filter = "*") -> list[str]:  # noqa: A002
    """Return names that `cv.load` accepts, of all sources that are installed.

    Args:
        filter: A name with wildcards (* ? [abc]), with or without its source ("timm:vit_tiny*", "vit_tiny*"), or a
            list of these. A source in front is faster: only that one is asked.

    Returns:
        Names such as "pets" or "timm:vit_tiny_patch16_224". Any model of the hub ("hf:ID"), file ("file:PATH") or own
        code ("MODULE:ATTRIBUTE") can be loaded too.

    Example:
        >>> import clairvit as cv
        >>> cv.list_models("timm:vit_tiny_patch16_?8?")
        ['timm:vit_tiny_patch16_384']
    """
    patterns = [filter] if isinstance(filter, str) else list(filter)
    names: dict[str, None] = {}
    for pattern in patterns:
        for source in sources(pattern):
            bare = source.spec.rpartition(":")[2]
            if any(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for name in (source.spec, bare)):
                names[source.spec] = None
    return list(names)


def _matching(names: Iterable[str], patterns: Filter) -> list[str]:
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in listed)]


def parse_method(method: str | MethodSpec, **options: Any) -> MethodSpec:
    """Return the method that a string such as "rollout(fusion=max)+skipplus" stands for.

    Args:
        method: NAME, NAME(option=value) or NAME+combinator; a `MethodSpec` is returned as it is.
        **options: Options on top of those in the string.

    Returns:
        A `MethodSpec`, which every verb accepts; `str(spec)` is its canonical text.

    Raises:
        UnknownName: A method, option or combinator that does not exist.
        BadInput: A string that is no method, or a value that an option cannot have.
        NotApplicable: A combinator that the method cannot have.

    Example:
        >>> import clairvit as cv
        >>> spec = cv.parse_method("genatt+skipplus")
        >>> str(spec), spec.method.family
        ('genatt+skipplus', 'gradient × attention')
    """
    return resolve_method(method, **options)


def parse_metric(metric: str | MetricSpec, **options: Any) -> MetricSpec:
    """Return the metric that a string such as "deletion(preset=rise)" stands for.

    Args:
        metric: NAME or NAME(option=value); a `MetricSpec` is returned as it is.
        **options: Options on top of those in the string.

    Returns:
        A `MetricSpec`, which every verb accepts; `str(spec)` is its canonical text.

    Raises:
        UnknownName: A metric or option that does not exist.
        BadInput: A string that is no metric, or a value that an option cannot have.

    Example:
        >>> import clairvit as cv
        >>> str(cv.parse_metric("deletion", removal="mean"))
        'deletion(removal=mean)'
    """
    return resolve_metric(metric, **options)


def method(
    name: str,
    *,
    output: Literal["matrix", "tokens", "image"],
    aggregation: Aggregation | None = None,
    family: str = "custom",
    paper: str = "",
    requires: Requires | Callable[..., Requires] = BACKWARD,
    signed: bool = False,
    class_specific: bool = True,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    slow: bool = False,
    overwrite: bool = False,
    **declared: Any,
) -> Callable[[Function], Function]:
    """Register the decorated function as a method of your own.

    Its keyword parameters with defaults become options, checked against their annotations.

    Args:
        name: What users type.
        output: What the function returns: "matrix" ([B, rows, N] per layer), "tokens" ([B, N] per layer) or "image"
            ([B, rows, cols] from the whole trace).
        aggregation: How layers are combined, from `clairvit.methods.aggregation`: `Product`, `Total`, `Single`; None
            for "image".
        family: A heading in lists and figures: one of the built-in ones, or "custom".
        paper: A reference.
        requires: What it needs of the shared trace: passes, rule table, recorders; or a function of the options to it.
        signed: Whether the map has negative values.
        class_specific: Whether the map depends on the target.
        presets: Published variants: name -> options.
        slow: It takes much longer than one trace, so "all" leaves it out.
        overwrite: Replace a built-in method of the same name.
        **declared: Further fields of `clairvit.methods.registry.Method`.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        BadInput: A built-in name without `overwrite`, an unknown family, a missing aggregation, a function without the
            parameter `layer` (or `trace`), or an option without annotation.

    Example:
        >>> import clairvit as cv
        >>> from clairvit.methods.aggregation import Total
        >>> from torch import Tensor
        >>> from clairvit.methods.registry import FORWARD
        >>> @cv.method("token-norm", output="tokens", aggregation=Total(), requires=FORWARD, class_specific=False)
        ... def token_norm(layer: cv.LayerView, power: float = 1.0) -> Tensor:
        ...     return layer.x.norm(dim=-1) ** power
        >>> cv.list_methods("token-*")
        ['token-norm']
        >>> cv.explain("pets", "demo", "token-norm(power=2)+last").maps.shape
        torch.Size([1, 14, 14])
    """
    _check_name(name, "method", [*RESERVED, *METHODS.names_so_far], _user_methods, overwrite)
    _check_choice(name, "output", output, ("matrix", "tokens", "image"))
    _check_choice(name, "family", family, (*FAMILIES, "baseline", "custom"))
    _check_fields(name, Method, declared)
    if (aggregation is None) != (output == "image") or isinstance(aggregation, type):
        raise BadInput(
            f"output={output!r} and aggregation={aggregation!r} were given for the method '{name}'; expected an "
            "aggregation of layers, such as clairvit.methods.aggregation.Total(), for 'matrix' and 'tokens', and none "
            "for 'image'."
        )

    def register(function: Function) -> Function:
        _check_first_parameter(name, function, "trace" if output == "image" else "layer")
        _check_options(name, dict([*inspect.signature(function).parameters.items()][1:]))
        register_method(
            name,
            function,
            family=family,
            paper=paper,
            output=output,
            aggregation=aggregation,
            requires=requires,
            signed=signed,
            class_specific=class_specific,
            presets=dict(presets or {}),
            **({"extra_cost": ExtraCost(slow=slow)} | declared),
        )
        _user_methods.add(name)
        return function

    return register


def metric(
    name: str,
    *,
    better: Better,
    span: tuple[float, float] = (-math.inf, math.inf),
    family: str = "custom",
    paper: str = "",
    needs: Sequence[Literal["masks", "others", "methods"]] = (),
    scope: Literal["image", "set"] = "image",
    cost: Callable[..., Cost] | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    overwrite: bool = False,
    **declared: Any,
) -> Callable[[Function], Function]:
    """Register the decorated function as a metric of your own.

    The function takes an `EvalContext` with the maps of M methods on B images and returns values [M, B], or a
    `MetricOutput` with curves. Its keyword parameters with defaults become options.

    Args:
        name: What users type.
        better: "higher" or "lower".
        span: The lowest and the highest value. Values outside are noted, and intervals are then not cut; `span_with=`,
            a function of the options, returns another span where they change it, or None.
        family: A heading in lists: one of the built-in ones, or "custom".
        paper: A reference.
        needs: What it reads next to the maps: "masks", "others" (classes of other objects), "methods" (it explains
            again).
        scope: "image", or "set" for a function of a whole `DatasetContext`.
        cost: A function of `patches` and the options that returns the passes for one map.
        presets: Published variants: name -> options.
        overwrite: Replace a built-in metric of the same name.
        **declared: Further fields of `clairvit.metrics.registry.Metric`.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        BadInput: A built-in name without `overwrite`, an unknown direction or family, a span that is none, or an option
            without annotation.

    Example:
        >>> import clairvit as cv
        >>> from torch import Tensor
        >>> @cv.metric("peak-share", better="higher", span=(0, 1))
        ... def peak_share(context: cv.EvalContext, power: float = 1.0) -> Tensor:
        ...     maps = context.maps.flatten(2).abs() ** power  # [M, B, patches]
        ...     return maps.amax(-1) / maps.sum(-1)
        >>> cv.evaluate("pets", "demo", "legrad", "peak-share").n_valid
        1
    """
    _check_name(name, "metric", METRICS.names_so_far, _user_metrics, overwrite)
    _check_choice(name, "better", better, ("higher", "lower"))
    _check_choice(name, "family", family, (*METRIC_FAMILIES, "custom"))
    _check_choice(name, "scope", scope, ("image", "set"))
    for need in needs:
        _check_choice(name, "needs", need, ("masks", "others", "parts", "methods"))
    _check_fields(name, Metric, declared)
    if len(span) != 2 or not span[0] < span[1]:
        raise BadInput(f"span={span!r} was given for '{name}'; expected the lowest and the highest value: (0, 1).")

    def register(function: Function) -> Function:
        _check_first_parameter(name, function)
        _check_options(name, dict([*inspect.signature(function).parameters.items()][1:]))
        register_metric(
            name,
            family=family,
            better=better,
            span=span,
            paper=paper,
            needs=tuple(needs),
            scope=scope,
            cost=cost,
            presets=dict(presets or {}),
            **declared,
        )(function)
        _user_metrics.add(name)
        return function

    return register


def _check_name(name: str, kind: str, registered: Sequence[str], by_user: set[str], overwrite: bool) -> None:
    if not isinstance(name, str) or not name or not name.replace("-", "").isalnum() or name != name.lower():
        raise BadInput(
            f"{name!r} is no name for a {kind}; expected lower-case letters, digits and dashes, such as 'my-{kind}'."
        )
    if name in registered and name not in by_user and not overwrite:
        raise BadInput(
            f"There is a built-in {kind} '{name}'; expected another name, such as 'my-{name}'. overwrite=True replaces "
            "it in this process."
        )


def _check_choice(name: str, field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        near = did_you_mean(str(value), choices)
        listed = ", ".join(map(repr, choices))
        raise BadInput(f"{field}={value!r} was given for '{name}'; expected one of {listed}.{near}")


def _check_fields(name: str, kind: type[Method | Metric], declared: Mapping[str, Any]) -> None:
    """Refuse further fields that there are not."""
    known = [field.name for field in dataclasses.fields(kind)]
    for field in declared:
        if field not in known:
            raise BadInput(
                f"'{name}' cannot be registered with {field}=; expected fields of {kind.__name__}: "
                f"{', '.join(known)}.{did_you_mean(field, known)}"
            )


def _check_first_parameter(name: str, function: Callable[..., Any], expected: str = "") -> None:
    """Refuse a function without the parameter that the library fills; a metric's may have any name."""
    first = next(iter(inspect.signature(function).parameters), None)
    if first is None or (expected and first != expected):
        example = {
            "layer": "def f(layer: cv.LayerView, power: float = 1.0), which is called for each layer",
            "trace": "def f(trace: cv.Trace, power: float = 1.0), as output='image' is made from the whole trace",
        }.get(expected, "def f(context: cv.EvalContext, power: float = 1.0)")
        seen = "takes no argument" if first is None else f"has the first parameter '{first}'"
        raise BadInput(f"The function of '{name}' {seen}; expected {example}.")


def _check_options(name: str, options: Mapping[str, inspect.Parameter]) -> None:
    """Refuse options that could not be typed: without a default, or without an annotation to check values by."""
    for option, parameter in options.items():
        if parameter.default is inspect.Parameter.empty or parameter.annotation is inspect.Parameter.empty:
            raise BadInput(
                f"The option '{option}' of '{name}' has no default or no annotation; expected both, such as "
                f"{option}: float = 1.0."
            )
