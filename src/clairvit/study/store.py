"""Store: a folder of Parquet parts, one for each unit, that any number of processes may write to and DuckDB reads.

store/
  store.json            the format, and the studies that were run
  parts/KEY.parquet     the rows of one unit, written under another name and renamed: whole, or not there
  failed/KEY.json       what went wrong with a unit; gone once it works
  claims/KEY            locked by the process that is at it; the lock dies with the process
  broken/KEY.parquet    parts that could not be read
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from clairvit._version import __version__
from clairvit.errors import BadInput, ClairError
from clairvit.study.plan import Cell, Study, Unit

FORMAT = 1
Row = dict[str, Any]
# Names and kinds of the columns, as DuckDB and Parquet call them.
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
    "meaning": "string",
    "across": "string",
    "counts": "list<double>",
    "forwards": "int64",
    "backwards": "int64",
    "seconds": "double",
    "note": "string",
    "version": "string",
}


@dataclass(frozen=True)
class Store:
    """What is known, in one folder."""

    path: Path

    @classmethod
    def open(cls, path: str | Path, *, create: bool = True) -> Store:
        """A store that is there, or a new one."""
        folder = Path(path)
        about = folder / "store.json"
        if about.exists():
            found = _read_json(about)
            if found.get("format") != FORMAT:
                raise BadInput(
                    f"The store '{folder}' has format {found.get('format')} (ClairViT {found.get('clairvit')}), and "
                    f"this is ClairViT {__version__} with format {FORMAT}; use that version, or another folder."
                )
        elif not create:
            raise BadInput(f"There is no store in '{folder}'; expected a folder that `clairvit bench` wrote.")
        elif folder.exists() and any(folder.iterdir()):
            raise BadInput(f"The folder '{folder}' is not empty and no store; expected a new folder, or a store.")
        for name in ("parts", "failed", "claims"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        store = cls(folder)
        if not about.exists():
            store._write_json(about, {"format": FORMAT, "clairvit": __version__, "studies": []})
        return store

    def remember(self, study: Study) -> None:
        """Note what was asked, once."""
        about = self.path / "store.json"
        with self._locked("store"):
            found = _read_json(about)
            document = json.loads(json.dumps(study.as_document()))
            if document not in found["studies"]:
                found["studies"].append(document)
                self._write_json(about, found)

    def studies(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = _read_json(self.path / "store.json")["studies"]
        return found

    def parts(self) -> tuple[list[Path], list[Path]]:
        """Those that can be read, and those that cannot: these are moved to broken/, so that they are made again."""
        import pyarrow.parquet as parquet
        from pyarrow.lib import ArrowException

        whole, broken = [], []
        for file in sorted((self.path / "parts").glob("*.parquet")):
            try:
                parquet.read_schema(file)
                parquet.read_table(file, columns=["unit"])
            except (ArrowException, OSError):
                (self.path / "broken").mkdir(exist_ok=True)
                os.replace(file, self.path / "broken" / file.name)
                broken.append(self.path / "broken" / file.name)
            else:
                whole.append(file)
        return whole, broken

    def cells(self) -> frozenset[Cell]:
        """What is computed."""
        _, rows = self.query("select distinct model_hash, image_hash, method, metric, settings from results")
        return frozenset(Cell(*row) for row in rows)

    def write(self, unit: Unit, rows: Sequence[Row]) -> Path:
        """The rows of a unit, all or nothing."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        schema = arrow.schema([(name, _arrow(kind)) for name, kind in COLUMNS.items()])
        table = arrow.Table.from_pylist([{**dict.fromkeys(COLUMNS), **row} for row in rows], schema=schema)
        target = self.path / "parts" / f"{unit.key}.parquet"
        with self._new(target) as temporary:
            parquet.write_table(table, temporary, compression="zstd")
        (self.path / "failed" / f"{unit.key}.json").unlink(missing_ok=True)
        return target

    def fail(self, unit: Unit, error: str) -> None:
        self._write_json(self.path / "failed" / f"{unit.key}.json", {"unit": unit.key, "error": error, **vars(unit)})

    def failures(self) -> list[dict[str, Any]]:
        return [_read_json(file) for file in sorted((self.path / "failed").glob("*.json"))]

    def has(self, unit: Unit) -> bool:
        return (self.path / "parts" / f"{unit.key}.parquet").exists()

    def claim(self, unit: Unit) -> IO[str] | None:
        """A lock on a unit, to be closed when it is done; None if another process has it.

        The lock is the open file's, so that a process that is killed lets go of it.
        """
        file = (self.path / "claims" / unit.key).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def query(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows; the table is `results`, one row a method, metric and image."""
        import duckdb

        whole, _ = self.parts()
        with duckdb.connect() as base:
            if whole:
                files = [str(file) for file in whole]
                base.from_parquet(files).create_view("results")
            else:
                columns = ", ".join(f"{name} {_duck(kind)}" for name, kind in COLUMNS.items())
                base.execute(f"create table results ({columns})")
            try:
                found = base.execute(sql)
                names = [column[0] for column in found.description or ()]
                return names, found.fetchall()
            except duckdb.Error as error:
                raise BadInput(
                    f"The query failed: {str(error).strip()} The table is 'results' with the columns "
                    f"{', '.join(COLUMNS)}."
                ) from error

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self.path / "claims" / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _new(self, target: Path) -> Iterator[Path]:
        """A temporary file that becomes the target when the block ends well."""
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".tmp")
        os.close(handle)
        try:
            yield Path(name)
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)

    def _write_json(self, target: Path, content: Mapping[str, Any]) -> None:
        with self._new(target) as temporary:
            temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClairError(f"'{path}' cannot be read ({error}); restore it, or begin a new store.") from error
    return found


def _arrow(kind: str) -> Any:
    import pyarrow as arrow

    kinds = {"string": arrow.string(), "int64": arrow.int64(), "double": arrow.float64(), "bool": arrow.bool_()}
    return kinds.get(kind) or arrow.list_(arrow.float64())


def _duck(kind: str) -> str:
    return {"string": "varchar", "int64": "bigint", "double": "double", "bool": "boolean"}.get(kind, "double[]")
