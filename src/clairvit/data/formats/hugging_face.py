"""Hugging Face data sets: by their name on the hub, or a folder that `save_to_disk` wrote."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clairvit.data.formats.encoded import encoded_entries, index_labels
from clairvit.data.formats.entry import DatasetIndex
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.locations import read_bytes
from clairvit.errors import BadInput, UnknownName, did_you_mean, importing

LABELS = ("label", "labels", "fine_label", "class", "target")
TREE = """
NAME:SPLIT                    ILSVRC/imagenet-1k:validation; or NAME:CONFIGURATION:SPLIT
FOLDER:SPLIT                  a folder of save_to_disk; :SPLIT may be left out if it has one
"""


@dataset_format(
    "hfds",
    "a Hugging Face data set",
    has=("labels",),
    splits=(),
    tree=TREE,
    why_no_download="the package datasets fetches it by itself",
    accepts="location",
)
def hugging_face(request: DataRequest) -> DatasetIndex:
    """Index the rows of a split; images are decoded when they are needed."""
    datasets = _import_datasets()
    table, title = _load(datasets, request.location, request.split)
    features = dict(table.features)
    column = next((name for name, feature in features.items() if isinstance(feature, datasets.Image)), None)
    if column is None:
        raise BadInput(f"The columns of {title} are {', '.join(features)}; expected one of images (datasets.Image).")
    label = next((name for name in LABELS if name in features), None)
    label = label or next((name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    encoded = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    values = [None] * len(table) if label is None else list(table.select_columns([label])[label])
    labels = index_labels(values, tuple(getattr(features.get(label), "names", None) or ()))
    lock = threading.Lock()

    def reader(row: int) -> Callable[[], bytes]:
        def read() -> bytes:
            with lock:
                cell = encoded[row][column]
            if cell.get("bytes") is not None:
                return bytes(cell["bytes"])
            if cell.get("path") is None:
                raise BadInput(f"Row {row} of {title} has no image; expected one.")
            return read_bytes(cell["path"])

        return read

    names = [f"{title}/{row}" for row in range(len(table))]
    entries = encoded_entries(names, [reader(row) for row in range(len(table))], labels)
    return DatasetIndex(entries, labels.classes, has_labels=labels.has_labels, numbering=labels.numbering)


def _import_datasets() -> Any:
    with importing("hfds:NAME:SPLIT", packages="datasets", error=BadInput):
        return importlib.import_module("datasets")


def _load(datasets: Any, location: str, split: str) -> tuple[Any, str]:
    """Return a split of a data set, and its name for messages and images."""
    folder, _, typed = (location, "", "") if Path(location).expanduser().is_dir() else location.rpartition(":")
    if folder and Path(folder).expanduser().is_dir():
        loaded = _translated(location, lambda: datasets.load_from_disk(str(Path(folder).expanduser())))
        title = Path(folder).name
        if isinstance(loaded, datasets.DatasetDict):
            name = _one_split(title, tuple(loaded), typed, split)
            return loaded[name], f"{title}:{name}"
        return loaded, title
    name, *configuration = (folder or location).split(":")
    chosen = split or (typed if folder else "")
    if not chosen:
        raise BadInput(f"hfds:{location} names no split; expected hfds:NAME:SPLIT, such as hfds:{location}:validation.")
    table = _translated(location, lambda: datasets.load_dataset(name, *configuration, split=chosen))
    return table, f"{name}:{chosen}"


def _one_split(title: str, splits: tuple[str, ...], typed: str, split: str) -> str:
    chosen = split or typed or (splits[0] if len(splits) == 1 else "")
    if chosen not in splits:
        wanted = f"no split '{chosen}'" if chosen else "several splits"
        raise UnknownName(f"{title} has {wanted}.{did_you_mean(chosen, splits)} Choose one of: {', '.join(splits)}.")
    return chosen


def _translated(location: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # the package and the hub's client raise dozens of kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(
            f"The data set '{location}' cannot be opened ({reason}); expected hfds:NAME:SPLIT of the hub, with the "
            "network or its cache, or a folder that save_to_disk wrote."
        ) from error
