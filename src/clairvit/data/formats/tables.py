"""Tables of images: a CSV manifest with paths or URLs, and Parquet files with paths or the bytes of the images."""

from __future__ import annotations

import csv
import io
import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from clairvit.data.formats.encoded import Label, encoded_entries, index_labels, unique_names
from clairvit.data.formats.entry import DatasetIndex, quoted_list
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.locations import expand_location, joined, opened, parent, read_bytes
from clairvit.errors import BadInput, importing

IMAGE_COLUMNS = ("image", "img", "path", "file", "filename", "jpg", "png")
LABEL_COLUMNS = ("label", "class", "cls", "target")
MASK_COLUMNS = ("mask",)
ROW_GROUPS = 4  # of image bytes that stay in memory
CSV_TREE = """
PATH.csv                      a file, pattern or {000..063}, here or at a URL
  image,label,mask            the first line; label and mask may be left out
  cats/1.jpg,cat,masks/1.png  relative to the file, or URLs
"""
PARQUET_TREE = """
PATH.parquet                  a file, folder, pattern or {000..063}, here or at a URL
  image                       bytes, {bytes, path} as Hugging Face writes it, or a path or URL
  label                       a number or a name; may be left out
"""


@dataset_format(
    "csv",
    "a CSV manifest of images",
    has=("labels", "masks"),
    tree=CSV_TREE,
    why_no_download="it is your own",
    accepts="location",
)
def csv_manifest(request: DataRequest) -> DatasetIndex:
    """Index the lines of manifests; nothing but the manifests is read."""
    lines: list[tuple[str, Mapping[str, str]]] = []  # folder and cells
    columns: dict[str, str | None] = {}
    for location in expand_location(request.location, (".csv", ".tsv", ".txt")):
        table = _read_csv(location)
        columns = _columns(location, table.fieldnames or ())
        lines += [(parent(location), row) for row in table]
    images = [(folder, _cell(row, columns["image"])) for folder, row in lines]
    names = [name or "" for _, name in images]
    if "" in names:
        raise BadInput(f"Line {names.index('') + 2} of '{request.location}' names no image; expected one per line.")
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise BadInput(f"{quoted_list(repeated)} are in '{request.location}' twice; expected each image once.")
    labels = index_labels([_cell(row, columns["label"]) for _, row in lines])
    masks = [_cell(row, columns["mask"]) for _, row in lines]
    folders = [folder for folder, _ in images]
    entries = encoded_entries(
        names,
        [joined(folder, name) for folder, name in zip(folders, names, strict=True)],
        labels,
        [None if mask is None else joined(folder, mask) for folder, mask in zip(folders, masks, strict=True)],
        request.mask_kind,
    )
    return DatasetIndex(
        entries,
        labels.classes,
        has_masks=any(mask is not None for mask in masks),
        has_labels=labels.has_labels,
        numbering=labels.numbering,
    )


def _read_csv(location: str) -> csv.DictReader[str]:
    try:
        text = read_bytes(location).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"The manifest '{location}' cannot be read ({error}); expected a CSV file in UTF-8.") from error
    return csv.DictReader(io.StringIO(text), delimiter="\t" if location.lower().endswith(".tsv") else ",")


def _columns(location: str, present: Sequence[str]) -> dict[str, str | None]:
    """Return the columns of image, label and mask by the names that they have here."""
    folded = {name.strip().lower(): name for name in present if name}
    columns = {
        key: next((folded[name] for name in names if name in folded), None)
        for key, names in (("image", IMAGE_COLUMNS), ("label", LABEL_COLUMNS), ("mask", MASK_COLUMNS))
    }
    if columns["image"] is None:
        raise BadInput(
            f"The columns of '{location}' are {quoted_list(list(present))}; expected one called "
            f"{', '.join(IMAGE_COLUMNS)}, and {', '.join(LABEL_COLUMNS)} for the classes."
        )
    return columns


def _cell(row: Mapping[str, Any], column: str | None) -> str | None:
    value = None if column is None else row.get(column)
    return value.strip() or None if isinstance(value, str) else None


@dataset_format(
    "parquet",
    "Parquet files of images",
    has=("labels",),
    tree=PARQUET_TREE,
    why_no_download="it is your own",
    accepts="location",
)
def parquet(request: DataRequest) -> DatasetIndex:
    """Index the rows: the label column is read, images are read by row group when they are needed."""
    files = [_ParquetFile.open(place) for place in expand_location(request.location, (".parquet", ".pq"))]
    cache = _RowGroups(files)
    rows = [(file, number, row) for number, file in enumerate(files) for row in range(len(file.labels))]
    labels = index_labels(
        [file.labels[row] for file, _, row in rows], next(filter(None, (f.classes for f in files)), ())
    )
    names = unique_names(
        [file.names[row] for file, _, row in rows],
        [f"{file.location.rpartition('/')[2]}/{row}" for file, _, row in rows],
    )
    sources = [_reader(name, file, cache, number, row) for name, (file, number, row) in zip(names, rows, strict=True)]
    entries = encoded_entries(names, sources, labels)
    return DatasetIndex(entries, labels.classes, has_labels=labels.has_labels, numbering=labels.numbering)


