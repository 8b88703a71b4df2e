"""Registry of dataset formats: name, annotations, folder layout, and the function that indexes a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clairvit._registry import Registry
from clairvit.data.formats.entry import DatasetIndex
from clairvit.errors import Argument, BadInput

Fetch = Callable[[Path], None]  # download into this folder
# What PATH may be: a folder of this disk; that or the URL of one; anything, which `open` reads itself. URLs and other
# locations are `DataRequest.location`.
Accepts = Literal["folder", "folder or URL", "location"]


@dataclass(frozen=True)
class DataRequest:
    """Which folder and split to index."""

    root: Path  # the folder in which all required paths exist
    split: str
    masks: Path | None = None
    mask_kind: str = "nonzero"
    location: str = ""  # what was typed after the name: a path, a pattern, a URL


@dataclass(frozen=True, eq=False)
class DatasetFormat:
    """A dataset format; `open` indexes a folder of it."""

    name: str
    title: str
    has: tuple[str, ...]  # masks, boxes, labels, others (classes of other objects)
    splits: tuple[str, ...]  # the first is the default; none: those that the data has itself
    tree: str  # the official folder layout
    open: Callable[[DataRequest], DatasetIndex]
    required_paths: tuple[str, ...] = ()  # in the order of error messages; with {split} or {Split}, | means or
    archive_folders: tuple[str, ...] = ()  # folders that archives unpack to: PATH may be their parent
    fetch: Fetch | None = None
    why_no_download: str = ""
    accepts: Accepts = "folder"

    @property
    def download(self) -> bool:
        """Return whether the dataset can be downloaded."""
        return self.fetch is not None

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}: {self.title}; {', '.join(self.has) or 'images'})"

    def layout(self, path: Path | str = "PATH") -> str:
        """Return the expected folder as a tree below the path that was typed, or what a location may be."""
        if self.accepts == "location":
            return "\n".join(f"  {line}" for line in self.tree.strip("\n").splitlines())
        return "\n".join([f"  {path}/", *(f"    {line}" for line in self.tree.strip("\n").splitlines())])


_MODULES = (  # of clairvit.data.formats, in the order in which their formats are listed
    *("folder", "pets", "flowers", "caltech101", "voc", "dogs", "labels_only"),
    *("imagenet", "imagenet_s", "imagenet_seg", "coco", "tables", "tar_shards", "hugging_face"),
)
FORMATS: Registry[DatasetFormat] = Registry(
    "data set",
    modules=[f"clairvit.data.formats.{module}" for module in _MODULES],
    advice="Type NAME:PATH, with one of: {names}.",
)


def dataset_format(
    name: str,
    title: str,
    *,
    tree: str,
    has: tuple[str, ...] = (),
    splits: tuple[str, ...] = ("all",),
    required_paths: tuple[str, ...] = (),
    archive_folders: tuple[str, ...] = (),
    fetch: Fetch | None = None,
    why_no_download: str = "",
    accepts: Accepts = "folder",
) -> Callable[[Callable[[DataRequest], DatasetIndex]], Callable[[DataRequest], DatasetIndex]]:
    """Register a function as the `open` of a format; one function may serve several names."""

    def register(function: Callable[[DataRequest], DatasetIndex]) -> Callable[[DataRequest], DatasetIndex]:
        registered = DatasetFormat(
            name,
            title,
            has,
            splits,
            tree,
            function,
            required_paths,
            archive_folders,
            fetch,
            why_no_download,
            accepts,
        )
        FORMATS.register(name, registered, module=function.__module__)
        return function

    return register


def find_root(data: DatasetFormat, path: Path, split: str) -> tuple[Path, str | None]:
    """Return the folder with all required paths and None, or the most complete one and its first missing path."""
    required = [pattern.format(split=split, Split=split.title()) for pattern in data.required_paths]
    best, best_count, best_missing = path, -1, required[0] if required else None
    for root in (path, *(path / name for name in data.archive_folders)):
        missing = [paths for paths in required if not any((root / name).exists() for name in paths.split("|"))]
        if root.exists() and not missing:
            return root, None
        count = len(required) - len(missing) if root.exists() else -1
        if missing and count > best_count:
            best, best_count, best_missing = root, count, missing[0]
    return best, best_missing


def missing_files_error(data: DatasetFormat, path: Path, root: Path, missing: str) -> BadInput:
    """Return the error for a missing path: what is missing, the expected layout, and what to type next."""
    if not path.exists():
        problem = f"There is no folder '{path}', so no {data.title} in it."
    else:
        either = " or ".join(f"'{name}'" for name in missing.split("|"))
        problem = f"'{root}' does not look like {data.title}: {either} is missing."
    download = (", or let it be downloaded there (", Argument("download", True), ")") if data.download else ()
    expected = f"{problem} Expected:\n{data.layout(path)}\nGive that folder as {data.name}:PATH"
    return BadInput(expected, *download, ".")
