"""Write what the library advises, which is data in its messages, as options of the command that was typed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from clairvit.cli.declare import TypedCommand, running
from clairvit.errors import Advice, Argument, Call, ClairError, Message, Verb

# Parameters whose option has another name, or takes a file in place of values.
OPTIONS: Mapping[str, str] = {
    "by_head": "--heads",
    "distractors": "--truth",
    "pretrained": "--no-pretrained",
    "size": "--crop",
    "evaluate.labels": "--truth",
}
FILES = ("source",)  # whose value is no file in Python
SUFFIXES: Mapping[str, str] = {"distractors": " with a column 'other'"}


def worded(text: str, command: TypedCommand | None = None) -> str:
    """Return a text of the library with its advice as options of a command, as far as it has them.

    Args:
        text: Any text; that of a `Message` has its advice as data.
        command: The command; None takes the one that is running.
    """
    command = command or running.get()
    if not isinstance(text, Message) or command is None:
        return text
    body = "".join(_typed(part, command) or str(part) if isinstance(part, Advice) else part for part in text.parts)
    hints = [option for advice in text.also if (option := _typed(advice, command))]
    return f"{body} On the command line: {', '.join(hints)}." if hints else body


def with_options(error: Exception, command: TypedCommand | None = None) -> str:
    """Return the message of an error in words of a command."""
    return worded(error.message, command) if isinstance(error, ClairError) else str(error)


def _typed(advice: Advice, command: TypedCommand) -> str:
    """Return advice as it is typed; "" where the command has no such option."""
    if isinstance(advice, Verb):
        options = "".join(f" {_option(Argument(name, value))}" for name, value in advice.named.items())
        if advice.name == command.name and not advice.file:
            return options.strip()
        return f"`clairvit {advice.name} IMAGES{options}{f' --out {shlex.quote(advice.file)}' if advice.file else ''}`"
    if not isinstance(advice, Argument):
        return ""
    metavar = command.options.get(_flag(advice))
    return "" if metavar is None else _option(advice, metavar)


def _option(advice: Argument, metavar: str = "FILE") -> str:
    """Return an option and its value; for a value that the command line takes as a file, its metavar."""
    flag, value = _flag(advice), advice.value
    if value is None or isinstance(value, bool):
        return flag
    if isinstance(value, Call):
        return f"{flag} {shlex.quote(_target(value)[1])}"
    is_file = value == [...] or advice.name in FILES
    text = metavar.partition("|")[0] if is_file else _text(value)
    return f"{flag} {shlex.quote(text)}{SUFFIXES.get(advice.name, '')}"


def _flag(advice: Argument) -> str:
    """Return the option of a parameter, batch_size is --batch-size, or of a target."""
    if isinstance(advice.value, Call):
        return _target(advice.value)[0]
    return OPTIONS.get(f"{advice.of}.{advice.name}") or OPTIONS.get(advice.name) or f"--{advice.name.replace('_', '-')}"


def _target(target: Call) -> tuple[str, str]:
    """Return the option of a target, and how its value is typed."""
    if target.name == "NextToken":
        return "--prompt", target.named["prompt"]
    if target.name == "Region":
        place = "point" if "point" in target.named else "box"
        class_ = f"{target.positional[0]}@" if target.positional else ""
        return {"point": "--point", "box": "--region"}[place], f"{class_}{_text(target.named[place])}"
    return f"--{target.name.lower()}", _text(target.positional[0])


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return "…" if value is ... else f"{value:g}" if isinstance(value, float) else str(value)
