"""`clairvit methods` and `clairvit models`: what there is to choose from."""

from __future__ import annotations

import fnmatch
import inspect
import json
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from clairvit.cli import options
from clairvit.cli.console import line, table
from clairvit.cli.options import AsJson
from clairvit.errors import BadInput, UnknownName, did_you_mean

if TYPE_CHECKING:
    from clairvit.methods.registry import Method


def methods_command(
    name: Annotated[str | None, typer.Argument(help="One method, with its formula and options.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or tell everything about one of them.

    [bold]Examples[/bold]

    clairvit methods

    clairvit methods rollout
    """
    from clairvit.methods.registry import list_methods
    from clairvit.methods.spec import resolve_method

    chosen = list_methods() if name is None else [resolve_method(name).method]
    if as_json:
        print(json.dumps([_plain(method) for method in chosen], ensure_ascii=False, indent=1, default=str))
    elif name is None:
        _print_all(chosen)
    else:
        _print_one(chosen[0])


def _print_all(methods: list[Method]) -> None:
    from clairvit.methods.registry import by_family
    from clairvit.plotting.labels import CLASS_AGNOSTIC, SIGNED

    ordered = [methods[place] for place in by_family(method.family for method in methods)]
    rows = [
        (
            method.family,
            method.name,
            SIGNED * (method.signed and not method.relu) + CLASS_AGNOSTIC * (not method.class_specific),
            " + ".join(method.tables) or "–",
            ("≤ " if method.at_most else "") + str(method.cost.forwards),
            str(method.cost.backwards),
            ", ".join(_conditions(method)),
            method.paper,
        )
        for method in ordered
    ]
    columns = ("family", "method", "", "rules", "forwards", "backwards", "mind", "paper")
    table(f"{len(methods)} methods", columns, rows, right=("forwards", "backwards"), grouped=True)
    line(f"{SIGNED} signed: evidence for and against.  {CLASS_AGNOSTIC} class-agnostic: one map for all classes.")
    line("mind: slow ones are left out of --method all; delicate: round-off shows; or what a model must have.")
    line("Recombine the layers: genatt+skipplus, ixg+plus, rollout+layer:3.  Set options: 'rollout(fusion=max)'.")
    line("More about one of them: clairvit methods rollout")


def _conditions(method: Method) -> list[str]:
    """What to know before using it, a word each."""
    found = [word for word, so in (("slow", method.slow), ("delicate", bool(method.numerically_unstable))) if so]
    found += ["often zero"] if method.zero_reason else []
    found += [f"{'/'.join(method.poolings)} pooling"] if method.poolings else []
    return [*found, *method.needs]


def _print_one(method: Method) -> None:
    line(f"{method.name} — {method.paper}\n")
    line(f"{inspect.getdoc(method.function) or method.summary}\n")
    facts = [
        ("family", method.family),
        ("explains", _explains(method)),
        ("shows", _sign(method)),
        ("passes", _passes(method) + (f" under the {' and '.join(method.tables)} rules" if method.tables else "")),
        *([("slow", "left out of --method all")] if method.slow else []),
        *([("delicate", method.numerically_unstable)] if method.numerically_unstable else []),
        *([("often zero", method.zero_reason)] if method.zero_reason else []),
        *([("only for", f"{' or '.join(method.poolings)} pooling")] if method.poolings else []),
        *([("needs", ", ".join(method.needs))] if method.needs else []),
        *([("papers differ", method.discrepancies)] if method.discrepancies else []),
    ]
    table("", ("", ""), facts)
    if method.options:
        choices = option_choices(method)
        rows = [(key, _value(value), choices.get(key, "")) for key, value in method.options.items()]
        table("Options", ("name", "default", "choices"), rows)
    if method.presets:
        presets = [(key, ", ".join(f"{k}={v}" for k, v in value.items())) for key, value in method.presets.items()]
        table(f"Presets, e.g. '{method.name}(preset={next(iter(method.presets))})'", ("name", "sets"), presets)
    if method.combinators:
        from clairvit.methods.registry import COMBINATORS

        meanings = [(mark, COMBINATORS.get(mark.removeprefix("+"), "")) for mark in method.combinators]
        table(f"Recombinations, e.g. {method.name}+skipplus", ("ending", "meaning"), meanings)


def option_choices(method: Method) -> dict[str, str]:
    """Return what each option of a method takes: "min | mean | max", "whole number", "true | false"."""
    from clairvit.methods.spec import option_hints

    return {name: " | ".join(_choices(hint)) for name, hint in option_hints(method).items()}


def _choices(hint: Any) -> list[str]:
    """Return the values or kinds of values that a type annotation allows."""
    kinds = {int: "whole number", float: "number", bool: "true | false", str: "text", type(None): "none"}
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return list(dict.fromkeys(choice for part in get_args(hint) for choice in _choices(part)))
    return [kinds.get(hint, getattr(hint, "__name__", str(hint)))]


def _passes(method: Method) -> str:
    from clairvit.plotting.labels import effort

    return ("at most " if method.at_most else "") + effort(method.cost) + (" on 14 × 14 patches" if method.more else "")


def _explains(method: Method) -> str:
    if not method.class_specific:
        return "no class in particular"
    return f"one class, by its {method.score} unless --score names another"


def _sign(method: Method) -> str:
    if method.signed and method.relu:
        return "relevance (not negative); evidence for and against with relu=false or a combinator"
    return "evidence for and against (signed)" if method.signed else "relevance (not negative)"


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
        "delicate": method.numerically_unstable,
        "often_zero": method.zero_reason,
        "poolings": list(method.poolings),
        "needs": list(method.needs),
        "discrepancies": method.discrepancies,
        "rules": method.rules,
        "also": method.also,
        "cost": {"forwards": method.cost.forwards, "backwards": method.cost.backwards, "at_most": method.at_most},
        "score": method.score,
        "options": method.options,
        "choices": option_choices(method),
        "presets": {name: dict(preset) for name, preset in method.presets.items()},
        "combinators": list(method.combinators),
    }


def models_command(
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
    from clairvit.models.sources.registry import sources

    found = sources(wanted)
    if not found:
        raise UnknownName(f"No model matches '{wanted}'; type 'clairvit models' for the kinds of names there are.")
    if as_json:
        fields = ("name", "description", "example", "activation")
        rows = [dict(zip(fields, source, strict=True)) for source in found]
        print(json.dumps(rows, ensure_ascii=False, indent=1))
    elif wanted is None:
        table("Models", ("name", "what it is", "example"), [source[:3] for source in found])
        meanings = [(source.spec, source.activation) for source in found]
        table("What scores mean, unless --activation says otherwise", ("name", "activation"), meanings)
        line("Names that contain a word: clairvit models siglip")
    else:
        table(
            f"{len(found)} model{'s' * (len(found) != 1)}",
            ("name", "note", "activation"),
            [(one.spec, one.description, one.activation) for one in found],
        )


def classes_command(
    wanted: Annotated[
        str | None, typer.Argument(metavar="FILTER", help="Part of a name or a glob: terrier, 'B*'.")
    ] = None,
    model: options.ModelName = "pets",
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    labels: options.Labels = None,
    as_json: AsJson = False,
) -> None:
    """List the class names of a model, with their numbers: what --target takes.

    [bold]Examples[/bold]

    clairvit classes

    clairvit classes terrier --model torchvision:vit_b_16 --no-pretrained
    """
    from clairvit.cli.request import load

    net = load(model, arch, no_pretrained, labels, None)
    if not net.labels:
        raise BadInput(
            f"{net.name} has no class names; give --target a number, or load it with --labels FILE (a JSON list)."
        )
    pattern = "*" if wanted is None else wanted if any(c in wanted for c in "*?[") else f"*{wanted}*"
    matches = [(i, name) for i, name in enumerate(net.labels) if fnmatch.fnmatchcase(name.lower(), pattern.lower())]
    if not matches:
        raise UnknownName(
            f"No class of {net.name} matches '{wanted}'.{did_you_mean(str(wanted), net.labels)} "
            "Type 'clairvit classes' without a filter for all of them."
        )
    if as_json:
        rows = [{"index": index, "name": name} for index, name in matches]
        print(json.dumps(rows, ensure_ascii=False, indent=1))
    else:
        title = f"{len(matches)} of {len(net.labels)} classes of {net.name}"
        table(title, ("number", "name"), [(str(index), name) for index, name in matches], right=("number",))