def _reader(name: str, file: _ParquetFile, cache: _RowGroups, number: int, row: int) -> Callable[[], bytes]:
    """Return the function that reads the bytes of a row's image."""

    def read() -> bytes:
        value = cache.cell(number, row)
        path = value.get("path") if isinstance(value, Mapping) else value if isinstance(value, str) else None
        encoded = value.get("bytes") if isinstance(value, Mapping) else value
        if isinstance(encoded, bytes):
            return encoded
        if path is None:
            raise BadInput(f"'{name}' in '{file.location}' has no image; expected its bytes or its path.")
        return read_bytes(joined(parent(file.location), path))

    return read


@dataclass(frozen=True, eq=False)
class _ParquetFile:
    """The columns of a Parquet file but its images, and where its row groups begin."""

    location: str
    image_column: str
    names: tuple[str, ...]
    labels: tuple[Label, ...]
    starts: tuple[int, ...]  # first row of each row group
    classes: tuple[str, ...]

    @classmethod
    def open(cls, location: str) -> _ParquetFile:
        """Read the schema, the labels and the names."""
        arrow = _import_arrow(location)
        with _readable(location), opened(location) as source:
            file = arrow.parquet.ParquetFile(source)
            columns = _columns(location, file.schema_arrow.names)
            image = str(columns["image"])
            paths = f"{image}.path"
            has_paths = any(file.schema.column(i).path == paths for i in range(len(file.schema)))
            is_text = str(file.schema_arrow.field(image).type) in ("string", "large_string")
            wanted = [name for name in (columns["label"], paths if has_paths else image if is_text else None) if name]
            table = file.read(columns=wanted) if wanted else None
            starts, total = [], 0
            for group in range(file.num_row_groups):
                starts.append(total)
                total += file.metadata.row_group(group).num_rows
            values = None if table is None or not (has_paths or is_text) else table.column(image).to_pylist()
            label = columns["label"]
            labels = [None] * total if table is None or label is None else table.column(label).to_pylist()
            classes = _class_names(file.schema_arrow.metadata or {}, label)
        names = ("" if value is None else str(value["path"] if has_paths else value) for value in values or [])
        return cls(location, image, tuple(names) or ("",) * total, tuple(labels), tuple(starts), classes)


def _import_arrow(location: str) -> Any:
    """Return the package pyarrow, with its module `parquet`; raise BadInput if it is missing."""
    with importing(f"The Parquet file '{location}'", extra="study", error=BadInput):
        import pyarrow
        import pyarrow.parquet

        return pyarrow


@contextmanager
def _readable(location: str) -> Iterator[None]:
    """Raise BadInput for what is no Parquet file."""
    try:
        yield
    except _import_arrow(location).ArrowException as error:
        raise BadInput(
            f"'{location}' cannot be read ({error}); expected a Parquet file with the column image."
        ) from error


def _class_names(metadata: Mapping[bytes, bytes], label: str | None) -> tuple[str, ...]:
    """Return the names that Hugging Face keeps of a column of classes; () without any."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


@dataclass(eq=False)
class _RowGroups:
    """The images of the row groups read last, shared by all threads that read."""

    files: Sequence[_ParquetFile]
    loaded: OrderedDict[tuple[int, int], list[Any]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cell(self, number: int, row: int) -> Any:
        """Return the image cell of a row of a file."""
        starts = self.files[number].starts
        group = bisect_right(starts, row) - 1
        with self.lock:
            if (number, group) not in self.loaded:
                self.loaded[number, group] = self._load(self.files[number], group)
                while len(self.loaded) > ROW_GROUPS:
                    self.loaded.popitem(last=False)
            self.loaded.move_to_end((number, group))
            return self.loaded[number, group][row - starts[group]]

    def _load(self, file: _ParquetFile, group: int) -> list[Any]:
        arrow = _import_arrow(file.location)
        with _readable(file.location), opened(file.location) as source:
            table = arrow.parquet.ParquetFile(source).read_row_group(group, columns=[file.image_column])
        cells: list[Any] = table.column(file.image_column).to_pylist()
        return cells
