"""Engines: who computes the units. Here other processes of this machine; cluster.py has the actors of a Ray cluster.

Each keeps its models loaded and is handed one unit when it is free. Rows come back here, and only this process writes
to the store: a worker that dies takes nothing with it but its unit, which another one is given.
"""

from __future__ import annotations

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

from clairvit.bench.plan import Study, Unit
from clairvit.bench.run import Engine
from clairvit.bench.store import Row
from clairvit.bench.worker import Worker, attempted
from clairvit.errors import BadInput

TRIES = 2  # for a unit whose worker died: the second time it is the unit's own fault
Answer = tuple[Unit, list[Row], str | None]


@dataclass(frozen=True)
class WorkerConfig:
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


def local(workers: int, *, device: str | None = None, batch_size: int | None = None) -> Engine:
    """So many processes of this machine, which share its cores."""
    if workers < 1:
        raise BadInput(f"workers={workers} was given; expected 1 or more processes.")

    def engine(study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
        return _in_processes(WorkerConfig(study, device, batch_size, share_of_cores(workers)), units, workers)

    return engine


def share_of_cores(workers: int) -> int | None:
    """Threads for each of so many workers; whoever set OMP_NUM_THREADS knows better."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // workers)


@dataclass(eq=False)
class WorkerProcess:
    """A process with the wire to it, and the unit that it is at."""

    process: BaseProcess
    wire: Connection
    unit: Unit

    @classmethod
    def begin(cls, outfit: WorkerConfig, unit: Unit) -> WorkerProcess:
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
        with suppress(ConnectionError):  # it is dead: its answer will say so
            self.wire.send(unit)

    def answer(self) -> tuple[list[Row], str | None] | None:
        """None: the process died."""
        try:
            found: tuple[list[Row], str | None] = self.wire.recv()
        except (EOFError, OSError):  # also in the middle of its answer
            self.process.join()
            return None
        return found

    def end(self) -> None:
        self.process.kill()  # nothing is lost: only the parent writes
        self.process.join()
        self.wire.close()


def _in_processes(outfit: WorkerConfig, units: Iterable[Unit], workers: int) -> Iterator[Answer]:
    waiting, died = iter(units), Counter[str]()
    hands: list[WorkerProcess] = []
    try:
        while len(hands) < workers and (first := next(waiting, None)) is not None:
            hands.append(WorkerProcess.begin(outfit, first))
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
                        hands.append(WorkerProcess.begin(outfit, further))
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
            "memory ran out: use fewer workers or a smaller batch size."
        )
    return f"The worker process ended with status {status} at this unit, {TRIES} times."


def _serve(outfit: WorkerConfig, wire: Connection) -> None:
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
