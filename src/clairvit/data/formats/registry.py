"""The list of data sets: what each is called, what it has, and how its folder looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clairvit.data.formats.entry import DatasetIndex
from clairvit.errors import BadInput

Fetch = Callable[[Path], None]  # download into this folder


@dataclass(frozen=True)
class DataRequest:
    """What a layout's function is handed."""

    root: Path  # the folder, or file, in which everything that is needed exists
    split: str
    masks: Path | None = None
    mask_kind: str = "nonzero"


@dataclass(frozen=True, eq=False)
class Dataset:
    """One line of the list."""

    name: str
    title: str
    has: tuple[str, ...]  # masks, boxes, labels, others (classes of second objects)
    splits: tuple[str, ...]  # the first is taken unless another is named
    tree: str  # the official layout
    open: Callable[[DataRequest], DatasetIndex]
    needs: tuple[
        str, ...
    ] = ()  # what has to be there, in the order in which it is missed; {split} or {Split} is filled in, | is or
    inside: tuple[str, ...] = ()  # names under which archives unpack: PATH may be the folder around them
    fetch: Fetch | None = None
    why_no_download: str = ""

    @property
    def download(self) -> bool:
        return self.fetch is not None

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}: {self.title}; {', '.join(self.has) or 'images'})"

    def layout(self, path: Path | str = "PATH") -> str:
        """The expected folder, as a tree under the path that was typed."""
        return "\n".join([f"  {path}/", *(f"    {line}" for line in self.tree.strip("\n").splitlines())])


_DATASETS: dict[str, Dataset] = {}


def dataset(
    name: str,
    title: str,
    *,
    tree: str,
    has: tuple[str, ...] = (),
    splits: tuple[str, ...] = ("all",),
    needs: tuple[str, ...] = (),
    inside: tuple[str, ...] = (),
    fetch: Fetch | None = None,
    why_no_download: str = "",
) -> Callable[[Callable[[DataRequest], DatasetIndex]], Callable[[DataRequest], DatasetIndex]]:
    """Put a function on the list; one function may serve several names."""

    def register(function: Callable[[DataRequest], DatasetIndex]) -> Callable[[DataRequest], DatasetIndex]:
        _DATASETS[name] = Dataset(name, title, has, splits, tree, function, needs, inside, fetch, why_no_download)
        return function

    return register


def registered() -> dict[str, Dataset]:
    return dict(_DATASETS)


def find_root(data: Dataset, path: Path, split: str) -> tuple[Path, str | None]:
    """The folder that holds everything and None, or the one that comes nearest and the first thing it lacks."""
    needs = [need.format(split=split, Split=split.title()) for need in data.needs]
    best, there, lacks = path, -1, needs[0] if needs else None
    for root in (path, *(path / name for name in data.inside)):
        missing = [need for need in needs if not any((root / one).exists() for one in need.split("|"))]
        if root.exists() and not missing:
            return root, None
        present = len(needs) - len(missing) if root.exists() else -1
        if missing and present > there:
            best, there, lacks = root, present, missing[0]
    return best, lacks


def not_there(data: Dataset, path: Path, root: Path, lacks: str) -> BadInput:
    """What is missing, how it should look, what to type next."""
    if not path.exists():
        seen = f"There is no folder '{path}', so no {data.title} in it."
    else:
        either = " or ".join(f"'{one}'" for one in lacks.split("|"))
        seen = f"'{root}' does not look like {data.title}: {either} is missing."
    advice = f"Give that folder as {data.name}:PATH" + (
        ", or let it be downloaded there (download=True)." if data.download else "."
    )
    parameters = {"download": "True"} if data.download else None
    return BadInput(f"{seen} Expected:\n{data.layout(path)}\n{advice}", parameters=parameters)
