"""`clairvit methods`, `metrics`, `models`, `classes` and `cite`: the names that the other commands take, and papers."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clairvit._presets import preset_formula, preset_settings
from clairvit.cli import options
from clairvit.cli.console import print_json, print_line, table
from clairvit.cli.declare import argument
from clairvit.cli.options import AS_JSON, ModelOptions
from clairvit.errors import BadInput, UnknownName, did_you_mean

if TYPE_CHECKING:
    from clairvit._spec import Registered
    from clairvit.methods.registry import Method
    from clairvit.metrics.registry import Metric
    from clairvit.option_types import Option


def methods_command(
    name: str | None = argument(None, "One method, with its formula and options."), as_json: bool = AS_JSON
) -> None:
    """List the methods, or describe one of them.

    [bold]Examples[/bold]

    clairvit methods

    clairvit methods rollout
    """
    from clairvit.methods.registry import list_methods
    from clairvit.methods.spec import resolve_method

    listed = list_methods() if name is None else [resolve_method(name).method]
    if as_json:
        print_json([_method_record(method) for method in listed])
    elif name is None:
        _print_methods(listed)
    else:
        _print_method(listed[0])


def _print_methods(methods: list[Method]) -> None:
    from clairvit.methods.recommended import default_methods, recommended_methods
    from clairvit.methods.registry import by_family
    from clairvit.plotting.labels import CLASS_AGNOSTIC, SIGNED

    ordered = [methods[row] for row in by_family(method.family for method in methods)]
    rows = [
        (
            method.family,
            method.name,
            SIGNED * (method.signed and not method.relu) + CLASS_AGNOSTIC * (not method.class_specific),
            " + ".join(method.tables) or "–",
            ("≤ " if method.extra_cost.at_most else "") + str(method.cost.forwards),
            str(method.cost.backwards),
            ", ".join(_conditions(method)),
            method.paper,
        )
        for method in ordered
    ]
    columns = ("family", "method", "", "rules", "forwards", "backwards", "mind", "paper")
    table(f"{len(methods)} methods", columns, rows, right=("forwards", "backwards"), grouped=True)
    advice = [(item.purpose, item.method, item.reason, item.evidence) for item in recommended_methods()]
    table("Recommended", ("for", "method", "why", "measured"), advice)
    defaults = [(item.models, item.method, item.reason, item.evidence) for item in default_methods()]
    table("Used where none is named", ("model", "method", "why", "measured"), defaults)
    print_line("If that one does not fit the model, the next is used, and a note says why.")
    print_line("measured: insertion − deletion (faithful) and average precision (localising), docs/which-method.md.")
    print_line(f"{SIGNED} signed: evidence for and against.  {CLASS_AGNOSTIC} class-agnostic: one map for all classes.")
    print_line("mind: slow ones are left out of --method all; delicate: round-off shows; or what a model must have.")
    print_line("Recombine the layers: genatt+skipplus, ixg+plus, rollout+layer:3.  Set options: 'rollout(fusion=max)'.")
    print_line("More about one of them: clairvit methods rollout")


def _conditions(method: Method) -> list[str]:
    """Return the restrictions of a method in one or two words each."""
    caveats, requires = method.caveats, method.requirements()
    flags = (("slow", method.slow), ("delicate", caveats.numerically_unstable), ("often zero", caveats.zero_reason))
    words = [word for word, applies in flags if applies]
    words += [f"{'/'.join(requires.poolings)} pooling"] if requires.poolings else []
    return [*words, *requires.structure]


def _print_method(method: Method) -> None:
    print_line(f"{method.name} — {method.paper}\n")
    print_line(f"{inspect.getdoc(method.function) or method.summary}\n")
    facts = [
        ("family", method.family),
        ("explains", _explains(method)),
        ("shows", _sign(method)),
        ("passes", _passes(method) + (f" under the {' and '.join(method.tables)} rules" if method.tables else "")),
        *([("slow", "left out of --method all")] if method.slow else []),
        *([("delicate", method.caveats.numerically_unstable)] if method.caveats.numerically_unstable else []),
        *([("often zero", method.caveats.zero_reason)] if method.caveats.zero_reason else []),
        *([("as written", method.caveats.as_written)] if method.caveats.as_written else []),
        *(
            [("only for", f"{' or '.join(method.requirements().poolings)} pooling")]
            if method.requirements().poolings
            else []
        ),
        *([("needs", ", ".join(method.requirements().structure))] if method.requirements().structure else []),
        *([("papers differ", method.caveats.discrepancies)] if method.caveats.discrepancies else []),
    ]
    table("", ("", ""), facts)
    _print_options(method.option_list)
    _print_presets(method)
    if method.combinators:
        from clairvit.methods.registry import COMBINATORS

        meanings = [(suffix, COMBINATORS.get(suffix.removeprefix("+"), "")) for suffix in method.combinators]
        table(f"Recombinations, e.g. {method.name}+skipplus", ("ending", "meaning"), meanings)


def _print_options(listed: Sequence[Option]) -> None:
    if listed:
        rows = [(option.name, str(option.default), option.allowed, option.doc) for option in listed]
        table("Options", ("name", "default", "choices", "meaning"), rows)


def _print_presets(entry: Method | Metric) -> None:
    if entry.presets:
        rows = []
        for name in entry.presets:
            settings = ", ".join(f"{key}={value}" for key, value in preset_settings(entry, name).items())
            parts = [part for part in (settings, preset_formula(entry, name)) if part]
            rows.append((name, "; ".join(parts) or "nothing: the defaults"))
        table(f"Presets, e.g. '{entry.name}(preset={next(iter(entry.presets))})'", ("name", "sets"), rows)


def _option_records(entry: Registered) -> dict[str, dict[str, Any]]:
    """Return the defaults of the options, what they take ("min | mean | max", "whole number") and what they mean."""
    return {
        "options": entry.options,
        "choices": {option.name: option.choices for option in entry.option_list},
        "ranges": {option.name: str(option.range) for option in entry.option_list if option.range is not None},
        "meanings": {option.name: option.doc for option in entry.option_list},
    }


def _passes(method: Method) -> str:
    from clairvit.plotting.labels import cost_label

    return (
        ("at most " if method.extra_cost.at_most else "")
        + cost_label(method.cost)
        + (" on 14 × 14 patches" if method.extra_cost.passes else "")
    )


def _explains(method: Method) -> str:
    if not method.class_specific:
        return "no class in particular"
    return f"one class, by its {method.score} unless --score names another"


def _sign(method: Method) -> str:
    if method.signed and method.relu:
        return "relevance (not negative); evidence for and against with relu=false or a combinator"
    return "evidence for and against (signed)" if method.signed else "relevance (not negative)"


def _method_record(method: Method) -> dict[str, Any]:
    from clairvit.methods.recommended import default_methods, recommended_methods
    from clairvit.methods.spec import resolve_method

    requires = method.requirements()
    return {
        "name": method.name,
        "family": method.family,
        "summary": method.summary,
        "paper": method.paper,
        "signed": method.signed,
        "class_specific": method.class_specific,
        "slow": method.slow,
        "delicate": method.caveats.numerically_unstable,
        "often_zero": method.caveats.zero_reason,
        "poolings": list(requires.poolings),
        "needs": list(requires.structure),
        "discrepancies": method.caveats.discrepancies,
        "rules": str(requires.rules) if requires.passes == "backward" else None,
        "also": None if requires.second_rules is None else str(requires.second_rules),
        "cost": {
            "forwards": method.cost.forwards,
            "backwards": method.cost.backwards,
            "at_most": method.extra_cost.at_most,
        },
        "score": method.score,
        "recommended_for": [
            {"purpose": item.purpose, "method": item.method, "reason": item.reason, "evidence": item.evidence}
            for item in recommended_methods()
            if resolve_method(item.method).method is method
        ],
        "default_for": [
            {"models": item.models, "method": item.method, "reason": item.reason, "evidence": item.evidence}
            for item in default_methods()
            if resolve_method(item.method).method is method
        ],
        **_option_records(method),
        "presets": {name: preset_settings(method, name) for name in method.presets},
        "combinators": list(method.combinators),
    }


def metrics_command(
    name: str | None = argument(None, "One metric, with its formula and options."), as_json: bool = AS_JSON
) -> None:
    """List the metrics, or describe one of them.

    [bold]Examples[/bold]

    clairvit metrics

    clairvit metrics deletion
    """
    from clairvit.metrics.registry import resolve_metric
    from clairvit.plotting.labels import metrics_by_family

    listed = metrics_by_family() if name is None else [resolve_metric(name).metric]
    if as_json:
        print_json([_metric_record(metric) for metric in listed])
    elif name is None:
        _print_metrics(listed)
    else:
        _print_metric(listed[0])


def _print_metrics(metrics: list[Metric]) -> None:
    from clairvit.plotting.labels import ARROWS, default_forwards, needs_label, value_range_label

    rows = [
        (
            metric.family,
            metric.name,
            ARROWS[metric.better],
            value_range_label(metric),
            ", ".join(needs_label(metric)),
            str(default_forwards(metric)),
            metric.paper,
        )
        for metric in metrics
    ]
    columns = ("family", "metric", "better", "range", "needs", "forwards", "paper")
    table(f"{len(metrics)} metrics", columns, rows, right=("forwards",), grouped=True)
    print_line("↑ higher is better.  ↓ lower is better.  forwards: per map of 14 × 14 patches, its own excluded.")
    print_line(
        "explains again: the method is run on other images or models; passes beyond one forward per run are extra."
    )
    print_line("Set options: 'deletion(removal=mean)'.  More about one of them: clairvit metrics deletion")


def _print_metric(metric: Metric) -> None:
    from clairvit.plotting.labels import default_forwards, needs_label, value_range_label

    print_line(f"{metric.name} — {metric.paper}\n")
    print_line(f"{inspect.getdoc(metric.function) or metric.summary}\n")
    facts = [
        ("family", metric.family),
        ("better", metric.better),
        ("range", value_range_label(metric)),
        *([("needs", ", ".join(needs_label(metric)))] if metric.needs else []),
        ("forwards", f"{default_forwards(metric)} for a map of 14 × 14 patches"),
        *(
            [("reads", "the order of the patches only; the order of a constant map is random")]
            if metric.rank_only
            else []
        ),
        *([("papers differ", metric.discrepancies)] if metric.discrepancies else []),
    ]
    table("", ("", ""), facts)
    _print_options(metric.option_list)
    _print_presets(metric)


def _metric_record(metric: Metric) -> dict[str, Any]:
    from clairvit.plotting.labels import default_forwards

    return {
        "name": metric.name,
        "family": metric.family,
        "summary": metric.summary,
        "paper": metric.paper,
        "better": metric.better,
        "span": list(metric.span),
        "needs": list(metric.needs),
        "orders": metric.rank_only,
        "cost": {"forwards": default_forwards(metric)},
        **_option_records(metric),
        "presets": {name: preset_settings(metric, name) for name in metric.presets},
        "discrepancies": metric.discrepancies,
    }


def models_command(
    pattern: str | None = argument(None, "Part of a name or a glob: siglip, 'timm:vit_tiny*'.", "FILTER"),
    as_json: bool = AS_JSON,
) -> None:
    """List the models that --model takes.

    [bold]Examples[/bold]

    clairvit models

    clairvit models 'timm:vit_tiny*'
    """
    from clairvit.models.sources.registry import sources

    models = sources(pattern)
    if not models:
        raise UnknownName(f"No model matches '{pattern}'; type 'clairvit models' for the kinds of names there are.")
    if as_json:
        fields = ("name", "description", "example", "activation")
        print_json([dict(zip(fields, source, strict=True)) for source in models])
    elif pattern is None:
        table("Models", ("name", "description", "example"), [source[:3] for source in models])
        activations = [(source.spec, source.activation) for source in models]
        table("What scores mean, unless --activation says otherwise", ("name", "activation"), activations)
        print_line("Names that contain a word: clairvit models siglip")
    else:
        table(
            f"{len(models)} model{'s' * (len(models) != 1)}",
            ("name", "note", "activation"),
            [(source.spec, source.description, source.activation) for source in models],
        )


def classes_command(
    pattern: str | None = argument(None, "Part of a name or a glob: terrier, 'B*'.", "FILTER"),
    model: str = options.model_name(),
    arch: str | None = options.ARCH,
    no_pretrained: bool = options.NO_PRETRAINED,
    labels: str | None = options.LABELS,
    as_json: bool = AS_JSON,
) -> None:
    """List the class names of a model, with their numbers: what --target takes.

    [bold]Examples[/bold]

    clairvit classes

    clairvit classes terrier --model torchvision:vit_b_16 --no-pretrained
    """
    net = ModelOptions(arch=arch, no_pretrained=no_pretrained, labels=labels).load(model)
    if not net.labels:
        raise BadInput(
            f"{net.name} has no class names; give --target a number, or load it with --labels FILE (a JSON list)."
        )
    glob = "*" if pattern is None else pattern if any(letter in pattern for letter in "*?[") else f"*{pattern}*"
    matches = [
        (index, name) for index, name in enumerate(net.labels) if fnmatch.fnmatchcase(name.lower(), glob.lower())
    ]
    if not matches:
        raise UnknownName(
            f"No class of {net.name} matches '{pattern}'.{did_you_mean(str(pattern), net.labels)} "
            "Type 'clairvit classes' without a filter for all of them."
        )
    if as_json:
        print_json([{"index": index, "name": name} for index, name in matches])
    else:
        title = f"{len(matches)} of {len(net.labels)} classes of {net.name}"
        table(title, ("number", "name"), [(str(index), name) for index, name in matches], right=("number",))


def cite_command(
    names: list[str] | None = argument(None, "Methods and metrics; none: ClairViT itself.", "[METHOD|METRIC]..."),
    as_json: bool = AS_JSON,
) -> None:
    """Print BibTeX entries for methods and metrics.

    [bold]Examples[/bold]

    clairvit cite genatt+skipplus deletion > references.bib

    clairvit cite
    """
    from clairvit.citations import citations, cite, reference_record

    if as_json:
        print_json(
            [{"cited_for": list(texts), **reference_record(key)} for key, texts in citations(names or []).items()]
        )
    else:
        print(cite(*(names or [])))
