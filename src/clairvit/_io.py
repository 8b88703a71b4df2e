"""File and JSON output: atomic writes, and JSON without NaN or Infinity."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clairvit.errors import BadInput


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
            f"Cannot write '{path}' ({reason}); choose a place you may write to.", parameters={"out": "PATH"}
        ) from error


def write_text(text: str, path: Path | str) -> Path:
    """Write `text` as UTF-8, atomically."""
    return atomic_write(path, text.encode())


def write_json(content: Any, path: Path | str) -> Path:
    """Write `content` as JSON, atomically."""
    return write_text(dumps_json(content) + "\n", path)


def dumps_json(content: Any, indent: int | None = 1, default: Callable[[Any], Any] | None = None) -> str:
    """Return `content` as JSON text that every reader accepts: null instead of NaN and Infinity.

    `default` converts values that JSON has no type for, such as dates; without it they raise TypeError.
    """
    return json.dumps(to_json(content), ensure_ascii=False, allow_nan=False, indent=indent, default=default)


def to_json(value: Any) -> Any:
    """Return `value` with None for every number that is not finite, in nested mappings, lists and tuples too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value
