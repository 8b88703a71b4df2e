"""Paper files: a paper's TOML, ours or a user's, read and checked; errors name the line of what is wrong."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from clairvit._toml import Location, TomlSource, read_toml
from clairvit.errors import BadInput, ClairError, did_you_mean
from clairvit.methods.spec import resolve_method
from clairvit.metrics.registry import resolve_metric
from clairvit.papers import paper as schema
from clairvit.papers.dimensions import problems as dimension_problems
from clairvit.papers.figure_spec import figure_problems
from clairvit.selection.start_layer import base_method

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from clairvit.papers.paper import Paper, Table

Problem = tuple[Location, str]
OTHERS = "others"  # as the losers of a claim: all methods of the paper that are no winners
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # results are files of this name
DOCS = "docs/reproduce.md"


def read_paper(path: Path) -> Paper:
    """Return the paper in a TOML file whose keys are the fields of `Paper`.

    A claim has `pairs`, or `winners` and `losers`, of which all pairs are meant; losers = "others" are all methods of
    the paper that are no winners. A table has `values`, or `per_image`, whose means are its values.

    Raises:
        BadInput: The file cannot be read or is no TOML; a key is unknown or missing, a value has the wrong type, or a
            name refers to nothing: with the line of it.
    """
    source = read_toml(path, "paper", DOCS)
    document = dict(source.document)
    entries = document.get("methods")
    listed = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    names = [str(entry.get("name")) for entry in listed if not entry.get("extra")]
    if isinstance(document.get("claims"), list):
        document["claims"] = [
            _with_pairs(claim, names, source, ("claims", place)) for place, claim in enumerate(document["claims"])
        ]
    try:
        paper = TypeAdapter(schema.Paper).validate_python(document)
    except ValidationError as error:
        raise _translated(source, error.errors()) from error
    for location, problem in _problems(paper):
        raise source.error(source.locate(location), f"{problem}.")
    return replace(paper, tables=tuple(map(_with_means, paper.tables)))


def _with_pairs(claim: Any, names: Sequence[str], source: TomlSource, place: Location) -> Any:
    """Replace winners and losers of a claim by all (winner, loser) pairs."""
    if not isinstance(claim, dict) or "winners" not in claim:
        return claim
    winners, losers = claim["winners"], claim.get("losers", OTHERS)
    for key, value in (("winners", winners), ("losers", losers)):
        if value != OTHERS and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            also = f", or '{OTHERS}'" if key == "losers" else ""
            raise source.error((*place, key), f"'{key}' is {value!r}; expected a list of the paper's methods{also}.")
    if losers == OTHERS:
        losers = [name for name in names if name not in winners]
    rest = {key: value for key, value in claim.items() if key not in ("winners", "losers")}
    return {"pairs": tuple(itertools.product(winners, losers)), **rest}


def _with_means(table: Table) -> Table:
    """Return a table with the means over images as values, where it has numbers for each image."""
    means = {measure: tuple(map(statistics.fmean, rows.values())) for measure, rows in table.per_image.items()}
    return replace(table, values={**means, **table.values})


# Errors of form


def _translated(source: TomlSource, errors: Sequence[ErrorDetails]) -> BadInput:
    """Return pydantic's errors as one message: the first unknown key, else missing key, else wrong value."""
    for kind in ("unexpected_keyword_argument", "missing"):
        for error in (error for error in errors if error["type"] == kind):
            *parents, key = error["loc"]
            names = _keys(tuple(parents))
            if kind == "missing":
                where = source.locate(tuple(parents))
                of = f"a table of '{parents[0]}'" if parents else "the file"
                return source.error(where, f"'{key}' is missing in {of}; expected it with {', '.join(names)}.")
            advice = did_you_mean(str(key), names)
            return source.error(
                source.locate(error["loc"]), f"'{key}' is no key here.{advice} Expected: {', '.join(names)}."
            )
    location = source.locate(errors[0]["loc"])
    key = next((step for step in reversed(location) if isinstance(step, str)), "the file")
    value = source.value(location)
    seen = f"'{key}' is {value!r}" if not isinstance(value, dict | list) else f"'{key}' is no such value"
    return source.error(location, f"{seen}: {errors[0]['msg'][:1].lower()}{errors[0]['msg'][1:]}.")


def _keys(parents: Location) -> list[str]:
    """Return the keys of the table at a location, required ones first; of a claim also those that make its pairs."""
    kind: Any = schema.Paper
    for step in (step for step in parents if isinstance(step, str)):
        kind = _dataclass_in(get_type_hints(kind).get(step)) if is_dataclass(kind) else None
    if kind is None:
        return []
    required = [entry.name for entry in fields(kind) if entry.default is MISSING and entry.default_factory is MISSING]
    names = [*required, *(entry.name for entry in fields(kind) if entry.name not in required)]
    return [*names, "winners", "losers"] if kind is schema.Claim else names


