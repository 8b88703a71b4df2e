"""Hints: translate what library errors advise in terms of Python into options of the command that was typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping

import click

from clairvit.errors import ClairError

# Parameters whose option has another name, or needs more than a value.
OPTIONS: Mapping[str, str] = {
    "by_head": "--heads",
    "others": "--truth",
    "pretrained": "--no-pretrained",
    "size": "--crop",
}
# Parameters of another command.
COMMANDS: Mapping[str, str] = {
    "calibrate": "`clairvit calibrate IMAGES --out {}`",
    "choose": "`clairvit choose IMAGES --out {}`",
    "tune_start": "`clairvit choose IMAGES --tune-start {} --out recipe.json`",
}
# Targets that a sentence of the library advises -> the option, and how its value is written.
TARGETS: Mapping[str, tuple[str, str]] = {
    "cv.Region(CLASS": ("--region", "CLASS@LEFT,TOP,RIGHT,BOTTOM"),
    "cv.Region(box": ("--region", "LEFT,TOP,RIGHT,BOTTOM"),
    "cv.Region(point": ("--point", "X,Y"),
    "cv.Query(": ("--query", "INDEX"),
    "target=cv.NextToken(": ("--prompt", "'What is this?'"),
}
SUFFIXES: Mapping[str, str] = {"others": " with a column 'other'"}


def with_options(error: Exception, command: click.Command | None = None) -> str:
    """Return the message of an error, and the options of a command that do what the message advises.

    Args:
        error: Any error; those of `clairvit.errors` may name parameters.
        command: The command that was typed; None takes the one that is running. Options it does not have are left out.
    """
    context = click.get_current_context(silent=True)
    if command is None and context is not None:
        command = context.command
    parameters = error.parameters if isinstance(error, ClairError) else {}
    hints = [hint for name, value in parameters.items() if (hint := _hint(name, value, command))]
    advised = (target for words, target in TARGETS.items() if words in str(error))
    hints += [f"{option} {value}" for option, value in advised if _has(command, option)]
    return f"{error} On the command line: {', '.join(hints)}." if hints else str(error)


def names_parameters(error: ClairError) -> bool:
    """Return whether an error advises parameters or targets, which may be options of a command."""
    return bool(error.parameters) or any(words in str(error) for words in TARGETS)


def option_of(parameter: str) -> str:
    """Return the option of a parameter: batch_size is --batch-size."""
    return OPTIONS.get(parameter, "--" + parameter.replace("_", "-"))


def parameters_as_options(sentence: str) -> str:
    """Return a sentence of the library with `mask_kind='trimap'` written as `--mask-kind trimap`, verbs as commands."""
    sentence = re.sub(r"\b(mask_kind)='(\w+)'", lambda match: f"{option_of(match[1])} {match[2]}", sentence)
    return re.sub(
        r"cv\.choose\(model, images, (tune_start)=\['([^']+)'\]\)",
        lambda match: COMMANDS[match[1]].format(shlex.quote(match[2])),
        sentence,
    )


def with_named_options(text: str, available: Collection[str]) -> str:
    """Return a text of the library, and the available options for the parameters that it names: `size=`, `mean=`."""
    named = dict.fromkeys(option_of(name) for name in re.findall(r"\b([a-z_]+)=", text))
    options = [option for option in named if option in available]
    return f"{text} On the command line: {', '.join(options)}." if options else text


def _hint(parameter: str, value: str, command: click.Command | None) -> str:
    if parameter in COMMANDS:
        return COMMANDS[parameter].format(shlex.quote(value))
    option = option_of(parameter)
    if not _has(command, option):
        return ""
    is_flag = value in ("True", "False")
    return option + ("" if is_flag else f" {shlex.quote(value)}") + SUFFIXES.get(parameter, "")


def _has(command: click.Command | None, option: str) -> bool:
    return command is not None and any(option in declared.opts for declared in command.params)
