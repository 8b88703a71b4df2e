"""Watch: long work says how far it is. Nobody listens in library use; the command line shows a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
Watcher = Callable[[str, int, int], None]  # what is done, steps done, steps in all

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def on_progress(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of each step of long work inside the block."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


@contextmanager
def report_progress(what: str, steps: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of steps just done; whoever watches is told how far the work is.

    Work that turns out shorter than `steps` is over at the end of the block, work that turns out longer stays at it.
    """
    watcher, done = _watcher.get(), 0

    def tell(further: int) -> None:
        nonlocal done
        done += further
        if watcher is not None and done < steps:
            watcher(what, done, steps)

    yield tell
    if watcher is not None and steps > 0:
        watcher(what, steps, steps)


def track(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items, one after the other; whoever watches is told after each."""
    with report_progress(what, len(items)) as tell:
        for item in items:
            yield item
            tell(1)
