"""Cite methods and metrics: BibTeX entries from the files of facts, and those that several share."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from clairvit._facts import NO_FACTS, entries_of, facts_beside, package_facts
from clairvit._version import __version__
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.methods.parsing import parse_spec
from clairvit.methods.registry import METHODS
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
        return _listed(spec.metric.name, "metric", spec.metric.paper, spec.metric.facts.references)
    return tuple(dict.fromkeys(_method_keys(spec)))


def _method_keys(spec: MethodSpec) -> list[str]:
    """Return the keys of a method, of its combinator and options, and of the methods that it is made of."""
    entries = entries_of("clairvit.methods")
    if spec.members:  # an ensemble, or a calibrated method
        return [
            *entries[spec.method.name].references,
            *(key for member in spec.members for key in _method_keys(member)),
        ]
    parsed = parse_spec(str(spec))
    known = METHODS.registered(parsed.name)
    facts = entries.get(parsed.name, NO_FACTS) if known is None else known.facts
    keys = list(_listed(parsed.name, "method", spec.method.paper, facts.references))
    added = [f"{option}={value}" for option, value in spec.options]
    added += [f"+{parsed.combinator.partition(':')[0]}"] if parsed.combinator else []
    for name in added:
        keys += entries.get(name, NO_FACTS).references
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


def references() -> Mapping[str, Mapping[str, Any]]:
    """Return key -> fields of every reference, of registered methods and metrics that are not ours too.

    Raises:
        BadInput: A file gives a key that there is already to another reference.
    """
    known = dict(_our_references())
    registered = [(method.name, method.function.__module__) for method in METHODS.values()]
    registered += [(metric.name, metric.function.__module__) for metric in METRICS.values()]
    for name, module in registered:
        for key, fields in facts_beside(module, [name]).references.items():
            if known.setdefault(key, fields) != fields:
                raise BadInput(
                    f"The facts beside the module '{module}' give the key '{key}' to another reference than the one "
                    "that has it already; expected a key of its own."
                )
    return known


@functools.cache
def _our_references() -> Mapping[str, Mapping[str, Any]]:
    """Return those of this package: what several modules cite, and what the files of facts add."""
    shared = tomllib.loads(resources.files("clairvit").joinpath("references.toml").read_text("utf-8"))
    files = [*package_facts("clairvit.methods").values(), *package_facts("clairvit.metrics").values()]
    return {**shared, **{key: fields for file in files for key, fields in file.references.items()}}


def _listed(name: str, kind: str, paper: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    if keys:
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
        near = did_you_mean(name, [*METHODS.names, *METRICS.names], METHODS.aliases)
        raise UnknownName(
            f"There is no method or metric '{name}'.{near} Expected a name of cv.list_methods() or cv.list_metrics()."
        ) from error
