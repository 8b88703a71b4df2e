"""Executors compute the units of a study: in this process, in other processes of this machine, or in Ray actors.

Each worker keeps its models loaded and gets one unit at a time. Rows come back to this process, which alone writes to
the store: a worker that dies loses nothing but its unit, which another worker gets.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from clairvit._registry import Registry
from clairvit.bench.plan import Study, Unit
from clairvit.bench.store import Row
from clairvit.bench.worker import Worker, compute_rows
from clairvit.data.pipeline import usable_cores
from clairvit.errors import Argument, BadInput, ClairError, importing
from clairvit.plugins import Import, imported

ATTEMPTS = 2  # for a unit whose worker died
CONNECT_TIMEOUT = 5.0  # seconds
ROUNDING = 1e-9  # ten tenths of a GPU are one
Answer = tuple[Unit, list[Row], str | None]  # rows, or the reason why there are none


class Executor(Protocol):
    """Compute units; yield each with its rows, or with the reason why there are none, in any order."""

    def __call__(self, study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]: ...


def in_process(study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
    """Compute one unit after the other in this process."""
    for unit in units:
        yield unit, *compute_rows(worker, unit)


@dataclass(frozen=True)
class WorkerConfig:
    """What each worker needs to start."""

    study: Study
    device: str | None = None
    batch_size: int | None = None
    threads: int | None = None  # None: torch's default
    folder: str | None = None  # where relative paths begin
    imports: tuple[Import, ...] = field(default_factory=imported)  # own methods and metrics, as this process has them

    def start(self) -> Worker:
        """Return the worker, in the process that calls this."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.folder is not None and os.path.isdir(self.folder):
            os.chdir(self.folder)
        return Worker(self.study, self.device, self.batch_size, imports=self.imports)


# Processes


