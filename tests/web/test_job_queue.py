"""Queues are short, slow work blocks no quick work, cancelled and overdue jobs end, and the model is unchanged."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable

import httpx
import pytest

from clairvit._progress import track
from clairvit.web.job_queue import JobCancelled, JobQueue, QueueFull, TimeLimitExceeded
from clairvit.web.state import AppState
from helpers.module_fingerprint import fingerprint


async def never_disconnected() -> bool:
    return False


def test_a_full_queue_says_when_to_retry() -> None:
    async def run() -> None:
        queue, gate = JobQueue("test", capacity=2, time_limit=60), threading.Event()
        first, second = queue.submit(gate.wait), queue.submit(gate.wait)
        try:
            with pytest.raises(QueueFull) as refused:
                queue.submit(gate.wait)
        finally:
            gate.set()
        assert refused.value.retry_after >= 1
        assert await first.wait(never_disconnected)
        assert await second.wait(never_disconnected)
        assert await queue.submit(lambda: 3).wait(never_disconnected) == 3
        assert queue.pending == 0

    asyncio.run(run())


class Cycle:
    """An object that only the garbage collector can free, as the tracebacks of cancelled jobs are."""

    def __init__(self, freed: threading.Event) -> None:
        self.itself = self
        weakref.finalize(self, freed.set)


def test_memory_is_returned_when_the_queue_has_been_idle() -> None:
    """Not after each job: the next one would take the same pages again."""
    freed = threading.Event()

    async def run() -> None:
        queue, gate = JobQueue("test", capacity=2, time_limit=60, trim_after=0.01), threading.Event()
        first, second = queue.submit(lambda: bool(Cycle(freed))), queue.submit(gate.wait)
        try:
            assert await first.wait(never_disconnected)
            assert not freed.wait(0.3), "the second job is running"
        finally:
            gate.set()
        await second.wait(never_disconnected)
        assert await asyncio.to_thread(freed.wait, 60)
        queue.close()

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def steps(count: int = 1000) -> int:
    for _ in track(range(count), "steps"):
        time.sleep(0.01)
    return count


def test_work_stops_when_its_time_is_over() -> None:
    async def run() -> None:
        queue = JobQueue("test", capacity=2, time_limit=0.2)
        with pytest.raises(TimeLimitExceeded):
            await queue.submit(steps).wait(never_disconnected)
        assert await queue.submit(lambda: steps(3)).wait(never_disconnected) == 3

    asyncio.run(run())


def test_work_that_reports_no_progress_is_abandoned() -> None:
    async def run() -> None:
        queue, gate = JobQueue("test", capacity=1, time_limit=0.1, patience=0.1), threading.Event()
        with pytest.raises(TimeLimitExceeded):
            await queue.submit(lambda: gate.wait(20)).wait(never_disconnected)
        with pytest.raises(QueueFull):
            queue.submit(steps)  # its place is taken until it is really over
        gate.set()

    asyncio.run(run())


async def disconnected() -> bool:
    return True


def test_work_stops_when_the_client_disconnects() -> None:
    async def run() -> None:
        queue = JobQueue("test", capacity=1, time_limit=60)
        job = queue.submit(steps)
        with pytest.raises(JobCancelled):
            await job.wait(disconnected)
        assert job.async_future is not None
        with pytest.raises(JobCancelled):
            await job.async_future  # the work itself

    asyncio.run(run())


def test_cancelled_work_leaves_the_queue_at_once_and_never_starts() -> None:
    """Somebody else's slow job is at work, and stays so."""

    async def run() -> None:
        queue, gate, begun = JobQueue("test", capacity=2, time_limit=60), threading.Event(), []
        other = queue.submit(gate.wait)
        try:
            for _ in range(5):
                with pytest.raises(JobCancelled):
                    await queue.submit(lambda: begun.append(1)).wait(disconnected)
                assert queue.pending == 1
        finally:
            gate.set()
        assert await other.wait(never_disconnected)
        assert await queue.submit(lambda: 3).wait(never_disconnected) == 3
        assert begun == []

    asyncio.run(run())


def test_a_closed_queue_accepts_no_jobs_and_leaves_no_thread() -> None:
    async def run() -> None:
        queue = JobQueue("closing", capacity=3, time_limit=60)
        working, waiting = (asyncio.create_task(queue.submit(steps).wait(never_disconnected)) for _ in range(2))
        await asyncio.sleep(0.2)
        queue.close()
        with pytest.raises(QueueFull):
            queue.submit(steps)
        assert [type(outcome) for outcome in await asyncio.gather(working, waiting, return_exceptions=True)] == [
            JobCancelled
        ] * 2
        assert await asyncio.to_thread(until, lambda: queue.pending == 0)

    asyncio.run(run())
    assert until(lambda: not any(thread.name.startswith("clairvit-closing") for thread in threading.enumerate()))


def until(true: Callable[[], bool], seconds: float = 90.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return False


def test_a_slow_method_does_not_block_quick_ones_and_cancelling_leaves_the_model_as_it_was(
    address: str, state: AppState
) -> None:
    """RISE is begun and is at work; a quick map and a curve come meanwhile; then the client hangs up."""
    module = state.models["slow"]["pets"].module
    before = fingerprint(module)
    form = {"method": "rise", "stream": "true"}
    with httpx.Client(base_url=address, timeout=60) as slow, httpx.Client(base_url=address, timeout=60) as quick:
        with slow.stream("POST", "/api/explain", data=form) as reply:
            lines = (json.loads(line) for line in reply.iter_lines())
            assert any(line["progress"]["done"] > 0 for line in lines)
            assert quick.post("/api/explain", data={"method": "rollout"}).status_code == 200
            assert quick.post("/api/curve", json={"steps": 1}).status_code == 200
            assert quick.get("/api/trace/3").status_code == 200
            assert state.queues["slow"].pending == 1
        assert until(lambda: state.queues["slow"].pending == 0), "the work went on after the client had gone"
        assert fingerprint(module) == before
        again = quick.post("/api/explain", data={"method": "lime(samples=16)"})
        assert again.status_code == 200
    assert fingerprint(module) == before


def test_a_client_without_a_stream_cancels_by_hanging_up_too(address: str, state: AppState) -> None:
    with httpx.Client(base_url=address, timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/api/explain", data={"method": "rise"})
    assert until(lambda: state.queues["slow"].pending == 0)


def test_a_full_server_answers_429_and_recovers(address: str, state: AppState) -> None:
    def ask(statuses: list[tuple[int, str | None]]) -> None:
        reply = httpx.post(f"{address}/api/explain", data={"method": "ixg"}, timeout=60)
        statuses.append((reply.status_code, reply.headers.get("retry-after")))

    statuses: list[tuple[int, str | None]] = []
    threads = [threading.Thread(target=ask, args=(statuses,)) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _ in statuses} == {200, 429}
    assert all(wait is not None and int(wait) >= 1 for status, wait in statuses if status == 429)
    assert httpx.post(f"{address}/api/explain", timeout=60).status_code == 200
    assert state.queues["quick"].pending == 0
