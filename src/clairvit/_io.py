"""Files that are whole or not there: written under another name, then renamed; nobody ever reads half of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clairvit.errors import BadInput


def atomic_write(path: Path, *parts: bytes | memoryview) -> Path:
    """Write `parts` to `path` and return it; readers see the old file or the whole new one, never a partial one.

    Raises:
        BadInput: If the folder cannot be made or written to.
    """
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
