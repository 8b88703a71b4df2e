"""`clairvit reproduce`: a paper's experiment on your data, with the paper's numbers next to yours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, download_data
from clairvit.cli.arguments import split_methods
from clairvit.cli.command import Command
from clairvit.cli.console import print_json, print_line, print_message, table
from clairvit.cli.declare import argument, option
from clairvit.cli.hints import with_options
from clairvit.cli.reproduce_all import OFFLINE_IMAGES, run_all
from clairvit.cli.reproduce_figures import FigureOptions
from clairvit.cli.reproduce_runs import (
    FinetuneOptions,
    FinishedRun,
    RunSettings,
    join_folders,
    model_names,
    pair_models,
    read_portion,
    run_folders,
    run_one,
    write_joined,
)
from clairvit.errors import BadInput, ClairError

if TYPE_CHECKING:
    from clairvit.papers.figures import FigureContent
    from clairvit.papers.joined import JoinedReproduction
    from clairvit.papers.paper import Paper
    from clairvit.papers.reproduce import Reproduction
    from clairvit.papers.setup import ReproductionConfig
    from clairvit.reports.blocks import Table

PAPERS = "focusvit|cmi|coporan|skipplus|joita|FILE.toml|all"
EXAMPLES = """[bold]Examples[/bold]

clairvit reproduce focusvit --check

clairvit reproduce skipplus --data pets:/data/oxford-iiit-pet --limit 200 --out runs/skipplus

clairvit reproduce cmi --data folder:photos --masks mask-rcnn

clairvit reproduce joita --data voc:/data --figures --out runs/joita

clairvit reproduce all --out runs/papers

