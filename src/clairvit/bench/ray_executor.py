"""Cluster: the engine whose workers are the actors of a Ray cluster."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from clairvit.bench.executors import TRIES, Answer, WorkerConfig
from clairvit.bench.plan import Study, Unit
from clairvit.bench.run import Engine
from clairvit.bench.store import Row
from clairvit.bench.worker import Worker, attempted
from clairvit.errors import BadInput, ClairError, install

KNOCK = 5.0  # seconds
SLACK = 1e-9  # ten tenths of a GPU are one


def on_ray(
    workers: int | None = None,
    *,
    address: str | None = None,
    num_gpus: float = 0.0,
    device: str | None = None,
    batch_size: int | None = None,
) -> Engine:
    """Actors of a Ray cluster (`address="auto"`: the one this machine belongs to; None: one begun for the occasion)."""
    if workers is not None and workers < 1:
        raise BadInput(f"workers={workers} was given; expected 1 or more actors.")
    if num_gpus < 0 or (num_gpus > 1 and num_gpus != int(num_gpus)):
        raise BadInput(
            f"num_gpus={num_gpus:g} was given; expected a part of a GPU or whole ones for each actor, such as 0.5 or 1."
        )
    ray = _ray()

    def engine(study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
        waiting = iter(units)
        first = next(waiting, None)
        if first is None:  # others are at all of them: no reason to begin a cluster
            return
        ours = _join(ray, address)
        try:
            place = device or ("cuda" if num_gpus else None)
            outfit = WorkerConfig(study, place, batch_size, folder=os.getcwd())
            listed = itertools.chain([first], waiting)
            room = _room(ray, num_gpus)  # looked at in any case: actors for which there is none would wait for ever
            yield from _on_actors(ray, outfit, listed, workers or room, num_gpus)
        finally:
            if ours:
                ray.shutdown()

    return engine


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # an actor without GPUs leaves the variable alone
    try:
        import ray
    except ImportError as error:
        raise ClairError(
            f"The engine 'ray' needs Ray, which cannot be imported ({error}); type: {install('ray')}"
        ) from error
    return ray


def _join(ray: Any, address: str | None) -> bool:
    """Be part of a cluster; True if it was not so before."""
    if ray.is_initialized():
        return False
    begun = address is None and "RAY_ADDRESS" not in os.environ
    own = {"include_dashboard": False} if begun else {}
    place = "local" if begun else address  # with None Ray would join whatever was started last on this machine
    try:
        _knock(address or "")
        ray.init(address=place, logging_level="ERROR", log_to_driver=False, **own)
    except (OSError, ValueError, RuntimeError) as error:
        raise ClairError(
            f"There is no Ray cluster at address {address!r} ({_line(error, 0)}); start one with "
            "`ray start --head`, or leave the address out: then one is begun on this machine."
        ) from error
    return True


def _knock(address: str) -> None:
    """HOST:PORT where nobody listens is said at once; Ray would look for it for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), KNOCK).close()


def _room(ray: Any, num_gpus: float) -> int:
    """How many actors the cluster has room for; each is on one node and has a core of it."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, gpus = ([node.get(kind, 0.0) for node in nodes] for kind in ("CPU", "GPU"))
    count = sum(
        int(min(cpu, gpu / num_gpus + SLACK) if num_gpus else cpu) for cpu, gpu in zip(cores, gpus, strict=True)
    )
    if count < 1:
        asked = f"1 CPU and {num_gpus:g} GPUs" if num_gpus else "1 CPU"
        there = "; ".join(f"{cpu:g} CPUs and {gpu:g} GPUs" for cpu, gpu in zip(cores, gpus, strict=True)) or "nothing"
        raise ClairError(
            f"Each actor is to have {asked}, and the nodes of the Ray cluster have: {there}. Expected a node with room "
            "for one: add one to the cluster, or change num_gpus.",
            parameters={"num_gpus": "N"},
        )
    return count


class _Actor:
    """A worker in a Ray actor."""

    def __init__(self, outfit: WorkerConfig) -> None:
        self.worker = outfit.worker()

    def attempt(self, unit: Unit) -> tuple[list[Row], str | None]:
        return attempted(self.worker, unit)


def _on_actors(
    ray: Any, outfit: WorkerConfig, units: Iterable[Unit], workers: int, num_gpus: float
) -> Iterator[Answer]:
    """Ray begins an actor whose node died anew elsewhere and gives it its unit again."""
    kind = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=-1, max_task_retries=TRIES - 1)(_Actor)
    waiting = iter(units)
    at: dict[Any, tuple[Any, Unit]] = {}  # promise -> actor and unit

    def give(actor: Any, unit: Unit) -> None:
        at[actor.attempt.remote(unit)] = actor, unit

    try:
        while len(at) < workers and (unit := next(waiting, None)) is not None:
            give(kind.remote(outfit), unit)
        while at:
            (promise, *_), _ = ray.wait(list(at))
            actor, done = at.pop(promise)
            try:
                rows, error = ray.get(promise)
            except ray.exceptions.RayError as failure:
                rows, error = [], f"Ray: {_line(failure, -1)}"
            further = next(waiting, None)
            if further is not None:
                give(actor, further)
            else:
                ray.kill(actor)  # makes room for one that lost its node and waits for another
            yield done, rows, error
    finally:
        for actor, _ in at.values():
            ray.kill(actor)


def _line(error: Exception, place: int) -> str:
    """The first or last line of what may be a page, or nothing at all."""
    return (str(error).strip() or type(error).__name__).splitlines()[place]
