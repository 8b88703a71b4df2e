"""`clairvit reproduce`: a paper's experiment on your data, with the paper's numbers next to yours."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, download_data
from clairvit.cli.arguments import split_methods
from clairvit.cli.command import Command
from clairvit.cli.console import print_json, print_line, print_message, table
from clairvit.cli.declare import argument, option
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.plan import Plan
    from clairvit.bench.store import Store
    from clairvit.models.model import Model
    from clairvit.papers.paper import Paper
    from clairvit.papers.reproduce import Reproduction
    from clairvit.papers.setup import LoadedData, ReproductionConfig
    from clairvit.reports.blocks import Table

EXAMPLES = """[bold]Examples[/bold]

clairvit reproduce focusvit --check

clairvit reproduce skipplus --data pets:/data/oxford-iiit-pet --limit 200 --out runs/skipplus

clairvit reproduce cmi --data folder:photos --masks mask-rcnn
"""


def reproduce(
    paper: str = argument(..., "Whose experiment is repeated.", "focusvit|cmi|coporan|skipplus|joita"),
    *,
    data: options.DataOptions,
    masks: str | None = options.MASKS,
    mask_kind: str = options.mask_kind("nonzero"),
    weights: str | None = options.WEIGHTS,
    model: str = options.model_name(),
    model_options: options.ModelOptions,
    target: str | None = options.single_target("Which class is explained.", "predicted|label", "the paper's choice"),
    method: list[str] | None = option(
        None,
        "Another method under a name of the paper, such as 'FocusViT=focusvit(m=8)'; commas or repeated.",
        "NAME=METHOD,…",
    ),
    effort: str = option("usual", "How many samples are drawn where the protocol needs many.", "quick|usual|paper"),
    seed: int = options.SEED,
    batch_size: int | None = options.BATCH_SIZE,
    check: bool = option(False, "Only recompute what the paper prints; needs no data."),
    out: str | None = options.out(
        None, "Keep the store, the tables and the radar there; a run that was stopped can be resumed.", "DIR"
    ),
    output: options.OutputOptions,
) -> None:
    from clairvit.papers.paper import check_effort, find_paper

    preset = find_paper(paper)
    check_effort(effort)
    command = Command("reproduce", None, output)
    if check:
        print_check(preset, command)
        return
    spec = data.single_spec()
    if spec is None:
        raise BadInput(
            f"No images were given to reproduce '{preset.name}' on; expected --data NAME:PATH, such as --data "
            "pets:/data/oxford-iiit-pet, or --check to compute the paper's own numbers again. To see what comes out, "
            "without any data: --data scenes --model scenes --limit 8."
        )
    from clairvit.bench.plan import DataConfig
    from clairvit.bench.store import check_packages
    from clairvit.papers.setup import ReproductionConfig, replace_methods
    from clairvit.perturbation.batching import check_execution_options

    check_packages()  # before a model is loaded
    preset = replace_methods(preset, split_methods(*method) if method else [])
    annotations = Annotations(masks=masks, mask_kind=mask_kind, weights=weights)
    annotations.check([], None)
    check_execution_options(batch_size, None)
    config = ReproductionConfig(
        preset,
        model_options.config(model, model_options.arch),
        DataConfig(spec, data.split, data.limit, masks, mask_kind),
        effort,
        target,
        seed,
    )
    config.check_target()  # before a model is loaded
    if data.download:
        download_data(spec, data.split)
    net = model_options.load(model)
    command.notes(net.assumptions)
    result = _run(config, annotations, net, model_options.device, batch_size, out, command)
    files = write(result, Path(out)) if out is not None else []
    print_result(result, files, output)
    if result.failed:
        for error in result.failed:
            print_message(f"some numbers could not be computed: {error}")
        raise typer.Exit(2)


reproduce.__doc__ = f"Repeat a paper's experiment on your data, its numbers next to yours.\n\n{EXAMPLES}"


def _run(
    config: ReproductionConfig,
    annotations: Annotations,
    model: Model,
    device: str | None,
    batch_size: int | None,
    out: str | None,
    command: Command,
) -> Reproduction:
    from clairvit.papers.reproduce import check_data, load_data
    from clairvit.papers.reproduce import reproduce as run

    def on_plan(plan: Plan) -> None:
        if not command.output.hidden:
            print_message(
                f"{plan.cells} numbers, {plan.done} of them there already; {len(plan.units)} units of work, about "
                f"{plan.forwards} forwards."
            )

    data = detected_data(config, annotations, model) if annotations.detects else load_data(config, model)
    check_data(config, data)  # before a store is created
    name = config.paper.name
    with _store(out, name) as store, command.progress(f"reproduce {name}"):
        return run(config, store, model=model, data=data, device=device, batch_size=batch_size, on_plan=on_plan)


@contextmanager
def _store(out: str | None, name: str) -> Iterator[Store]:
    """Open a store in the folder that was named, or in a temporary one."""
    from clairvit.bench.store import Store

    if out is not None:
        yield Store.open(Path(out) / f"{name}-store")
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Store.open(Path(folder) / "store")


def detected_data(config: ReproductionConfig, annotations: Annotations, model: Model) -> LoadedData:
    """Return the images of a folder with Mask R-CNN's masks of the whole pictures."""
    from dataclasses import replace

    from clairvit.data.hashing import digest
    from clairvit.data.open import open_data
    from clairvit.papers.setup import LoadedData

    if config.data.spec.partition(":")[0] != "folder":
        raise BadInput(
            f"--masks {annotations.masks} was given with --data {config.data.spec}; expected --data folder:PATH, whose "
            "pictures are searched for objects, or the data set with its own masks."
        )
    data = open_data(config.data.spec, split=config.data.split, limit=config.data.limit, seed=config.seed)
    images = [str(data.root / name) for name in data.dataset.names]
    dataset = annotations.dataset(images, model).images
    # the masks depend on the picture, the detector's options and its weights
    detector = (str(annotations.masks).encode(), None if annotations.weights is None else Path(annotations.weights))
    hashed = replace(dataset, content_hash=lambda row: digest(dataset.content_hash(row), *detector))
    title = f"{data.title}, {len(data)} of {data.total} images"
    return LoadedData(hashed, title, f"{annotations.masks}, trained on COCO", data.notes)


