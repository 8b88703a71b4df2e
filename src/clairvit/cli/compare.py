"""`clairvit compare`: many methods side by side, from shared passes of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.explain import load, read_targets
from clairvit.cli.paper import line, progress, table
from clairvit.cli.report import end, print_classes, print_files, print_json, print_notes
from clairvit.cli.split import split_methods
from clairvit.cli.work import Delivered, Job, carry_out, find, place

if TYPE_CHECKING:
    from clairvit.methods.explanation import Explanation
    from clairvit.methods.method import Method
    from clairvit.models.images import Batch

USUAL = "raw-attention,rollout,grad-rollout,attcam,genatt,gmar-l1,legrad,focusvit,attcat,decompx+skipplus,attnlrp"
ALL = "all"
EXAMPLES = """[bold]Examples[/bold]

clairvit compare demo

clairvit compare cat.jpg --methods 'rollout(fusion=max),legrad' --out cat.pdf

clairvit compare photos/ --methods all --target Bengal
"""


def compare(
    images: options.Images,
    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B,…",
            help="Methods separated by commas; 'all' are those that fit the model and are not slow.",
            show_default="eleven well-known ones",
        ),
    ] = USUAL,
    model: options.ModelName = "pets",
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    labels: options.Labels = None,
    device: options.Device = None,
    target: options.Target = None,
    contrast: options.Contrast = None,
    score: options.Score = "logit",
    seed: options.Seed = 0,
    out: options.Out = "out/",
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    batch_size: options.BatchSize = 8,
) -> None:
    import clairvit as cv
    from clairvit.methods.bind import bind
    from clairvit.show.save import save_comparison

    given = split_methods(methods)
    wanted, left_out = choose(given, cv.methods())
    for method in wanted:
        bind(method)  # a misspelt method is refused before a model is loaded
    where = place(out)
    found, failures = find(images)
    net = load(model, arch, no_pretrained, labels, device)

    def verb(batch: Batch, aim: Any) -> Mapping[str, Explanation]:
        return cv.compare(net, batch, wanted, aim, score=score, seed=seed, skip=ALL in given)

    def save(explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
        return [save_comparison(explanations, path)]

    job = Job(net, read_targets(target, contrast, net), verb, save, where, "compare", batch_size, values=as_json)
    with progress(f"{len(wanted)} methods", len(found), hidden=as_json or quiet) as advance:
        results = carry_out(job, found, failures, advance)
    if as_json:
        print_json("compare", [_entry(one, left_out) for one in results], failures)
    elif not quiet:
        print_classes(results)
        if results:
            _print_methods(results[0], left_out)
        print_notes(results)
        print_files(results)
    end(results, failures)


compare.__doc__ = f"Show several methods side by side.\n\n{EXAMPLES}"


def choose(given: Sequence[str], registered: Sequence[Method]) -> tuple[list[str], dict[str, str]]:
    """'all' stands for every method but the slow ones; also which of these were left out, and why."""
    if ALL not in given:
        return list(given), {}
    usual = [method.name for method in registered if not method.slow]
    wanted = [name for text in given for name in (usual if text == ALL else [text])]
    slow = [method.name for method in registered if method.slow and method.name not in wanted]
    return wanted, {name: f"it is slow; --methods {ALL},{name} adds it." for name in slow}


def _print_methods(result: Delivered, left_out: Mapping[str, str]) -> None:
    """Each method with what it is and what it cost; then those that do not fit the model."""
    from clairvit.methods.bind import bind
    from clairvit.show.words import effort

    rows = []
    for name, record in result.records.items():
        kind, cost = bind(record["method"]).method, record["cost"]
        passes = (str(cost["forwards"]), str(cost["backwards"]))
        rows.append((name, kind.family, kind.rules or "–", *passes, f"{1000 * cost['own_seconds']:.1f}"))
    columns = ("method", "family", "rules", "forwards", "backwards", "ms")
    table(f"{len(rows)} methods; the passes are shared, the milliseconds each one's own", columns, rows, columns[3:])
    if result.cost is not None:
        line(f"All together, passes included: {effort(result.cost)}, {1000 * result.cost.seconds:.0f} ms.")
    for name, reason in {**result.skipped, **left_out}.items():
        line(f"Left out {name}: {reason}")


def _entry(result: Delivered, left_out: Mapping[str, str]) -> dict[str, Any]:
    return {
        "image": result.image,
        "files": [str(file) for file in result.files],
        "cost": None if result.cost is None else vars(result.cost),
        "methods": result.records,
        "skipped": {**result.skipped, **left_out},
    }
