"""`clairvit bench`: models × data × methods × metrics into a store that goes on where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clairvit.cli import options
from clairvit.cli.annotations import fetch
from clairvit.cli.bench_config import METHODS, METRICS, data_of, models_of, study_of
from clairvit.cli.bench_table import print_plan, print_query, report
from clairvit.cli.console import progress, remark, say
from clairvit.cli.request import read_preprocess
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.executors import Executor
    from clairvit.bench.plan import Plan

OFTEN = 30.0  # seconds between two words on how far it is, where there is no bar
EXAMPLES = """[bold]Examples[/bold]

clairvit bench --data folder:photos/ --method legrad,rollout,genatt --metric deletion,insertion --out study/

clairvit bench study.toml --out study/ --plan

clairvit bench study.toml --out study/ --engine local --workers 4

clairvit bench --out study/ --sql "select method, metric, avg(value) from results group by all order by all"
"""


def bench(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY.toml", help="The study as a file; options win over it.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="A,B,…", help="Models, as everywhere.", show_default="pets"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME:PATH,…", help="Images: folder:PATH, pets:PATH, …", show_default=False),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Methods; 'all' are those that fit the model and are not slow. random and center run beside them.",
            show_default=METHODS,
        ),
    ] = None,
    metric: Annotated[str | None, typer.Option(metavar="A,B,…", help="Metrics.", show_default=METRICS)] = None,
    limit: options.Limit = None,
    download: options.Download = False,
    split: options.Split = None,
    masks: options.MaskFolder = None,
    mask_kind: Annotated[str | None, options.MASK_KIND] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="'label': the true class; default: the prediction."),
    ] = None,
    maps: Annotated[str | None, options.MAPS] = None,
    seed: Annotated[int | None, typer.Option(help="For all that draws lots.", show_default="0")] = None,
    arch: options.Arch = None,
    no_pretrained: options.NoPretrained = False,
    labels: options.Labels = None,
    activation: options.Activation = None,
    mean: options.Mean = None,
    std: options.Std = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    interpolation: options.Interpolation = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1.", show_default="a GPU if there is one", rich_help_panel="Engine"),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="local|ray", help="Who computes.", rich_help_panel="Engine")] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes (local) or actors (ray).",
            show_default="this process; for ray as many as the cluster has room for",
            rich_help_panel="Engine",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Of the Ray cluster: auto, or HOST:PORT.", show_default="one of its own", rich_help_panel="Engine"
        ),
    ] = None,
    num_gpus: Annotated[
        float, typer.Option(min=0, help="GPUs for each Ray actor, such as 1 or 0.5.", rich_help_panel="Engine")
    ] = 0.0,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="STORE", help="The folder of the store.", rich_help_panel="Result"),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show the plan and stop.", rich_help_panel="Result")] = False,
    sql: Annotated[
        str | None,
        typer.Option(metavar="QUERY", help="Ask the store (the table is 'results').", rich_help_panel="Result"),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    batch_size: options.BatchSize = None,
) -> None:
    from clairvit.bench.config import StudyConfig, read_config
    from clairvit.bench.run import planned, run_study
    from clairvit.bench.store import Store, check_place
    from clairvit.bench.worker import Worker

    if out is None:
        raise BadInput("Where is the store? Expected --out STORE, a folder; it is made if it is not there.")
    if sql is not None:
        print_query(*Store.open(out, create=False).query(sql), as_json)
        return
    wish = read_config(study) if study is not None else StudyConfig()
    how_seen = read_preprocess(mean, std, resize, crop, interpolation)
    models = models_of(wish, model, arch, no_pretrained, labels, activation, how_seen)
    images = data_of(wish, data, limit, split, masks, mask_kind)
    asked = study_of(wish, models, images, method, metric, target, maps, seed)
    where = device if device is not None or engine == "ray" else _gpu()
    who = _engine(engine, workers, address, num_gpus, where, batch_size)
    settled = asked.settled()
    check_place(out)
    for one in images if download else ():
        fetch(one.spec, one.split)
    worker = Worker(settled, where if who is None else None, batch_size)  # others compute: it only plans

    def told(made: Plan) -> None:
        if not (as_json or quiet):
            print_plan(settled, made)
        if who is not None:
            worker.models.clear()  # each of the others has its own

    if plan:
        store = Store.open(out, create=False) if (Path(out) / "store.json").exists() else None
        made, _ = planned(settled, store, worker)
        if as_json:
            print_plan(settled, made, as_json=True)
        else:
            told(made)
        return
    worker.open()  # before a store is begun: what is wrong with models or images is found here
    assumed = (note for place in range(len(models)) for note in worker.model(place).assumptions)
    remark(assumed, as_json or quiet)
    remark((note for place in range(len(images)) for note in worker.dataset(place).notes), as_json or quiet)
    store = Store.open(out)
    with progress("study", 1, hidden=as_json or quiet), _words(as_json or quiet):
        outcome = run_study(settled, store, worker=worker, told=told, **({} if who is None else {"engine": who}))
    report(store, settled, asked.methods, outcome, as_json, quiet)


bench.__doc__ = f"Run a study: every method by every metric, for each model on each set of images.\n\n{EXAMPLES}"


def _gpu() -> str | None:
    import torch

    return "cuda" if torch.cuda.is_available() else None


def _engine(
    name: str, workers: int | None, address: str | None, num_gpus: float, device: str | None, batch_size: int | None
) -> Executor | None:
    """None: this process."""
    from clairvit.bench.executors import EXECUTORS, local, on_ray

    EXECUTORS.resolve(name)
    if name == "ray":
        return on_ray(workers, address=address, num_gpus=num_gpus, device=device, batch_size=batch_size)
    if address is not None or num_gpus:
        raise BadInput("--address and --num-gpus were given without --engine ray; expected them with it only.")
    return local(workers, device=device, batch_size=batch_size) if workers is not None and workers > 1 else None


@contextmanager
def _words(hidden: bool) -> Iterator[None]:
    """Where no bar is drawn, in a log, a line now and then says how far it is."""
    import sys

    from clairvit.perturbation.progress import on_progress

    if hidden or sys.stderr.isatty():
        yield
        return
    with on_progress(_speaker(say, time.monotonic)):
        yield


def _speaker(speak: Callable[[str], None], clock: Callable[[], float]) -> Callable[[str, int, int], None]:
    begun, last = clock(), -OFTEN

    def watch(what: str, done: int, steps: int) -> None:
        nonlocal last
        now = clock()
        if what == "study" and 0 < done < steps and now - max(last, begun - OFTEN) >= OFTEN:
            last = now
            remaining = duration((now - begun) / done * (steps - done))
            speak(f"{done} of {steps} units, about {remaining} left if the rest is as fast.")

    return watch


def duration(seconds: float) -> str:
    """'40 s', '12 min', '3.5 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
