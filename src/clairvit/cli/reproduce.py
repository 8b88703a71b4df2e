"""`clairvit reproduce`: a paper's experiment on your data, with the paper's numbers beside yours."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, fetch
from clairvit.cli.arguments import split_labels
from clairvit.cli.bench_config import model_config
from clairvit.cli.console import line, progress, remark, say, table
from clairvit.cli.request import load, read_preprocess
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.plan import Plan
    from clairvit.models.model import Model
    from clairvit.papers.paper import Paper
    from clairvit.papers.reproduce import Reproduction
    from clairvit.papers.setup import LoadedData, ReproductionConfig
    from clairvit.report.reproduction import Sheet

EXAMPLES = """[bold]Examples[/bold]

clairvit reproduce focusvit --check

clairvit reproduce skipplus --data pets:/data/oxford-iiit-pet --limit 200 --out runs/skipplus

clairvit reproduce cmi --data folder:photos --masks mask-rcnn
"""


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            metavar="focusvit|cmi|coporan|skipplus|joita", help="Whose experiment is repeated.", show_default=False
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:PATH", help="Your images: pets:PATH, voc:PATH, folder:PATH, …", rich_help_panel="Data"
        ),
    ] = None,
    split: options.Split = None,
    limit: options.Limit = None,
    download: options.Download = False,
    masks: options.Masks = None,
    mask_kind: options.MaskKind = "nonzero",
    weights: options.Weights = None,
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
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="predicted|label",
            help="Which class is explained.",
            show_default="the paper's choice",
            rich_help_panel="What is explained",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME=METHOD",
            help="Another method of ours under a name of the paper, such as 'FocusViT=focusvit(m=8)'; may be repeated.",
            show_default=False,
            rich_help_panel="What is explained",
        ),
    ] = None,
    effort: Annotated[
        str,
        typer.Option(
            metavar="quick|usual|paper",
            help="How many samples are drawn where the protocol asks for very many.",
            rich_help_panel="What is explained",
        ),
    ] = "usual",
    seed: options.Seed = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Only compute again what the paper prints; needs no data.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Keep the store, the tables and the radar there; a run that was stopped goes on.",
            rich_help_panel="Result",
        ),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    batch_size: options.BatchSize = None,
) -> None:
    from clairvit.papers.paper import check_effort, find_paper

    preset = find_paper(paper)
    check_effort(effort)
    if check:
        checked(preset, as_json, quiet)
        return
    if data is None:
        raise BadInput(
            f"No images were given to reproduce '{preset.name}' on; expected --data NAME:PATH, such as --data "
            "pets:/data/oxford-iiit-pet, or --check to compute the paper's own numbers again."
        )
    from clairvit.bench.plan import DataConfig
    from clairvit.papers.reproduce import check_data, open_shown
    from clairvit.papers.reproduce import reproduce as run
    from clairvit.papers.setup import ReproductionConfig, instead
    from clairvit.perturbation.batching import check_pace

    preset = instead(preset, method or [])
    known = Annotations(masks, mask_kind, weights, None)
    known.check([], None)
    check_pace(batch_size, None)
    how_seen = read_preprocess(mean, std, resize, crop, interpolation)
    names = split_labels(labels) if labels is not None else None
    wish = ReproductionConfig(
        preset,
        model_config(model, arch, names, not no_pretrained, activation, how_seen),
        DataConfig(data, split, limit, masks, mask_kind),
        effort,
        target,
        seed,
    )
    wish.check_target()  # before a model is loaded
    hidden = as_json or quiet
    if download:
        fetch(data, split)

    def told(plan: Plan) -> None:
        if not hidden:
            say(
                f"{plan.cells} numbers, {plan.done} of them there already; {len(plan.units)} units of work, about "
                f"{plan.forwards} forwards."
            )

    net = load(model, arch, no_pretrained, labels, device, activation, how_seen)
    remark(net.assumptions, hidden)
    shown = found_objects(wish, known, net) if known.detects else open_shown(wish, net)
    check_data(wish, shown)  # before a store is begun
    with _store(out, preset) as store, progress(f"reproduce {preset.name}", 1, hidden=hidden):
        result = run(wish, store, model=net, shown=shown, device=device, batch_size=batch_size, told=told)
    files = write(result, Path(out)) if out is not None else []
    show(result, files, as_json, quiet)
    if result.failed:
        for error in result.failed:
            say(f"some numbers could not be computed: {error}")
        raise typer.Exit(2)


reproduce.__doc__ = f"Repeat a paper's experiment on your data, its numbers beside yours.\n\n{EXAMPLES}"


@contextmanager
def _store(out: str | None, preset: Paper) -> Iterator[Any]:
    """In the folder that was named, or in one that is gone afterwards."""
    from clairvit.bench.store import Store

    if out is not None:
        yield Store.open(Path(out) / f"{preset.name}-store")
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Store.open(Path(folder) / "store")


def found_objects(wish: ReproductionConfig, known: Annotations, model: Model) -> LoadedData:
    """A folder's images, with Mask R-CNN's masks of the whole pictures."""
    from dataclasses import replace

    from clairvit.data.hashing import digest
    from clairvit.data.open import open_data
    from clairvit.papers.setup import LoadedData

    if wish.data.spec.partition(":")[0] != "folder":
        raise BadInput(
            f"--masks {known.masks} was given with --data {wish.data.spec}; expected --data folder:PATH, whose "
            "pictures are searched for objects, or the data set with its own masks."
        )
    found = open_data(wish.data.spec, split=wish.data.split, limit=wish.data.limit, seed=wish.seed)
    images = [str(found.root / name) for name in found.dataset.names]
    dataset = known.dataset(images, model).images
    # what the detector finds follows from the picture, its options and its weights
    how = (str(known.masks).encode(), None if known.weights is None else Path(known.weights))
    marked = replace(dataset, content_hash=lambda row: digest(dataset.content_hash(row), *how))
    words = f"{found.title}, {len(found)} of {found.total} images"
    return LoadedData(marked, words, f"{known.masks}, trained on COCO", found.notes)


def checked(preset: Paper, as_json: bool, quiet: bool) -> None:
    """What the paper prints, computed again; a finding that does not hold is no failure of ours."""
    from clairvit.report.reproduction import check_sheet

    findings = preset.check()
    if as_json:
        from clairvit._version import __version__
        from clairvit.plotting.save import dumps

        found = [vars(one) for one in findings]
        print(dumps({"clairvit": __version__, "command": "reproduce", "paper": preset.name, "check": found}))
    elif not quiet:
        print_sheet(check_sheet(preset, findings))


def write(result: Reproduction, folder: Path) -> list[Path]:
    """NAME.md, NAME.json and, where there are measures enough, NAME-radar.png."""
    from clairvit.plotting.save import write_figure, write_json, write_text
    from clairvit.report.reproduction import document, markdown, radar_picture

    name = result.wish.preset.name
    files = [
        write_text(markdown(result), folder / f"{name}.md"),
        write_json(document(result), folder / f"{name}.json"),
    ]
    figure = radar_picture(result)
    return files if figure is None else [*files, write_figure(figure, folder / f"{name}-radar.png")]


def show(result: Reproduction, files: list[Path], as_json: bool, quiet: bool) -> None:
    from clairvit.report.reproduction import document, sheets

    if as_json:
        from clairvit.plotting.save import dumps

        print(dumps({**document(result), "files": [str(file) for file in files]}))
    elif not quiet:
        for sheet in sheets(result):
            print_sheet(sheet)
        line("What is not as in the paper:")
        for about, sentence in result.differences:
            line(f"  {about}: {sentence}")
        for file in files:
            line(f"Wrote {file}")
        if not files:
            line("Nothing was kept; --out DIR keeps the numbers, the tables and the radar.")


def print_sheet(sheet: Sheet) -> None:
    table(sheet.title, sheet.columns, sheet.rows, sheet.right, sheet.grouped)
