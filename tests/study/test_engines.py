"""Engines give the numbers of one process to the last bit, outlive their workers, and do not outlive their parent."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clairvit.errors import BadInput, ClairError
from clairvit.study import engines
from clairvit.study.engines import Answer, local, on_ray, share_of_cores
from clairvit.study.plan import Study, Unit
from clairvit.study.run import Engine, run_study
from clairvit.study.store import Store
from clairvit.study.work import Worker
from small_study import Deadly, study, table


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes find what this one finds."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    """A folder with a study in it, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("engines")
    store = Store.open(folder / "alone")
    assert run_study(study(folder, at_once=1), store).computed == 6
    return folder, table(store)


def deadly(folder: Path, flags: Path, times: int) -> Study:
    own = study(folder, at_once=3)
    (model,) = own.models
    flags.mkdir()
    return dataclasses.replace(own, models=(Deadly(model.spec, model.arch, flags=str(flags), times=times),))


def waited(ready: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# processes ------------------------------------------------------------------------------------------------------------


def test_two_processes_give_the_same_numbers(home: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path) -> None:
    folder, expected = home
    store = Store.open(tmp_path / "store")
    outcome = run_study(study(folder, at_once=1), store, local(2))
    assert (outcome.computed, outcome.failed) == (6, ())
    assert table(store) == expected


def test_a_unit_whose_worker_died_is_given_to_another(home: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path) -> None:
    folder, expected = home
    store = Store.open(tmp_path / "store")
    outcome = run_study(deadly(folder, tmp_path / "flags", times=1), store, local(1))
    assert (outcome.computed, outcome.failed) == (2, ())
    assert [row[:4] for row in table(store)] == [row[:4] for row in expected]
    assert len(list((tmp_path / "flags").iterdir())) == 1


def test_a_unit_that_kills_its_workers_is_a_failure_and_the_rest_goes_on(
    home: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "store")
    outcome = run_study(deadly(home[0], tmp_path / "flags", times=2), store, local(1))
    assert outcome.computed == 1
    ((unit, error),) = outcome.failed
    assert unit.rows == (0, 1, 2)
    assert "killed by SIGKILL at this unit, 2 times" in error


PARENT = """
import sys
from pathlib import Path

from clairvit.study.engines import local
from clairvit.study.run import run_study
from clairvit.study.store import Store
from small_study import study

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    own = study(folder, methods=("rise(samples=2000000)",), metrics=("sparseness",), at_once=1)
    run_study(own, Store.open(folder / "store"), local(2))
"""


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are looked for in /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    study(tmp_path)
    for number in (0, 3):  # two units that are over at once: when they are stored, the workers are at long ones
        (tmp_path / "photos" / "0" / f"{number:03}.png").write_text(f"no picture {number}")
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        parts = tmp_path / "store" / "parts"
        assert waited(lambda: len(list(parts.glob("*.parquet"))) == 2, 90)
        workers = [pid for pid in children(parent.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 2
        time.sleep(0.5)
        assert all(map(alive, workers))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert waited(lambda: not any(map(alive, workers)), 3)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert share_of_cores(2) is None  # OMP_NUM_THREADS is set
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [share_of_cores(workers) for workers in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


def test_workers_that_make_no_sense() -> None:
    with pytest.raises(BadInput, match="1 or more processes"):
        local(0)
    pytest.importorskip("ray")
    with pytest.raises(BadInput, match="1 or more actors"):
        on_ray(0)
    with pytest.raises(BadInput, match="0 or more GPUs"):
        on_ray(num_gpus=-1)


# Ray ------------------------------------------------------------------------------------------------------------------


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClairError, match=r"pip install 'clairvit\[ray\]'"):
        on_ray()


def interrupted(engine: Engine, after: int, event: Callable[[], None]) -> Engine:
    """Something happens when so many units are done."""

    def run(own: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
        for number, answer in enumerate(engine(own, units, worker), 1):
            yield answer
            if number == after:
                event()

    return run


def test_a_cluster_that_loses_a_node_gives_the_same_numbers(
    home: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    folder, expected = home
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    few = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**few, "include_dashboard": False})
    try:
        other = cluster.add_node(**few)
        store = Store.open(tmp_path / "store")
        # two CPUs, two actors: the one that loses its node must wait for the room of the other
        engine = interrupted(on_ray(address=cluster.address), 2, lambda: cluster.remove_node(other))
        outcome = run_study(study(folder, at_once=1), store, engine)
        assert (outcome.computed, outcome.failed) == (6, ())
        assert table(store) == expected
        assert len(list((store.path / "parts").iterdir())) == 6
    finally:
        cluster.shutdown()


def test_a_cluster_that_is_not_there() -> None:
    pytest.importorskip("ray")
    engine, nothing = on_ray(address="auto"), Study((), (), (), ())
    with pytest.raises(ClairError, match=r"no Ray cluster at address 'auto'.*ray start --head"):
        next(iter(engine(nothing, [Unit("k", "w", 0, 0, (0,), ("m",), (), (), 1)], Worker(nothing))))
    assert list(engine(nothing, [], Worker(nothing))) == []  # nobody is looked for in vain


def test_a_cluster_without_gpus_cannot_give_any() -> None:
    class Ray:
        def cluster_resources(self) -> dict[str, float]:
            return {"CPU": 8.0, "GPU": 1.0}

    assert (engines._room(Ray(), 0), engines._room(Ray(), 0.25), engines._room(Ray(), 1)) == (8, 4, 1)
    with pytest.raises(ClairError, match="1 GPUs and each actor is to have 2"):
        engines._room(Ray(), 2)
