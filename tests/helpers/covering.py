"""Which pairs of a product are tested: a covering array, or every pair with `--cases=all` (`make test-all`).

A sweep over methods × models has thousands of pairs, most of which run the same lines. A covering array is a sample
with a guarantee: each method meets every trait that a model may have (its pooling, library, grid …), each model meets
every trait that a method may have (its family, output …), and each method runs on `least` models or more. The choice is
deterministic: a greedy search whose ties are decided by a checksum of the names and of `seed`. Sweeps of other files
name another seed, so that together they run more pairs than each of them.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

Traits = Callable[[Any], Iterable[Hashable]]
Relation = Callable[[Any, Any], bool]
LEAST_MODELS = 10  # for each method, of those that it is defined for
_settings = {"all": False}


def run_all_cases(every: bool) -> None:
    """Choose between covering arrays and products, before tests are collected (`tests/conftest.py`)."""
    _settings["all"] = every


def all_cases() -> bool:
    """Return whether this run tests every pair."""
    return _settings["all"]


def no_traits(_: Any) -> tuple[Hashable, ...]:
    """Return no traits: only the name itself is to appear."""
    return ()


def covering_array(
    rows: Sequence[Any],
    columns: Sequence[Any],
    row_traits: Traits = no_traits,
    column_traits: Traits = no_traits,
    least: int = 1,
    fitting: Relation = lambda row, column: True,
    seed: str = "",
) -> list[tuple[Any, Any]]:
    """Return pairs (row, column) in the order of the product; all of them with `--cases=all`.

    Each row meets `least` columns that fit it (or all there are), each column one row, each row every trait of the
    columns and each column every trait of the rows. Pairs that fit and pairs that do not (which are to be refused) are
    counted apart: a trait that a row meets in both ways is met in both ways.
    """
    product = [(row, column) for row in rows for column in columns]
    if all_cases():
        return product
    facts = {pair: _facts(pair, row_traits, column_traits, fitting) for pair in product}
    chosen: dict[tuple[Any, Any], None] = {}
    missing = {fact for pair in product for fact in facts[pair]}
    used: Counter[Any] = Counter()

    def choose(candidates: Iterable[tuple[Any, Any]], gain: Callable[[tuple[Any, Any]], int]) -> None:
        pair = max(candidates, key=lambda pair: (gain(pair), -used[pair[0]] - used[pair[1]], _checksum(pair, seed)))
        chosen[pair] = None
        missing.difference_update(facts[pair])
        used.update(pair)

    for side, name in enumerate(("row", "column")):
        for pairs in _grouped(product, side):
            while useful := [pair for pair in pairs if any(fact[0] == name for fact in facts[pair] & missing)]:
                choose(useful, lambda pair: len(facts[pair] & missing))
    for pairs in _grouped(product, 0):
        fit = [pair for pair in pairs if fitting(*pair)]
        while sum(pair in chosen for pair in fit) < min(least, len(fit)):
            choose([pair for pair in fit if pair not in chosen], lambda pair: 0)
    return [pair for pair in product if pair in chosen]


def _facts(
    pair: tuple[Any, Any], row_traits: Traits, column_traits: Traits, fitting: Relation
) -> frozenset[tuple[Hashable, ...]]:
    """Return what a pair shows: of its row with each trait of the column, and of its column with each of the row."""
    row, column = pair
    fit = fitting(row, column)
    of_row = {("row", row, trait, fit) for trait in ("there", *column_traits(column))}
    of_column = {("column", column, trait, fit) for trait in ("there", *row_traits(row))}
    return frozenset(of_row | of_column)


def _grouped(product: Sequence[tuple[Any, Any]], side: int) -> list[list[tuple[Any, Any]]]:
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    for pair in product:
        groups.setdefault(pair[side], []).append(pair)
    return list(groups.values())


def _checksum(pair: tuple[Any, Any], seed: str) -> int:
    return zlib.crc32(f"{seed} {pair[0]} {pair[1]}".encode())


# Methods and models


def model_traits(kind: str) -> tuple[Hashable, ...]:
    """Return what methods may depend on in a tiny model: pooling, library, grid, prefix tokens, what it lacks."""
    from helpers.tiny_models import ZOO

    tiny = ZOO[kind]
    return (
        ("pooling", tiny.pooling),
        ("library", kind.partition("-")[0]),
        ("square", tiny.grid[0] == tiny.grid[1]),
        ("prefix", min(tiny.prefix, 2)),
        ("pool", tiny.pools > 0),
        ("classifier", tiny.classifier),
    )


def method_traits(text: str) -> tuple[Hashable, ...]:
    """Return what models may treat differently in a method: its family, what it gives, how it goes back."""
    from helpers.method_conditions import method_of

    method = method_of(text)
    return (("family", method.family), ("output", method.output), ("passes", method.passes))


def method_model_pairs(
    texts: Sequence[str], kinds: Sequence[str], least: int = LEAST_MODELS, seed: str = ""
) -> list[tuple[str, str]]:
    """Return pairs (method, model) in which each method is run on `least` models and meets every pooling and library.

    Pairs that a method declares itself undefined for are in it too, one for each trait: they are to be refused.
    """
    from helpers.method_conditions import fits

    return covering_array(texts, kinds, method_traits, model_traits, least, fits, seed)


def methods_on(kind: str, texts: Sequence[str], kinds: Sequence[str], **options: Any) -> list[str]:
    """Return the methods that `method_model_pairs` runs on one model."""
    return [text for text, other in method_model_pairs(texts, kinds, **options) if other == kind]


def one_of_each(items: Sequence[Any], traits: Traits) -> list[Any]:
    """Return one item for each combination of traits, for a fact that depends on nothing else.

    All of them with `--cases=all`. Which one is decided by a checksum, so that it is not always the first.
    """
    if all_cases():
        return [*items]
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(tuple(traits(item)), []).append(item)
    chosen = [max(group, key=lambda item: _checksum((item, ""), "one of each")) for group in groups.values()]
    return [item for item in items if item in chosen]


def some_models(kinds: Sequence[str], count: int = 6, seed: str = "") -> list[str]:
    """Return `count` models that show as many traits as so few can; all of them with `--cases=all`."""
    if all_cases():
        return [*kinds]
    chosen: list[str] = []
    shown: set[Hashable] = set()
    for _ in range(min(count, len(kinds))):
        rest = [kind for kind in kinds if kind not in chosen]
        chosen.append(max(rest, key=lambda kind: (len({*model_traits(kind)} - shown), _checksum((kind, ""), seed))))
        shown.update(model_traits(chosen[-1]))
    return [kind for kind in kinds if kind in chosen]
