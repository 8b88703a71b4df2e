"""Overlap reading and writing with the model's passes: threads decode images ahead of it and write results behind it.

Both keep the order, hold a bounded number of items, and leave no thread when their block ends, also by an error.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")
MOST_WORKERS = 8  # threads; Pillow decodes and resizes without the interpreter's lock
THREAD_NAME = "clairvit-pipeline"


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # noqa: TID251


def decode_workers() -> int:
    """Return how many threads decode images: one per core of this process, at most `MOST_WORKERS`."""
    return min(MOST_WORKERS, usable_cores())


@contextmanager
def read_ahead(
    read: Callable[[Item], Value], items: Iterable[Item], *, workers: int, ahead: int
) -> Iterator[Iterator[Callable[[], Value]]]:
    """Yield an iterator of functions, one per item in their order; each returns the value read, or raises its error.

    Args:
        read: Reads one item; called in threads.
        items: What is read.
        workers: Threads; 0 reads each item when its function is called.
        ahead: Most items that are read, or being read, and not handed out yet.
    """
    if workers < 1:
        yield (partial(read, item) for item in items)
        return
    executor = ThreadPoolExecutor(workers, thread_name_prefix=THREAD_NAME)
    try:
        yield _in_order(executor, read, iter(items), max(1, ahead))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _in_order(
    executor: ThreadPoolExecutor, read: Callable[[Item], Value], items: Iterator[Item], ahead: int
) -> Iterator[Callable[[], Value]]:
    pending: deque[Future[Value]] = deque(executor.submit(read, item) for item in islice(items, ahead))
    while pending:
        first = pending.popleft()
        pending.extend(executor.submit(read, item) for item in islice(items, 1))
        yield first.result


class WriteBehind(Generic[Value]):
    """Run functions one after the other in a thread while the caller goes on.

    Args:
        pending: Most functions that wait or run; one more blocks the caller until the first of them has ended.

    Example:
        >>> with WriteBehind(pending=2) as writer:
        ...     for number in range(3):
        ...         writer.submit(lambda number=number: number * number)
        ...     writer.finish()
        [0, 1, 4]
    """

    def __init__(self, pending: int) -> None:
        self._limit = max(1, pending)
        self._pending: deque[Future[Value]] = deque()
        self._values: list[Value] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)

    def submit(self, work: Callable[[], Value]) -> None:
        """Run a function after those before it; raise the error of one that failed."""
        while len(self._pending) >= self._limit or (self._pending and self._pending[0].done()):
            self._values.append(self._pending.popleft().result())
        self._pending.append(self._executor.submit(work))

    def finish(self) -> list[Value]:
        """Wait for all functions and return their values in the order of `submit`."""
        while self._pending:
            self._values.append(self._pending.popleft().result())
        return self._values

    def __enter__(self) -> WriteBehind[Value]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the function that runs; those that have not begun are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)