clairvit reproduce focusvit --data pets:PATH --data flowers:PATH --model timm:vit_base_patch16_224 --finetune --out runs
"""


def reproduce(
    paper: str = argument(
        ..., "Whose experiment is repeated: a name, a paper's own TOML file, or all: one page of all papers.", PAPERS
    ),
    *,
    data: options.DataOptions,
    masks: str | None = options.MASKS,
    mask_kind: str = options.mask_kind("nonzero"),
    weights: str | None = options.WEIGHTS,
    model: list[str] | None = options.model_list(
        f"{options.MODEL_HELP} One for all data sets, or one for each.", "the paper's, where it names one, else pets"
    ),
    model_options: options.ModelOptions,
    target: str | None = options.single_target("Which class is explained.", "predicted|label", "the paper's choice"),
    method: list[str] | None = option(
        None,
        "Another method under a name of the paper, such as 'FocusViT=focusvit(m=8)'; commas or repeated.",
        "NAME=METHOD,…",
    ),
    effort: str = option("usual", "How many samples are drawn where the protocol needs many.", "quick|usual|paper"),
    validation: str | None = option(
        None,
        "How many images, or which share, choose what the paper chooses on a validation set (FocusViT's m*) and are "
        "not scored; 0: none, the middle layer.",
        "N|SHARE",
        shown="0.2",
    ),
    finetuning: FinetuneOptions,
    cost: bool = option(False, "Measure what the paper says of its method's cost: passes, and the ratio of times."),
    multiverse: bool = option(
        False, "Test each claim under every protocol that is in use: in how many of them does it hold?"
    ),
    join: list[str] | None = option(None, "The --out folder of a finished run, to join with others; repeated.", "DIR"),
    seed: int = options.SEED,
    batch_size: int | None = options.BATCH_SIZE,
    check: bool = option(False, "Only recompute what the paper prints; needs no data."),
    figures: FigureOptions,
    out: str | None = options.out(
        None,
        "Keep the store, the page, the tables and the figures there; a run that was stopped can be resumed.",
        "DIR",
    ),
    output: options.OutputOptions,
) -> None:
    from clairvit.papers.paper import ALL, check_effort, find_paper, list_papers

    presets = list_papers() if paper == ALL else (find_paper(paper),)
    check_effort(effort)
    command = Command("reproduce", None, output)
    if check:
        print_check(presets, command)
        return
    if join:
        show_joined(join_folders(only(presets, "--join"), join), out, output)
        return
    specs, typed, limit = data.specs(), model, data.limit
    if not specs and paper != ALL:
        raise BadInput(
            f"No images were given to reproduce '{paper}' on; expected --data NAME:PATH, such as --data "
            "pets:/data/oxford-iiit-pet, or --check to compute the paper's own numbers again. To see what comes out, "
            "without any data: --data scenes --model scenes --limit 8."
        )
    if not specs:
        specs, typed, limit = ["scenes"], model or ["scenes"], limit or OFFLINE_IMAGES
    from clairvit.bench.plan import DataConfig
    from clairvit.bench.store import check_packages
    from clairvit.papers.cost import check_costs
    from clairvit.papers.setup import ReproductionConfig, replace_methods
    from clairvit.papers.tuning import check_validation
    from clairvit.perturbation.batching import check_execution_options

    check_packages()  # before a model is loaded
    if method:
        presets = (replace_methods(only(presets, "--method"), split_methods(*method)),)
    annotations = Annotations(masks=masks, mask_kind=mask_kind, weights=weights)
    annotations.check([], None)
    check_execution_options(batch_size, None)
    finetuning.portion()
    figures.check(out)
    if cost and paper != ALL:
        check_costs(presets[0])
    if finetuning.finetune:
        only(presets, "--finetune")
    portion = None if validation is None else read_portion(validation, "--validation")
    configs = [
        ReproductionConfig(
            preset,
            model_options.config(name, model_options.arch),
            DataConfig(spec, data.split, limit, masks, mask_kind),
            effort,
            target,
            seed,
            portion if paper != ALL or preset.tune else None,
        )
        for preset in presets
        for spec, name in pair_models(specs, model_names(preset, typed, specs))
    ]
    configs[0].check_target()  # before a model is loaded
    check_validation(configs[0])
    if data.download:
        for spec in specs:
            download_data(spec, data.split)
    settings = RunSettings(command, annotations, model_options, finetuning, batch_size, cost, figures, multiverse)
    if paper == ALL:
        run_all(configs, settings, out)
        return
    folders = run_folders(out, specs)
    if len(configs) > 1:
        run_several(configs, folders, settings, out)
        return
    run = run_one(configs[0], folders[0], settings)
    files = write(run, folders[0]) if folders[0] is not None else []
    print_result(run.result, files, output)
    exit_if_failed([run.result])


reproduce.__doc__ = f"Repeat a paper's experiment on your data, its numbers next to yours.\n\n{EXAMPLES}"


def run_several(
    configs: Sequence[ReproductionConfig], folders: Sequence[Path | None], settings: RunSettings, out: str | None
) -> None:
    """Reproduce a paper on several data sets, and join them; one that cannot be used does not end the others."""
    from clairvit.papers.figures import join_figures
    from clairvit.papers.joined import data_name, join
    from clairvit.reports.reproduction import reproduction_json

    output = settings.command.output
    results, errors = [], []
    figures: dict[str, tuple[FigureContent, ...]] = {}
    for config, folder in zip(configs, folders, strict=True):
        try:
            run = run_one(config, folder, settings)
        except ClairError as error:
            errors.append(f"{config.data.spec}: {with_options(error)}")
            continue
        files = write(run, folder) if folder is not None else []
        results.append(run.result)
        figures[data_name(config.data.spec) if folder is None else folder.name] = run.figures
        if not output.as_json:
            print_result(run.result, files, output)
    if len(results) > 1:
        joined = join([reproduction_json(result) for result in results], configs[0].paper)
        show_joined(joined, out, output, join_figures(figures))
    elif output.as_json:
        for result in results:
            print_json(reproduction_json(result))
    for sentence in errors:
        print_message(f"left out: {sentence}")
    exit_if_failed(results)
    if errors:
        raise typer.Exit(2)


def show_joined(
    joined: JoinedReproduction,
    out: str | None,
    output: options.OutputOptions,
    figures: Sequence[FigureContent] = (),
) -> None:
    """Write what several runs give together into the folder, and print its tables."""
    from clairvit.reports.joined import joined_json, joined_tables

    files = write_joined(joined, Path(out), figures) if out is not None else []
    if output.as_json:
        print_json({**joined_json(joined), "files": [str(file) for file in files]})
    elif not output.quiet:
        for joined_table in joined_tables(joined):
            print_table(joined_table)
        for file in files:
            print_line(f"Wrote {file}")


def exit_if_failed(results: Sequence[Reproduction]) -> None:
    """End with status 2 where some numbers could not be computed."""
    failed = [error for result in results for error in result.failed]
    for error in failed:
        print_message(f"some numbers could not be computed: {error}")
    if failed:
        raise typer.Exit(2)


def only(presets: Sequence[Paper], flag: str) -> Paper:
    """Return the paper of a command of one paper; raise BadInput for an option that all papers cannot share."""
    if len(presets) > 1:
        raise BadInput(f"{flag} is of one paper, and 'all' was given; expected one of their names.")
    return presets[0]


def print_check(presets: Sequence[Paper], command: Command) -> None:
    """Print the papers' own numbers, computed again; a finding that does not hold is no failure."""
    from clairvit.reports.reproduction import check_table

    findings = {preset.name: preset.check() for preset in presets}
    documents = [
        {"paper": name, "check": [finding.as_document() for finding in checked]} for name, checked in findings.items()
    ]

    def show() -> None:
        for preset in presets:
            if findings[preset.name]:
                print_table(check_table(preset, findings[preset.name]))
            else:
                print_line(
                    f"Nothing that '{preset.name}' prints can be computed again: it has no table with numbers for a "
                    "claim, and none with numbers by image next to their mean."
                )

    command.finish(1, lambda: documents[0] if len(documents) == 1 else {"papers": documents}, show)


def write(run: FinishedRun, folder: Path) -> list[Path]:
    """Write NAME.html, NAME.md, NAME.json, if there are enough measures NAME-radar.png, and the figures."""
    from clairvit._io import write_json, write_text
    from clairvit.plotting.save import write_figure
    from clairvit.reports.multiverse import multiverse_chart
    from clairvit.reports.paper_figures import write_figures
    from clairvit.reports.render import to_html, to_markdown
    from clairvit.reports.reproduction import reproduction_json, reproduction_radar, reproduction_report

    result, name = run.result, run.result.config.paper.name
    report = reproduction_report(result, run.figures)
    files = [
        write_text(to_html(report), folder / f"{name}.html"),
        write_text(to_markdown(report), folder / f"{name}.md"),
        write_json(reproduction_json(result), folder / f"{name}.json"),
    ]
    charts = {f"{name}-radar.png": reproduction_radar(result), f"{name}-multiverse.png": multiverse_chart(result)}
    files += [write_figure(chart, folder / file) for file, chart in charts.items() if chart is not None]
    return [*files, *write_figures(run.figures, folder, name)]


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
