"""Engines: who computes the units. Other processes of this machine, or the actors of a Ray cluster.

Each keeps its models loaded and is handed one unit when it is free. Rows come back here, and only this process writes
to the store: a worker that dies takes nothing with it but its unit, which another one is given.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from clairvit.errors import BadInput, ClairError
from clairvit.study.plan import Study, Unit
from clairvit.study.run import Engine
from clairvit.study.store import Row
from clairvit.study.work import Worker, attempted

TRIES = 2  # for a unit whose worker died: the second time it is the unit's own fault
Answer = tuple[Unit, list[Row], str | None]


@dataclass(frozen=True)
class Outfit:
    """What each worker is told once."""

    study: Study
    device: str | None = None
    batch_size: int | None = None
    threads: int | None = None  # None: as many as torch likes
    folder: str | None = None  # where relative paths begin

    def worker(self) -> Worker:
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.folder is not None and os.path.isdir(self.folder):
            os.chdir(self.folder)
        return Worker(self.study, self.device, self.batch_size)


# processes ------------------------------------------------------------------------------------------------------------


def local(workers: int, *, device: str | None = None, batch_size: int | None = None) -> Engine:
    """So many processes of this machine, which share its cores."""
    if workers < 1:
        raise BadInput(f"workers={workers} was given; expected 1 or more processes.")

    def engine(study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
        return _in_processes(Outfit(study, device, batch_size, share_of_cores(workers)), units, workers)

    return engine


def share_of_cores(workers: int) -> int | None:
    """Threads for each of so many workers; whoever set OMP_NUM_THREADS knows better."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // workers)


@dataclass(eq=False)
class _Hand:
    """A process with the wire to it, and the unit that it is at."""

    process: BaseProcess
    wire: Connection
    unit: Unit

    @classmethod
    def begin(cls, outfit: Outfit, unit: Unit) -> _Hand:
        spawning = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and CUDA's state, broken
        here, there = spawning.Pipe()
        process = spawning.Process(target=_serve, args=(outfit, there), daemon=True)
        process.start()
        there.close()  # so that this end notices when the process is gone
        hand = cls(process, here, unit)
        hand.give(unit)
        return hand

    def give(self, unit: Unit) -> None:
        self.unit = unit
        with suppress(BrokenPipeError):  # it is dead: its answer will say so
            self.wire.send(unit)

    def answer(self) -> tuple[list[Row], str | None] | None:
        """None: the process died."""
        try:
            found: tuple[list[Row], str | None] = self.wire.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return None
        return found

    def end(self) -> None:
        self.process.kill()  # nothing is lost: only the parent writes
        self.process.join()
        self.wire.close()


def _in_processes(outfit: Outfit, units: Iterable[Unit], workers: int) -> Iterator[Answer]:
    waiting, died = iter(units), Counter[str]()
    hands: list[_Hand] = []
    try:
        while len(hands) < workers and (first := next(waiting, None)) is not None:
            hands.append(_Hand.begin(outfit, first))
        while hands:
            for wire in wait([hand.wire for hand in hands]):
                hand = next(one for one in hands if one.wire is wire)
                unit, answer = hand.unit, hand.answer()
                if answer is None:
                    died[unit.key] += 1
                    answer = [], _death(hand.process.exitcode)
                    hands.remove(hand)
                    hand.end()
                    further = unit if died[unit.key] < TRIES else next(waiting, None)
                    if further is not None:
                        hands.append(_Hand.begin(outfit, further))
                    if further is unit:
                        continue
                elif (further := next(waiting, None)) is not None:
                    hand.give(further)  # first, so that it works while the store is written to
                else:
                    hands.remove(hand)
                    hand.end()
                yield unit, *answer
    finally:
        for hand in hands:
            hand.end()


def _death(status: int | None) -> str:
    if status is not None and status < 0:
        return (
            f"The worker process was killed by {signal.Signals(-status).name} at this unit, {TRIES} times; perhaps "
            "memory ran out: use fewer --workers or a smaller --batch-size."
        )
    return f"The worker process ended with status {status} at this unit, {TRIES} times."


def _serve(outfit: Outfit, wire: Connection) -> None:
    """What a worker process does until nobody wants anything more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_follow_parent, daemon=True).start()
    worker = outfit.worker()
    while True:
        try:
            unit = wire.recv()
        except (EOFError, ConnectionError):
            return
        wire.send(attempted(worker, unit))


def _follow_parent() -> None:
    """End with the parent, however it ended: a worker in the middle of a unit does not look at its wire."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


# Ray ------------------------------------------------------------------------------------------------------------------


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
    if num_gpus < 0:
        raise BadInput(f"num_gpus={num_gpus} was given; expected 0 or more GPUs for each actor, such as 1 or 0.5.")
    ray = _ray()

    def engine(study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
        waiting = iter(units)
        first = next(waiting, None)
        if first is None:  # others are at all of them: no reason to begin a cluster
            return
        ours = _join(ray, address)
        try:
            place = device or ("cuda" if num_gpus else None)
            outfit = Outfit(study, place, batch_size, folder=os.getcwd())
            listed = itertools.chain([first], waiting)
            yield from _on_actors(ray, outfit, listed, workers or _room(ray, num_gpus), num_gpus)
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
            f"--engine ray needs Ray, which is not installed ({error}); type: pip install 'clairvit[ray]'."
        ) from error
    return ray


def _join(ray: Any, address: str | None) -> bool:
    """Be part of a cluster; True if it was not so before."""
    if ray.is_initialized():
        return False
    begun = address is None and "RAY_ADDRESS" not in os.environ
    own = {"include_dashboard": False} if begun else {}
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClairError(
            f"There is no Ray cluster at address {address!r} ({str(error).strip().splitlines()[0]}); start one with "
            "`ray start --head`, or leave --address out: then one is begun on this machine."
        ) from error
    return True


def _room(ray: Any, num_gpus: float) -> int:
    """How many actors the cluster has room for."""
    there = ray.cluster_resources()
    count = int(there.get("GPU", 0) / num_gpus) if num_gpus else int(there.get("CPU", 1))
    if count < 1:
        raise ClairError(
            f"The Ray cluster has {there.get('GPU', 0):g} GPUs and each actor is to have {num_gpus:g}; "
            "expected fewer: --num-gpus."
        )
    return count


class _Actor:
    """A worker in a Ray actor."""

    def __init__(self, outfit: Outfit) -> None:
        self.worker = outfit.worker()

    def attempt(self, unit: Unit) -> tuple[list[Row], str | None]:
        return attempted(self.worker, unit)


def _on_actors(ray: Any, outfit: Outfit, units: Iterable[Unit], workers: int, num_gpus: float) -> Iterator[Answer]:
    """Ray begins an actor whose node died anew elsewhere and gives it its unit again."""
    kind = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=-1, max_task_retries=TRIES)(_Actor)
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
                rows, error = [], f"Ray: {str(failure).strip().splitlines()[-1]}"
            further = next(waiting, None)
            if further is not None:
                give(actor, further)
            else:
                ray.kill(actor)  # makes room for one that lost its node and waits for another
            yield done, rows, error
    finally:
        for actor, _ in at.values():
            ray.kill(actor)
