"""Columns: the names and kinds of what a store keeps of each cell. Whoever changes them raises the store's FORMAT."""

from __future__ import annotations

from typing import Any

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
    "among": "string",
    "version": "string",
}
# A cell under the names by which it was asked for; two studies that ran at once may both have computed it.
ONE_CELL = ("model_hash", "data", "image", "image_hash", "method", "metric", "settings", "among")


def schema() -> Any:
    """As Parquet has them."""
    import pyarrow as arrow

    kinds = {"string": arrow.string(), "int64": arrow.int64(), "double": arrow.float64(), "bool": arrow.bool_()}
    return arrow.schema([(name, kinds.get(kind) or arrow.list_(arrow.float64())) for name, kind in COLUMNS.items()])


def declared() -> str:
    """As SQL declares them."""
    kinds = {"string": "varchar", "int64": "bigint", "double": "double", "bool": "boolean"}
    return ", ".join(f"{name} {kinds.get(kind, 'double[]')}" for name, kind in COLUMNS.items())
