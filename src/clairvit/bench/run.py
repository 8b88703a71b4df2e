"""Run a study: plan it, compute what its store lacks, store it. A run that was stopped continues when repeated."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from clairvit._progress import report_progress
from clairvit._version import __version__
from clairvit.bench.executors import Executor, in_process
from clairvit.bench.plan import FORWARDS_PER_UNIT, Plan, Shard, StoredPlan, Study, Unit, make_plan
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.data.hashing import model_record
from clairvit.errors import ClairWarning
from clairvit.metrics.own_code import Codes, codes_of

if TYPE_CHECKING:
    from filelock import BaseFileLock

POLL = 0.5  # seconds between looks at units that another process computes


@dataclass(frozen=True)
class Outcome:
    """The result of a run: units computed, units that failed, and the plan."""

    computed: int  # units
    failed: tuple[tuple[Unit, str], ...]
    seconds: float
    plan: Plan


@dataclass(frozen=True)
class StudyProgress:
    """How far a run is, over all its workers."""

    done: int  # units, with failed ones
    units: int
    failed: int
    cells: int  # computed in this run
    images: int  # of the units computed; an image counts once per unit
    seconds: float

    @property
    def remaining(self) -> float:
        """Return the seconds left if the other units take as long as those done."""
        return self.seconds / self.done * (self.units - self.done) if self.done else float("nan")

    @property
    def images_per_second(self) -> float:
        """Return the rate of all workers together."""
        return self.images / self.seconds if self.seconds > 0 else float("nan")


def plan_study(
    study: Study, store: Store | None, worker: Worker | None = None, shard: Shard | None = None
) -> tuple[Plan, Worker]:
    """Return the plan of a resolved study, and the worker with its models loaded and its images hashed.

    On a CPU a unit costs seconds. On a GPU many images at once are quicker, and shards must be the same on every
    machine: there a unit is `study.at_once` images.
    """
    worker = worker or Worker(study)
    worker.open()
    hashes = [worker.model_hash(index) for index in range(len(study.models))]
    datasets = [worker.dataset(index) for index in range(len(study.data))]
    if store is not None and (others := [version for version in store.versions() if version != __version__]):
        warnings.warn(
            f"The store '{store.path}' has numbers of ClairViT {', '.join(others)}, and this is {__version__}: they "
            "are used as they are. To compute them anew, use another folder.",
            ClairWarning,
            stacklevel=2,
        )
    codes = codes_of(study.method_specs.values(), study.metric_specs.values())
    on_cpu = all(worker.model(index).device.type == "cpu" for index in range(len(study.models)))
    most_forwards = FORWARDS_PER_UNIT if on_cpu and shard is None else math.inf
    if store is None:
        return make_plan(study, hashes, datasets, frozenset(), codes, most_forwards), worker
    expected = store.codes_with(study, codes)
    _note_other_code(store, expected)
    return make_plan(study, hashes, datasets, store.cells(expected), codes, most_forwards), worker


def _note_other_code(store: Store, codes: Codes) -> None:
    """Warn of methods and metrics whose numbers in the store were computed by other code."""
    for column, expected, last in zip(("method", "metric"), codes, store.codes(), strict=True):
        if not expected:
            continue
        before = dict.fromkeys((str(text) for (text,) in store.query(f"select distinct {column} from parts")[1]), "")
        known = before | dict(last)  # earlier versions kept no code
        for text in [text for text, code in expected if known.get(text, code) != code]:
            reason = (
                f"The code of '{text}' changed since the store '{store.path}' got its numbers"
                if text in dict(last)
                else f"The store '{store.path}' does not say by which code the numbers of '{text}' were computed"
            )
            warnings.warn(f"{reason}; computed again.", ClairWarning, stacklevel=4)


@dataclass(eq=False)
class LockedUnits:
    """Iterate over units, each locked while it is computed; those that another process has locked are `elsewhere`."""

    store: Store
    units: Sequence[Unit]
    elsewhere: list[Unit] = field(default_factory=list)
    _locks: dict[str, BaseFileLock] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Unit]:
        for unit in self.units:
            lock = self.store.lock_unit(unit)
            if lock is None:
                self.elsewhere.append(unit)
            elif self.store.has(unit):  # another process computed it meanwhile
                self.store.unlock_unit(unit, lock)
            else:
                self._locks[unit.key] = lock
                yield unit

    def release(self, unit: Unit) -> None:
        self.store.unlock_unit(unit, self._locks.pop(unit.key))

    def __enter__(self) -> LockedUnits:
        return self

    def __exit__(self, *_: object) -> None:
        for unit in self.units:
            if unit.key in self._locks:
                self.release(unit)


def run_study(
    study: Study,
    out: Store | str | PathLike[str],
    engine: Executor = in_process,
    worker: Worker | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    shard: Shard | None = None,
    on_unit: Callable[[StudyProgress], None] = lambda progress: None,
) -> Outcome:
    """Run a study: compute what its store lacks.

    Units that another process computes are left to it and looked at again at the end: if it died, they are done here.

    Args:
        study: The study; names need not be canonical.
        out: Where results are written: a folder, or its store. A study that was stopped goes on there.
        engine: Which executor computes the units.
        worker: A worker that has models or data loaded already.
        on_plan: Called with the plan before the work begins.
        shard: Compute this part of the units only; stores of all parts are joined by `Store.merge`.
        on_unit: Called after each unit, whichever worker computed it.

    Returns:
        What was computed in this run (`computed` units, `failed` ones with their errors, `seconds`) and the `plan`.

    Example:
        >>> import clairvit as cv
        >>> from clairvit.bench.config import DataConfig, ModelConfig
        >>> study = cv.Study((ModelConfig("scenes"),), (DataConfig("scenes:1"),), ("rollout",), ("sparseness",))
        >>> cv.run_study(study, "runs/scenes").computed
        1
        >>> cv.run_study(study, "runs/scenes").computed  # nothing is left to do
        0
    """
    store = out if isinstance(out, Store) else Store.open(Path(out))
    study = study.resolved()
    store.add_study(study)
    plan, worker = plan_study(study, store, worker, shard)
    models = {worker.model_hash(index): worker.model(index) for index in range(len(study.models))}
    store.add_models({key: {"model": model.name, **model_record(model)} for key, model in models.items()})
    store.add_codes(study, codes_of(study.method_specs.values(), study.metric_specs.values()))
    store.write_plan(StoredPlan.of(study, plan).as_document())
    if shard is not None:
        plan = replace(plan, units=tuple(unit for unit in plan.units if shard.holds(unit)))
    on_plan(plan)
    started = time.monotonic()
    progress = StudyProgress(0, len(plan.units), 0, 0, 0, 0.0)
    failed: list[tuple[Unit, str]] = []
    remaining = list(plan.units)
    with report_progress("study", len(remaining)) as tell:
        while remaining:
            with LockedUnits(store, remaining) as units:
                for unit, rows, error in engine(study, units, worker):
                    if error is None:
                        store.write(unit, rows)
                    else:
                        store.write_failure(unit, error)
                        failed.append((unit, error))
                    units.release(unit)
                    progress = _advanced(progress, unit, error, time.monotonic() - started)
                    on_unit(progress)
                    tell(1)
            remaining = units.elsewhere
            if remaining:
                time.sleep(POLL)
    return Outcome(progress.done - progress.failed, tuple(failed), time.monotonic() - started, plan)


def _advanced(progress: StudyProgress, unit: Unit, error: str | None, seconds: float) -> StudyProgress:
    """Return the progress after one more unit."""
    computed = error is None
    return replace(
        progress,
        done=progress.done + 1,
        failed=progress.failed + (not computed),
        cells=progress.cells + unit.cells * computed,
        images=progress.images + len(unit.rows) * computed,
        seconds=seconds,
    )
