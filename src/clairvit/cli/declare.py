"""Declare options and arguments of commands, one line each, and turn groups of them into parameters of a command.

A group is a frozen dataclass whose fields are options, or groups; `expand_groups` gives a command one option per field.
`add_import_option` gives every command `--import FILE|MODULE`, for methods and metrics of the user's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer

Group = TypeVar("Group")
IMPORTS = "imports"  # the parameter of --import


@dataclass(frozen=True)
class TypedCommand:
    """A command that was typed: its name, and the metavar ("" if it has none) of each of its options."""

    name: str
    options: Mapping[str, str]


running: ContextVar[TypedCommand | None] = ContextVar("running", default=None)


@dataclass(frozen=True)
class Declared:
    """An option or argument of a command: its default, its flags if they are not its name, and what typer is told."""

    default: Any
    kind: Callable[..., Any]
    flags: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]

    def names(self, parameter: str) -> tuple[str, ...]:
        """Return the flags of an option that is this parameter."""
        return self.flags or (f"--{parameter.replace('_', '-')}",)

    def annotation(self, name: str, hint: Any, panel: str | None) -> Any:
        """Return the type of a parameter of that name with the declaration, as typer reads it."""
        flags = self.names(name) if self.kind is typer.Option else ()  # named, a flag has no --no-… besides
        extra = {"rich_help_panel": panel} if panel is not None else {}
        return Annotated[hint, self.kind(*flags, **{**extra, **dict(self.settings)})]


def option(
    default: Any,
    help_text: str,
    metavar: str | None = None,
    *flags: str,
    shown: str | None = None,
    panel: str | None = None,
    **settings: Any,
) -> Any:
    """Declare an option.

    Args:
        default: Its value where it is not typed; False makes a flag of it.
        help_text: What it does.
        metavar: How its value is written.
        flags: Its names where they are not the parameter's: `--target`, `-t`.
        shown: What the help says of the default, if it is no value.
        panel: The heading of the help that it stands under; None takes that of its group.
        settings: Others of `typer.Option`, such as `min`.
    """
    return _declared(typer.Option, default, flags, help_text, metavar, shown, panel, settings)


def argument(default: Any, help_text: str, metavar: str | None = None) -> Any:
    """Declare an argument; `...` as its default makes it required."""
    return _declared(typer.Argument, default, (), help_text, metavar, None, None, {})


def _declared(
    kind: Callable[..., Any],
    default: Any,
    flags: tuple[str, ...],
    help_text: str,
    metavar: str | None,
    shown: str | None,
    panel: str | None,
    settings: dict[str, Any],
) -> Declared:
    named = {"help": help_text, "metavar": metavar, "show_default": shown, "rich_help_panel": panel, **settings}
    return Declared(default, kind, flags, tuple((name, value) for name, value in named.items() if value is not None))


@dataclass_transform(frozen_default=True, kw_only_default=True)
def group(panel: str | None = None) -> Callable[[type[Group]], type[Group]]:
    """Make a class a group of options, which stand under the heading `panel` of the help."""

    def decorate(cls: type[Group]) -> type[Group]:
        for name in inspect.get_annotations(cls):
            value = cls.__dict__.get(name, MISSING)
            if isinstance(value, Declared):
                setattr(cls, name, field(default=value.default, metadata={"declared": value, "panel": panel}))
        return dataclass(frozen=True, kw_only=True)(cls)

    return decorate


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with one option per field in place of each parameter that is a group.

    A parameter of the command itself replaces a field of the same name; its value goes into the group as well.
    """
    parameters = inspect.signature(command).parameters
    hints = get_type_hints(command)
    direct = [name for name in parameters if not is_dataclass(hints[name])]
    declared: dict[str, tuple[Any, Declared, str | None]] = {}
    for name, parameter in parameters.items():
        if name in direct:
            declared[name] = (hints[name], parameter.default, None)
        else:
            declared |= {inner: entry for inner, entry in _declarations(hints[name]).items() if inner not in direct}
    expanded = {name: _parameter(name, *entry) for name, entry in declared.items()}
    options = {
        flag: dict(option.settings).get("metavar", "")
        for name, (_, option, _) in declared.items()
        if option.kind is typer.Option
        for flag in option.names(name)
    }

    typed = TypedCommand(command_name(command), options)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        running.set(typed)
        command(**{name: values[name] if name in direct else _filled(hints[name], values) for name in parameters})

    run.__signature__ = inspect.Signature(list(expanded.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in expanded.items()}
    return run


def command_name(command: Callable[..., None]) -> str:
    """Return the name of a command: that of its function, `methods_command` for one whose name is taken."""
    return command.__name__.removesuffix("_command")


def _parameter(name: str, hint: Any, declared: Declared, panel: str | None) -> inspect.Parameter:
    default = inspect.Parameter.empty if declared.default is ... else declared.default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=declared.annotation(name, hint, panel))


def _declarations(kind: Any) -> dict[str, tuple[Any, Declared, str | None]]:
    """Return the type, declaration and heading of each option of a group and of the groups in it."""
    hints = get_type_hints(kind)
    declared: dict[str, tuple[Any, Declared, str | None]] = {}
    for entry in fields(kind):
        if is_dataclass(hints[entry.name]):
            declared |= _declarations(hints[entry.name])
        else:
            declared[entry.name] = (hints[entry.name], entry.metadata["declared"], entry.metadata["panel"])
    return declared


def _filled(kind: Any, values: dict[str, Any]) -> Any:
    """Return a group with the values that were typed."""
    hints = get_type_hints(kind)
    return kind(
        **{
            entry.name: _filled(hints[entry.name], values) if is_dataclass(hints[entry.name]) else values[entry.name]
            for entry in fields(kind)
        }
    )


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
    option = inspect.Parameter(IMPORTS, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Imports)

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        values.pop(IMPORTS)
        return command(**values)

    run.__signature__ = inspect.Signature([*parameters, option])  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, IMPORTS: Imports}
    return run
