"""Engines give the numbers of one process to the last bit, outlive their workers, and do not outlive their parent."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clairvit.bench.executors import (
    Answer,
    Executor,
    WorkerConfig,
    WorkerProcess,
    _actor_capacity,
    _gpus_per_actor,
    local,
    on_ray,
    threads_per_worker,
    worker_devices,
)
from clairvit.bench.plan import Study, Unit
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.errors import BadInput, ClairError
from helpers.small_study import Deadly, study, table

PATHS = [str(Path(__file__).parent.parent), *sys.path]  # other processes find what this one finds
NO_STUDY = Study((), (), (), ())
UNIT = Unit("k", "w", 0, 0, (0,), ("m",), (), (), 1)


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATHS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    """A folder with a study in it, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("engines")
    store, threads = Store.open(folder / "alone"), torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have: sums over two threads round differently
    try:
        assert run_study(study(folder, at_once=1), store).computed == 6
    finally:
        torch.set_num_threads(threads)
    return folder, table(store)


def deadly(folder: Path, flags: Path, times: int) -> Study:
    small_study = study(folder, at_once=3)
    (model,) = small_study.models
    flags.mkdir()
    return dataclasses.replace(small_study, models=(Deadly(model.spec, model.arch, flags=str(flags), times=times),))


