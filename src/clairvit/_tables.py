"""Results as documents and tables: `to_dict`, `to_pandas` and files, in one style for all of them."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from clairvit._io import csv_text, write_json, write_text
from clairvit.errors import BadInput, importing

SUFFIXES = (".json", ".csv")
TableRow = dict[str, Any]  # column -> value


class Tabular(ABC):
    """A result that is a document (`to_dict`, .json) and a table (`to_pandas`, .csv)."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""

    @abstractmethod
    def _table(self) -> list[TableRow]:
        """Return the rows of the table, all with the same columns."""

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`: a row per map, image, method, check, …, as in the .csv file.

        Raises:
            ClairError: pandas is not installed.
        """
        rows = self._table()
        columns = list(rows[0]) if rows else []
        return import_pandas().DataFrame([tuple(row[name] for name in columns) for row in rows], columns=columns)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a file by its suffix: .json the document, .csv the table.

        Args:
            path: The file to write; readers never see a partial file.

        Returns:
            The path.

        Raises:
            BadInput: Another suffix.
        """
        check_suffix(path, SUFFIXES)
        return write_table(self, path)


def write_table(result: Tabular, path: str | PathLike[str]) -> Path:
    """Write a result's document (.json) or its table (.csv), where undefined numbers are empty cells."""
    path = Path(path)
    if path.suffix.lower() == ".json":
        return write_json(result.to_dict(), path)
    rows = result._table()
    columns = list(rows[0]) if rows else []
    return write_text(csv_text([columns, *([_cell(row[name]) for name in columns] for row in rows)]), path)


def check_suffix(path: str | PathLike[str], suffixes: Sequence[str]) -> str:
    """Return the suffix in lower case; raise BadInput if it is none that can be written."""
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        problem = f"ends in '{suffix}'" if suffix else "has no suffix"
        raise BadInput(f"'{path}' {problem}; write to a name that ends in {', '.join(suffixes)}.")
    return suffix


def import_pandas() -> Any:
    """Return the module pandas, which is optional."""
    with importing("to_pandas()", packages="pandas"):
        return importlib.import_module("pandas")


def _cell(value: Any) -> Any:
    """Return a value as a cell has it: nothing for what is not defined."""
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
