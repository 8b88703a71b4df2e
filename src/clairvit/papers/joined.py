"""Joined: reproductions of one paper on several data sets as one result, from the documents that each of them wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clairvit.errors import BadInput
from clairvit.papers.comparison import Cell, radar_radii
from clairvit.papers.paper import Paper, find_paper

Document = Mapping[str, Any]  # NAME.json of a reproduction


@dataclass(frozen=True, eq=False)
class JoinedRun:
    """One reproduction among several."""

    name: str  # of its data set, which no other run has
    images: int
    model: str
    cells: Mapping[str, Mapping[str, Cell]]  # method -> measure -> cell
    better: Mapping[str, str]  # measure -> "higher" or "lower"
    verdicts: Mapping[str, str]  # claim -> what came out
    printed: str | None  # the paper's name of this data; None where it has no numbers on it
    tuned: int | None = None  # the start layer that was chosen

    def value(self, measure: str, method: str, *, printed: bool = False) -> float:
        """Return our number, or the paper's on this data; NaN where there is none."""
        cell = self.cells.get(method, {}).get(measure)
        if cell is None or (printed and self.printed is None):
            return math.nan
        return cell.paper if printed else cell.ours

    def best(self, measure: str, methods: Sequence[str]) -> frozenset[str]:
        """Return the methods with the best number of ours."""
        sign = 1 if self.better[measure] == "higher" else -1
        values = {method: sign * self.value(measure, method) for method in methods}
        known = [value for value in values.values() if not math.isnan(value)]
        return frozenset(method for method, value in values.items() if known and value == max(known))


@dataclass(frozen=True, eq=False)
class JoinedReproduction:
    """The same paper on several data sets."""

    paper: Paper
    runs: tuple[JoinedRun, ...]
    documents: tuple[Document, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the paper's methods, then those for comparison that every run has."""
        first, *others = self.runs
        return tuple(name for name in first.cells if all(name in run.cells for run in others))

    @property
    def ranked(self) -> tuple[str, ...]:
        """Return the methods that the paper has itself."""
        extra = {entry.name for entry in self.paper.methods_and_baselines if entry.extra}
        return tuple(name for name in self.methods if name not in extra)

    def radii(self, run: JoinedRun, *, printed: bool) -> Mapping[str, Sequence[float]]:
        """Return the place of each method on each axis of a run's radar; empty where numbers are missing."""
        if printed and run.printed is None:
            return {}
        return radar_radii(self.paper, run.cells, self.ranked, printed=printed)


def join(documents: Sequence[Document], paper: Paper | None = None) -> JoinedReproduction:
    """Return the reproductions of one paper as one result.

    Args:
        documents: What `NAME.json` of each holds.
        paper: Their paper; None: the built-in one of that name.

    Raises:
        BadInput: They are fewer than two, or of several papers.
    """
    if len(documents) < 2:
        raise BadInput(f"{len(documents)} finished run was given to join; expected two or more.")
    names = list(dict.fromkeys(document["paper"]["name"] for document in documents))
    if len(names) > 1:
        raise BadInput(f"Reproductions of {' and '.join(names)} were given to join; expected those of one paper.")
    paper = find_paper(names[0]) if paper is None else paper
    titles = unique_names([data_name(document["data"]) for document in documents])
    runs = tuple(_run(paper, name, document) for name, document in zip(titles, documents, strict=True))
    return JoinedReproduction(paper, runs, tuple(documents))


def data_name(spec: str) -> str:
    """Return the name of a data set: "pets" of pets:PATH, the last folder of folder:PATH."""
    kind, _, path = spec.partition(":")
    return Path(path).name or kind if kind == "folder" else kind


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of which no two are equal: pets, pets-2."""
    return tuple(
        name if names[:index].count(name) == 0 else f"{name}-{names[:index].count(name) + 1}"
        for index, name in enumerate(names)
    )


def read_document(folder: Path, name: str) -> Document:
    """Return what a finished reproduction wrote into its folder.

    Raises:
        BadInput: There is no such file, or it is none.
    """
    path = folder / f"{name}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(
            f"There is no '{path}'; expected the folder that a finished `clairvit reproduce {name}` wrote."
        ) from error
    except (OSError, ValueError) as error:
        raise BadInput(
            f"'{path}' cannot be read ({error}); expected what `clairvit reproduce {name}` wrote."
        ) from error
    if not isinstance(document, dict) or "rows" not in document or document.get("command") != "reproduce":
        raise BadInput(f"'{path}' is no result of `clairvit reproduce {name}`; expected one with the numbers of a run.")
    return document


def _run(paper: Paper, name: str, document: Document) -> JoinedRun:
    cells = {row["method"]: {key: _cell(cell) for key, cell in row["cells"].items()} for row in document["rows"]}
    printed = paper.table_of_dataset.get(document["data"].partition(":")[0])
    better = {measure.name: measure.better for measure in paper.measures}
    if paper.area is not None:
        better[paper.area] = "higher"
    tuned = document.get("tuned")
    return JoinedRun(
        name,
        document["images"],
        document["model"],
        cells,
        better,
        {entry["claim"]: _verdict(entry) for entry in document["claims"]},
        printed if printed == document["numbers_on"] else None,
        None if tuned is None else tuned["best"],
    )


def _cell(values: Mapping[str, Any]) -> Cell:
    """Return a cell of a document, which has null where a number is NaN."""
    low, high = (_number(edge) for edge in values["interval"])
    return Cell(
        _number(values["paper"]),
        _number(values["ours"]),
        _number(values["standard_error"]),
        (low, high),
        values["images"],
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _verdict(entry: Mapping[str, Any]) -> str:
    """Return "holds in part (3 of 5)"."""
    return (
        f"{entry['verdict']} ({entry['true']} of {entry['comparisons']})" if entry["comparisons"] else entry["verdict"]
    )
