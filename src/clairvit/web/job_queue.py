"""Job queues: bounded queues with one worker thread each, so that slow work never blocks quick work.

A job is cancelled where long work reports its progress (`_progress.py`): the callback raises, and every `with`
on the way out restores the model.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import math
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from clairvit._progress import on_progress

Result = TypeVar("Result")
POLL_INTERVAL = 0.1  # seconds between two checks whether the client is still connected
UNRESPONSIVE_AFTER = 2.0  # seconds after the time limit until a job that reports no progress is abandoned
MAX_RETRY_AFTER = 120  # seconds
TRIM_AFTER = 3.0  # idle seconds until free memory is returned: the next job would take the same pages again


class QueueFull(Exception):
    """The queue has no free place."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The server is busy; try again in {retry_after} s.")
        self.retry_after = retry_after


class JobCancelled(Exception):
    """The client disconnected, or the server is closing."""


class TimeLimitExceeded(Exception):
    """The work took longer than this server allows."""


@dataclass(eq=False)
class Job(Generic[Result]):
    """One piece of work, its progress, and its two early ends: cancelled, or over the time limit."""

    time_limit: float  # seconds
    patience: float = UNRESPONSIVE_AFTER  # seconds
    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: tuple[str, int, int] = ("waiting", 0, 0)  # task, steps done, steps in total
    started: float | None = None
    future: Future[Result] | None = None  # in the worker thread
    async_future: asyncio.Future[Result] | None = None  # the same on the event loop

    def update(self, task: str, done: int, steps: int) -> None:
        """Store the progress and raise if the job must end; the work itself calls it after each of its steps."""
        self.progress = (task, done, steps)
        if self.cancelled.is_set():
            raise JobCancelled
        if self.is_overdue():
            raise TimeLimitExceeded

    def cancel(self) -> None:
        """End running work at its next progress report; remove waiting work from the queue now."""
        self.cancelled.set()
        if self.future is not None:
            self.future.cancel()

    def is_overdue(self, tolerance: float = 0.0) -> bool:
        """Return whether the job runs longer than its time limit and the tolerance, in seconds."""
        return self.started is not None and time.monotonic() > self.started + self.time_limit + tolerance

    async def progress_updates(self) -> AsyncIterator[tuple[str, int, int]]:
        """Yield the progress ten times a second until the job is done; raise if it is cancelled or unresponsive."""
        assert self.async_future is not None
        while not self.async_future.done():
            await asyncio.wait([self.async_future], timeout=POLL_INTERVAL)
            if not self.async_future.done():
                if self.cancelled.is_set():
                    raise JobCancelled
                if self.is_overdue(self.patience):
                    raise TimeLimitExceeded
                yield self.progress

    def result(self) -> Result:
        """Return the result of a job that is done, or raise its error."""
        assert self.async_future is not None
        if self.async_future.cancelled():
            raise JobCancelled  # while it waited
        return self.async_future.result()

    async def wait(self, is_disconnected: Callable[[], Awaitable[bool]]) -> Result:
        """Return the result; cancel the job when the client disconnects."""
        try:
            async for _ in self.progress_updates():
                if await is_disconnected():
                    raise JobCancelled
            return self.result()
        finally:
            self.cancel()  # also when this request itself was cancelled


class JobQueue:
    """One worker thread and a bounded number of jobs.

    Args:
        name: Of its thread.
        capacity: Most jobs that wait or run.
        time_limit: Seconds that a job may run.
        patience: Seconds after the time limit until a job that reports no progress is abandoned.
        trim_after: Idle seconds until free memory is returned to the system.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        time_limit: float,
        *,
        patience: float = UNRESPONSIVE_AFTER,
        trim_after: float = TRIM_AFTER,
    ) -> None:
        self.name, self.capacity, self.time_limit = name, capacity, time_limit
        self.patience, self.trim_after = patience, trim_after
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"clairvit-{name}")
        self._lock = threading.Lock()
        self._jobs: set[Job[Any]] = set()  # waiting or running
        self._mean_seconds = 0.5  # of a job, a running mean
        self._trim_timer: threading.Timer | None = None

    def submit(self, work: Callable[[], Result]) -> Job[Result]:
        """Queue the work or raise QueueFull. Must be called on the event loop that waits for the job."""
        job: Job[Result] = Job(self.time_limit, self.patience)
        with self._lock:
            if len(self._jobs) >= self.capacity:
                raise QueueFull(min(MAX_RETRY_AFTER, max(1, math.ceil(self._mean_seconds * len(self._jobs)))))
            self._jobs.add(job)
        context = contextvars.copy_context()
        try:
            job.future = self._pool.submit(context.run, self._run, job, work)
        except RuntimeError:  # the server is closing
            self._remove(job)
            raise QueueFull(1) from None
        job.future.add_done_callback(lambda _: self._remove(job))  # done, failed or cancelled
        job.async_future = asyncio.wrap_future(job.future)
        job.async_future.add_done_callback(_retrieve_exception)
        return job

    def _run(self, job: Job[Result], work: Callable[[], Result]) -> Result:
        started = time.monotonic()
        try:
            job.started, job.progress = started, ("working", 0, 0)
            with on_progress(job.update):
                return work()
        finally:
            self._mean_seconds += 0.2 * (time.monotonic() - started - self._mean_seconds)

    def _remove(self, job: Job[Result]) -> None:
        with self._lock:
            self._jobs.discard(job)
            if self._trim_timer is not None:
                self._trim_timer.cancel()
            self._trim_timer = threading.Timer(self.trim_after, self._trim_if_idle)
            self._trim_timer.daemon = True
            self._trim_timer.start()

    def _trim_if_idle(self) -> None:
        if not self._jobs:
            release_free_memory()

    @property
    def pending(self) -> int:
        """Return the number of jobs that wait or run."""
        return len(self._jobs)

    def close(self) -> None:
        """Accept no more work, and cancel all jobs."""
        with self._lock:
            jobs = list(self._jobs)
            if self._trim_timer is not None:
                self._trim_timer.cancel()
        for job in jobs:
            job.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)


def release_free_memory() -> None:
    """Return free memory to the system; glibc would keep it in the arena of each thread.

    Cancelled jobs leave cycles of tracebacks and frames that hold tensors, which nothing collects while all is idle.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _retrieve_exception(future: asyncio.Future[Result]) -> None:
    """Retrieve the exception of a job whose client is gone, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
