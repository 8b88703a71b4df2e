"""`clairvit patch`: replace every head or layer by itself, and show how much the score owes to each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli import options
from clairvit.cli.arguments import read_single_target
from clairvit.cli.command import Command
from clairvit.cli.console import is_printed, print_line, table
from clairvit.cli.declare import option
from clairvit.cli.finish import print_paths
from clairvit.cli.image_job import DEFAULT_BATCH_SIZE, OutputPath, output_path, read_images

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
    images: list[str] = options.IMAGES,
    *,
    kind: str = option(
        "head",
        "What is replaced, one at a time: a head's output, a block's input tokens, or what its attention or MLP adds.",
        "head|block|attention|mlp",
    ),
    value: str | None = option(
        None,
        "What it becomes: zero, the mean over the image's patches, or the same activation in --source.",
        "zero|mean|source",
        shown="zero, or source with --source",
    ),
    source: str | None = option(None, "The image whose activations are put in.", "IMAGE"),
    model: str = options.model_name(),
    model_options: options.ModelOptions,
    target: str | None = options.single_target(
        "A class name (or its unique beginning) or number; default: the predicted class of each image."
    ),
    readouts: options.ReadoutOptions,
    score: str | None = option(None, options.SCORE_HELP, shown="logit, or the target's own kind", panel=options.TARGET),
    batch_size: int | None = options.BATCH_SIZE,
    out: str = options.out(
        "out/", "A folder (PNG, JSON and NPZ of the sweep) or one file: .png .jpg .pdf .svg .json .npz"
    ),
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.models.image_files import read_image
    from clairvit.perturbation.patching import PatchSweep, check_sweep

    chosen = value or ("zero" if source is None else "source")
    check_sweep(kind, chosen, source)
    other = None if source is None else read_image(source)
    path = output_path(out)
    model_options.preprocess()
    typed_readouts = readouts.readouts()
    command = Command("patch", "patched", output)
    paths = command.image_files(images)
    net = model_options.load(model)
    explained = read_single_target(target, net, typed_readouts)
    size = batch_size or DEFAULT_BATCH_SIZE
    sweeps: list[PatchSweep] = []
    notes: list[str] = []
    with command.progress(f"{kind} → {chosen}", len(paths)) as advance:
        for start in range(0, len(paths), size):
            listed = paths[start : start + size]
            batch = read_images(listed, net, command.failures)
            if batch is not None:
                arguments: dict[str, Any] = {"kind": kind, "target": explained, "value": chosen, "score": score}
                sweeps.append(cv.patch_sweep(net, batch, source=other, **arguments))
                notes += [note for note in batch.notes if note not in notes]
            advance(len(listed))
        if not sweeps:
            command.stop()
        sweep = PatchSweep.concat(sweeps)
        files = _write(sweep, path)

    def document() -> dict[str, Any]:
        return {**sweep.to_dict(), "notes": notes, "files": [str(file) for file in files]}

    def show() -> None:
        _print_strongest(sweep)
        for note in notes:
            if not is_printed(note):
                print_line(f"Note: {note}")
        print_paths(files)

    command.finish(len(sweep.names), document, show)


patch.__doc__ = f"Show what a score owes to each head or layer, by replacing one at a time.\n\n{EXAMPLES}"


def _write(sweep: PatchSweep, out: OutputPath) -> list[Path]:
    """Write the file that the user named, or three files 'patch-head-zero' in a folder."""
    paths = [out.path] if out.is_file else out.files(f"patch-{sweep.kind}-{sweep.value}")
    return [sweep.save(path) for path in paths]


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
