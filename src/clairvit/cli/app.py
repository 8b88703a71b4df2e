"""`clairvit …`: the commands, and what the shell sees when one of them fails."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import click
import typer

from clairvit._version import __version__
from clairvit.cli.bench import bench
from clairvit.cli.choose import choose
from clairvit.cli.compare import compare
from clairvit.cli.console import print_note, say
from clairvit.cli.doctor import doctor
from clairvit.cli.evaluate import evaluate
from clairvit.cli.explain import explain
from clairvit.cli.finetune import finetune
from clairvit.cli.hints import with_options
from clairvit.cli.lists import classes_command, methods_command, models_command
from clairvit.cli.metrics import metrics_command
from clairvit.cli.report import report
from clairvit.cli.reproduce import reproduce
from clairvit.cli.serve import serve
from clairvit.errors import ClairError, ClairWarning

app = typer.Typer(
    name="clairvit",
    help="Why did my Vision Transformer say that? Explain its answer with any method of the field.",
    epilog="Start with:  clairvit compare demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback, a mistake one sentence (see main)
    rich_markup_mode="rich",
)
app.command("explain", no_args_is_help=True)(explain)
app.command("compare", no_args_is_help=True)(compare)
app.command("evaluate", no_args_is_help=True)(evaluate)
app.command("choose", no_args_is_help=True)(choose)
app.command("doctor", no_args_is_help=True)(doctor)
app.command("bench", no_args_is_help=True)(bench)
app.command("report", no_args_is_help=True)(report)
app.command("reproduce", no_args_is_help=True)(reproduce)
app.command("finetune", no_args_is_help=True)(finetune)
app.command("serve")(serve)
app.command("methods")(methods_command)
app.command("metrics")(metrics_command)
app.command("models")(models_command)
app.command("classes")(classes_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"clairvit {__version__}")
        raise typer.Exit


@app.callback()
def _everything(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0: done, 1: a check of `doctor` failed, 2: could not be done as asked, 130: stopped by the user.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _warnings_as_notes(), _closed_pipe_ignored():
            app(args=given, prog_name="clairvit")
    except SystemExit as end:  # typer ends every command this way
        return _finish(_status(end.code))
    except ClairError as error:
        message = with_options(error, _command(given) if error.parameters else None)
        if "--json" in given:
            print(json.dumps({"error": message}, ensure_ascii=False))
        say(message)
        return _finish(2)
    except KeyboardInterrupt:
        return _finish(130)
    return _finish(0)


def _command(given: Sequence[str]) -> click.Command | None:
    """Return the command that was typed; None for none that there is."""
    group = typer.main.get_command(app)
    return next((group.commands[name] for name in given if name in group.commands), None)  # type: ignore[attr-defined]


def _status(code: object) -> int:
    return code if isinstance(code, int) else int(code is not None)


def _finish(status: int) -> int:
    if status == 130:
        say("stopped; what was written until now is complete.")
    return status


class _PipeWriter:
    """Standard output whose reader may go away (`clairvit methods | head -1`): the rest is written to nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._unless_closed(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _closed_pipe_ignored() -> Iterator[None]:
    """Let the command finish, with its own exit status, when the reader of its output has gone away."""
    before = sys.stdout
    sys.stdout = _PipeWriter(before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Our own warnings become one line on stderr; other libraries' warnings stay as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", ClairWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            if issubclass(category, ClairWarning):
                print_note(str(message))
            else:
                usual(message, category, *where)  # type: ignore[arg-type]

        warnings.showwarning = show  # type: ignore[assignment]
        yield
