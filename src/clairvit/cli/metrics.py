"""`clairvit metrics`: what maps can be scored by."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit._io import dumps_json
from clairvit.cli.console import line, table
from clairvit.cli.options import AsJson

if TYPE_CHECKING:
    from clairvit.metrics.registry import Metric


def metrics_command(
    name: Annotated[str | None, typer.Argument(help="One metric, with its formula and options.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the metrics, or tell everything about one of them.

    [bold]Examples[/bold]

    clairvit metrics

    clairvit metrics deletion
    """
    from clairvit.metrics.registry import resolve_metric
    from clairvit.plotting.labels import in_order

    chosen = in_order() if name is None else [resolve_metric(name).metric]
    if as_json:
        print(dumps_json([_plain(one) for one in chosen], default=str))
    elif name is None:
        _print_all(chosen)
    else:
        _print_one(chosen[0])


def _print_all(metrics: list[Metric]) -> None:
    from clairvit.plotting.labels import ARROWS, forwards, needs, span

    rows = [
        (one.family, one.name, ARROWS[one.better], span(one), ", ".join(needs(one)), str(forwards(one)), one.paper)
        for one in metrics
    ]
    columns = ("family", "metric", "better", "range", "needs", "forwards", "paper")
    table(f"{len(metrics)} metrics", columns, rows, right=("forwards",), grouped=True)
    line("↑ higher is better.  ↓ lower is better.  forwards: of one map of 14 × 14 patches, beside those that made it.")
    line("explains again: the method is run on other images or models; passes beyond a forward a run come on top.")
    line("Set options: 'deletion(removal=mean)'.  More about one of them: clairvit metrics deletion")


def _print_one(metric: Metric) -> None:
    from clairvit.plotting.labels import forwards, needs, span

    line(f"{metric.name} — {metric.paper}\n")
    line(f"{inspect.getdoc(metric.function) or metric.summary}\n")
    facts = [
        ("family", metric.family),
        ("better", metric.better),
        ("range", span(metric)),
        *([("needs", ", ".join(needs(metric)))] if metric.needs else []),
        ("forwards", f"{forwards(metric)} for a map of 14 × 14 patches"),
        *([("reads", "the order of the patches only; a constant map is a lottery")] if metric.orders else []),
        *([("papers differ", metric.discrepancies)] if metric.discrepancies else []),
    ]
    table("", ("", ""), facts)
    if metric.options:
        table("Options", ("name", "default"), [(key, str(value)) for key, value in metric.options.items()])
    if metric.presets:
        presets = [(key, ", ".join(f"{k}={v}" for k, v in value.items())) for key, value in metric.presets.items()]
        rows = [(key, sets or "nothing: the defaults") for key, sets in presets]
        table(f"Presets, e.g. '{metric.name}(preset={next(iter(metric.presets))})'", ("name", "sets"), rows)


def _plain(metric: Metric) -> dict[str, Any]:
    from clairvit.plotting.labels import forwards

    return {
        "name": metric.name,
        "family": metric.family,
        "summary": metric.summary,
        "paper": metric.paper,
        "better": metric.better,
        "span": list(metric.span),
        "needs": list(metric.needs),
        "orders": metric.orders,
        "cost": {"forwards": forwards(metric)},
        "options": metric.options,
        "presets": {name: dict(preset) for name, preset in metric.presets.items()},
        "discrepancies": metric.discrepancies,
    }
