"""What is printed for people: sentences on stderr, tables on stdout. Rich is imported when something is printed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from rich.console import Console

LONG = 1.0  # seconds after which work inside a step gets a bar of its own
# What is said of a method in tables, in as few words as can be: is it class-specific, is it signed?
EXPLAINS = {True: "class", False: "any class ∀"}
SHOWS = {True: "for/against ±", False: "relevance"}
WIDE = 140  # columns where nobody says how wide the paper is (a pipe, a log file)


class Advance(Protocol):
    def __call__(self, steps: int, /) -> None: ...


def say(sentence: str) -> None:
    """One line on stderr, marked as ours; where it names a Python argument, with the option that sets it here."""
    print(f"clairvit: {with_option(sentence)}", file=sys.stderr)


def with_option(sentence: str) -> str:
    """Return a library's sentence that names an argument (mask_kind='trimap') with the option (--mask-kind trimap)."""
    return re.sub(r"\b(mask_kind)='(\w+)'", lambda m: f"--{m[1].replace('_', '-')} {m[2]}", sentence)


_printed_notes: list[str] = []  # of this process, so that a note which was a warning is not printed again


def print_note(note: str) -> None:
    """Print a note on stderr and remember it: `is_printed` is then true of it."""
    _printed_notes.append(note)
    say(f"note: {note}")


def is_printed(note: str) -> bool:
    """Return whether this note is on stderr already."""
    return note in _printed_notes


def remark(notes: Iterable[str], hidden: bool) -> None:
    """What is odd about the data, each said once."""
    for note in () if hidden else dict.fromkeys(notes):
        say(f"note: {note}")


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)


def line(text: str) -> None:
    console().print(text, markup=False, soft_wrap=True)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    grouped: bool = False,
) -> None:
    """A table on stdout. Cells are plain text: a file called '[red].jpg' stays what it is.

    `grouped`: rows that begin with the same cell stand together, and only the first of them says it.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    paper = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        whole = number <= grouped  # never broken into lines: what a row is about
        longest = max((len(word) for word in column.split()), default=0)  # words of a heading are never broken
        justify: Literal["left", "right"] = "right" if column in right else "left"
        paper.add_column(column, justify=justify, overflow="fold", no_wrap=whole, min_width=longest)
    previous: str | None = None
    for first, *rest in rows:
        again = grouped and first == previous
        if grouped and not again and previous is not None:
            paper.add_row()
        paper.add_row(*(Text(cell) for cell in ("" if again else first, *rest)))
        previous = first
    console().print(paper)


@contextmanager
def progress(what: str, total: int, hidden: bool = False) -> Iterator[Advance]:
    """A bar on stderr for more than one step, and one for long work inside a step; only where stderr is a terminal."""
    if hidden or not sys.stderr.isatty():
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from clairvit.perturbation.progress import on_progress

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        speed_estimate_period=600.0,  # seconds; steps that take minutes have a speed too
    )
    inner: dict[str, TaskID] = {}
    begun: dict[str, float] = {}

    def watch(part: str, done: int, steps: int) -> None:
        if time.monotonic() - begun.setdefault(part, time.monotonic()) > LONG and part not in inner:
            inner[part] = bar.add_task(part, total=steps)
        if part in inner:
            bar.update(inner[part], completed=done)
        if done == steps:
            begun.pop(part)
            if part in inner:
                bar.remove_task(inner.pop(part))

    with bar, on_progress(watch):
        task = bar.add_task(what, total=total, visible=total > 1)
        yield lambda steps: bar.advance(task, steps)
