"""`clairvit bench`: models × data × methods × metrics into a store; a run that was stopped can be resumed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.bench import METHODS, METRICS
from clairvit.cli import options
from clairvit.cli.annotations import download_data
from clairvit.cli.arguments import resolve_methods, resolve_metrics
from clairvit.cli.console import print_data_notes, print_json, print_message, progress_bar
from clairvit.cli.declare import argument, group, option
from clairvit.cli.output import print_plan, print_query, print_study
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.config import StudyConfig
    from clairvit.bench.executors import Executor
    from clairvit.bench.loggers import RunLogger
    from clairvit.bench.plan import ModelConfig, Plan, Shard, Study
    from clairvit.bench.run import StudyProgress
    from clairvit.bench.store import Store
    from clairvit.bench.worker import Worker

REPORT_INTERVAL = 30.0  # seconds between two progress messages where there is no bar
EXAMPLES = """[bold]Examples[/bold]

clairvit bench --data folder:photos/ --method attnlrp+plus,rollout,genatt --metric deletion,insertion --out study/

clairvit bench study.toml --out study/ --plan

clairvit bench study.toml --out study/ --engine local --workers 4

clairvit bench study.toml --out part-3/ --shard 3/64, then: clairvit bench --out study/ --merge part-0/ --merge …

clairvit bench --data 'wds:shards/{000..063}.tar' --autocast bfloat16 --workers 8 --log tensorboard:runs --out study/