def local(workers: int, *, device: str | None = None, batch_size: int | None = None) -> Executor:
    """Return an executor with so many processes of this machine, which share its cores and its GPUs."""
    if workers < 1:
        raise BadInput(f"workers={workers} was given; expected 1 or more processes.")

    def execute(study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
        config = WorkerConfig(study, device, batch_size, threads_per_worker(workers))
        return _in_processes([replace(config, device=place) for place in worker_devices(device, workers)], units)

    return execute


def worker_devices(device: str | None, workers: int) -> list[str | None]:
    """Return the device of each worker: "cuda" names no single GPU, and stands for all visible ones in turn."""
    import torch

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return [f"cuda:{index % gpus}" if gpus else device for index in range(workers)]


def threads_per_worker(workers: int) -> int | None:
    """Return the threads of each of so many workers; None leaves them to OMP_NUM_THREADS, where it is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, usable_cores() // workers)


@dataclass(eq=False)
class WorkerProcess:
    """A process, the pipe to it, and the unit that it computes."""

    process: BaseProcess
    pipe: Connection
    unit: Unit
    config: WorkerConfig

    @classmethod
    def start(cls, config: WorkerConfig, unit: Unit) -> WorkerProcess:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and CUDA's state, broken
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_serve, args=(config, child_end), daemon=True)
        process.start()
        child_end.close()  # so that this end notices when the process is gone
        worker = cls(process, parent_end, unit, config)
        worker.send(unit)
        return worker

    def send(self, unit: Unit) -> None:
        self.unit = unit
        with suppress(ConnectionError):  # the process is dead: `receive` returns None
            self.pipe.send(unit)

    def receive(self) -> tuple[list[Row], str | None] | None:
        """Return the rows or the error of the unit; None if the process died."""
        try:
            answer: tuple[list[Row], str | None] = self.pipe.recv()
        except (EOFError, OSError):  # also in the middle of an answer
            self.process.join()
            return None
        return answer

    def stop(self) -> None:
        self.process.kill()  # nothing is lost: only the parent writes
        self.process.join()
        self.pipe.close()


def _in_processes(configs: Sequence[WorkerConfig], units: Iterable[Unit]) -> Iterator[Answer]:
    """Yield the answers of one process per configuration; a process that died is replaced on the same device."""
    remaining, deaths = iter(units), Counter[str]()
    workers: list[WorkerProcess] = []
    try:
        for config in configs:
            first = next(remaining, None)
            if first is None:
                break
            workers.append(WorkerProcess.start(config, first))
        while workers:
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(candidate for candidate in workers if candidate.pipe is pipe)
                unit, answer = worker.unit, worker.receive()
                if answer is None:
                    deaths[unit.key] += 1
                    answer = [], _death_message(worker.process.exitcode)
                    workers.remove(worker)
                    worker.stop()
                    following = unit if deaths[unit.key] < ATTEMPTS else next(remaining, None)
                    if following is not None:
                        workers.append(WorkerProcess.start(worker.config, following))
                    if following is unit:
                        continue
                elif (following := next(remaining, None)) is not None:
                    worker.send(following)  # before the yield, so that it computes while the store is written to
                else:
                    workers.remove(worker)
                    worker.stop()
                yield unit, *answer
    finally:
        for worker in workers:
            worker.stop()


def _death_message(status: int | None) -> str:
    if status is not None and status < 0:
        return (
            f"The worker process was killed by {signal.Signals(-status).name} at this unit, {ATTEMPTS} times; perhaps "
            "memory ran out: use fewer workers or a smaller batch size."
        )
    return f"The worker process ended with status {status} at this unit, {ATTEMPTS} times."


def _serve(config: WorkerConfig, pipe: Connection) -> None:
    """Compute units from the pipe until it is closed: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    worker = config.start()
    while True:
        try:
            unit = pipe.recv()
        except (EOFError, ConnectionError):
            return
        pipe.send(compute_rows(worker, unit))


def _exit_with_parent() -> None:
    """End this process when the parent ends: a worker in the middle of a unit does not read its pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


# Ray


def on_ray(
    workers: int | None = None,
    *,
    address: str | None = None,
    num_gpus: float | None = None,
    device: str | None = None,
    batch_size: int | None = None,
) -> Executor:
    """Return an executor with actors of a Ray cluster.

    Args:
        workers: Actors; None starts as many as the cluster has resources for.
        address: Of the cluster; "auto" is the one that this machine belongs to, None starts one on this machine.
        num_gpus: GPUs per actor, a fraction or whole ones; None is one where the cluster has GPUs and `device` is no
            other, so that there is an actor per GPU.
        device: Where models run; None is "cuda" for actors with GPUs.
        batch_size: Images per forward pass; None chooses.
    """
    if workers is not None and workers < 1:
        raise BadInput(f"workers={workers} was given; expected 1 or more actors.")
    if num_gpus is not None and (num_gpus < 0 or (num_gpus > 1 and num_gpus != int(num_gpus))):
        raise BadInput(
            f"num_gpus={num_gpus:g} was given; expected a part of a GPU or whole ones for each actor, such as 0.5 or 1."
        )
    ray = _import_ray()

    def execute(study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
        remaining = iter(units)
        first = next(remaining, None)
        if first is None:  # other processes compute all of them: no reason to start a cluster
            return
        connected = _connect(ray, address)
        try:
            gpus = _gpus_per_actor(ray, device) if num_gpus is None else num_gpus
            config = WorkerConfig(study, device or ("cuda" if gpus else None), batch_size, folder=os.getcwd())
            capacity = _actor_capacity(ray, gpus)  # checked in any case: actors without resources wait for ever
            yield from _on_actors(ray, config, itertools.chain([first], remaining), workers or capacity, gpus)
        finally:
            if connected:
                ray.shutdown()

    return execute


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # an actor without GPUs leaves the variable alone
    with importing("The engine 'ray'", extra="ray"):
        import ray

        return ray


def _connect(ray: Any, address: str | None) -> bool:
    """Connect to a cluster, or start one; return False if this process was connected before."""
    if ray.is_initialized():
        return False
    start = address is None and "RAY_ADDRESS" not in os.environ
    options = {"include_dashboard": False} if start else {}
    place = "local" if start else address  # with None, Ray connects to the last cluster started on this machine
    try:
        _check_connection(address or "")
        ray.init(address=place, logging_level="ERROR", log_to_driver=False, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ClairError(
            f"There is no Ray cluster at address {address!r} ({_line(error, 0)}); start one with "
            "`ray start --head`, or leave the address out: then one is begun on this machine."
        ) from error
    return True


def _check_connection(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT; Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()


def _gpus_per_actor(ray: Any, device: str | None) -> float:
    """Return 1 where the cluster has GPUs and models are to run on them, else 0."""
    on_gpu = device is None or device.startswith("cuda")
    return float(on_gpu and any(node["Alive"] and node["Resources"].get("GPU", 0.0) >= 1 for node in ray.nodes()))


def _actor_capacity(ray: Any, num_gpus: float) -> int:
    """Return how many actors the cluster has resources for; each takes a CPU and its GPUs of one node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    resources = [(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in nodes]
    count = sum(int(min(cpus, gpus / num_gpus + ROUNDING) if num_gpus else cpus) for cpus, gpus in resources)
    if count < 1:
        required = f"1 CPU and {num_gpus:g} GPUs" if num_gpus else "1 CPU"
        available = "; ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in resources) or "nothing"
        raise ClairError(
            f"Each actor is to have {required}, and the nodes of the Ray cluster have: {available}. Expected a node "
            "with these resources: add one to the cluster, or change num_gpus.",
            advice=[Argument("num_gpus", 0.5)],
        )
    return count


class _Actor:
    """A worker in a Ray actor."""

    def __init__(self, config: WorkerConfig) -> None:
        self.worker = config.start()

    def compute(self, unit: Unit) -> tuple[list[Row], str | None]:
        return compute_rows(self.worker, unit)


def _on_actors(ray: Any, config: WorkerConfig, units: Iterable[Unit], count: int, num_gpus: float) -> Iterator[Answer]:
    """Compute units on actors; Ray restarts an actor whose node died elsewhere, with the same unit."""
    actor_class = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=-1, max_task_retries=ATTEMPTS - 1)(_Actor)
    shared = ray.put(config)  # by reference: sent to each node once, however many actors it has
    remaining = iter(units)
    pending: dict[Any, tuple[Any, Unit]] = {}  # object reference -> actor and unit

    def submit(actor: Any, unit: Unit) -> None:
        pending[actor.compute.remote(unit)] = actor, unit

    try:
        while len(pending) < count and (unit := next(remaining, None)) is not None:
            submit(actor_class.remote(shared), unit)
        while pending:
            (reference, *_), _ = ray.wait(list(pending))
            actor, done = pending.pop(reference)
            try:
                rows, error = ray.get(reference)
            except ray.exceptions.RayError as failure:
                rows, error = [], f"Ray: {_line(failure, -1)}"
            following = next(remaining, None)
            if following is not None:
                submit(actor, following)
            else:
                ray.kill(actor)  # frees its resources for an actor that lost its node
            yield done, rows, error
    finally:
        for actor, _ in pending.values():
            ray.kill(actor)


def _line(error: Exception, index: int) -> str:
    """Return the first or last line of an error, or its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[index]


EXECUTORS: Registry[Callable[..., Executor]] = Registry("engine", {"local": local, "ray": on_ray})
