"""What is printed for people: sentences on stderr, tables on stdout. Rich is imported when something is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 140  # columns where nobody says how wide the paper is (a pipe, a log file)


class Advance(Protocol):
    def __call__(self, steps: int, /) -> None: ...


def say(sentence: str) -> None:
    """One line on stderr, marked as ours."""
    print(f"clairvit: {sentence}", file=sys.stderr)


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)


def line(text: str) -> None:
    console().print(text, markup=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table on stdout. Cells are plain text: a file called '[red].jpg' stays what it is."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    paper = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        paper.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=number == 0)
    for row in rows:
        paper.add_row(*(Text(cell) for cell in row))
    console().print(paper)


@contextmanager
def progress(what: str, total: int, hidden: bool = False) -> Iterator[Advance]:
    """A bar on stderr for more than one step; nothing where stderr is not a terminal."""
    if hidden or total < 2 or not sys.stderr.isatty():
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)