clairvit bench --out study/ --sql "select method, metric, avg(value) from results group by all order by all"
"""


@group()
class StudyOptions:
    """The options that define a study; None where nothing was typed."""

    model: list[str] | None = options.model_list("Models, separated by commas or repeated.")
    method: list[str] | None = options.method_list(
        f"{options.METHODS_HELP} random and center are scored as baselines.", ",".join(METHODS)
    )
    metric: list[str] | None = options.metric_list(options.METRICS_HELP, ",".join(METRICS))
    data: options.DataOptions
    masks: str | None = option(
        None,
        "With folder:PATH: a folder with a mask for each image, 'cat.png' for 'cat.jpg'.",
        "DIR",
        panel="Annotations",
    )
    mask_kind: str | None = options.mask_kind(None)
    target: str | None = options.single_target("'label': the true class; default: the prediction.", None)
    maps: str | None = options.MAPS_TYPED
    seed: int | None = option(None, "Seed of everything random.", shown="0", panel=options.RUN)
    model_options: options.ModelOptions
    autocast: str | None = options.AUTOCAST

    def study(self, config: StudyConfig) -> Study:
        """Return the study of a file and the options."""
        from clairvit.bench.config import DataConfig, StudyConfig
        from clairvit.bench.study_file import study_of

        if self.data.data is None and config.data is None:
            raise BadInput("Which images? Expected --data folder:PATH (or pets:PATH, …), or data = … in the file.")
        entries = config.data or () if self.data.data is None else tuple(map(DataConfig, self.data.specs()))
        typed: dict[str, Any] = {"masks": self.masks, "mask_kind": self.mask_kind}
        changes = {name: value for name, value in typed.items() if value is not None}
        overrides = StudyConfig(
            models=self._models(config),
            data=tuple(replace(entry, **changes) for entry in entries),
            split=self.data.split,
            limit=self.data.limit,
            seed=self.seed,
            target=self.target,
            maps=self.maps,
            autocast=self.autocast,
        )
        methods = resolve_methods(*self.method) if self.method else None
        return study_of(config, overrides, methods, resolve_metrics(*self.metric) if self.metric else None)

    def _models(self, config: StudyConfig) -> tuple[ModelConfig, ...]:
        """Return the models that were typed, else those of the file."""
        from clairvit.models.activation import check_activation

        loading = self.model_options
        preprocess = loading.preprocess()
        if self.model is None and config.models is not None:
            if loading.typed() or loading.no_pretrained:
                raise BadInput(
                    "--arch, --no-pretrained, --labels, --activation and preprocessing belong to --model; expected "
                    "them in the file, or both."
                )
            return config.models
        if loading.activation is not None:
            check_activation(loading.activation)
        names = options.model_names(self.model)
        if preprocess and len(names) > 1:
            raise BadInput(
                f"Preprocessing is of one model, and {len(names)} were given; expected a study file in which each has "
                "its own."
            )
        # --arch belongs to files of weights; without any, loading a model explains what it is for
        files = [name for name in names if name.startswith("file:")] or names
        return tuple(loading.config(name, loading.arch if name in files else None) for name in names)


@group("Engine")
class EngineOptions:
    """Which processes compute."""

    engine: str = option("local", "What computes the units.", "local|ray")
    workers: int | None = option(
        None,
        "Processes (local) or actors (ray).",
        shown="this process; for ray as many as the cluster has room for",
        min=1,
    )
    address: str | None = option(None, "Of the Ray cluster: auto, or HOST:PORT.", shown="one of its own")
    num_gpus: float | None = option(
        None, "GPUs for each Ray actor, such as 1 or 0.5.", shown="1 where the cluster has GPUs", min=0
    )
    shard: str | None = option(
        None, "Compute one of N parts of the study, from 0/N: one job of an array. Join the stores by --merge.", "I/N"
    )

    def create(self, device: str | None, batch_size: int | None) -> Executor | None:
        """Return the engine; None is this process."""
        from clairvit.bench.executors import EXECUTORS, local, on_ray

        EXECUTORS.resolve(self.engine)
        if self.engine == "ray":
            return on_ray(
                self.workers, address=self.address, num_gpus=self.num_gpus, device=device, batch_size=batch_size
            )
        if self.address is not None or self.num_gpus is not None:
            raise BadInput("--address and --num-gpus were given without --engine ray; expected them with it only.")
        if self.workers is None or self.workers == 1:
            return None
        return local(self.workers, device=device, batch_size=batch_size)


def bench(
    study: Path | None = argument(None, "The study as a file; options win over it.", "STUDY.toml"),
    *,
    typed: StudyOptions,
    device: str | None = option(None, "cpu, cuda, cuda:1.", shown="a GPU if there is one", panel="Engine"),
    engine_options: EngineOptions,
    batch_size: int | None = options.BATCH_SIZE,
    log: list[str] | None = option(
        None,
        "Log progress and means: tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT; may be repeated.",
        "NAME[:PLACE]",
        panel=options.RESULT,
    ),
    out: str | None = options.out(None, "The folder of the store, or a URL that fsspec writes to.", "STORE"),
    compact: bool = option(False, "Join the parts into few large files and stop.", panel=options.RESULT),
    plan: bool = option(False, "Show the plan and stop.", panel=options.RESULT),
    merge: list[str] | None = option(None, "Add the results of other stores and stop.", "STORE", panel=options.RESULT),
    sql: str | None = option(None, "Query the store (the table is 'results').", "QUERY", panel=options.RESULT),
    output: options.OutputOptions,
) -> None:
    import torch

    from clairvit.bench.config import StudyConfig, read_config
    from clairvit.bench.loggers import opened_loggers
    from clairvit.bench.plan import Shard
    from clairvit.bench.store import Store, check_place
    from clairvit.bench.worker import Worker
    from clairvit.data.remote_folder import local_folder
    from clairvit.plugins import import_code

    if out is None:
        raise BadInput("Where is the store? Expected --out STORE, a folder; it is made if it is not there.")
    with local_folder(out) as folder:
        if sql is not None:
            print_query(*Store.open(folder, create=False).query(sql), output.as_json)
            return
        if merge:
            _merge(folder, out, merge, output)
        if compact:
            _compact(folder, out, output)
        if merge or compact:
            return
        shard = None if engine_options.shard is None else Shard.parse(engine_options.shard)
        config = read_config(study) if study is not None else StudyConfig()
        import_code(config.imports, study and study.parent)
        requested = typed.study(config)
        if device is None and engine_options.engine != "ray" and torch.cuda.is_available():
            device = "cuda"
        engine = engine_options.create(device, batch_size)
        resolved = requested.resolved()
        check_place(folder)
        for entry in requested.data if typed.data.download else ():
            download_data(entry.spec, entry.split)
        worker = Worker(resolved, device if engine is None else None, batch_size)  # with an engine it only plans
        if plan:
            _plan_only(resolved, worker, folder, output)
        else:
            with opened_loggers(log or []) as loggers:
                _run(resolved, requested.methods, worker, engine, folder, output, shard, loggers)


bench.__doc__ = f"Run a study: every method by every metric, for each model on each set of images.\n\n{EXAMPLES}"


def _merge(folder: Path, out: str, others: list[str], output: options.OutputOptions) -> None:
    """Add the results of other stores to one."""
    from clairvit.bench.store import Store

    sources = [Store.open(path, create=False) for path in others]
    store = Store.open(folder)
    added = sum(store.merge(source) for source in sources)
    parts = len(store.parts()[0])
    if output.as_json:
        print_json({"command": "bench", "merged": others, "added": added, "parts": parts}, indent=None)
    elif not output.quiet:
        print_message(f"Added {added} parts of {len(others)} stores; '{out}' has {parts}.")


def _compact(folder: Path, out: str, output: options.OutputOptions) -> None:
    """Join the parts of a store."""
    from clairvit.bench.store import Store

    store = Store.open(folder, create=False)
    removed = store.compact()
    parts = len(store.parts()[0])
    if output.as_json:
        print_json({"command": "bench", "compacted": removed, "parts": parts}, indent=None)
    elif not output.quiet:
        print_message(f"Joined {removed} parts; '{out}' has {parts}.")


def _plan_only(study: Study, worker: Worker, out: Path, output: options.OutputOptions) -> None:
    """Print what a run would compute."""
    from clairvit.bench.run import plan_study
    from clairvit.bench.store import Store

    store = Store.open(out, create=False) if (out / "store.json").exists() else None
    plan, _ = plan_study(study, store, worker)
    if output.as_json or not output.quiet:
        print_plan(study, plan, output.as_json)


def _run(
    study: Study,
    methods: tuple[str, ...],
    worker: Worker,
    engine: Executor | None,
    folder: Path,
    output: options.OutputOptions,
    shard: Shard | None = None,
    loggers: Sequence[RunLogger] = (),
) -> None:
    """Compute what the store lacks and print the scores; `methods` are those of the study without baselines."""
    from clairvit._progress import on_progress
    from clairvit.bench.executors import in_process
    from clairvit.bench.run import run_study
    from clairvit.bench.store import Store

    worker.open()  # before a store is created: this finds what is wrong with models or images
    assumptions = (note for row in range(len(study.models)) for note in worker.model(row).assumptions)
    print_data_notes(assumptions, output.hidden)
    print_data_notes((note for row in range(len(study.data)) for note in worker.dataset(row).notes), output.hidden)

    def on_plan(plan: Plan) -> None:
        if not output.hidden:
            print_plan(study, plan)
        if engine is not None:
            worker.models.clear()  # each worker of the engine has its own

    store = Store.open(folder)
    has_bar = sys.stderr.isatty()  # elsewhere a line every `REPORT_INTERVAL` seconds
    reporter = None if output.hidden or has_bar else on_progress(progress_reporter(print_message, time.monotonic))
    with progress_bar("study", 1, hidden=output.hidden), reporter or nullcontext():
        outcome = run_study(
            study,
            store,
            worker=worker,
            on_plan=on_plan,
            engine=engine or in_process,
            shard=shard,
            on_unit=lambda progress: _log_progress(loggers, progress),
        )
    if loggers:
        _log_means(loggers, store, study, len(outcome.plan.units))
    print_study(store, study, methods, outcome, output.as_json, output.quiet)


def _log_progress(loggers: Sequence[RunLogger], progress: StudyProgress) -> None:
    """Log the progress of all workers together."""
    for logger in loggers:
        values = {"units": progress.done, "failed": progress.failed, "cells": progress.cells}
        rates = {"images_per_second": progress.images_per_second, "seconds_left": progress.remaining}
        logger.log({f"study/{name}": float(value) for name, value in {**values, **rates}.items()}, progress.done)


def _log_means(loggers: Sequence[RunLogger], store: Store, study: Study, step: int) -> None:
    """Log the mean of each model, method and metric over the images in the store."""
    from clairvit.bench.plan import settings_of

    _, rows = store.query(
        "select model, method, metric, avg(value) from results where value is not null and "
        f"settings = '{settings_of(study)}' group by all order by all"
    )
    values = {f"{metric}/{model}/{method}": float(mean) for model, method, metric, mean in rows}
    for logger in loggers:
        logger.log(values, step)


def progress_reporter(report: Callable[[str], None], clock: Callable[[], float]) -> Callable[[str, int, int], None]:
    """Return a progress callback that reports the steps done and the time remaining, at most once per interval."""
    started, last = clock(), -REPORT_INTERVAL

    def update(title: str, done: int, steps: int) -> None:
        nonlocal last
        now = clock()
        if title == "study" and 0 < done < steps and now - max(last, started - REPORT_INTERVAL) >= REPORT_INTERVAL:
            last = now
            remaining = format_duration((now - started) / done * (steps - done))
            report(f"{done} of {steps} units, about {remaining} left if the rest is as fast.")

    return update


def format_duration(seconds: float) -> str:
    """Return '40 s', '12 min' or '3.5 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
