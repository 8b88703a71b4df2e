"""Run: plan a study, compute what is missing, store it. Stop at any moment and start again: it goes on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from filelock import BaseFileLock

from clairvit._version import __version__
from clairvit.bench.missing import Planned
from clairvit.bench.plan import Plan, Study, Unit, make_plan
from clairvit.bench.store import Row, Store
from clairvit.bench.worker import Worker, attempted
from clairvit.data.hashing import model_record
from clairvit.errors import ClairWarning
from clairvit.perturbation.progress import report_progress

WAIT = 0.5  # seconds between looks at units that another process is at


class Engine(Protocol):
    """Who computes: yields each unit with its rows, or with the reason why there are none, in any order."""

    def __call__(
        self, study: Study, units: Iterable[Unit], worker: Worker
    ) -> Iterator[tuple[Unit, list[Row], str | None]]: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    computed: int  # units
    failed: tuple[tuple[Unit, str], ...]
    seconds: float
    plan: Plan


def planned(study: Study, store: Store | None, worker: Worker | None = None) -> tuple[Plan, Worker]:
    """What is left to do for a settled study. Models are loaded and images hashed here, for a unit is its content."""
    worker = worker or Worker(study)
    worker.open()
    hashes = [worker.hash_of(place) for place in range(len(study.models))]
    albums = [worker.dataset(place) for place in range(len(study.data))]
    if store is not None and (older := [one for one in store.versions() if one != __version__]):
        warnings.warn(
            f"The store '{store.path}' has numbers of ClairViT {', '.join(older)}, and this is {__version__}: they are "
            "used as they are. To compute them anew, use another folder.",
            ClairWarning,
            stacklevel=2,
        )
    return make_plan(study, hashes, albums, frozenset() if store is None else store.cells()), worker


def in_process(study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[tuple[Unit, list[Row], str | None]]:
    """The engine of one process: unit after unit."""
    for unit in units:
        yield unit, *attempted(worker, unit)


class Claims:
    """Units that are ours: each is locked when an engine takes it. Others are `elsewhere`, with another process."""

    def __init__(self, store: Store, units: Sequence[Unit]) -> None:
        self.store, self.units = store, units
        self.elsewhere: list[Unit] = []
        self._held: dict[str, BaseFileLock] = {}

    def __iter__(self) -> Iterator[Unit]:
        for unit in self.units:
            lock = self.store.claim(unit)
            if lock is None:
                self.elsewhere.append(unit)
            elif self.store.has(unit):  # another process was quicker
                self.store.release(unit, lock)
            else:
                self._held[unit.key] = lock
                yield unit

    def release(self, unit: Unit) -> None:
        self.store.release(unit, self._held.pop(unit.key))

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        for unit in self.units:
            if unit.key in self._held:
                self.release(unit)


def run_study(
    study: Study,
    store: Store,
    engine: Engine = in_process,
    worker: Worker | None = None,
    told: Callable[[Plan], None] = lambda plan: None,
) -> Outcome:
    """Compute what the store lacks; `told` hears the plan before the work begins.

    Units that another process is at are left to it and looked at again at the end: if it died, they are done here.
    """
    study = study.settled()
    store.remember(study)
    plan, worker = planned(study, store, worker)
    models = {worker.hash_of(place): worker.model(place) for place in range(len(study.models))}
    store.remember_models({key: {"model": model.name, **model_record(model)} for key, model in models.items()})
    store.keep_plan(Planned.of(study, plan).as_document())
    told(plan)
    started, computed = time.monotonic(), 0
    failed: list[tuple[Unit, str]] = []
    left = list(plan.units)
    with report_progress("study", len(left)) as tell:
        while left:
            with Claims(store, left) as claims:
                for unit, rows, error in engine(study, claims, worker):
                    if error is None:
                        store.write(unit, rows)
                        computed += 1
                    else:
                        store.fail(unit, error)
                        failed.append((unit, error))
                    claims.release(unit)
                    tell(1)
            left = claims.elsewhere
            if left:
                time.sleep(WAIT)
    return Outcome(computed, tuple(failed), time.monotonic() - started, plan)