def _dataclass_in(hint: Any) -> Any:
    """Return the dataclass in a type such as tuple[Measure, ...] or ImageSet | None; None without one."""
    if is_dataclass(hint):
        return hint
    return next((kind for kind in map(_dataclass_in, get_args(hint)) if kind is not None), None)


# Names that refer to something


def _problems(paper: Paper) -> Iterator[Problem]:
    """Yield location and what does not fit together in a paper whose types are right."""
    if NAME.fullmatch(paper.name) is None:
        yield ("name",), f"'{paper.name}' is no name of files; expected letters, digits, '.', '_' and '-'"
    if paper.name == schema.ALL:
        yield ("name",), f"its name is '{schema.ALL}', which stands for every paper"
    yield from _specs(paper)
    yield from _table_problems(paper)
    methods = {entry.name for entry in paper.methods_and_baselines}
    measures = {measure.name for measure in paper.measures} | {paper.area}
    for place, claim in enumerate(paper.claims):
        winners, losers = ({pair[side] for pair in claim.pairs} for side in (0, 1))
        for key, names, known in (
            ("winners", winners, methods),
            ("losers", losers, methods),
            ("measures", set(claim.measures), measures),
        ):
            for name in sorted(names - known):
                yield _unknown(("claims", place, key), claim.statement, name, known)
    own = {entry.name for entry in paper.methods}
    for place, cost in enumerate(paper.costs):
        unknown = sorted({cost.method, cost.baseline} - own)
        yield from (_unknown(("costs", place), cost.statement, name, own) for name in unknown)
    for place, dimension in enumerate(paper.dimensions):
        yield from ((("dimensions", place), problem) for problem in dimension_problems(dimension, methods))
    measure_names = [measure.name for measure in paper.measures]
    yield from ((("figures",), problem) for problem in figure_problems(paper.figures, methods, measure_names))
    yield from ((("tune",), problem) for problem in _tuning_problems(paper))
    texts = {entry.method for entry in paper.methods} | {measure.metric for measure in paper.measures}
    for effort, replaced in paper.efforts.items():
        if effort not in schema.EFFORTS:
            yield ("efforts", effort), f"'{effort}' is no effort, expected one of {', '.join(schema.EFFORTS)}"
        for text in set(replaced) - texts:
            yield ("efforts", effort, text), f"effort '{effort}' replaces '{text}', which is not used"


def _unknown(location: Location, statement: str, name: str | None, names: set[Any]) -> Problem:
    near = did_you_mean(str(name), [known for known in names if known]).rstrip(".")
    return location, f"'{statement}' names '{name}', which the paper does not have{'.' if near else ''}{near}"


def _specs(paper: Paper) -> Iterator[Problem]:
    """Yield methods and metrics that do not exist."""
    for place, entry in enumerate(paper.methods):
        try:
            resolve_method(entry.method)
        except ClairError as error:
            yield ("methods", place, "method"), str(error).rstrip(".")
    for place, measure in enumerate(paper.measures):
        try:
            resolve_metric(measure.metric)
        except ClairError as error:
            yield ("measures", place, "metric"), str(error).rstrip(".")


def _table_problems(paper: Paper) -> Iterator[Problem]:
    methods = {entry.name for entry in paper.methods_and_baselines}
    measures = {measure.name for measure in paper.measures} | {paper.area}
    for place, table in enumerate(paper.tables):
        here: Location = ("tables", place)
        for name in [*(set(table.methods) - methods), *({*table.values, *table.per_image} - measures)]:
            key = ("values", name) if name in table.values else ("methods",)
            yield (*here, *key), f"the table on {table.data} names '{name}', which the paper does not have"
        for measure, rows in table.per_image.items():
            if tuple(rows) != table.methods or any(len(row) != len(table.images) for row in rows.values()):
                listed = ", ".join(table.methods)
                problem = f"{measure} on {table.data} is not given for each of {listed} on each image"
                yield (*here, "per_image", measure), problem
        for measure, row in table.values.items():
            if len(row) != len(table.methods):
                problem = f"{measure} on {table.data} has {len(row)} numbers for {len(table.methods)} methods"
                yield (*here, "values", measure), problem


def _tuning_problems(paper: Paper) -> Iterator[str]:
    """Yield what is wrong with the start layer that a paper chooses."""
    if paper.tune is None:
        return
    entries = {entry.name: entry for entry in paper.methods}
    for name in (paper.tune.method, *paper.tune.together):
        if name not in entries:
            yield f"[tune] names '{name}', which the paper does not have"
            continue
        try:
            base_method(entries[name].method)
        except ClairError as error:
            yield f"[tune] names '{name}': {str(error).rstrip('.')}"
    try:
        resolve_metric(paper.tune.metric)
    except ClairError as error:
        yield f"[tune] names a metric that does not exist: {str(error).rstrip('.')}"
    if not 0 < paper.tune.share < 1:
        yield f"[tune] takes a share of {paper.tune.share:g} of the images, expected one between 0 and 1"
