"""Store: a folder of Parquet parts, one for each unit, that any number of processes may write to and DuckDB reads.

store/
  store.json            the format, the studies that were run, and what is known of each model
  parts/KEY-SUM.parquet the rows of one unit, written under another name and renamed: whole, or not there;
                        SUM is a checksum of its bytes
  plans/KEY.json        the weights and images that a study planned, by which a report knows what is missing
  failed/KEY.json       what went wrong with a unit; gone once it works
  claims/KEY            locked by the process that is at it; the lock dies with the process
  broken/               parts that are not what was written
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from clairvit._version import __version__
from clairvit.bench.plan import Cell, Study, Unit
from clairvit.bench.schema import COLUMNS, ONE_CELL, declared, schema
from clairvit.errors import BadInput, ClairError, ClairWarning

FORMAT = 1
STALE = 3600.0  # seconds; nobody writes a file for so long
BEGUN = ("parts", "failed", "claims")  # with temporary files, what a process killed while it began a store leaves
POLL = 0.05  # seconds between attempts to lock a file that another process has locked
Row = dict[str, Any]


@dataclass(frozen=True)
class Store:
    """What is known, in one folder."""

    path: Path

    @classmethod
    def open(cls, path: str | Path, *, create: bool = True) -> Store:
        """A store that is there, or a new one."""
        check_place(path, create=create)
        store = cls(Path(path))
        if create:
            with store._writing():
                for name in BEGUN:
                    (store.path / name).mkdir(parents=True, exist_ok=True)
            about = store.path / "store.json"
            with store._locked("store"):  # another process may begin it too
                if not about.exists():
                    store._write_json(about, {"format": FORMAT, "clairvit": __version__, "studies": []})
        return store

    def remember(self, study: Study) -> None:
        """Note what was asked, once."""
        about = self.path / "store.json"
        with self._locked("store"):
            self._sweep()
            found = _read_json(about)
            document = json.loads(json.dumps(study.as_document()))
            if document not in found["studies"]:
                found["studies"].append(document)
                self._write_json(about, found)

    def remember_models(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Note preprocessing and weights of models by the hash that their rows have as `model_hash`."""
        about = self.path / "store.json"
        with self._locked("store"):
            content = _read_json(about)
            models = {**content.get("models", {}), **records}
            if models != content.get("models"):
                self._write_json(about, {**content, "models": models})

    def models(self) -> dict[str, dict[str, Any]]:
        """Return preprocessing, weights' hash and assumptions by `model_hash`; stores of earlier versions have none."""
        records: dict[str, dict[str, Any]] = _read_json(self.path / "store.json").get("models", {})
        return records

    def keep_plan(self, document: Mapping[str, Any]) -> None:
        """Write which weights and images a study planned; one file for each study, the latest plan counts."""
        with self._writing():
            (self.path / "plans").mkdir(exist_ok=True)
        key = hashlib.blake2b(json.dumps(document["study"], sort_keys=True).encode(), digest_size=8).hexdigest()
        self._write_json(self.path / "plans" / f"{key}.json", document)

    def plans(self) -> list[dict[str, Any]]:
        """Return what `keep_plan` wrote."""
        return [_read_json(file) for file in sorted((self.path / "plans").glob("*.json"))]

    def _sweep(self) -> None:
        """What processes that were killed have left behind: files half written, and claims on what they had done."""
        for path in list((self.path / "claims").iterdir()):
            if path.name != "store" and (lock := self._lock(path, blocking=False)) is not None:
                _remove(lock, path)
        for file in self.path.rglob(".*.tmp"):
            with suppress(FileNotFoundError):  # its writer is alive and has just renamed it
                if time.time() - file.stat().st_mtime > STALE:
                    file.unlink()

    def studies(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = _read_json(self.path / "store.json")["studies"]
        return found

    def parts(self) -> tuple[list[Path], list[Path]]:
        """Those that are what was written, and those that are not: moved to broken/, so that they are made again."""
        whole, broken = [], []
        for file in sorted((self.path / "parts").glob("*.parquet")):
            try:
                if file.stem.rpartition("-")[2] == _checksum(file):
                    whole.append(file)
                    continue
                broken.append(self._aside(file))
            except FileNotFoundError:  # another process has moved it
                continue
            except OSError as error:
                if error.errno != errno.EIO:  # no right to read it, too many open files: it may well be whole
                    raise ClairError(
                        f"'{file}' cannot be read ({error.strerror or error}) and was left where it is; get the right "
                        "to read it, then type the same again."
                    ) from error
                broken.append(self._aside(file))
        return whole, broken

    def _aside(self, file: Path) -> Path:
        aside = self.path / "broken" / file.name
        with self._writing():
            aside.parent.mkdir(exist_ok=True)
            try:
                os.replace(file, aside)
            except FileNotFoundError:
                return aside  # another process found the same, and has said so
        message = f"'{file}' is damaged and was moved to '{aside}'; what was in it is computed again by the next run."
        warnings.warn(message, ClairWarning, stacklevel=2)
        return aside

    def versions(self) -> list[str]:
        """The versions of ClairViT that computed what is there."""
        return [str(version) for (version,) in self.query("select distinct version from parts order by all")[1]]

    def cells(self) -> frozenset[Cell]:
        """What is computed."""
        columns = "model_hash, image_hash, method, metric, settings, coalesce(among, '')"
        _, rows = self.query(f"select distinct {columns} from parts")
        return frozenset(map(Cell._make, rows))

    def write(self, unit: Unit, rows: Sequence[Row]) -> Path:
        """The rows of a unit, all or nothing."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        table = arrow.Table.from_pylist([{**dict.fromkeys(COLUMNS), **row} for row in rows], schema=schema())
        with self._new(self.path / "parts") as temporary:
            parquet.write_table(table, temporary, compression="zstd")
            target = self.path / "parts" / f"{unit.key}-{_checksum(temporary)}.parquet"
            _settle(temporary, target)
            (self.path / "failed" / f"{unit.key}.json").unlink(missing_ok=True)
        return target

    def fail(self, unit: Unit, error: str) -> None:
        self._write_json(self.path / "failed" / f"{unit.key}.json", {"unit": unit.key, "error": error, **vars(unit)})

    def failures(self) -> list[dict[str, Any]]:
        return [_read_json(file) for file in sorted((self.path / "failed").glob("*.json"))]

    def has(self, unit: Unit) -> bool:
        return any((self.path / "parts").glob(f"{unit.key}-*.parquet"))

    def claim(self, unit: Unit) -> BaseFileLock | None:
        """Return a lock on a unit, to be released when it is done; None if another process has it.

        The operating system holds the lock, so that a process that is killed lets go of it.
        """
        return self._lock(self.path / "claims" / unit.key, blocking=False)

    def _lock(self, path: Path, *, blocking: bool) -> BaseFileLock | None:
        """Return the lock on a file, or None where another process holds it and `blocking` is false."""
        with self._writing():
            path.touch()
        lock: BaseFileLock = FileLock(path, thread_local=False)
        error: Exception = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        try:
            while True:
                with suppress(Timeout):
                    lock.acquire(blocking=False)
                if isinstance(lock, SoftFileLock):  # a mere file, which a process that is killed would leave behind
                    lock.release()
                    break
                if lock.is_locked:
                    return lock
                if not blocking:
                    return None
                time.sleep(POLL)
        except (OSError, NotImplementedError) as refused:  # a network disk without locks
            error = refused
        raise ClairError(
            f"Files in '{path.parent}' cannot be locked ({getattr(error, 'strerror', None) or error}), so that two "
            "processes could not share the store; expected a folder on a disk of this machine."
        ) from error

    def release(self, unit: Unit, lock: BaseFileLock) -> None:
        """Remove a claim and its lock."""
        _remove(lock, self.path / "claims" / unit.key)

    def query(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows; the table is `results`, each cell once (`parts`: as often as it was made)."""
        import duckdb

        whole, _ = self.parts()
        with duckdb.connect() as base:
            if whole:
                base.from_parquet([str(file) for file in whole]).create_view("parts")
            else:
                base.execute(f"create table parts ({declared()})")
            once = f"row_number() over (partition by {', '.join(ONE_CELL)} order by unit) = 1"
            base.execute(f"create view results as select * from parts qualify {once}")
            try:
                found = base.execute(sql)
                if found is None:
                    raise BadInput("The query is empty; expected one such as 'select * from results limit 9'.")
                names = [column[0] for column in found.description or ()]
                return names, found.fetchall()
            except duckdb.Error as error:
                raise BadInput(
                    f"The query failed: {' '.join(str(error).split())} The table is 'results' with the columns "
                    f"{', '.join(COLUMNS)}."
                ) from error

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        lock = self._lock(self.path / "claims" / name, blocking=True)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk or a folder that is read-only ends a run in a sentence."""
        try:
            yield
        except OSError as error:
            raise ClairError(
                f"The store '{self.path}' cannot be written to ({error.strerror or error}). What is in it is complete; "
                "make room or get the right to write, then type the same again: it goes on from there."
            ) from error

    @contextmanager
    def _new(self, folder: Path) -> Iterator[Path]:
        """A temporary file, to be renamed; nothing of it is left otherwise."""
        temporary = folder / f".{secrets.token_hex(8)}.tmp"  # others may read it as the umask says: stores are shared
        with self._writing():
            try:
                yield temporary
            finally:
                temporary.unlink(missing_ok=True)

    def _write_json(self, target: Path, content: Mapping[str, Any]) -> None:
        with self._new(target.parent) as temporary:
            temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
            _settle(temporary, target)


def check_place(path: str | Path, *, create: bool = True) -> None:
    """Refuse a folder that is no store of ours, or of another format; nothing is made yet."""
    folder = Path(path)
    about = folder / "store.json"
    if about.exists():
        found = _read_json(about)
        if found.get("format") != FORMAT:
            raise BadInput(
                f"The store '{folder}' has format {found.get('format')} (ClairViT {found.get('clairvit')}), and "
                f"this is ClairViT {__version__} with format {FORMAT}; use that version, or another folder."
            )
        if not isinstance(found.get("studies"), list):
            raise ClairError(f"'{about}' has no list of studies; restore it, or begin a new store in another folder.")
    elif not create:
        raise BadInput(f"There is no store in '{folder}'; expected a folder that `clairvit bench` wrote.")
    elif folder.exists() and not folder.is_dir():
        raise BadInput(f"'{folder}' is a file; expected a new folder, or a store.")
    elif folder.exists() and any(one.name not in BEGUN and one.suffix != ".tmp" for one in folder.iterdir()):
        raise BadInput(f"The folder '{folder}' is not empty and no store; expected a new folder, or a store.")


def _checksum(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def _settle(temporary: Path, target: Path) -> None:
    """Rename once the bytes are on the disk, or a power cut could leave a name without them."""
    with temporary.open("rb+") as file:  # Windows flushes only what may be written
        os.fsync(file.fileno())
    os.replace(temporary, target)


def _remove(lock: BaseFileLock, path: Path) -> None:
    """Remove the file of a lock while it is held, so that no other process's lock is removed, then release the lock.

    Windows removes no file that is open. There it is removed after the release, which fails, and may, where another
    process has opened it since.
    """
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        lock.release()
        with suppress(OSError):
            path.unlink(missing_ok=True)
    else:
        lock.release()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, no table")
    except (OSError, ValueError) as error:
        raise ClairError(f"'{path}' cannot be read ({error}); restore it, or begin a new store.") from error
    return found
