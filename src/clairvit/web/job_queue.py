"""Lanes: work waits in short queues, a lane for each kind, so that slow work never stands in the way of quick work.

A job is stopped where long work says how far it is (`perturb.watch`): the watcher raises, and every `with` on the way
out puts the model back as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import math
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from clairvit.perturbation.progress import on_progress

Made = TypeVar("Made")
LOOK = 0.1  # seconds between two looks at whether the client is still there
GRACE = 2.0  # seconds after the time limit until a job that does not look up is given up on
LONGEST_WAIT = 120  # seconds that a client is told to wait at most


class Busy(Exception):
    """The queue is full."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"All places are taken; try again in {retry_after} s.")
        self.retry_after = retry_after


class Stopped(Exception):
    """Nobody waits for the work any more, or the server is closing."""


class TooSlow(Exception):
    """The work took longer than this server allows."""


@dataclass(eq=False)
class Job(Generic[Made]):
    """One piece of work, its progress, and the two ways to end it early."""

    seconds: float  # it may take
    stop: threading.Event = field(default_factory=threading.Event)
    progress: tuple[str, int, int] = ("waiting", 0, 0)  # what is done, steps done, steps in all
    begun: float | None = None
    place: Future[Made] | None = None  # in the lane
    answer: asyncio.Future[Made] | None = None  # for those who wait on the event loop

    def watch(self, what: str, done: int, steps: int) -> None:
        """Called by the work itself, after each of its steps."""
        self.progress = (what, done, steps)
        self.check()

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped
        if self.overdue():
            raise TooSlow

    def leave(self) -> None:
        """Nobody waits for it any more: work that goes on stops where it looks up, waiting work frees its place now."""
        self.stop.set()
        if self.place is not None:
            self.place.cancel()

    def overdue(self, grace: float = 0.0) -> bool:
        return self.begun is not None and time.monotonic() > self.begun + self.seconds + grace

    async def looks(self) -> AsyncIterator[tuple[str, int, int]]:
        """How far it is, ten times a second, until it is done; TooSlow if it is overdue and does not look up."""
        assert self.answer is not None
        while not self.answer.done():
            await asyncio.wait([self.answer], timeout=LOOK)
            if not self.answer.done():
                if self.stop.is_set():
                    raise Stopped
                if self.overdue(GRACE):
                    raise TooSlow
                yield self.progress

    def result(self) -> Made:
        assert self.answer is not None
        if self.answer.cancelled():
            raise Stopped  # while it waited
        return self.answer.result()

    async def wait(self, gone: Callable[[], Awaitable[bool]]) -> Made:
        """The result; the work is told to stop when the client is `gone`."""
        try:
            async for _ in self.looks():
                if await gone():
                    raise Stopped
            return self.result()
        finally:
            self.leave()  # also when this request itself was cancelled


class JobQueue:
    """One worker and a few places to wait in."""

    def __init__(self, name: str, places: int, seconds: float) -> None:
        self.name, self.places, self.seconds = name, places, seconds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"clairvit-{name}")
        self._lock = threading.Lock()
        self._jobs: set[Job[Any]] = set()  # that wait or are being done
        self._usual = 0.5  # seconds a job takes, a running mean

    def submit(self, work: Callable[[], Made]) -> Job[Made]:
        """Take a place, or raise Busy. Must be called on the event loop that waits for the job."""
        job: Job[Made] = Job(self.seconds)
        with self._lock:
            if len(self._jobs) >= self.places:
                raise Busy(min(LONGEST_WAIT, max(1, math.ceil(self._usual * len(self._jobs)))))
            self._jobs.add(job)
        context = contextvars.copy_context()
        try:
            job.place = self._pool.submit(context.run, self._carry_out, job, work)
        except RuntimeError:  # the server is closing
            self._leave(job)
            raise Busy(1) from None
        job.place.add_done_callback(lambda _: self._leave(job))  # done, failed or cancelled
        job.answer = asyncio.wrap_future(job.place)
        job.answer.add_done_callback(_looked_at)
        return job

    def _carry_out(self, job: Job[Made], work: Callable[[], Made]) -> Made:
        started = time.monotonic()
        try:
            job.begun, job.progress = started, ("working", 0, 0)
            with on_progress(job.watch):
                return work()
        finally:
            self._usual += 0.2 * (time.monotonic() - started - self._usual)

    def _leave(self, job: Job[Made]) -> None:
        with self._lock:
            self._jobs.discard(job)
            idle = not self._jobs
        if idle:
            with contextlib.suppress(RuntimeError):  # the server is closing
                self._pool.submit(give_back)  # behind the answer, which need not wait for it

    @property
    def inside(self) -> int:
        """Jobs that wait or are being done."""
        return len(self._jobs)

    def close(self) -> None:
        """Take no more work, and end what there is."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            job.leave()
        self._pool.shutdown(wait=False, cancel_futures=True)


def give_back() -> None:
    """Hand memory that is free back to the system; glibc would keep what a busy minute took, in each thread's arena."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _looked_at(answer: asyncio.Future[Made]) -> None:
    """An error of a job that nobody waits for any more is no news."""
    if not answer.cancelled():
        answer.exception()
