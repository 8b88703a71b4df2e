"""`clairvit intervene`: replace every head or layer by itself, and show how much the score owes to each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli import options
from clairvit.cli.arguments import read_single_target
from clairvit.cli.command import Command
from clairvit.cli.console import is_printed, print_line, table
from clairvit.cli.declare import option
from clairvit.cli.finish import print_paths
from clairvit.cli.image_job import OutputPath, output_path
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.methods.intervention import InterventionSweep

STRONGEST = 10  # sites in the table
EXAMPLES = """[bold]Examples[/bold]

clairvit intervene demo

clairvit intervene photos/ --kind mlp --value mean --target Bengal --out mlp.png

clairvit intervene cat.jpg --source dog.jpg --target cat

clairvit intervene street.jpg --model open_clip:ViT-B-32:openai --text 'a red car' --json
"""


def intervene(
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
    from clairvit.data.dataset import photo_dataset
    from clairvit.methods.intervention import check_sweep
    from clairvit.models.image_files import read_image

    chosen = value or ("zero" if source is None else "source")
    check_sweep(kind, chosen, source)
    other = None if source is None else read_image(source)
    path = output_path(out)
    model_options.preprocess()
    typed_readouts = readouts.readouts()
    command = Command("intervene", "used", output)
    paths = command.image_files(images)
    net = model_options.load(model)
    explained = read_single_target(target, net, typed_readouts)
    replaced: dict[str, Any] = {"kind": kind, "value": chosen, "source": other}
    scored = {"target": explained, "score": score, "batch_size": batch_size, "on_error": command.on_error}
    missing = len(command.failures)
    with command.progress(f"{kind} → {chosen}"):
        try:
            sweep = cv.intervene_sweep(net, photo_dataset(paths, net), **replaced, **scored)
        except BadInput:
            if len(command.failures) < missing + len(paths):
                raise
            command.stop()
        files = _write(sweep, path)

    def document() -> dict[str, Any]:
        return {**sweep.to_dict(), "files": [str(file) for file in files]}

    def show() -> None:
        _print_strongest(sweep)
        for note in sweep.notes:
            if not is_printed(note):
                print_line(f"Note: {note}")
        print_paths(files)

    command.finish(len(sweep.names), document, show)


intervene.__doc__ = f"Show what a score owes to each head or layer, by replacing one at a time.\n\n{EXAMPLES}"


def _write(sweep: InterventionSweep, out: OutputPath) -> list[Path]:
    """Write the file that the user named, or three files 'intervene-head-zero' in a folder."""
    paths = [out.path] if out.is_file else out.files(f"intervene-{sweep.kind}-{sweep.value}")
    return [sweep.save(path) for path in paths]


def _print_strongest(sweep: InterventionSweep) -> None:
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
