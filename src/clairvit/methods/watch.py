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
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of each step of long work inside the block."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def told(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items, one after the other; whoever watches is told after each."""
    watcher = _watcher.get()
    for done, item in enumerate(items, 1):
        yield item
        if watcher is not None:
            watcher(what, done, len(items))
