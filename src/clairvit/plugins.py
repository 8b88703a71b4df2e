"""Methods and metrics of others: packages that declare entry points, and files or modules that are imported by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from clairvit._registry import Registration, recorded
from clairvit.errors import BadInput, ClairError, ClairWarning, user_stacklevel

GROUPS = ("clairvit.methods", "clairvit.metrics")


class Import(NamedTuple):
    """A file or module to import, and the folder from which its name is read."""

    name: str
    folder: str

    @property
    def path(self) -> Path | None:
        """The file; None for a module."""
        is_file = self.name.endswith(".py") or any(mark in self.name for mark in {os.sep, "/"})
        return Path(self.folder, self.name).resolve() if is_file else None


_lock = threading.RLock()
_loading: set[str] = set()  # groups that this process is importing
_loaded: set[str] = set()
_refused: set[tuple[str, str]] = set()  # package and module of entry points that failed
_imported: dict[Import, None] = {}
_origins: dict[tuple[str, str], str] = {}  # kind and name -> who registered it


def load_entry_points(group: str) -> None:
    """Import what installed packages declare under a group, once; a package that fails is a warning."""
    if group in _loaded:
        return
    with _lock:
        if group in _loaded or group in _loading:  # what is being imported may ask for names
            return
        _loading.add(group)
        try:
            for entry in entry_points(group=group):
                _load(entry)
            _loaded.add(group)
        finally:
            _loading.discard(group)


def _load(entry: EntryPoint) -> None:
    """Import an entry point, or warn."""
    package = entry.dist.name if entry.dist is not None else entry.module
    if (package, entry.value) in _refused:
        return
    try:
        with _registering(f"the package '{package}'"):
            entry.load()
    except Exception as error:  # the code of others may raise anything
        _refused.add((package, entry.value))
        warnings.warn(
            f"The methods and metrics of the package '{package}' are left out, because importing '{entry.module}' "
            f"failed ({_reason(error)}).",
            ClairWarning,
            stacklevel=user_stacklevel(),
        )


def import_code(names: Iterable[str | Import], folder: Path | str | None = None) -> None:
    """Import files (`my.py`) and modules (`package.module`) that register methods or metrics, each once.

    Args:
        names: Files and modules, as `--import` takes them.
        folder: Where relative names begin; None: the current directory.

    Raises:
        BadInput: One that is not there, cannot be imported, or registers nothing.
    """
    for name in names:
        source = name if isinstance(name, Import) else Import(name, str(Path(folder or ".").resolve()))
        path = source.path
        source = source if path is None else Import(str(path), "")
        if source not in _imported:
            _import(source)
            _imported[source] = None


def imported() -> tuple[Import, ...]:
    """Return what `import_code` imported in this process, for the processes that work for it."""
    return tuple(_imported)


def _import(source: Import) -> None:
    """Import a file or module; undo what it registered if that fails."""
    path, name = source.path, source.name if source.path is None else source.path.name
    if path is not None and not path.is_file():
        raise BadInput(
            f"There is no file '{path}' to import; expected a Python file that registers methods or metrics, or the "
            "name of a module."
        )
    known = set(sys.modules)
    try:
        with (
            _registering(f"'{path or name}'") as registrations,
            importable_from(source.folder if path is None else path.parent),
        ):
            module = importlib.import_module(source.name) if path is None else _import_file(path)
    except ClairError as error:
        raise BadInput(f"'{name}' cannot be imported: {error}") from error
    except ModuleNotFoundError as error:
        if path is not None or error.name is None or not f"{source.name}.".startswith(f"{error.name}."):
            raise _import_error(name, path, error) from error
        raise BadInput(
            f"There is no module '{source.name}' to import; looked in {source.folder} and in the installed packages. "
            "A file is named with its ending: my.py."
        ) from error
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise _import_error(name, path, error) from error
    if not registrations and module.__name__ not in known:
        del sys.modules[module.__name__]  # so that the next attempt is refused too
        raise BadInput(
            f"'{name}' registers no method and no metric; expected a function with @cv.method or @cv.metric in it."
        )


def _import_file(path: Path) -> ModuleType:
    """Import a file by its own name, or by one with a hash where another module has that name."""
    name = path.stem
    present = sys.modules.get(name)
    if present is not None and getattr(present, "__file__", None) == str(path):
        return present
    with importable_from(path.parent):
        importable = importlib.util.find_spec(name) if name.isidentifier() and present is None else None
    if importable is None or importable.origin != str(path):
        name = f"{name}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def importable_from(folder: Path | str) -> Iterator[None]:
    """Put a folder first on the import path inside the block and remove it afterwards."""
    directory = os.fspath(folder)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


@contextmanager
def _registering(origin: str) -> Iterator[list[Registration]]:
    """Keep what is registered inside if the block ends well and takes no name of another origin."""
    with recorded() as registrations:
        try:
            yield registrations
            for item in registrations:
                owner = _origins.get((item.registry.kind, item.name), origin)
                if item.replaced and owner != origin:
                    raise BadInput(
                        f"There is a {item.registry.kind} '{item.name}' of {owner}; expected another name, such as "
                        f"'my-{item.name}'."
                    )
        except BaseException:
            for item in reversed(registrations):
                item.undo()
            raise
    _origins.update({(item.registry.kind, item.name): origin for item in registrations})


def _reason(error: BaseException) -> str:
    """Return the first line of an error, with its type if it is not ours."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return first.removesuffix(".") if isinstance(error, ClairError) else f"{type(error).__name__}: {first}"


def _import_error(name: str, path: Path | None, error: BaseException) -> BadInput:
    """Return the error for an exception in the user's own code, with the line of the file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if path is not None and frame.filename == str(path)]
    place = f", line {lines[-1]}" if lines and not isinstance(error, SyntaxError) else ""  # which names its line itself
    return BadInput(f"'{name}' cannot be imported ({_reason(error)}{place}); expected Python that runs without error.")
