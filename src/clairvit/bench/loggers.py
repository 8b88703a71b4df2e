"""Loggers of a study's progress and scores: TensorBoard, Weights & Biases, MLflow. A logger is a function and a
registration; the package it is for is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from clairvit._registry import Registry
from clairvit.errors import importing


class RunLogger(Protocol):
    """Take numbers by name at a step."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class FunctionLogger:
    """A logger of two functions."""

    write: Callable[[Mapping[str, float], int], Any]
    end: Callable[[], Any]

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers of a step."""
        self.write(values, step)

    def close(self) -> None:
        """End the run."""
        self.end()


CreateLogger = Callable[[str], RunLogger]  # from a folder, project or experiment; "" is the package's default
LOGGERS: Registry[CreateLogger] = Registry("logger", advice="Type NAME or NAME:PLACE, with one of: {names}.")


def run_logger(name: str) -> Callable[[CreateLogger], CreateLogger]:
    """Register a function that begins a run under a name that `--log` takes."""

    def register(create: CreateLogger) -> CreateLogger:
        LOGGERS.register(name, create)
        return create

    return register


@run_logger("tensorboard")
def tensorboard(place: str) -> RunLogger:
    """Write scalars into a folder (runs/ by default)."""
    writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(place or None)

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return FunctionLogger(write, writer.close)


@run_logger("wandb")
def wandb(place: str) -> RunLogger:
    """Log into a run of a project."""
    run = _import("wandb", "wandb").init(project=place or "clairvit")
    return FunctionLogger(lambda values, step: run.log(dict(values), step=step), run.finish)


@run_logger("mlflow")
def mlflow(place: str) -> RunLogger:
    """Log into a run of an experiment; names have / for what MLflow does not take."""
    package = _import("mlflow", "mlflow")
    if place:
        package.set_experiment(place)
    package.start_run()

    def write(values: Mapping[str, float], step: int) -> None:
        package.log_metrics({_mlflow_name(name): value for name, value in values.items()}, step=step)

    return FunctionLogger(write, package.end_run)


def _mlflow_name(name: str) -> str:
    """Return a name of the letters that MLflow allows: alphanumeric ones, _ - . / and spaces."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)


def _import(module: str, package: str) -> Any:
    with importing(f"The logger '{package}'", packages=package):
        return importlib.import_module(module)


@contextmanager
def opened_loggers(specs: list[str]) -> Iterator[list[RunLogger]]:
    """Begin the runs that 'NAME' or 'NAME:PLACE' name, and end them after the block."""
    for spec in specs:
        LOGGERS.resolve(spec.partition(":")[0])  # all names are checked before a run begins
    loggers: list[RunLogger] = []
    try:
        for spec in specs:
            name, _, place = spec.partition(":")
            loggers.append(LOGGERS.resolve(name)(place))
        yield loggers
    finally:
        for logger in loggers:
            logger.close()
