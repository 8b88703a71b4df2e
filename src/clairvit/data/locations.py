"""Locations: files of this disk, or at any URL that fsspec reads (s3://, gs://, https://, memory://, …)."""

from __future__ import annotations

import glob
import importlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from clairvit.errors import BadInput
from clairvit.models.image_files import glob_files, natural_order, walk_files

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # two letters or more: C:// is a drive
_BRACES = re.compile(r"\{([^{}]*)\}")


def is_url(location: str) -> bool:
    """Return whether a location is a URL and no path."""
    return bool(_URL.match(location))


def read_bytes(location: str, start: int = 0, size: int | None = None) -> bytes:
    """Return the content of a file, or `size` bytes of it from `start` on.

    Raises:
        BadInput: If it is not there, cannot be read, or is shorter than asked for.
    """
    with translated_errors(location):
        if is_url(location):
            filesystem, path = filesystem_of(location)
            content: bytes = filesystem.cat_file(path, start=start, end=None if size is None else start + size)
        else:
            with Path(location).expanduser().open("rb") as file:
                file.seek(start)
                content = file.read() if size is None else file.read(size)
    if size is not None and len(content) != size:
        raise BadInput(f"'{location}' ends after {start + len(content)} bytes; expected {start + size} or more.")
    return content


@contextmanager
def opened(location: str) -> Iterator[IO[bytes]]:
    """Open a file for reading; it can be sought in. Errors of the disk and the network inside are `BadInput`."""
    with translated_errors(location):
        if is_url(location):
            filesystem, path = filesystem_of(location)
            with filesystem.open(path, "rb") as file:
                yield file
        else:
            with Path(location).expanduser().open("rb") as file:
                yield file


def expand_location(location: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files that a location stands for, in natural order, each once.

    Args:
        location: A file, a folder, a pattern ("shards/*.tar") or a range ("shards/{000..063}.tar", "{a,b}.csv").
        suffixes: Of the files that are taken from a folder: (".tar",).

    Raises:
        BadInput: If a file of a range is not there, or nothing matches.
    """
    files: list[str] = []
    for pattern in expand_braces(location):
        if _has_magic(pattern):
            matches = [path for path in _glob(pattern) if path.lower().endswith(tuple(suffixes))]
        elif _is_folder(pattern):
            matches = files_below(pattern, suffixes)
        elif _exists(pattern):
            matches = [pattern]
        else:
            raise BadInput(f"There is no file '{pattern}'; expected a file, a folder, a pattern (*) or {{000..063}}.")
        files += matches
    if not files:
        raise BadInput(f"No file matches '{location}'; looked for files ending in {', '.join(suffixes)}.")
    return list(dict.fromkeys(files))


def expand_braces(text: str) -> list[str]:
    """Return every text that braces stand for: "a{08..10}" is a08, a09 and a10, "{x,y}" is x and y.

    Example:
        >>> expand_braces("s{8..10}.tar")
        ['s8.tar', 's9.tar', 's10.tar']
        >>> expand_braces("{00..01}-{a,b}")
        ['00-a', '00-b', '01-a', '01-b']
    """
    pieces = _BRACES.split(text)  # text, content of braces, text, …
    choices = [[piece] if place % 2 == 0 else _choices(piece) for place, piece in enumerate(pieces)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(content: str) -> list[str]:
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", content)
    if numbers is None:
        return content.split(",") if "," in content else ["{" + content + "}"]
    first, last = int(numbers[1]), int(numbers[2])
    if last < first:
        raise BadInput(f"The range {{{content}}} is empty; expected its lower end first, such as {{000..063}}.")
    return [f"{number:0{len(numbers[1])}d}" for number in range(first, last + 1)]


def files_below(location: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files below a folder with one of the suffixes, in natural order; hidden ones are skipped."""
    with translated_errors(location):
        if not is_url(location):
            root = Path(location).expanduser()
            paths = [str(path) for path in walk_files(root) if path.is_file()]
            base = str(root)
        else:
            filesystem, base = filesystem_of(location)
            paths = [str(path) for path in filesystem.find(base)]
    base = base.rstrip("/")
    visible = [path for path in paths if not any(part.startswith(".") for part in _parts(path[len(base) :]))]
    taken = sorted((path for path in visible if path.lower().endswith(tuple(suffixes))), key=natural_order)
    return [str(filesystem.unstrip_protocol(path)) for path in taken] if is_url(location) else taken


def parent(location: str) -> str:
    """Return the folder of a file."""
    return location.rpartition("/")[0] if is_url(location) else str(Path(location).expanduser().parent)


def joined(folder: str, name: str) -> str:
    """Return the location of a name in a folder; a name that is a URL or an absolute path stays as it is."""
    if is_url(name) or os.path.isabs(name):
        return name
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else str(Path(folder) / name)


def _parts(path: str) -> tuple[str, ...]:
    return PurePosixPath(path.replace("\\", "/").lstrip("/")).parts


def _has_magic(location: str) -> bool:
    return glob.has_magic(location) and not (not is_url(location) and Path(location).exists())


def _glob(pattern: str) -> list[str]:
    with translated_errors(pattern):
        if not is_url(pattern):
            return [str(path) for path in glob_files(str(Path(pattern).expanduser()))]
        filesystem, path = filesystem_of(pattern)
        matches = [str(filesystem.unstrip_protocol(match)) for match in filesystem.glob(path)]
    return sorted(matches, key=natural_order)


def _is_folder(location: str) -> bool:
    with translated_errors(location):
        if not is_url(location):
            return Path(location).expanduser().is_dir()
        filesystem, path = filesystem_of(location)
        return bool(filesystem.isdir(path))


def _exists(location: str) -> bool:
    with translated_errors(location):
        if not is_url(location):
            return Path(location).expanduser().exists()
        filesystem, path = filesystem_of(location)
        return bool(filesystem.exists(path))


def filesystem_of(location: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, which it keeps per process, and the path in it."""
    try:
        fsspec: Any = importlib.import_module("fsspec")
        filesystem, path = fsspec.core.url_to_fs(location)
    except ImportError as error:  # fsspec itself, or the package for the protocol: its message names it
        raise BadInput(
            f"'{location}' cannot be read: {error}. URLs are read by fsspec, with a package for each protocol: "
            "pip install fsspec s3fs (or gcsfs, adlfs, aiohttp, …)."
        ) from error
    except ValueError as error:
        raise BadInput(f"'{location}' cannot be read: {error}; expected a URL that fsspec knows.") from error
    return filesystem, str(path)


@contextmanager
def translated_errors(location: str, verb: str = "read") -> Iterator[None]:
    """Raise BadInput for errors of the disk or the network while a location is read, or "written to"."""
    try:
        yield
    except BadInput:
        raise
    except FileNotFoundError as error:
        raise BadInput(f"There is no file '{location}'; expected one that can be read.") from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise BadInput(f"'{location}' cannot be {verb} ({reason}); look at its permissions and the network.") from error
