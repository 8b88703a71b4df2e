"""`clairvit compare`: several methods side by side, from shared passes of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli import options
from clairvit.cli.arguments import ALL, left_out, read_model, split_methods, with_method_options
from clairvit.cli.command import Command
from clairvit.cli.console import EXPLAINS, SHOWS, print_line, table
from clairvit.cli.finish import print_files, print_notes, print_paths, print_predictions, print_skipped
from clairvit.cli.image_job import Failure, ImageJob, WrittenResult, safe_file_name
from clairvit.cli.models_job import ModelsJob, WrittenModels, entry, print_models
from clairvit.errors import NotApplicable

if TYPE_CHECKING:
    from clairvit.methods.explanation import Explanation
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

MAX_NAME = 40  # letters of the methods in a file name; longer lists get a hash
EXAMPLES = """[bold]Examples[/bold]

clairvit compare demo

clairvit compare cat.jpg --method 'rollout(fusion=max),attnlrp+plus' --out cat.pdf

clairvit compare photos/ --method all --target Bengal

clairvit compare cat.jpg -m timm:vit_base_patch16_224 -m torchvision:resnet50 --method gradcam,rollout --target 'tabby'
"""


def compare(
    images: list[str] = options.IMAGES,
    *,
    method: list[str] | None = options.method_list(options.METHODS_HELP, "eleven well-known ones"),
    model: list[str] | None = options.model_list(
        f"{options.MODEL_HELP} Several stand side by side, each with options of its own in parentheses: "
        "'file:w.safetensors(arch=timm:NAME,mean=0.5)'."
    ),
    model_options: options.PictureModelOptions,
    targets: options.TargetOptions,
    run_options: options.RunOptions,
    sampling: options.SamplingOptions,
    out: str = options.OUT,
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.methods.explain import DEFAULT_PANEL

    typed = split_methods(*method) if method else list(DEFAULT_PANEL)
    methods = with_method_options(typed, **vars(sampling))  # misspelt ones are refused before a model is loaded
    slow = left_out(typed)
    run_options.check()
    suffix = file_suffix([spec.text for spec in methods])
    names = options.model_names(model)
    if len(names) > 1:
        job = ModelsJob(images, names, model_options, targets, run_options, output, methods, out, suffix)
        _finish_models(*job.run(), slow, output)
        return
    skip = len(methods) > 1 or ALL in typed  # a method that does not fit the model does not stop the others

    def explain_batch(net: Model, batch: Batch, target: Any) -> Mapping[str, Explanation]:
        comparison = cv.compare(
            net, batch, methods, targets=target, score=targets.score, skip=skip, **run_options.arguments()
        )
        if not comparison:
            raise NotApplicable(next(iter(comparison.skipped.values())))
        return comparison

    name, settings = read_model(names[0])
    image_job = ImageJob(
        images,
        name,
        model_options.with_settings(settings),
        targets,
        run_options,
        output,
        explain=explain_batch,
        save=_save,
        out=out,
        suffix=suffix,
        title=f"{len(methods)} methods",
        methods=len(methods),
    )
    results, failures = image_job.run()

    def show() -> None:
        print_predictions(results)
        if results:
            _print_methods(results[0], slow)
        print_notes(results)
        print_files(results)

    command = Command("compare", "explained", output, failures)
    command.finish(len(results), lambda: {"results": [_entry(result, slow) for result in results]}, show)


def _finish_models(
    results: Sequence[WrittenModels], failures: list[Failure], slow: Mapping[str, str], output: options.OutputOptions
) -> None:
    """Print what several models give, as a document or for people, and end with the exit status."""

    def show() -> None:
        print_models(results, slow)
        print_notes([written for result in results for written in result.models.values()])
        print_paths([file for result in results for file in result.files])

    command = Command("compare", "explained", output, failures)
    command.finish(len(results), lambda: {"results": [entry(result, slow) for result in results]}, show)


compare.__doc__ = f"Show several methods, or models, side by side.\n\n{EXAMPLES}"


def file_suffix(methods: Sequence[str]) -> str:
    """Return the end of file names: "compare" for the default methods, else with their names, or a hash of many.

    Two lists of methods have two files, so that one comparison does not overwrite another.
    """
    from clairvit.methods.explain import DEFAULT_PANEL

    if list(methods) == list(DEFAULT_PANEL):
        return "compare"
    names = "-".join(safe_file_name(method) for method in methods)
    return f"compare-{names if len(names) <= MAX_NAME else hashlib.sha256(','.join(methods).encode()).hexdigest()[:8]}"


def _save(_: Model, explanations: Mapping[str, Explanation], path: Path) -> list[Path]:
    from clairvit.plotting.save import save_comparison

    return [save_comparison(explanations, path)]


def _print_methods(result: WrittenResult, slow: Mapping[str, str]) -> None:
    """Print each method with its properties and cost, then those that were left out."""
    from clairvit.methods.spec import resolve_method
    from clairvit.plotting.labels import cost_label

    rows = []
    for name, record in result.records.items():
        spec, cost = resolve_method(record["method"]), record["cost"]
        rules = ", ".join(map(str, spec.tables))
        kind = (EXPLAINS[record["class_specific"]], SHOWS[record["signed"]])
        passes = (str(cost["forwards"]), str(cost["backwards"]))
        rows.append((record["family"], name, *kind, rules or "–", *passes, f"{1000 * cost['own_seconds']:.1f}"))
    columns = ("family", "method", "explains", "shows", "rules", "forwards", "backwards", "ms")
    title = f"{len(rows)} methods; the passes are shared, the milliseconds each one's own"
    table(title, columns, rows, right=columns[5:], grouped=True)
    if result.cost is not None:
        print_line(f"All together, passes included: {cost_label(result.cost)}, {1000 * result.cost.seconds:.0f} ms.")
    print_skipped(result.skipped, slow)


def _entry(result: WrittenResult, slow: Mapping[str, str]) -> dict[str, Any]:
    return {
        "image": result.image,
        "files": [str(file) for file in result.files],
        "cost": None if result.cost is None else vars(result.cost),
        "methods": result.records,
        "skipped": {**result.skipped, **slow},
    }
