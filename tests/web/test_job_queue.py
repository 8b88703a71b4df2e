"""Queues are short, slow work is in nobody's way, what is cancelled or overdue stops, and the model is untouched."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from clairvit.perturbation.progress import track
from clairvit.web.job_queue import Busy, JobQueue, Stopped, TooSlow
from clairvit.web.state import AppState
from fingerprint import fingerprint


async def never_gone() -> bool:
    return False


def test_a_full_lane_says_when_to_come_again() -> None:
    async def scene() -> None:
        lane, gate = JobQueue("test", places=2, seconds=60), threading.Event()
        first, second = lane.submit(gate.wait), lane.submit(gate.wait)
        try:
            with pytest.raises(Busy) as refused:
                lane.submit(gate.wait)
        finally:
            gate.set()
        assert refused.value.retry_after >= 1
        assert await first.wait(never_gone)
        assert await second.wait(never_gone)
        assert await lane.submit(lambda: 3).wait(never_gone) == 3
        assert lane.inside == 0

    asyncio.run(scene())


def steps(count: int = 1000) -> int:
    for _ in track(range(count), "steps"):
        time.sleep(0.01)
    return count


def test_work_stops_when_its_time_is_over() -> None:
    async def scene() -> None:
        lane = JobQueue("test", places=2, seconds=0.2)
        with pytest.raises(TooSlow):
            await lane.submit(steps).wait(never_gone)
        assert await lane.submit(lambda: steps(3)).wait(never_gone) == 3

    asyncio.run(scene())


def test_work_that_does_not_look_up_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clairvit.web.job_queue.GRACE", 0.1)

    async def scene() -> None:
        lane, gate = JobQueue("test", places=1, seconds=0.1), threading.Event()
        with pytest.raises(TooSlow):
            await lane.submit(lambda: gate.wait(20)).wait(never_gone)
        with pytest.raises(Busy):
            lane.submit(steps)  # its place is taken until it is really over
        gate.set()

    asyncio.run(scene())


async def gone() -> bool:
    return True


def test_work_stops_when_the_client_goes() -> None:
    async def scene() -> None:
        lane = JobQueue("test", places=1, seconds=60)
        job = lane.submit(steps)
        with pytest.raises(Stopped):
            await job.wait(gone)
        assert job.answer is not None
        with pytest.raises(Stopped):
            await job.answer  # the work itself

    asyncio.run(scene())


def test_waiting_work_that_nobody_wants_frees_its_place_at_once_and_never_begins() -> None:
    """Somebody else's slow job is at work, and stays so."""

    async def scene() -> None:
        lane, gate, begun = JobQueue("test", places=2, seconds=60), threading.Event(), []
        other = lane.submit(gate.wait)
        try:
            for _ in range(5):
                with pytest.raises(Stopped):
                    await lane.submit(lambda: begun.append(1)).wait(gone)
                assert lane.inside == 1
        finally:
            gate.set()
        assert await other.wait(never_gone)
        assert await lane.submit(lambda: 3).wait(never_gone) == 3
        assert begun == []

    asyncio.run(scene())


def test_a_lane_that_closes_takes_nothing_more_and_leaves_no_thread() -> None:
    async def scene() -> None:
        lane = JobQueue("closing", places=3, seconds=60)
        working, waiting = (asyncio.create_task(lane.submit(steps).wait(never_gone)) for _ in range(2))
        await asyncio.sleep(0.2)
        lane.close()
        with pytest.raises(Busy):
            lane.submit(steps)
        assert [type(one) for one in await asyncio.gather(working, waiting, return_exceptions=True)] == [Stopped] * 2
        assert await asyncio.to_thread(until, lambda: lane.inside == 0)

    asyncio.run(scene())
    assert until(lambda: not any(one.name.startswith("clairvit-closing") for one in threading.enumerate()))


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
    asked = {"method": "rise", "stream": "true"}
    with httpx.Client(base_url=address, timeout=60) as slow, httpx.Client(base_url=address, timeout=60) as quick:
        with slow.stream("POST", "/api/explain", data=asked) as reply:
            lines = (json.loads(one) for one in reply.iter_lines())
            assert any(one["progress"]["done"] > 0 for one in lines)
            assert quick.post("/api/explain", data={"method": "rollout"}).status_code == 200
            assert quick.post("/api/curve", json={"steps": 1}).status_code == 200
            assert quick.get("/api/trace/3").status_code == 200
            assert state.lanes["slow"].inside == 1
        assert until(lambda: state.lanes["slow"].inside == 0), "the work went on after the client had gone"
        assert fingerprint(module) == before
        again = quick.post("/api/explain", data={"method": "lime(samples=16)"})
        assert again.status_code == 200
    assert fingerprint(module) == before


def test_a_client_without_a_stream_cancels_by_hanging_up_too(address: str, state: AppState) -> None:
    with httpx.Client(base_url=address, timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/api/explain", data={"method": "rise"})
    assert until(lambda: state.lanes["slow"].inside == 0)


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
    assert state.lanes["quick"].inside == 0
