"""`clairvit features`: patch tokens as pictures, without a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli import options
from clairvit.cli.command import Command
from clairvit.cli.console import is_printed, print_line, print_result_note, table
from clairvit.cli.declare import option
from clairvit.cli.finish import MAX_ROWS, print_paths
from clairvit.cli.image_job import OutputPath, file_stems, output_path, read_images
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.methods.features import PatchFeatures

ALL = "all"
EXAMPLES = """[bold]Examples[/bold]

clairvit features demo

clairvit features photos/ --model timm:vit_small_patch14_dinov2.lvd142m --out features/

clairvit features cat.jpg --patch 5,7 --out cat.png

clairvit features cat.jpg --layer all

clairvit features cat.jpg --layer all --channels 8 --model torchvision:resnet50

clairvit features photos/ --foreground positive --threshold 0.5 --out all.png
"""


def features(
    images: list[str] = options.IMAGES,
    *,
    layer: str = option(
        "-1",
        "The block (or stage of a CNN) whose output is shown, from 0; all: a strip of all layers too.",
        "K|all",
        shown="-1, the last",
    ),
    patch: str | None = option(
        None, "Show the cosine of every patch to this one, counted from the upper left, 0,0.", "ROW,COL"
    ),
    foreground: str | None = option(
        None,
        "Keep the patches on that side of the first component, and compute the components from these alone.",
        "positive|negative",
    ),
    threshold: float = option(
        0.0, "With --foreground: how far on that side, in standard deviations of the first component."
    ),
    channels: int | None = option(
        None,
        "Draw the feature maps of so many channels of each layer, too: those with the largest mean |activation|.",
        "N",
        min=1,
    ),
    model: str = options.model_name(),
    model_options: options.PictureModelOptions,
    batch_size: int | None = options.BATCH_SIZE,
    out: str = options.OUT,
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.methods.features import check_options

    layer_index, place = _read_layer(layer), _read_patch(patch)
    check_options(layer_index, foreground, threshold)
    out_path = output_path(out)
    model_options.preprocess()
    command = Command("features", "shown", output)
    paths = command.image_files(images)
    net = model_options.load(model)
    batch = read_images(paths, net, command.failures) or command.stop()
    _check_rows(out_path, len(batch))
    with command.progress("features"):
        arguments: dict[str, Any] = {"foreground": foreground, "threshold": threshold, "batch_size": batch_size}
        shown = cv.features(net, batch, layer=layer_index, **arguments)
        if place is not None:
            shown.similarity(*place)  # refused before a file is written
        files = _write(shown, out_path, place, channels)
    command.finish(
        len(batch), lambda: {"results": _entries(shown, files, place, channels)}, lambda: _print_features(shown, files)
    )


features.__doc__ = f"Show what a model's patches have in common: components, norms, similarities.\n\n{EXAMPLES}"


def _read_layer(text: str) -> Any:
    """Return 'all' or the number of a layer."""
    if text.strip() == ALL:
        return ALL
    try:
        return int(text)
    except ValueError as error:
        raise BadInput(f"--layer {text} was given; expected a whole number such as -1, the last, or all.") from error


def _read_patch(text: str | None) -> tuple[int, int] | None:
    """Return the row and the column in '5,7'."""
    if text is None:
        return None
    try:
        row, col = (int(part) for part in text.split(","))
    except ValueError as error:
        raise BadInput(f"--patch {text} was given; expected ROW,COL, two whole numbers such as 5,7.") from error
    return row, col


def _check_rows(out: OutputPath, images: int) -> None:
    """Raise BadInput if one picture of all images would be too tall, before the work and not after it."""
    from clairvit.plotting.save import PICTURES, check_suffix
    from clairvit.plotting.tiles import check_rows

    if out.is_file and check_suffix(out.path) in PICTURES:
        check_rows(images)


def _write(
    shown: PatchFeatures, out: OutputPath, patch: tuple[int, int] | None, channels: int | None
) -> dict[str, list[Path]]:
    """Write one file of all images, or three files per image; return the files of each image."""
    if out.is_file:
        files = _save(shown, out.path, patch, channels)
        return dict.fromkeys(shown.names, files)
    stems = file_stems(shown.names)
    return {
        image.names[0]: [
            file
            for path in out.files(f"{stems[image.names[0]]}-features")
            for file in _save(image, path, patch, channels)
        ]
        for image in shown
    }


def _save(shown: PatchFeatures, path: Path, patch: tuple[int, int] | None, channels: int | None) -> list[Path]:
    """Write the file itself and next to a picture 'cat-layers.png', if there are layers, and 'cat-channels.png'."""
    from clairvit.plotting.save import PICTURES

    is_picture = path.suffix.lower() in PICTURES
    files = [shown.save(path, patch=patch, channels=None if is_picture else channels)]
    if shown.layers and is_picture:
        files.append(shown.save(path.with_stem(f"{path.stem}-layers"), layers=True))
    for number, image in enumerate(shown if channels is not None and is_picture else (), 1):
        suffix = "channels" if len(shown) == 1 else f"channels-{number}"
        files.append(image.save(path.with_stem(f"{path.stem}-{suffix}"), channels=channels))
    return files


def _entries(
    shown: PatchFeatures, files: dict[str, list[Path]], patch: tuple[int, int] | None, channels: int | None
) -> list[dict[str, Any]]:
    return [
        {
            "image": image.names[0],
            "files": [str(file) for file in files[image.names[0]]],
            **image.to_dict(patch=patch, channels=channels),
        }
        for image in shown
    ]


def _print_features(shown: PatchFeatures, files: dict[str, list[Path]]) -> None:
    """Print the variance of the components, the norms of each image, notes and files."""
    rows, cols = shown.grid
    shares = ", ".join(f"{100 * share:.1f} %" for share in shown.explained_variance_ratio.tolist())
    lines = [
        (
            image.names[0],
            f"{float(image.norms.median()):.4g}",
            f"{float(image.norms.max()):.4g}",
            "–" if image.outliers is None else str(int(image.outliers.sum())),
        )
        for image in shown[:MAX_ROWS]
    ]
    table(
        f"{shown.layer_name} of {shown.model}",
        ("image", "median norm", "largest", "outliers"),
        lines,
        ("median norm", "largest", "outliers"),
    )
    if len(shown) > MAX_ROWS:
        print_line(f"… and {len(shown) - MAX_ROWS} more images; --json lists all of them.")
    width = shown.tokens.shape[-1]
    print_line(f"{rows} × {cols} patches of {width} channels; three components hold {shares} of the variance.")
    for note in shown.notes:
        if not is_printed(note):
            print_result_note(note)
    print_paths([file for image_files in files.values() for file in image_files])
