"""Store: a folder of Parquet parts, one for each unit, that any number of processes may write to and DuckDB reads.

store/
  store.json            the format, the studies that were run, and a record of each model
  parts/KEY-SUM.parquet the rows of one unit, written atomically; SUM is a checksum of its bytes
  parts/units-KEY-SUM.parquet  the rows of many units, whose keys its metadata lists: `Store.compact` writes it
  plans/KEY.json        the weights and images that a study planned, from which a report knows what is missing
  failed/KEY.json       the error of a unit; removed once it is computed
  claims/KEY            locked by the process that computes the unit; the lock ends with the process
  broken/               parts whose checksum is wrong
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit._io import replace_file
from clairvit._version import __version__
from clairvit.bench.plan import CellSet, Study, Unit
from clairvit.data.locations import is_url
from clairvit.errors import BadInput, ClairError, ClairWarning, importing
from clairvit.metrics.own_code import Codes

if TYPE_CHECKING:
    from filelock import BaseFileLock

FORMAT = 1  # raised with every change that makes older stores unreadable; a column that a part lacks is null
STALE = 3600.0  # seconds after which a temporary file has no writer any more
FOLDERS = ("parts", "failed", "claims")  # with temporary files, what a process killed in `open` may leave
POLL = 0.05  # seconds between attempts to lock a file that another process has locked
COLUMNS = {
    "unit": "string",
    "model": "string",
    "model_hash": "string",
    "data": "string",
    "image": "string",
    "image_hash": "string",
    "label": "int64",
    "predicted": "int64",
    "probability": "double",
    "method": "string",
    "metric": "string",
    "settings": "string",
    "options": "string",
    "better": "string",
    "value": "double",
    "degenerate": "bool",
    "x": "list<double>",
    "y": "list<double>",
    "meaning": "string",  # of y
    "across": "string",  # meaning of x
    "counts": "list<double>",
    "forwards": "int64",
    "backwards": "int64",
    "seconds": "double",
    "note": "string",
    "among": "string",  # hash of the set of images, for a metric of a whole set
    "version": "string",
    "code": "string",  # of an own method and of an own metric, "hash/hash"
}
# A cell and the names by which it was requested; two studies that ran at the same time may both have computed it.
CELL_COLUMNS = ("model_hash", "data", "image", "image_hash", "method", "metric", "settings", "among")
COMPACTED = "units"  # the beginning of the names of parts that hold many units
COMPACTED_ROWS = 1_000_000
UNITS_KEY = b"clairvit.units"  # of a compacted part's metadata
SORTED_BY = ("metric", "method", "image")  # rows of a compacted part
ROW_GROUP = 100_000  # rows
READ_ATTEMPTS = 5  # of a query whose parts are compacted while it begins
Row = dict[str, Any]


@dataclass(frozen=True)
class Store:
    """The results of studies in one folder."""

    path: Path

    @classmethod
    def open(cls, path: str | Path, *, create: bool = True) -> Store:
        """Return the store in a folder, or create it there."""
        check_place(path, create=create)
        store = cls(Path(path))
        if create:
            with store._os_errors():
                for name in FOLDERS:
                    (store.path / name).mkdir(parents=True, exist_ok=True)
            with store._locked("store"):  # another process may create it too
                if not store._index.exists():
                    store._write_json(store._index, {"format": FORMAT, "clairvit": __version__, "studies": []})
        return store

    @property
    def _index(self) -> Path:
        return self.path / "store.json"

    # studies, models and plans

    def add_study(self, study: Study) -> None:
        """Add a study to the index, once; remove what processes that were killed have left."""
        with self._locked("store"):
            for path in list((self.path / "claims").iterdir()):  # lock files of processes that ended
                if path.name != "store" and (lock := self._lock(path, blocking=False)) is not None:
                    _remove_lock(lock, path)
            for file in self.path.rglob(".*.tmp"):
                with suppress(FileNotFoundError):  # its writer is alive and has just renamed it
                    if time.time() - file.stat().st_mtime > STALE:
                        file.unlink()
            index = _read_json(self._index)
            document = json.loads(json.dumps(study.as_document()))
            if document not in index["studies"]:
                index["studies"].append(document)
                self._write_json(self._index, index)

    def studies(self) -> list[dict[str, Any]]:
        """Return what `add_study` wrote."""
        documents: list[dict[str, Any]] = _read_json(self._index)["studies"]
        return documents

    def add_models(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Add preprocessing and weights of models by the hash that their rows have as `model_hash`."""
        with self._locked("store"):
            index = _read_json(self._index)
            models = {**index.get("models", {}), **records}
            if models != index.get("models"):
                self._write_json(self._index, {**index, "models": models})

    def models(self) -> dict[str, dict[str, Any]]:
        """Return preprocessing, weights' hash and assumptions by `model_hash`; stores of earlier versions have none."""
        records: dict[str, dict[str, Any]] = _read_json(self._index).get("models", {})
        return records

    def add_codes(self, study: Study, codes: Codes) -> None:
        """Keep by which code the own methods and metrics of a study are computed now: results are of no other one."""
        with self._locked("store"):
            kept, index = self.codes_with(study, codes), _read_json(self._index)
            if kept != self.codes():
                entry = {kind: dict(items) for kind, items in zip(Codes._fields, kept, strict=True)}
                self._write_json(self._index, {**index, "codes": entry})

    def codes_with(self, study: Study, codes: Codes) -> Codes:
        """Return `codes()` once a study with these codes is computed; "" for what was own and is built in now."""
        kept = []
        for texts, last, present in zip((study.methods, study.metrics), self.codes(), codes, strict=True):
            known, now = dict(last), dict(present)
            kept.append(known | {text: now.get(text, "") for text in texts if text in now or text in known})
        return Codes(*(tuple(items.items()) for items in kept))

    def codes(self) -> Codes:
        """Return by which code the own methods and metrics were computed last; "" for what is built in now."""
        kept = _read_json(self._index).get("codes", {}) if self._index.exists() else {}
        return Codes(*(tuple(kept.get(kind, {}).items()) for kind in Codes._fields))

    def write_plan(self, document: Mapping[str, Any]) -> None:
        """Write which weights and images a study planned; one file for each study, the latest plan counts."""
        with self._os_errors():
            (self.path / "plans").mkdir(exist_ok=True)
        key = hashlib.blake2b(json.dumps(document["study"], sort_keys=True).encode(), digest_size=8).hexdigest()
        self._write_json(self.path / "plans" / f"{key}.json", document)

    def plans(self) -> list[dict[str, Any]]:
        """Return what `write_plan` wrote."""
        return [_read_json(file) for file in sorted((self.path / "plans").glob("*.json"))]

    # results

    def write(self, unit: Unit, rows: Sequence[Row]) -> Path:
        """Write the rows of a unit atomically."""
        import pyarrow as arrow

        table = arrow.Table.from_pylist([{**dict.fromkeys(COLUMNS), **row} for row in rows], schema=_arrow_schema())
        content = _parquet_bytes(table)
        target = self.path / "parts" / f"{unit.key}-{_checksum(content)}.parquet"
        with self._os_errors():
            replace_file(target, content)
            (self.path / "failed" / f"{unit.key}.json").unlink(missing_ok=True)
        return target

    def merge(self, other: Store) -> int:
        """Add the results, studies, models and plans of another store, such as one shard's; return the parts added.

        Parts are named by their content, so that what is here already is not written again.
        """
        added = 0
        present = self._units()
        for part in other.parts()[0]:
            target = self.path / "parts" / part.name
            if not target.exists() and not units_of(part) <= present:
                with self._os_errors():
                    replace_file(target, part.read_bytes())
                added += 1
        for document in other.plans():
            self.write_plan(document)
        self.add_models(other.models())
        codes = {kind: dict(items) for kind, items in zip(Codes._fields, other.codes(), strict=True)}
        with self._locked("store"):
            index = _read_json(self._index)
            new = [study for study in other.studies() if study not in index["studies"]]
            kept = {kind: items | index.get("codes", {}).get(kind, {}) for kind, items in codes.items()}
            if new or any(kept.values()):
                codes_entry = {"codes": kept} if any(kept.values()) else {}
                self._write_json(self._index, {**index, "studies": [*index["studies"], *new], **codes_entry})
        return added

    def has(self, unit: Unit) -> bool:
        """Return whether the rows of a unit are stored, alone or compacted."""
        folder = self.path / "parts"
        return any(folder.glob(f"{unit.key}-*.parquet")) or any(
            unit.key in units_of(file) for file in folder.glob(f"{COMPACTED}-*.parquet")
        )

    def _units(self) -> frozenset[str]:
        """Return the keys of all units that are stored."""
        files = (self.path / "parts").glob("*.parquet")
        return frozenset(key for file in files for key in units_of(file))

    def write_failure(self, unit: Unit, error: str) -> None:
        self._write_json(self.path / "failed" / f"{unit.key}.json", {"unit": unit.key, "error": error, **vars(unit)})

    def failures(self) -> list[dict[str, Any]]:
        """Return what `write_failure` wrote of units that still have no rows."""
        return [_read_json(file) for file in sorted((self.path / "failed").glob("*.json"))]

    def parts(self) -> tuple[list[Path], list[Path]]:
        """Return the intact parts, and the damaged ones after moving them to broken/, so that they are computed again.

        A part whose unit was compacted and that is not removed yet is left out. A file is checked once per process,
        and again if it changes.

        Raises:
            ClairError: If a part cannot be read although the disk did not lose it.
        """
        intact, broken = [], []
        for file in sorted((self.path / "parts").glob("*.parquet")):
            try:
                if _is_intact(file):
                    intact.append(file)
                    continue
                broken.append(self._move_to_broken(file))
            except FileNotFoundError:  # another process has moved it
                continue
            except OSError as error:
                if error.errno != errno.EIO:  # no permission, too many open files: it may well be intact
                    raise ClairError(
                        f"'{file}' cannot be read ({error.strerror or error}) and was left where it is; get the right "
                        "to read it, then type the same again."
                    ) from error
                broken.append(self._move_to_broken(file))
        compacted = {key for file in intact if _is_compacted(file) for key in units_of(file)}
        return [file for file in intact if _is_compacted(file) or not units_of(file) <= compacted], broken

    def compact(self, rows: int = COMPACTED_ROWS) -> int:
        """Write the rows of many units into few large files and remove their parts; return the parts removed.

        Readers and writers may go on: a large file is complete before its parts are removed, and readers leave out
        parts whose units are in one. A process that is killed leaves both, and the next call removes the parts.

        Args:
            rows: About as many rows of one file; files of half as many or more are left as they are.
        """
        with self._locked("compact"):
            removed = self._remove_compacted()
            group: list[Path] = []
            count = 0
            for file in [*self._small_parts(rows), None]:
                if group and (file is None or count >= rows):
                    removed += self._compact_files(group) if len(group) > 1 else 0
                    group, count = [], 0
                if file is not None:
                    group.append(file)
                    count += _row_count(file)
        return removed

    def _small_parts(self, rows: int) -> list[Path]:
        return [file for file in self.parts()[0] if _row_count(file) < rows / 2]

    def _compact_files(self, files: Sequence[Path]) -> int:
        """Write one file with the rows of several, sorted so that equal texts are together, then remove these."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        tables = [parquet.read_table(file, schema=_arrow_schema()) for file in files]
        units = sorted(frozenset(key for file in files for key in units_of(file)))
        table = arrow.concat_tables(tables).sort_by([(name, "ascending") for name in SORTED_BY])
        table = table.replace_schema_metadata({UNITS_KEY: json.dumps(units).encode()})
        content = _parquet_bytes(table)
        key = hashlib.blake2b("".join(units).encode(), digest_size=8).hexdigest()
        with self._os_errors():
            replace_file(self.path / "parts" / f"{COMPACTED}-{key}-{_checksum(content)}.parquet", content)
            for file in files:
                file.unlink(missing_ok=True)
        return len(files)

    def _remove_compacted(self) -> int:
        """Remove parts whose units are in a larger file: a compaction was stopped before it could."""
        compacted = frozenset(key for file in self.parts()[0] if _is_compacted(file) for key in units_of(file))
        files = [file for file in (self.path / "parts").glob("*.parquet") if not _is_compacted(file)]
        leftover = [file for file in files if units_of(file) <= compacted]
        with self._os_errors():
            for file in leftover:
                file.unlink(missing_ok=True)
        return len(leftover)

    def _move_to_broken(self, file: Path) -> Path:
        target = self.path / "broken" / file.name
        with self._os_errors():
            target.parent.mkdir(exist_ok=True)
            try:
                os.replace(file, target)
            except FileNotFoundError:
                return target  # another process moved it, and warned
        message = f"'{file}' is damaged and was moved to '{target}'; what was in it is computed again by the next run."
        warnings.warn(message, ClairWarning, stacklevel=2)
        return target

    def versions(self) -> list[str]:
        """Return the versions of ClairViT that computed the results."""
        return [str(version) for (version,) in self.query("select distinct version from parts order by all")[1]]

    def cells(self, codes: Codes | None = None) -> CellSet:
        """Return the cells that are computed, those of own methods and metrics by these codes; None: by the last ones.

        The database numbers the pairs of method and metric and returns the images that have the same ones together, so
        that neither it nor this process holds a text per cell.
        """
        current = self._by_code(codes)
        _, rows = self.query(
            f"with current as (select * from parts where {current}), "
            "numbers as (select method, metric, row_number() over () as number "
            "from (select distinct method, metric from current)), "
            "of_image as (select model_hash, image_hash, settings, coalesce(among, '') as image_set, "
            "list_sort(list(distinct number)) as numbers "
            "from current join numbers using (method, metric) group by all) "
            "select numbers, list([model_hash, image_hash, settings, image_set]) as images, null as pair "
            "from of_image group by numbers "
            "union all select [number], null, [method, metric] from numbers"
        )
        pairs = {numbers[0]: (pair[0], pair[1]) for numbers, _, pair in rows if pair is not None}
        groups = [(frozenset(pairs[number] for number in numbers), images) for numbers, images, pair in rows if images]
        return CellSet({(key[0], key[1], key[2], key[3]): of_image for of_image, images in groups for key in images})

    def _by_code(self, codes: Codes | None = None) -> str:
        """Return the SQL condition that rows of own methods and metrics are of these codes; None: of the last ones."""
        conditions = ["true"]
        for part, column, items in zip((1, 2), ("method", "metric"), codes or self.codes(), strict=True):
            conditions += [
                f"({column} <> {sql_text(text)} or coalesce(split_part(code, '/', {part}), '') = {sql_text(code)})"
                for text, code in items
            ]
        return " and ".join(conditions)

    def query(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return column names and rows; the table `results` has each cell once, `parts` as often as it was computed."""
        import duckdb

        for attempt in range(READ_ATTEMPTS):
            intact, _ = self.parts()
            try:
                return _query(intact, sql, self._by_code())
            except duckdb.Error as error:
                if attempt + 1 < READ_ATTEMPTS and not all(file.exists() for file in intact):
                    continue  # parts were compacted since they were listed
                raise BadInput(
                    f"The query failed: {' '.join(str(error).split())} The table is 'results' with the columns "
                    f"{', '.join(COLUMNS)}."
                ) from error
        raise AssertionError("unreachable")

    # locks

    def lock_unit(self, unit: Unit) -> BaseFileLock | None:
        """Return a lock on a unit, to be released by `unlock_unit`; None if another process has it.

        The operating system holds the lock, so that it is released when the process is killed.
        """
        return self._lock(self.path / "claims" / unit.key, blocking=False)

    def unlock_unit(self, unit: Unit, lock: BaseFileLock) -> None:
        """Remove the lock of a unit and its file."""
        _remove_lock(lock, self.path / "claims" / unit.key)

    def _lock(self, path: Path, *, blocking: bool) -> BaseFileLock | None:
        """Return the lock on a file, or None where another process holds it and `blocking` is false."""
        with self._os_errors():
            path.touch()
        from filelock import FileLock, SoftFileLock, Timeout

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
        except (OSError, NotImplementedError) as os_error:  # a network disk without locks
            error = os_error
        raise ClairError(
            f"Files in '{path.parent}' cannot be locked ({getattr(error, 'strerror', None) or error}), so that two "
            "processes could not share the store; expected a folder on a disk of this machine."
        ) from error

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        lock = self._lock(self.path / "claims" / name, blocking=True)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    # files

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Raise `ClairError` for a full disk or a folder that is read-only."""
        try:
            yield
        except OSError as error:
            raise ClairError(
                f"The store '{self.path}' cannot be written to ({error.strerror or error}). What is in it is complete; "
                "free some space or get the right to write, then type the same again: it goes on from there."
            ) from error

    def _write_json(self, target: Path, content: Mapping[str, Any]) -> None:
        with self._os_errors():
            replace_file(target, json.dumps(content, ensure_ascii=False, indent=1).encode())


def check_packages() -> None:
    """Raise a ClairError unless the packages of studies can be imported: now, and not after the first unit."""
    with importing("A study", extra="study"):
        import duckdb  # noqa: F401
        import filelock  # noqa: F401
        import jinja2  # noqa: F401
        import pyarrow.parquet  # noqa: F401


def check_place(path: str | Path, *, create: bool = True) -> None:
    """Raise `BadInput` for a URL, a folder that is no store, or one of another format; create nothing."""
    check_packages()
    if is_url(str(path)):
        raise BadInput(
            f"The store '{path}' is at a URL, where units cannot be locked nor parts renamed; expected a folder of a "
            "disk. Copy it there afterwards: its parts never change."
        )
    folder = Path(path)
    index_file = folder / "store.json"
    if index_file.exists():
        index = _read_json(index_file)
        if index.get("format") != FORMAT:
            raise BadInput(
                f"The store '{folder}' has format {index.get('format')} (ClairViT {index.get('clairvit')}), and "
                f"this is ClairViT {__version__} with format {FORMAT}; use that version, or another folder."
            )
        if not isinstance(index.get("studies"), list):
            raise ClairError(
                f"'{index_file}' has no list of studies; restore it, or begin a new store in another folder."
            )
    elif not create:
        raise BadInput(f"There is no store in '{folder}'; expected a folder that `clairvit bench` wrote.")
    elif folder.exists() and not folder.is_dir():
        raise BadInput(f"'{folder}' is a file; expected a new folder, or a store.")
    elif folder.exists() and any(file.name not in FOLDERS and file.suffix != ".tmp" for file in folder.iterdir()):
        raise BadInput(f"The folder '{folder}' is not empty and no store; expected a new folder, or a store.")


def units_of(file: Path) -> frozenset[str]:
    """Return the keys of the units in a part."""
    return _listed_units(str(file)) if _is_compacted(file) else frozenset((file.stem.rpartition("-")[0],))


@lru_cache(maxsize=4096)  # a file's name has a checksum of its bytes
def _listed_units(path: str) -> frozenset[str]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        metadata = parquet.read_schema(path).metadata or {}
        return frozenset(map(str, json.loads(metadata.get(UNITS_KEY, b"[]"))))
    except (OSError, ValueError, arrow.ArrowException):  # damaged, which `parts` reports
        return frozenset()


def _is_compacted(file: Path) -> bool:
    return file.name.startswith(f"{COMPACTED}-")


def _row_count(file: Path) -> int:
    import pyarrow.parquet as parquet

    return int(parquet.read_metadata(file).num_rows)


_CHECKED: set[tuple[str, int, int, int]] = set()  # path, size and times of files whose checksum is right
_WITHOUT_COPIES: set[frozenset[str]] = set()  # sets of parts in which every cell is once


def forget_checks() -> None:
    """Forget what this process checked, as a new process does."""
    _CHECKED.clear()
    _WITHOUT_COPIES.clear()


def _is_intact(file: Path) -> bool:
    """Return whether a file has the checksum of its name."""
    status = file.stat()
    state = (str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if state in _CHECKED:
        return True
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    if file.stem.rpartition("-")[2] != checksum:
        return False
    _CHECKED.add(state)
    return True


def sql_text(value: str) -> str:
    """Return a text as SQL writes it."""
    return "'" + value.replace("'", "''") + "'"


def _query(files: Sequence[Path], sql: str, current: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run a query on the views `parts` and `results` of these files, the latter of rows that are `current`.

    Errors are DuckDB's. Parts of earlier versions lack the newest columns, which are null there. Two studies that ran
    at the same time may both have computed a cell, which `results` has once. Sorting millions of rows takes long, so
    they are sorted only if a hash of their cell occurs twice.
    """
    import duckdb

    types = {"string": "varchar", "int64": "bigint", "double": "double", "bool": "boolean"}
    columns = ", ".join(f"{name} {types.get(kind, 'double[]')}" for name, kind in COLUMNS.items())
    with duckdb.connect() as database:
        if files:
            read = f"read_parquet([{', '.join(sql_text(str(file)) for file in files)}], union_by_name = true)"
            database.execute(f"create table newest ({columns})")
            database.execute(f"create view parts as select * from {read} union all by name select * from newest")
        else:
            database.execute(f"create table parts ({columns})")

        cell, key = ", ".join(CELL_COLUMNS), frozenset([current, *map(str, files)])
        results = f"select * from parts where {current}"
        if key not in _WITHOUT_COPIES:
            hashes = f"select hash({cell}) as cell from parts where {current} group by cell having count(*) > 1 limit 1"
            if database.execute(hashes).fetchall():
                results += f" qualify row_number() over (partition by {cell} order by unit) = 1"
            else:
                _WITHOUT_COPIES.add(key)
        database.execute(f"create view results as {results}")
        result = database.execute(sql)
        if result is None:
            raise BadInput("The query is empty; expected one such as 'select * from results limit 9'.")
        return [column[0] for column in result.description or ()], result.fetchall()


def _parquet_bytes(table: Any) -> bytes:
    import pyarrow.parquet as parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd", row_group_size=ROW_GROUP)
    return buffer.getvalue()


@lru_cache(maxsize=1)
def _arrow_schema() -> Any:
    import pyarrow as arrow

    types = {"string": arrow.string(), "int64": arrow.int64(), "double": arrow.float64(), "bool": arrow.bool_()}
    return arrow.schema([(name, types.get(kind) or arrow.list_(arrow.float64())) for name, kind in COLUMNS.items()])


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _remove_lock(lock: BaseFileLock, path: Path) -> None:
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
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, no table")
    except (OSError, ValueError) as error:
        raise ClairError(f"'{path}' cannot be read ({error}); restore it, or begin a new store.") from error
    return content
