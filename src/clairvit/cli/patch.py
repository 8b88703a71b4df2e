"""`clairvit patch`: replace every head or layer by itself, and show how much the score owes to each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.arguments import read_single_target
from clairvit.cli.console import is_printed, print_line, progress_bar, table
from clairvit.cli.finish import exit_on_failures, print_document, print_paths
from clairvit.cli.image_job import DEFAULT_BATCH_SIZE, OutputPath, find_image_files, output_path, read_images

if TYPE_CHECKING:
    from clairvit.perturbation.patching import PatchSweep

STRONGEST = 10  # sites in the table
EXAMPLES = """[bold]Examples[/bold]

clairvit patch demo

clairvit patch photos/ --kind mlp --value mean --target Bengal --out mlp.png

clairvit patch cat.jpg --source dog.jpg --target cat

clairvit patch street.jpg --model open_clip:ViT-B-32:openai --text 'a red car' --json
"""


def patch(
    images: options.Images,
    *,
    kind: Annotated[
        str,
        typer.Option(
            metavar="head|block|attention|mlp",
            help="What is replaced, one at a time: a head's output, a block's input tokens, or what its attention or "
            "MLP adds.",
        ),
    ] = "head",
    value: Annotated[
        str | None,
        typer.Option(
            metavar="zero|mean|source",
            help="What it becomes: zero, the mean over the image's patches, or the same activation in --source.",
            show_default="zero, or source with --source",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="The image whose activations are put in.", show_default=False),
    ] = None,
    model: options.ModelName = "pets",
    model_options: options.ModelOptions,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="CLASS",
            help="A class name (or its unique beginning) or number; default: the predicted class of each image.",
            rich_help_panel="Target",
        ),
    ] = None,
    readouts: options.ReadoutOptions,
    score: Annotated[
        str | None,
        typer.Option(
            help="logit, prob or logprob.", show_default="logit, or the target's own kind", rich_help_panel="Target"
        ),
    ] = None,
    batch_size: options.BatchSize = None,
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="A folder (PNG, JSON and NPZ of the sweep) or one file: .png .jpg .pdf .svg .json .npz",
            rich_help_panel="Result",
        ),
    ] = "out/",
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.models.image_files import read_image
    from clairvit.perturbation.patching import PatchSweep, check_sweep

    # What is misspelt is refused before a model is loaded.
    chosen = value or ("zero" if source is None else "source")
    check_sweep(kind, chosen, source)
    other = None if source is None else read_image(source)
    path = output_path(out)
    model_options.preprocess()
    typed_readouts = readouts.readouts()
    paths, failures = find_image_files(images)
    if not paths:
        exit_on_failures(0, failures, "patched")
    net = model_options.load(model)
    asked = read_single_target(target, net, typed_readouts)
    size = batch_size or DEFAULT_BATCH_SIZE
    sweeps: list[PatchSweep] = []
    notes: list[str] = []
    with progress_bar(f"{kind} → {chosen}", len(paths), hidden=output.hidden) as advance:
        for start in range(0, len(paths), size):
            listed = paths[start : start + size]
            batch = read_images(listed, net, failures)
            if batch is not None:
                arguments: dict[str, Any] = {"kind": kind, "target": asked, "value": chosen, "score": score}
                sweeps.append(cv.patch_sweep(net, batch, source=other, **arguments))
                notes += [note for note in batch.notes if note not in notes]
            advance(len(listed))
        if not sweeps:
            exit_on_failures(0, failures, "patched")
        sweep = PatchSweep.concat(sweeps)
        files = _write(sweep, path)
    if output.as_json:
        _print_json(sweep, files, notes, failures)
    elif not output.quiet:
        _print_strongest(sweep)
        for note in notes:
            if not is_printed(note):
                print_line(f"Note: {note}")
        print_paths(files)
    exit_on_failures(len(sweep.names), failures, "patched")


patch.__doc__ = f"Show what a score owes to each head or layer, by replacing one at a time.\n\n{EXAMPLES}"


def _write(sweep: PatchSweep, out: OutputPath) -> list[Path]:
    """Write the file that the user named, or three files 'patch-head-zero' in a folder."""
    paths = [out.path] if out.is_file else out.files(f"patch-{sweep.kind}-{sweep.value}")
    return [sweep.save(path) for path in paths]


def _print_json(sweep: PatchSweep, files: list[Path], notes: list[str], failures: list[Any]) -> None:
    content = {**sweep.to_dict(), "notes": notes, "files": [str(file) for file in files]}
    print_document("patch", content, failures)


def _print_strongest(sweep: PatchSweep) -> None:
    """Print the sites whose replacement changes the score most, by the mean over the images."""
    import torch

    effects = sweep.table.flatten()
    order = torch.where(effects.isnan(), -1.0, effects.abs()).argsort(descending=True)[:STRONGEST].tolist()
    columns = sweep.table.shape[1]
    rows = []
    for index in order:
        layer, column = divmod(index, columns)
        site = f"layer {layer}, head {column}" if sweep.kind == "head" else f"layer {layer}"
        rows.append((site, f"{float(effects[index]):+.4g}"))
    targets = sorted(set(sweep.target))
    explained = targets[0] if len(targets) == 1 else f"{len(targets)} targets"
    images = sweep.names[0] if len(sweep.names) == 1 else f"the mean of {len(sweep.names)} images"
    title = f"{sweep.kind} → {sweep.value} of {sweep.model}, {images}: change of the {sweep.score} of {explained}, "
    title += f"{float(sweep.scores.mean()):.4g} as it is"
    table(title, (sweep.kind, "change"), rows, right=("change",))
