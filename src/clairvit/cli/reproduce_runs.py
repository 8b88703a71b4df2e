"""The runs of `clairvit reproduce`: one data set after the other, with its model, fine-tuned or not, and joined."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clairvit.cli import options
from clairvit.cli.annotations import Annotations
from clairvit.cli.command import Command
from clairvit.cli.console import print_message
from clairvit.cli.declare import group, option
from clairvit.cli.reproduce_figures import FigureOptions
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.plan import Plan
    from clairvit.bench.store import Store
    from clairvit.models.model import Model
    from clairvit.papers.dimensions import Fit
    from clairvit.papers.figures import FigureContent
    from clairvit.papers.joined import JoinedReproduction
    from clairvit.papers.paper import Paper
    from clairvit.papers.reproduce import Reproduction
    from clairvit.papers.setup import LoadedData, ReproductionConfig
    from clairvit.papers.split import Portion
    from clairvit.training.chained import FinetunedModel
    from clairvit.training.checkpoint import Epoch


@group("Fine-tuning")
class FinetuneOptions:
    """Whether the model is fine-tuned first, and on how much."""

    finetune: bool = option(False, "Fine-tune the model on the data first, by the paper's recipe; with --out.")
    training: str | None = option(
        None,
        "How many images, or which share, are trained on, of the training split; of the only split where there is one.",
        "N|SHARE",
        shown="the training split, or 0.6 of the only one",
    )
    epochs: int | None = option(None, "Largest number of epochs.", shown="the recipe's", min=1)

    def portion(self) -> Portion | None:
        """Return how much is trained on; raise BadInput for options that need --finetune."""
        for flag, value in (("--training", self.training), ("--epochs", self.epochs)):
            if value is not None and not self.finetune:
                raise BadInput(f"{flag} {value} is of fine-tuning; expected it with --finetune.")
        return None if self.training is None else read_portion(self.training, "--training")


@dataclass(frozen=True)
class RunSettings:
    """What all runs of one command share."""

    command: Command
    annotations: Annotations
    model_options: options.ModelOptions
    finetune: FinetuneOptions
    batch_size: int | None
    cost: bool
    figures: FigureOptions
    multiverse: bool = False

    def without_cost(self) -> RunSettings:
        """Return the settings for a paper that says nothing of cost."""
        return replace(self, cost=False)


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """One run: its numbers, and what its figures show."""

    result: Reproduction
    figures: tuple[FigureContent, ...] = ()


def read_portion(text: str, flag: str) -> Portion:
    """Return "200" as a number of images and "0.2" as a share; raise BadInput for anything else."""
    if text.isdecimal():
        return int(text)
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise BadInput(f"{flag} {text} was given; expected a number of images, such as 200, or a share, such as 0.2.")
    return share


def model_names(paper: Paper, typed: list[str] | None, specs: Sequence[str]) -> list[str]:
    """Return the models that were typed; none: the paper's for each data set."""
    from clairvit.papers.preparation import default_model

    return options.model_names(typed) if typed else [default_model(paper.model, spec) for spec in specs]


def pair_models(specs: Sequence[str], models: Sequence[str]) -> list[tuple[str, str]]:
    """Return (data set, model): one model for all, or one for each."""
    if len(models) not in (1, len(specs)):
        raise BadInput(
            f"{len(models)} models were given for {len(specs)} data set{'s' * (len(specs) > 1)}; expected one, or "
            "one for each in their order."
        )
    return list(zip(specs, models if len(models) > 1 else [models[0]] * len(specs), strict=True))


def run_folders(out: str | None, specs: Sequence[str]) -> list[Path | None]:
    """Return where each run keeps its files: the folder itself for one, a folder of it for each of several."""
    from clairvit.papers.joined import data_name, unique_names

    if out is None:
        return [None] * len(specs)
    if len(specs) == 1:
        return [Path(out)]
    return [Path(out) / name for name in unique_names([data_name(spec) for spec in specs])]


