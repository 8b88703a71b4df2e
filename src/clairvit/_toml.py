"""TOML files whose errors name the line: where a value of the document stands in the text."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clairvit.errors import BadInput

Location = tuple[str | int, ...]  # keys and list indices that lead to a value of the document


@dataclass(frozen=True)
class TomlSource:
    """The text of a TOML file and its content, in which the lines of errors are found."""

    path: Path
    text: str
    document: Mapping[str, Any]

    def locate(self, steps: Sequence[str | int]) -> Location:
        """Return the steps of a pydantic location that exist in the document.

        Others are members of a union, indices of a list that was a single value, and keys that are missing.
        """
        location: Location = ()
        for step in steps:
            if contains(self.document, (*location, step)):
                location = (*location, step)
        return location

    def value(self, location: Location) -> Any:
        """Return the value at a location of the document."""
        document: Any = self.document
        for step in location:
            document = document[step]
        return document

    def error(self, location: Location, message: str) -> BadInput:
        """Return an error that begins with file and line."""
        return BadInput(f"{self.path}, line {self.line(location)}: {message}")

    def line(self, location: Location) -> int:
        """Return the line of a value: that of its key, in the shortest beginning of the file that has the value."""
        if not location:
            return 1
        lines = self.text.splitlines()
        before = 0  # lines that are valid TOML without the value
        for count in range(1, len(lines) + 1):
            try:
                beginning = tomllib.loads("\n".join(lines[:count]))
            except tomllib.TOMLDecodeError:
                continue  # inside a list or a text of several lines
            if contains(beginning, location):
                break
            before = count
        else:
            count = len(lines)
        return _line_of_key(lines[:count], before, location)


def read_toml(path: Path, kind: str, docs: str) -> TomlSource:
    """Return the content of a file; raise `BadInput` if it cannot be read or is not TOML.

    Args:
        path: The file.
        kind: What it is, "study", for the message.
        docs: Where its keys are described.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The {kind} '{path}' cannot be read ({error}); expected a TOML file in UTF-8.") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"The {kind} '{path}' is not TOML: {error}.") from error
    except RecursionError as error:
        raise BadInput(f"The {kind} '{path}' is nested too deep; expected lists and tables as in `{docs}`.") from error
    return TomlSource(path, text, document)


def _line_of_key(lines: Sequence[str], before: int, location: Location) -> int:
    """Return the first line after so many whose key, once renamed, removes the value from the document."""
    *_, key = (step for step in location if isinstance(step, str))
    pattern = re.compile(rf"(^|[\s\[{{,.\"'])({re.escape(key)})(?=[\"']?\s*[=\].])")
    location = location[: max(place for place, step in enumerate(location) if step == key) + 1]
    for index in range(before, len(lines)):
        renamed = pattern.sub(r"\1\2_", lines[index])
        try:
            without = tomllib.loads("\n".join([*lines[:index], renamed, *lines[index + 1 :]]))
        except tomllib.TOMLDecodeError:
            continue
        if not contains(without, location):
            return index + 1
    return before + 1


def contains(document: Any, location: Location) -> bool:
    """Return whether a document has a value at a location."""
    for step in location:
        in_list = isinstance(document, list) and isinstance(step, int) and step < len(document)
        if not in_list and not (isinstance(document, dict) and step in document):
            return False
        document = document[step]
    return True
