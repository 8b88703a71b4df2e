"""`--import FILE|MODULE` on every command: methods and metrics of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

NAME = "imports"


def _import(context: typer.Context, names: list[str] | None) -> None:
    if names and not context.resilient_parsing:
        from clairvit.plugins import import_code

        import_code(names)


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE|MODULE",
        callback=_import,
        is_eager=True,  # before the names in other options are looked up
        help="Import methods and metrics of your own first: my.py or package.module; may be repeated.",
        show_default=False,
    ),
]


def add_import_option(app: typer.Typer) -> None:
    """Give every command of an app the option `--import`, and what stands before the command too."""
    for info in (*app.registered_commands, app.registered_callback):
        if info is not None and info.callback is not None:
            info.callback = _with_imports(info.callback)


def _with_imports(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with one more option, which the command itself does not see."""
    hints = get_type_hints(command, include_extras=True)
    parameters = [item.replace(annotation=hints[item.name]) for item in inspect.signature(command).parameters.values()]
    option = inspect.Parameter(NAME, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Imports)

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        values.pop(NAME)
        return command(**values)

    run.__signature__ = inspect.Signature([*parameters, option])  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, NAME: Imports}
    return run
