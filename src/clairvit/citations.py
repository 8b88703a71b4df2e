"""Cite methods and metrics: BibTeX entries from `references.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from clairvit._version import __version__
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.methods.parsing import parse_spec
from clairvit.methods.registry import ALIASES, METHODS
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.registry import METRICS, MetricSpec, resolve_metric

OURS = "clairvit"  # the key of ClairViT itself, and of what is its own


def cite(*names: str | MethodSpec | MetricSpec) -> str:
    """Return BibTeX entries for methods and metrics, each reference once.

    Args:
        *names: Methods and metrics as every verb takes them: "genatt+skipplus", "deletion(preset=rise)", specs. What a
            combinator or an option adds is cited too. Without names: the entry of ClairViT itself.

    Returns:
        BibTeX in UTF-8. A comment before each entry names what it is cited for.

    Raises:
        UnknownName: A name that is neither a method nor a metric.
        BadInput: Something that is neither a string nor a spec.

    Example:
        >>> import clairvit as cv
        >>> print(cv.cite("genatt", "rollout").count("@inproceedings"))
        2
        >>> print(cv.cite("rollout"))
        % rollout
        @inproceedings{abnar2020quantifying,
          author = {Abnar, Samira and Zuidema, Willem},
          title = {{Quantifying Attention Flow in Transformers}},
          booktitle = {Annual Meeting of the Association for Computational Linguistics (ACL)},
          year = {2020},
        }
    """
    return "\n\n".join(f"% {', '.join(cited_for)}\n{bibtex(key)}" for key, cited_for in citations(names).items())


def citations(names: Iterable[str | MethodSpec | MetricSpec]) -> dict[str, tuple[str, ...]]:
    """Return the keys of all references, in order, with the names that they are cited for."""
    cited: dict[str, list[str]] = {}
    specs = [_resolve(name) for name in names]
    for spec in specs:
        for key in citation_keys(spec):
            cited.setdefault(key, []).append(str(spec))
    if not specs:
        cited[OURS] = [f"ClairViT {__version__}"]
    return {key: tuple(dict.fromkeys(texts)) for key, texts in cited.items()}


def citation_keys(spec: MethodSpec | MetricSpec) -> tuple[str, ...]:
    """Return the keys of the references of a method or metric.

    Raises:
        UnknownName: It has none: it was registered by the user.
    """
    if isinstance(spec, MetricSpec):
        return tuple(_listed(spec.metric.name, "metric", spec.metric.paper, metric_citations()))
    return tuple(dict.fromkeys(_method_keys(spec)))


def _method_keys(spec: MethodSpec) -> list[str]:
    """Return the keys of a method, of its combinator and options, and of the methods that it is made of."""
    table = method_citations()
    if spec.members:  # an ensemble, or a calibrated method
        return [*table[spec.method.name], *(key for member in spec.members for key in _method_keys(member))]
    parsed = parse_spec(str(spec))
    keys = list(_listed(parsed.name, "method", spec.method.paper, table))
    for option, values in table["options"].items():
        keys += values.get(dict(spec.options).get(option), ())
    if parsed.combinator:
        keys += table["combinators"][parsed.combinator.partition(":")[0]]
    return keys + [key for text in parsed.inner for key in _method_keys(resolve_method(text))]


def bibtex(key: str) -> str:
    """Return the BibTeX entry of a reference; titles keep their capitals."""
    fields = dict(references()[key])
    kind = fields.pop("type")
    if key == OURS:
        fields["version"] = __version__
    fields["title"] = f"{{{fields['title']}}}"
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])


def reference_record(key: str) -> dict[str, Any]:
    """Return the fields of a reference and its BibTeX entry, for JSON."""
    return {"key": key, **references()[key], "bibtex": bibtex(key)}


@functools.cache
def references() -> Mapping[str, Mapping[str, Any]]:
    """Return key -> fields of every reference."""
    return _toml("clairvit", "references.toml")


@functools.cache
def method_citations() -> Mapping[str, Any]:
    """Return method -> keys; under "combinators" and "options", what these add."""
    return _toml("clairvit.methods", "citations.toml")


@functools.cache
def metric_citations() -> Mapping[str, Any]:
    """Return metric -> keys."""
    return _toml("clairvit.metrics", "citations.toml")


def _toml(package: str, name: str) -> Mapping[str, Any]:
    return tomllib.loads(resources.files(package).joinpath(name).read_text("utf-8"))


def _listed(name: str, kind: str, paper: str, table: Mapping[str, Any]) -> list[str]:
    if name in table:
        keys: list[str] = table[name]
        return keys
    reference = f"; it names its source as: {paper}" if paper else ""
    raise UnknownName(f"The {kind} '{name}' has no BibTeX entry: it is not one of ClairViT's own{reference}.")


def _resolve(name: str | MethodSpec | MetricSpec) -> MethodSpec | MetricSpec:
    if isinstance(name, MethodSpec | MetricSpec):
        return name
    if not isinstance(name, str):
        raise BadInput(f"{name!r} cannot be cited; expected a method or metric, such as 'genatt' or 'deletion'.")
    if parse_spec(name).name in METRICS:
        return resolve_metric(name)
    try:
        return resolve_method(name)
    except UnknownName as error:
        if parse_spec(name).name in METHODS:  # an option or combinator of a method that exists
            raise
        near = did_you_mean(name, [*METHODS.names, *METRICS.names], ALIASES)
        raise UnknownName(
            f"There is no method or metric '{name}'.{near} Expected a name of cv.list_methods() or cv.list_metrics()."
        ) from error
