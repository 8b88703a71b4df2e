"""Console output: messages on stderr, tables on stdout, a progress bar. Rich is imported when it is needed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from clairvit._io import dumps_json, printable
from clairvit.cli.hints import worded
from clairvit.errors import Message

if TYPE_CHECKING:
    from rich.console import Console

INNER_BAR_AFTER = 1.0  # seconds after which work inside a step gets a bar of its own
# Short labels in tables: is the method class-specific, is its map signed?
EXPLAINS = {True: "class", False: "any class ∀"}
SHOWS = {True: "for/against ±", False: "relevance"}
DEFAULT_WIDTH = 140  # columns where stdout is no terminal (a pipe, a log file)

Advance = Callable[[int], None]  # the number of steps that were just completed


def print_message(sentence: str) -> None:
    """Print one line on stderr that begins with the program's name; what it advises becomes options."""
    print(f"clairvit: {printable(worded(sentence))}", file=sys.stderr)


_printed_notes: list[str] = []  # of this process, so that a note which was a warning is not printed again


def print_note(note: str) -> None:
    """Print a note on stderr and remember it: `is_printed` is then true for it."""
    _printed_notes.append(note)
    print_message(Message("note: ", note))


def is_printed(note: str) -> bool:
    """Return whether `print_note` printed this note before."""
    return note in _printed_notes


def print_data_notes(notes: Iterable[str], hidden: bool) -> None:
    """Print notes about models and data on stderr, each once."""
    for note in () if hidden else dict.fromkeys(notes):
        print_message(Message("note: ", note))


def print_line(text: str) -> None:
    """Print one line on stdout."""
    _stdout().print(printable(text), markup=False, soft_wrap=True)


def print_result_note(note: str) -> None:
    """Print a note of a result on stdout; what it advises becomes options."""
    print_line(f"Note: {worded(note)}")


def print_json(content: Mapping[str, Any] | Sequence[Any], indent: int | None = 1) -> None:
    """Print one JSON document on stdout; numbers that are not finite become null."""
    is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    print(dumps_json(content, indent, default=str, ascii_only=not is_unicode))


def _stdout() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else DEFAULT_WIDTH, highlight=False)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), grouped: bool = False
) -> None:
    """Print a table on stdout. Cells are plain text: a file called '[red].jpg' is printed as it is.

    Args:
        title: The line above the table.
        columns: The headings.
        rows: One cell per column; a cell may have several lines.
        right: The columns that are aligned to the right.
        grouped: Print the first cell of consecutive rows only once, and an empty row between groups.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        title=Text(printable(title)), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for number, column in enumerate(columns):
        is_key = number <= grouped  # the columns that name the row are never broken into lines
        longest = max((len(word) for word in column.split()), default=0)  # words of a heading are never broken
        justify: Literal["left", "right"] = "right" if column in right else "left"
        grid.add_column(printable(column), justify=justify, overflow="fold", no_wrap=is_key, min_width=longest)
    previous: str | None = None
    for first, *rest in rows:
        repeated = grouped and first == previous
        if grouped and not repeated and previous is not None:
            grid.add_row()
        grid.add_row(*(Text(printable(cell)) for cell in ("" if repeated else first, *rest)))
        previous = first
    _stdout().print(grid)


@contextmanager
def progress_bar(title: str, total: int, hidden: bool = False) -> Iterator[Advance]:
    """Show a bar on stderr for more than one step, and one for long work inside a step, if stderr is a terminal."""
    if hidden or not sys.stderr.isatty():
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from clairvit._progress import on_progress

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        speed_estimate_period=600.0,  # seconds; steps that take minutes have a speed too
    )
    tasks: dict[str, TaskID] = {}
    started: dict[str, float] = {}

    def update(part: str, done: int, steps: int) -> None:
        is_long = time.monotonic() - started.setdefault(part, time.monotonic()) > INNER_BAR_AFTER
        if is_long and part not in tasks:
            tasks[part] = bar.add_task(part, total=steps)
        if part in tasks:
            bar.update(tasks[part], completed=done)
        if done == steps:
            started.pop(part)
            if part in tasks:
                bar.remove_task(tasks.pop(part))

    with bar, on_progress(update):
        task = bar.add_task(title, total=total, visible=total > 1)
        yield lambda steps: bar.advance(task, steps)