def waited(ready: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# processes ------------------------------------------------------------------------------------------------------------


def test_processes_on_two_devices_give_the_numbers_of_one(
    home: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit; two names of one processor stand for two GPUs."""
    folder, expected = home
    started: list[str | None] = []
    start = WorkerProcess.start.__func__  # type: ignore[attr-defined]

    def noted(cls: type[WorkerProcess], config: WorkerConfig, unit: Unit) -> WorkerProcess:
        started.append(config.device)
        process: WorkerProcess = start(cls, config, unit)
        return process

    monkeypatch.setattr(WorkerProcess, "start", classmethod(noted))
    monkeypatch.setattr("clairvit.bench.executors.worker_devices", lambda device, workers: ["cpu", "cpu:0"][:workers])
    store = Store.open(tmp_path / "store")
    outcome = run_study(study(folder, at_once=1), store, local(2))
    assert (outcome.computed, outcome.failed) == (6, ())
    assert started == ["cpu", "cpu:0"]
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


def test_a_worker_that_dies_in_the_middle_of_its_answer_is_dead() -> None:
    class Dead:
        exitcode = -9

        def join(self) -> None:
            pass

    here, there = multiprocessing.Pipe()
    os.write(there.fileno(), struct.pack("!i", 1000) + b"only the beginning")  # a length, as the pipe has it
    there.close()
    process: Any = Dead()
    assert WorkerProcess(process, here, UNIT, WorkerConfig(NO_STUDY)).receive() is None


PARENT = """
import sys
from pathlib import Path

from clairvit.bench.executors import local
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from helpers.small_study import study

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    own = study(folder, methods=("rise(samples=2000000)",), metrics=("sparseness",), at_once=1)
    run_study(own, Store.open(folder / "store"), local(2))
"""


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(pid: int) -> list[int]:
    return [child for child in children(pid) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


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
        assert waited(lambda: len(list(parts.glob("*.parquet"))) >= 2 and len(workers_of(parent.pid)) == 2, 90)
        workers = workers_of(parent.pid)
        time.sleep(0.5)
        assert all(map(alive, workers))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert waited(lambda: not any(map(alive, workers)), 90)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert threads_per_worker(2) is None  # OMP_NUM_THREADS is set
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [threads_per_worker(workers) for workers in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


def test_workers_that_make_no_sense() -> None:
    with pytest.raises(BadInput, match="1 or more processes"):
        local(0)
    with pytest.raises(BadInput, match="1 or more actors"):
        on_ray(0)
    for gpus in (-1, 1.5):
        with pytest.raises(BadInput, match=rf"num_gpus={gpus} was given; expected a part of a GPU or whole ones"):
            on_ray(num_gpus=gpus)


# Ray ------------------------------------------------------------------------------------------------------------------


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClairError, match=r'pip install "clairvit\[ray\]", or in a clone: pip install "\.\[ray\]"$'):
        on_ray()


def interrupted(executor: Executor, after: int, event: Callable[[], None]) -> Executor:
    """Something happens when so many units are done."""

    def run(small_study: Study, units: Iterable[Unit], worker: Worker) -> Iterator[Answer]:
        for number, answer in enumerate(executor(small_study, units, worker), 1):
            yield answer
            if number == after:
                event()

    return run


FEW = {"num_cpus": 1, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Of one node."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("PYTHONPATH", os.pathsep.join(PATHS))
        patched.setenv("OMP_NUM_THREADS", "1")
        ray_cluster = Cluster(initialize_head=True, head_node_args={**FEW, "include_dashboard": False})
        yield ray_cluster
        ray_cluster.shutdown()


@pytest.mark.ray
def test_a_cluster_that_loses_a_node_gives_the_same_numbers(
    home: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path, cluster: Any
) -> None:
    folder, expected = home
    other = cluster.add_node(**FEW)
    store = Store.open(tmp_path / "store")
    # two CPUs, two actors: the one that loses its node must wait for the room of the other
    engine = interrupted(on_ray(address=cluster.address), 2, lambda: cluster.remove_node(other))
    outcome = run_study(study(folder, at_once=1), store, engine)
    assert (outcome.computed, outcome.failed) == (6, ())
    assert table(store) == expected
    assert len(list((store.path / "parts").iterdir())) == 6


@pytest.mark.ray
def test_a_unit_that_kills_its_actors_is_a_failure_and_the_rest_goes_on(
    home: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path, cluster: Any
) -> None:
    store = Store.open(tmp_path / "store")
    outcome = run_study(deadly(home[0], tmp_path / "flags", times=2), store, on_ray(1, address=cluster.address))
    assert outcome.computed == 1
    ((unit, error),) = outcome.failed
    assert unit.rows == (0, 1, 2)
    assert error.startswith("Ray: ")
    assert len(list((tmp_path / "flags").iterdir())) == 2  # tries, as with processes


@pytest.mark.ray
def test_actors_for_which_there_is_no_room_are_not_waited_for(
    home: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path, cluster: Any
) -> None:
    store = Store.open(tmp_path / "store")
    with pytest.raises(ClairError, match="Each actor is to have 1 CPU and 64 GPUs"):
        run_study(study(home[0]), store, on_ray(1, address=cluster.address, num_gpus=64))
    assert [path.name for path in (store.path / "claims").iterdir()] == ["store"]


@pytest.mark.ray
def test_a_cluster_that_is_not_there() -> None:
    engine, nothing = on_ray(address="127.0.0.1:1"), Study((), (), (), ())
    with pytest.raises(ClairError, match=r"no Ray cluster at address '127.0.0.1:1' \(.*refused.*ray start --head"):
        next(iter(engine(nothing, [UNIT], Worker(nothing))))
    assert list(engine(nothing, [], Worker(nothing))) == []  # nobody is looked for in vain


class Nodes:
    """What is asked of Ray about its nodes; the last one is gone."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        gone = {"Alive": False, "Resources": {"CPU": 9.0, "GPU": 9.0}}
        self.listed = [*({"Alive": True, "Resources": node} for node in nodes), gone]

    def nodes(self) -> list[dict[str, Any]]:
        return self.listed


def test_actors_fit_on_single_nodes() -> None:
    two = Nodes({"CPU": 8.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0})
    assert [_actor_capacity(two, gpus) for gpus in (0, 0.1, 0.25, 1)] == [10, 8 + 2, 4 + 2, 2]
    with pytest.raises(ClairError, match=r"1 CPU and 2 GPUs, and .*: 8 CPUs and 1 GPUs; 2 CPUs and 1 GPUs.*num_gpus"):
        _actor_capacity(two, 2)  # two in all, and no node has both
    with pytest.raises(ClairError, match="1 CPU, and the nodes of the Ray cluster have: 0 CPUs and 0 GPUs"):
        _actor_capacity(Nodes({"memory": 5.0}), 0)


def test_there_is_an_actor_per_gpu_unless_another_device_is_named() -> None:
    mixed, plain = Nodes({"CPU": 8.0, "GPU": 4.0}, {"CPU": 2.0}), Nodes({"CPU": 8.0})
    assert [_gpus_per_actor(mixed, device) for device in (None, "cuda", "cpu")] == [1.0, 1.0, 0.0]
    assert _gpus_per_actor(plain, None) == 0.0, "the node with GPUs is gone"
    assert _actor_capacity(mixed, _gpus_per_actor(mixed, None)) == 4


def test_workers_share_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert worker_devices("cuda", 5) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert worker_devices("cuda:1", 2) == ["cuda:1", "cuda:1"], "a GPU that was named is used alone"
    assert worker_devices(None, 2) == [None, None]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert worker_devices("cuda", 2) == ["cuda", "cuda"], "the error about a missing GPU is that of one process"