def run_one(config: ReproductionConfig, folder: Path | None, settings: RunSettings) -> FinishedRun:
    """Reproduce a paper on one data set, after fine-tuning the model where that is asked for."""
    from clairvit.papers.preparation import prepared
    from clairvit.papers.reproduce import check_data, load_data
    from clairvit.papers.reproduce import reproduce as run

    command, device = settings.command, settings.model_options.device
    finetuned = _finetuned(config, folder, settings) if settings.finetune.finetune else None
    if finetuned is None:
        config = prepared(config)
        stated = config.model
        model = settings.model_options.load(stated.spec, fit=stated.fit, interpolation=stated.interpolation)
        detects = settings.annotations.detects
        data = detected_data(config, settings.annotations, model) if detects else load_data(config, model)
    else:
        config = finetuned.config
        model = config.model.load(device)
        data = finetuned.parts.load(config.data, model)
        data = replace(data, remarks=(("training", finetuned.sentence),))
    command.notes(model.assumptions)
    check_data(config, data)  # before a store is created

    def on_plan(plan: Plan) -> None:
        if not command.output.hidden:
            print_message(
                f"{plan.cells} numbers, {plan.done} of them there already; {len(plan.units)} units of work, about "
                f"{plan.forwards} forwards."
            )

    def variants(fit: Fit) -> Model:
        stated = replace(config.model, fit=fit)
        if finetuned is not None:
            return stated.load(device)
        return settings.model_options.load(stated.spec, fit=fit, interpolation=stated.interpolation)

    name = config.paper.name
    with _store(folder, name) as store, command.progress(f"reproduce {name}"):
        result = run(
            config,
            store,
            model=model,
            data=data,
            device=device,
            batch_size=settings.batch_size,
            cost=settings.cost,
            variants=variants if settings.multiverse else None,
            on_plan=on_plan,
        )
        figures = settings.figures.compute(result, model, data, settings.model_options)
    if finetuned is not None:
        result = replace(result, training=finetuned.as_document(), failed=(*finetuned.failed, *result.failed))
    return FinishedRun(result, figures)


def _finetuned(config: ReproductionConfig, folder: Path | None, settings: RunSettings) -> FinetunedModel:
    """Return the model of a run, fine-tuned in its folder."""
    from clairvit.training.chained import finetune_for

    if folder is None:
        raise BadInput("--finetune keeps the model that it trains; expected --out DIR.")
    if settings.annotations.detects:
        raise BadInput(
            f"--masks {settings.annotations.masks} was given with --finetune; expected data with its own masks."
        )
    command = settings.command

    def print_epoch(epoch: Epoch) -> None:
        if not command.output.hidden:
            print_message(f"epoch {epoch.number}: loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.1%}")

    with command.progress("fine-tuning"):
        finetuned = finetune_for(
            config,
            folder,
            portion=settings.finetune.portion(),
            epochs=settings.finetune.epochs,
            device=settings.model_options.device,
            on_epoch=print_epoch,
        )
    command.notes(finetuned.trained.assumptions)
    return finetuned


@contextmanager
def _store(folder: Path | None, name: str) -> Iterator[Store]:
    """Open a store in the folder that was named, or in a temporary one."""
    from clairvit.bench.store import Store

    if folder is not None:
        yield Store.open(folder / f"{name}-store")
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Store.open(Path(temporary) / "store")


def detected_data(config: ReproductionConfig, annotations: Annotations, model: Model) -> LoadedData:
    """Return the images of a folder with Mask R-CNN's masks of the whole pictures."""
    from clairvit.data.hashing import digest
    from clairvit.data.open import open_data
    from clairvit.papers.setup import LoadedData

    if config.data.spec.partition(":")[0] != "folder":
        raise BadInput(
            f"--masks {annotations.masks} was given with --data {config.data.spec}; expected --data folder:PATH, whose "
            "pictures are searched for objects, or the data set with its own masks."
        )
    chosen = config.data
    data = open_data(chosen.spec, split=chosen.split, limit=chosen.limit, seed=config.seed, names=chosen.names)
    images = [str(data.root / name) for name in data.dataset.names]
    dataset = annotations.dataset(images, model).images
    # the masks depend on the picture, the detector's options and its weights
    detector = (str(annotations.masks).encode(), None if annotations.weights is None else Path(annotations.weights))
    hashed = replace(dataset, content_hash=lambda row: digest(dataset.content_hash(row), *detector))
    title = f"{data.title}, {len(data)} of {data.total} images"
    return LoadedData(hashed, title, f"{annotations.masks}, trained on COCO", data.notes)


def join_folders(preset: Paper, folders: Sequence[str]) -> JoinedReproduction:
    """Return finished runs, each in its folder, as one result."""
    from clairvit.papers.joined import join, read_document

    return join([read_document(Path(folder), preset.name) for folder in folders], preset)


def write_joined(joined: JoinedReproduction, folder: Path, contents: Sequence[FigureContent] = ()) -> list[Path]:
    """Write NAME-joined.html, .md and .json, the figures, and, if there are enough measures, NAME-radars.png."""
    from clairvit._io import write_json, write_text
    from clairvit.plotting.save import write_figure
    from clairvit.reports.joined import joined_json, joined_radars, joined_report
    from clairvit.reports.paper_figures import write_figures
    from clairvit.reports.render import to_html, to_markdown

    name, report = joined.paper.name, joined_report(joined, contents)
    files = [
        write_text(to_html(report), folder / f"{name}-joined.html"),
        write_text(to_markdown(report), folder / f"{name}-joined.md"),
        write_json(joined_json(joined), folder / f"{name}-joined.json"),
    ]
    figure = joined_radars(joined)
    files += [] if figure is None else [write_figure(figure, folder / f"{name}-radars.png")]
    return [*files, *write_figures(contents, folder, name)]
