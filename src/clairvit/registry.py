"""List and parse methods, metrics and models by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from clairvit.methods.registry import list_methods as registered_methods
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.registry import MetricSpec, resolve_metric
from clairvit.metrics.registry import list_metrics as registered_metrics
from clairvit.models.sources.registry import sources

Filter = str | Sequence[str]


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
