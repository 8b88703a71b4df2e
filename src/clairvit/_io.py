"""File, JSON and CSV output: atomic writes, JSON without NaN or Infinity, text that is safe to print."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clairvit.errors import Argument, BadInput

_SURROGATES = re.compile("[\ud800-\udfff]")
# A terminal obeys control characters (C1 ones too), and text after marks of direction is shown backwards.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes cells that begin so


def atomic_write(path: Path | str, *parts: bytes | memoryview) -> Path:
    """Write `parts` to `path` and return it; readers see the old file or the whole new one, never a partial one.

    Raises:
        BadInput: If the folder cannot be made or written to.
    """
    path = Path(path)
    with _translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, *parts)
    return path


def check_writable(path: Path) -> None:
    """Raise BadInput if `path` cannot be written to; its folder is made, and nothing else is left behind."""
    with _translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path) as temporary:
            temporary.touch()


def replace_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write `parts` to `path` atomically, in a folder that exists; OS errors are not translated.

    The file is renamed once the bytes are on the disk, or a power cut could leave a name without them.
    """
    with _temporary(path) as temporary:
        with temporary.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a path next to `path`, and remove what is there afterwards."""
    temporary = path.parent / f".clairvit-{secrets.token_hex(6)}.tmp"
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(
            f"Cannot write '{path}' ({reason}); choose a place you may write to.", advice=[Argument("out", "PATH")]
        ) from error


def write_text(text: str, path: Path | str) -> Path:
    """Write `text` as UTF-8, atomically; bytes of file names that are not UTF-8 are written as \\xff."""
    return atomic_write(path, decoded(text).encode())


def decoded(text: str) -> str:
    """Return a text that any encoding of Unicode takes.

    Python keeps the bytes of a file name that it cannot decode as lone surrogates: bytes that are UTF-8 (in a C locale)
    become letters, others are written as \\xff.
    """
    if not _SURROGATES.search(text):
        return text
    escaped = re.sub("[\ud800-\udc7f\udd00-\udfff]", lambda lone: f"\\u{ord(lone[0]):04x}", text)
    return escaped.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def printable(text: str) -> str:
    """Return a text that is safe on a terminal and in a figure: `decoded`, control characters written as \\x1b."""

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return _CONTROLS.sub(escaped, decoded(text))


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV that a spreadsheet only shows: a text that would be a formula gets an apostrophe before it."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([_csv_cell(value) for value in row] for row in rows)
    return buffer.getvalue()


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.startswith(_FORMULA):
        try:
            float(value)  # a number that is text stays one
        except ValueError:
            return f"'{printable(value)}"
    return printable(value)


def write_json(content: Any, path: Path | str) -> Path:
    """Write `content` as JSON, atomically."""
    return write_text(dumps_json(content) + "\n", path)


def dumps_json(
    content: Any,
    indent: int | None = 1,
    default: Callable[[Any], Any] | None = None,
    *,
    ascii_only: bool = False,
) -> str:
    """Return `content` as JSON text that every reader accepts: null instead of NaN and Infinity.

    Bytes of file names that are not UTF-8 and all control characters are escaped, so that `json.loads` gives the name
    back and a terminal that shows the text obeys nothing in it.

    Args:
        content: Mappings, lists, numbers and texts.
        indent: Spaces per level; None is one line.
        default: Converts values that JSON has no type for, such as dates; without it they raise TypeError.
        ascii_only: Escape all that is not ASCII, for a stream of another encoding than Unicode.
    """
    text = json.dumps(to_json(content), ensure_ascii=ascii_only, allow_nan=False, indent=indent, default=default)
    return re.sub("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def parse_json(text: str | bytes) -> Any:
    """Return the content of JSON text; raise ValueError, also where it is nested too deep for Python's reader."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def to_json(value: Any) -> Any:
    """Return `value` with None for every number that is not finite, in nested mappings, lists and tuples too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value
