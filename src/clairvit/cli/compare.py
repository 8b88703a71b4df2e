"""`clairvit compare`: many methods side by side, from shared passes of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli import options
from clairvit.cli.arguments import split_methods
from clairvit.cli.console import EXPLAINS, SHOWS, line, table
from clairvit.cli.finish import SLOW, end, print_classes, print_files, print_json, print_left_out, print_notes
from clairvit.cli.image_job import Delivered, file_name
from clairvit.cli.request import Request, read_preprocess
from clairvit.errors import BadInput, NotApplicable

if TYPE_CHECKING:
    from clairvit.methods.explanation import Explanation
    from clairvit.methods.registry import Method
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

ALL = "all"
EXAMPLES = """[bold]Examples[/bold]

clairvit compare demo

clairvit compare cat.jpg --method 'rollout(fusion=max),legrad' --out cat.pdf

clairvit compare photos/ --method all --target Bengal
"""


def compare(
    images: options.Images,
    methods: options.Methods = None,
    model: options.ModelName = "pets",
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    labels: options.Labels = None,
    activation: options.Activation = None,
    device: options.Device = None,
    mean: options.Mean = None,
    std: options.Std = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    interpolation: options.Interpolation = None,
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
    from clairvit.methods.explain import DEFAULT_PANEL
    from clairvit.methods.registry import list_methods
    from clairvit.perturbation.batching import check_pace
    from clairvit.plotting.save import save_comparison

    given = list(DEFAULT_PANEL) if methods is None else split_methods(methods)
    listed, left_out = choose(given, list_methods())
    # A misspelt method is refused before a model is loaded.
    wanted = with_options(listed, samples=samples, removal=removal)
    check_pace(batch_size, autocast)
    asked = Request(
        images,
        model,
        arch,
        no_pretrained,
        labels,
        device,
        target,
        contrast,
        out,
        as_json,
        quiet,
        batch_size,
        activation,
        preprocess=read_preprocess(mean, std, resize, crop, interpolation),
    )

    def verb(net: Model, batch: Batch, aim: Any) -> Mapping[str, Explanation]:
        skip = len(wanted) > 1 or ALL in given  # one that does not fit does not stop the others
        comparison = cv.compare(
            net, batch, wanted, targets=aim, score=score, seed=seed, skip=skip, batch_size=batch_size, autocast=autocast
        )
        if not comparison:
            raise NotApplicable(next(iter(comparison.skipped.values())))
        return comparison

    def save(_: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
        return [save_comparison(explanations, path)]

    results, failures = asked.carry_out(verb, save, f"{len(wanted)} methods", file_ending(wanted), methods=len(wanted))
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


def file_ending(methods: Sequence[str]) -> str:
    """Return the ending of file names: "compare" for the usual methods, else with their names, or a hash of many.

    Two lists of methods have two files, so that one comparison does not overwrite another.
    """
    from clairvit.methods.explain import DEFAULT_PANEL

    if list(methods) == list(DEFAULT_PANEL):
        return "compare"
    names = "-".join(file_name(method) for method in methods)
    return f"compare-{names if len(names) <= 40 else hashlib.sha256(','.join(methods).encode()).hexdigest()[:8]}"


def with_options(texts: Sequence[str], **options: Any) -> list[str]:
    """Each method with those of the options that it has; what was typed with a method itself stays."""
    from clairvit.methods.parsing import parse_spec
    from clairvit.methods.spec import resolve_method

    given = {name: value for name, value in options.items() if value is not None}
    taken: set[str] = set()
    made = []
    for text in texts:
        own = {name: value for name, value in given.items() if name in resolve_method(text).method.options}
        taken |= set(own)
        made.append(
            resolve_method(text, **{name: own[name] for name in own if name not in parse_spec(text).options}).text
        )
    for name in given:
        if name not in taken:
            raise BadInput(
                f"--{name} {given[name]} was given, and none of the methods takes {name}; expected one that draws "
                "variants of the image among --method, such as lime or kernelshap."
            )
    return made


def choose(given: Sequence[str], registered: Sequence[Method]) -> tuple[list[str], dict[str, str]]:
    """Return the methods that `given` stands for, and why slow ones were left out of 'all'."""
    from clairvit.methods.explain import expand_all

    wanted = expand_all(given)
    slow = [method.name for method in registered if method.slow and method.name not in wanted] if ALL in given else []
    return wanted, {name: f"{SLOW}; --method {ALL},{name} adds it." for name in slow}


def _print_methods(result: Delivered, left_out: Mapping[str, str]) -> None:
    """Each method with what it is and what it cost; then those that do not fit the model."""
    from clairvit.methods.spec import resolve_method
    from clairvit.plotting.labels import effort

    rows = []
    for name, record in result.records.items():
        spec, cost = resolve_method(record["method"]), record["cost"]
        rules = ", ".join(table for table in (spec.rules, spec.also) if table is not None)
        kind = (EXPLAINS[record["class_specific"]], SHOWS[record["signed"]])
        passes = (str(cost["forwards"]), str(cost["backwards"]))
        rows.append((record["family"], name, *kind, rules or "–", *passes, f"{1000 * cost['own_seconds']:.1f}"))
    columns = ("family", "method", "explains", "shows", "rules", "forwards", "backwards", "ms")
    title = f"{len(rows)} methods; the passes are shared, the milliseconds each one's own"
    table(title, columns, rows, right=columns[5:], grouped=True)
    if result.cost is not None:
        line(f"All together, passes included: {effort(result.cost)}, {1000 * result.cost.seconds:.0f} ms.")
    print_left_out({**result.skipped, **left_out})


def _entry(result: Delivered, left_out: Mapping[str, str]) -> dict[str, Any]:
    return {
        "image": result.image,
        "files": [str(file) for file in result.files],
        "cost": None if result.cost is None else vars(result.cost),
        "methods": result.records,
        "skipped": {**result.skipped, **left_out},
    }
