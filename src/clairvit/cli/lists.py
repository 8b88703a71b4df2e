"""`clairvit methods` and `clairvit models`: what there is to choose from."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli.options import AsJson
from clairvit.cli.paper import line, table
from clairvit.errors import UnknownName

if TYPE_CHECKING:
    from clairvit.methods.method import Method


def list_methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its formula and options.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or tell everything about one of them.

    [bold]Examples[/bold]

    clairvit methods

    clairvit methods rollout
    """
    from clairvit.methods.bind import bind
    from clairvit.methods.method import methods

    chosen = methods() if name is None else [bind(name).method]
    if as_json:
        print(json.dumps([_plain(method) for method in chosen], ensure_ascii=False, indent=1, default=str))
    elif name is None:
        _print_all(chosen)
    else:
        _print_one(chosen[0])


def _print_all(methods: list[Method]) -> None:
    rows = [
        (
            method.name,
            method.family,
            "class" if method.class_specific else "any class",
            "for/against" if method.signed else "relevance",
            method.rules or "–",
            _passes(method),
            method.paper,
        )
        for method in methods
    ]
    table(
        f"{len(methods)} methods", ("method", "family", "explains", "shows", "backward rules", "passes", "paper"), rows
    )
    line("Recombine the layers: genatt+skipplus, ixg+plus, rollout+layer:3.  Set options: 'rollout(fusion=max)'.")
    line("More about one of them: clairvit methods rollout")


def _print_one(method: Method) -> None:
    line(f"{method.name} — {method.paper}\n")
    line(f"{inspect.getdoc(method.function) or method.summary}\n")
    facts = [
        ("family", method.family),
        ("explains", "one class" if method.class_specific else "no class in particular"),
        ("shows", "evidence for and against (signed)" if method.signed else "relevance (not negative)"),
        ("passes", _passes(method) + (f" under the {method.rules} rules" if method.rules else "")),
        *([("slow", "left out of --methods all")] if method.slow else []),
    ]
    table("", ("", ""), facts)
    if method.options:
        table("Options", ("name", "default"), [(key, _value(value)) for key, value in method.options.items()])
    if method.presets:
        presets = [(key, ", ".join(f"{k}={v}" for k, v in value.items())) for key, value in method.presets.items()]
        table(f"Presets, e.g. '{method.name}(preset={next(iter(method.presets))})'", ("name", "sets"), presets)
    if method.combinators:
        from clairvit.methods.method import COMBINATORS

        meanings = [(mark, COMBINATORS.get(mark.removeprefix("+"), "")) for mark in method.combinators]
        table(f"Recombinations, e.g. {method.name}+skipplus", ("ending", "meaning"), meanings)


def _passes(method: Method) -> str:
    from clairvit.show.words import effort

    return effort(method.cost)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _plain(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "family": method.family,
        "summary": method.summary,
        "paper": method.paper,
        "signed": method.signed,
        "class_specific": method.class_specific,
        "slow": method.slow,
        "rules": method.rules,
        "cost": {"forwards": method.cost.forwards, "backwards": method.cost.backwards},
        "options": method.options,
        "presets": {name: dict(preset) for name, preset in method.presets.items()},
        "combinators": list(method.combinators),
    }


def list_models(
    wanted: Annotated[
        str | None, typer.Argument(metavar="FILTER", help="Part of a name or a glob: siglip, 'timm:vit_tiny*'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models that --model takes.

    [bold]Examples[/bold]

    clairvit models

    clairvit models 'timm:vit_tiny*'
    """
    from clairvit.models.sources import sources

    found = sources(wanted)
    if not found:
        raise UnknownName(f"No model matches '{wanted}'; type 'clairvit models' for the kinds of names there are.")
    if as_json:
        fields = ("name", "description", "example")
        rows = [dict(zip(fields, source, strict=True)) for source in found]
        print(json.dumps(rows, ensure_ascii=False, indent=1))
    elif wanted is None:
        table("Models", ("name", "what it is", "example"), found)
        line("Names that contain a word: clairvit models siglip")
    else:
        table(f"{len(found)} models", ("name", "note"), [(source.spec, source.description) for source in found])
