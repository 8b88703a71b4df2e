"""`clairvit …`: the commands, their exit status, and how errors and warnings are printed."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer

from clairvit._io import decoded
from clairvit._version import __version__
from clairvit.cli.bench import bench
from clairvit.cli.calibrate import calibrate
from clairvit.cli.certify import certify
from clairvit.cli.choose import choose
from clairvit.cli.compare import compare
from clairvit.cli.console import print_json, print_message, print_note
from clairvit.cli.declare import add_import_option, command_name, expand_groups, running
from clairvit.cli.doctor import doctor
from clairvit.cli.evaluate import evaluate
from clairvit.cli.expect import expect
from clairvit.cli.explain import explain
from clairvit.cli.features import features
from clairvit.cli.finetune import finetune
from clairvit.cli.hints import with_options
from clairvit.cli.intervene import intervene
from clairvit.cli.lists import cite_command, classes_command, methods_command, metrics_command, models_command
from clairvit.cli.mistakes import mistakes
from clairvit.cli.report import report
from clairvit.cli.reproduce import reproduce
from clairvit.cli.serve import serve
from clairvit.errors import ClairError, ClairWarning, UnknownName

RENAMED_COMMANDS = {"patch": "intervene"}  # old name -> new name, since 0.3
HIDDEN_ALIASES = {"methods": "method", "metrics": "metric", "batch": "batch-size"}  # earlier names of options


def _current_name(name: str) -> str:
    """Return the present name of an option that was renamed."""
    return HIDDEN_ALIASES.get(name, name)


app = typer.Typer(
    name="clairvit",
    help="Why did my Vision Transformer say that? Explain its answer with any method of the field.",
    epilog="Start with:  clairvit compare demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback, a wrong input one sentence (see main)
    rich_markup_mode="rich",
    context_settings={"token_normalize_func": _current_name},
)
WITHOUT_ARGUMENTS = {"serve", "methods", "metrics", "models", "classes", "cite"}  # the others print their help then
for _function in (
    *(
        explain,
        compare,
        evaluate,
        choose,
        calibrate,
        certify,
        expect,
        mistakes,
        doctor,
        bench,
        report,
        reproduce,
        finetune,
        features,
        intervene,
        serve,
    ),
    *(methods_command, metrics_command, models_command, classes_command, cite_command),
):
    _name = command_name(_function)
    app.command(_name, no_args_is_help=_name not in WITHOUT_ARGUMENTS)(expand_groups(_function))


def _version(requested: bool) -> None:
    if requested:
        print(f"clairvit {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


add_import_option(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    0: done, 1: a check of `doctor` or a threshold of `expect` failed, 2: bad input or a failure, 130: stopped by the
    user.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if "matplotlib" not in sys.modules:
        os.environ["MPLBACKEND"] = "agg"  # no window is opened; matplotlib cannot be imported with a wrong name here
    with _safe_streams() as streams:
        status = _run(typed)
        sys.stdout.flush()
        problem = streams[0].error
        if problem is not None:
            print_message(f"Standard output cannot be written to ({problem.strerror or problem}); files are complete.")
    return status if problem is None else max(status, 2)


def _run(typed: Sequence[str]) -> int:
    """Run a command, print what ended it, and return the exit status."""
    before = running.set(None)
    try:
        if typed and typed[0] in RENAMED_COMMANDS:
            old, new = typed[0], RENAMED_COMMANDS[typed[0]]
            raise UnknownName(f"clairvit {old} is called clairvit {new} since 0.3.")
        with _warnings_as_notes():
            app(args=typed, prog_name="clairvit")
    except SystemExit as exit_:  # typer ends every command this way
        return _finish(_status(exit_.code))
    except ClairError as error:
        message = with_options(error)
        if "--json" in typed:
            print_json({"error": message}, indent=None)
        print_message(message)
        return _finish(2)
    except KeyboardInterrupt:
        return _finish(130)
    finally:
        running.reset(before)
    return _finish(0)


def _status(code: object) -> int:
    return code if isinstance(code, int) else int(code is not None)


def _finish(status: int) -> int:
    if status == 130:
        print_message("stopped; what was written until now is complete.")
    return status


class _SafeWriter:
    """Standard output or error that raises for nothing that is written: the command goes on and its files are whole.

    What an encoding lacks is approximated. Once a write fails, because the reader is gone (`clairvit methods | head
    -1`) or the disk is full, the rest is discarded; `error` says why, None if only the reader is gone.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            self._unless_closed(lambda: self._stream.write(text))
        except UnicodeEncodeError as error:
            encoded = decoded(text).translate(_APPROXIMATIONS).encode(error.encoding, "replace")
            approximate = encoded.decode(error.encoding)
            self._unless_closed(lambda: self._stream.write(approximate))
        return len(text)

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self.error = self.error or (None if isinstance(error, BrokenPipeError) else error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# What is often printed -> letters of every encoding
_APPROXIMATIONS = str.maketrans(
    {"█": "#", "▏": "|", "→": ">", "↑": "^", "↓": "v", "–": "-", "−": "-", "—": "-", "…": "."}
)


@contextmanager
def _safe_streams() -> Iterator[tuple[_SafeWriter, _SafeWriter]]:
    """Let the command finish with its own exit status, whatever standard output and error are.

    Descriptors 0 to 2 that are closed (`>&-`, daemons) are opened, or the next file would be written to by prints.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    before = sys.stdout, sys.stderr
    streams = _SafeWriter(before[0]), _SafeWriter(before[1])
    sys.stdout, sys.stderr = streams
    try:
        yield streams
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print warnings of ClairViT as one line on stderr each; other libraries' warnings stay as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", ClairWarning)
        default = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *location: object) -> None:
            if issubclass(category, ClairWarning):
                print_note(message.args[0] if isinstance(message, Warning) else message)
            else:
                default(message, category, *location)  # type: ignore[arg-type]

        warnings.showwarning = show  # type: ignore[assignment]
        yield
