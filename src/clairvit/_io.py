"""Files that are whole or not there: written under another name, then renamed; nobody ever reads half of one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clairvit.errors import BadInput


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Another name in the same folder, gone afterwards; what the disk has against it is told."""
    temporary = path.parent / f".clairvit-{secrets.token_hex(6)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(
            f"Cannot write '{path}' ({reason}); choose a place you may write to.", parameters={"out": "PATH"}
        ) from error


def atomic_write(path: Path, *parts: bytes | memoryview) -> Path:
    with beside(path) as temporary:
        with temporary.open("xb") as file:
            file.writelines(parts)
        temporary.replace(path)
    return path