def print_check(preset: Paper, command: Command) -> None:
    """Print the paper's own numbers, computed again; a finding that does not hold is no failure."""
    from clairvit.reports.reproduction import check_table

    findings = preset.check()
    document = {"paper": preset.name, "check": [finding.as_document() for finding in findings]}
    command.finish(1, lambda: document, lambda: print_table(check_table(preset, findings)))


def write(result: Reproduction, folder: Path) -> list[Path]:
    """Write NAME.md, NAME.json and, if there are enough measures, NAME-radar.png."""
    from clairvit._io import write_json, write_text
    from clairvit.plotting.save import write_figure
    from clairvit.reports.render import to_markdown
    from clairvit.reports.reproduction import reproduction_json, reproduction_radar, reproduction_report

    name = result.config.paper.name
    files = [
        write_text(to_markdown(reproduction_report(result)), folder / f"{name}.md"),
        write_json(reproduction_json(result), folder / f"{name}.json"),
    ]
    figure = reproduction_radar(result)
    return files if figure is None else [*files, write_figure(figure, folder / f"{name}-radar.png")]


def print_result(result: Reproduction, files: list[Path], output: options.OutputOptions) -> None:
    """Print the tables, the differences from the paper's set-up, and the files."""
    from clairvit.reports.reproduction import reproduction_json, result_tables

    if output.as_json:
        print_json({**reproduction_json(result), "files": [str(file) for file in files]})
    elif not output.quiet:
        for result_table in result_tables(result):
            print_table(result_table)
        print_line("What is not as in the paper:")
        for about, sentence in result.differences:
            print_line(f"  {about}: {sentence}")
        for file in files:
            print_line(f"Wrote {file}")
        if not files:
            print_line("Nothing was kept; --out DIR keeps the numbers, the tables and the radar.")


def print_table(content: Table) -> None:
    """Print a table of a reproduction."""
    columns = [column.title for column in content.columns]
    right = [column.title for column in content.columns if column.number]
    rows = [[cell.text for cell in row.cells] for row in content.rows]
    table(content.caption, columns, rows, right, content.grouped)
