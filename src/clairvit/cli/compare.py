"""`clairvit compare`: many methods side by side, from shared passes of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.paper import EXPLAINS, SHOWS, line, table
from clairvit.cli.report import end, print_classes, print_files, print_json, print_notes
from clairvit.cli.request import Request
from clairvit.cli.split import split_methods
from clairvit.cli.work import Delivered
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.methods.explanation import Explanation
    from clairvit.methods.method import Method
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

USUAL = "raw-attention,rollout,grad-rollout,attcam,genatt,gmar-l1,legrad,focusvit,attcat,attnlrp,decompx+skipplus"
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
    score: options.Score = None,
    seed: options.Seed = 0,
    samples: options.Samples = None,
    removal: options.Removal = None,
    autocast: options.Autocast = None,
    out: options.Out = "out/",
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    batch_size: options.BatchSize = None,
) -> None:
    import clairvit as cv
    from clairvit.perturb.batch import check_pace
    from clairvit.show.save import save_comparison

    given = split_methods(methods)
    listed, left_out = choose(given, cv.methods())
    # A misspelt method is refused before a model is loaded.
    wanted = with_options(listed, samples=samples, removal=removal)
    check_pace(batch_size, autocast)
    asked = Request(
        images, model, arch, no_pretrained, labels, device, target, contrast, out, as_json, quiet, batch_size
    )

    def verb(net: Model, batch: Batch, aim: Any) -> Mapping[str, Explanation]:
        skip = ALL in given
        return cv.compare(
            net, batch, wanted, aim, score=score, seed=seed, skip=skip, batch_size=batch_size, autocast=autocast
        )

    def save(_: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
        return [save_comparison(explanations, path)]

    results, failures = asked.carry_out(verb, save, f"{len(wanted)} methods", "compare", methods=len(wanted))
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


def with_options(texts: Sequence[str], **options: Any) -> list[str]:
    """Each method with those of the options that it has; what was typed with a method itself stays."""
    from clairvit.methods.bind import bind
    from clairvit.methods.parse import parse

    given = {name: value for name, value in options.items() if value is not None}
    taken: set[str] = set()
    made = []
    for text in texts:
        own = {name: value for name, value in given.items() if name in bind(text).method.options}
        taken |= set(own)
        made.append(bind(text, **{name: own[name] for name in own if name not in parse(text).options}).text)
    for name in given:
        if name not in taken:
            raise BadInput(
                f"--{name} {given[name]} was given, and none of the methods takes {name}; expected one that draws "
                "variants of the image among --methods, such as lime or kernelshap."
            )
    return made


def choose(given: Sequence[str], registered: Sequence[Method]) -> tuple[list[str], dict[str, str]]:
    """'all' stands for every method but the slow ones, family by family; also which were left out, and why.

    Methods that are listed one by one stay in the order in which they were typed.
    """
    from clairvit.methods.bind import bind
    from clairvit.methods.method import by_family

    if ALL not in given:
        return list(given), {}
    usual = [method.name for method in registered if not method.slow]
    listed = [name for text in given for name in (usual if text == ALL else [text])]
    family = [bind(text).method.family for text in listed]
    wanted = [listed[place] for place in by_family(family)]
    slow = [method.name for method in registered if method.slow and method.name not in wanted]
    return wanted, {name: f"it is slow; --methods {ALL},{name} adds it." for name in slow}


def _print_methods(result: Delivered, left_out: Mapping[str, str]) -> None:
    """Each method with what it is and what it cost; then those that do not fit the model."""
    from clairvit.methods.bind import bind
    from clairvit.show.words import effort

    rows = []
    for name, record in result.records.items():
        bound, cost = bind(record["method"]), record["cost"]
        rules = ", ".join(table for table in (bound.rules, bound.also) if table is not None)
        kind = (EXPLAINS[record["class_specific"]], SHOWS[record["signed"]])
        passes = (str(cost["forwards"]), str(cost["backwards"]))
        rows.append((record["family"], name, *kind, rules or "–", *passes, f"{1000 * cost['own_seconds']:.1f}"))
    columns = ("family", "method", "explains", "shows", "rules", "forwards", "backwards", "ms")
    title = f"{len(rows)} methods; the passes are shared, the milliseconds each one's own"
    table(title, columns, rows, right=columns[5:], grouped=True)
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
