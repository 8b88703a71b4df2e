"""Report the progress of long work to a listener, if there is one: the command line's bar, the web server's jobs.

The listener is a context variable and no field of `ExecutionOptions`. These options determine how passes are run; a
listener observes, as a logger does, and changes no result. Work is also reported where no options are passed: while a
network flow is solved, images are read, a model is trained or a report is written. Each thread and asynchronous task
has its own value, so that jobs of the web server do not hear of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
ProgressListener = Callable[[str, int, int], None]  # (label, steps done, steps in all)

_listener: ContextVar[ProgressListener | None] = ContextVar("progress_listener", default=None)


@contextmanager
def on_progress(listener: ProgressListener) -> Iterator[None]:
    """Call `listener(label, done, steps)` after each step of long work inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def report_progress(label: str, steps: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of steps just done and reports the sum to the listener.

    Work that takes fewer than `steps` is reported as complete at the end of the block; work that takes more stays
    below it until then.
    """
    listener, done = _listener.get(), 0

    def advance(further: int) -> None:
        nonlocal done
        done += further
        if listener is not None and done < steps:
            listener(label, done, steps)

    yield advance
    if listener is not None and steps > 0:
        listener(label, steps, steps)


def track(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yield the items one by one; report progress after each."""
    with report_progress(label, len(items)) as advance:
        for item in items:
            yield item
            advance(1)
