"""`clairvit …`: the commands, and what the shell sees when one of them fails."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from clairvit._version import __version__
from clairvit.cli.bench import bench
from clairvit.cli.choose import choose
from clairvit.cli.compare import compare
from clairvit.cli.evaluate import evaluate
from clairvit.cli.explain import explain
from clairvit.cli.finetune import finetune
from clairvit.cli.lists import list_methods, list_models
from clairvit.cli.metrics import list_metrics
from clairvit.cli.paper import say
from clairvit.cli.reproduce import reproduce
from clairvit.cli.serve import serve
from clairvit.cli.study_report import report
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
app.command("bench", no_args_is_help=True)(bench)
app.command("report", no_args_is_help=True)(report)
app.command("reproduce", no_args_is_help=True)(reproduce)
app.command("finetune", no_args_is_help=True)(finetune)
app.command("serve")(serve)
app.command("methods")(list_methods)
app.command("metrics")(list_metrics)
app.command("models")(list_models)


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
    """Run a command; returns the exit status. 0: done, 2: could not be done as asked, 130: stopped by the user."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _warnings_as_notes():
            app(args=given, prog_name="clairvit")
    except SystemExit as end:  # typer ends every command this way
        return _finish(_status(end.code))
    except ClairError as error:
        if "--json" in given:
            print(json.dumps({"error": str(error)}, ensure_ascii=False))
        say(str(error))
        return _finish(2)
    except KeyboardInterrupt:
        return _finish(130)
    except BrokenPipeError:
        _forget_output()
        return 1
    return _finish(0)


def _status(code: object) -> int:
    return code if isinstance(code, int) else int(code is not None)


def _finish(status: int) -> int:
    """Flush now: a reader that has gone away (`clairvit methods | head -1`) is no error worth a word."""
    if status == 130:
        say("stopped; what was written until now is complete.")
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
        return 1
    return status


def _forget_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Our own warnings become one line on stderr; other libraries' warnings stay as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", ClairWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            if issubclass(category, ClairWarning):
                say(f"note: {message}")
            else:
                usual(message, category, *where)  # type: ignore[arg-type]

        warnings.showwarning = show  # type: ignore[assignment]
        yield
