"""Several papers on the same data as one page: which claims hold, then the tables and figures of each paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clairvit._version import __version__
from clairvit.metrics.confidence_intervals import FEWEST
from clairvit.papers.comparison import ClaimResult
from clairvit.papers.figures import FigureContent
from clairvit.papers.joined import data_name, unique_names
from clairvit.papers.paper import Paper
from clairvit.papers.reproduce import Reproduction
from clairvit.reports.blocks import Block, Document, Item, Items, Section, Table, Text
from clairvit.reports.reproduction import check_table, reproduction_json, reproduction_report
from clairvit.reports.text_tables import text_table

NOT_TESTABLE = "not testable here"
PLURALS = {  # verdict: the same of several claims
    "holds": "hold",
    "holds in part": "hold in part",
    "does not hold": "do not hold",
    NOT_TESTABLE: "cannot be tested here",
}
TITLE = "The papers, computed again"
GENERATED = ("scenes", "parts")


@dataclass(frozen=True, eq=False)
class PaperRun:
    """One paper on one data set; `missing` says why there is no result."""

    paper: Paper
    data: str
    result: Reproduction | None = None
    figures: tuple[FigureContent, ...] = ()
    missing: str = ""


def all_report(runs: Sequence[PaperRun]) -> Document:
    """Return the page: what was run, which claims hold, what is left out, and a section for each paper."""
    sections = [Section("Which claims hold", [*_lead(runs), summary_table(runs)])]
    left_out = [run for run in runs if run.missing]
    if left_out:
        items = tuple(Item(run.missing, f"{run.paper.name} on {run.data}:") for run in left_out)
        sections.append(Section("Left out", [Items(items)]))
    papers = list(dict.fromkeys(run.paper.name for run in runs))
    sections += [_paper_section([run for run in runs if run.paper.name == name]) for name in papers]
    results = [run.result for run in runs if run.result is not None]
    about = f"{len(papers)} papers on {', '.join(dict.fromkeys(run.data for run in runs))}"
    models = ", ".join(dict.fromkeys(result.model for result in results))
    return Document(TITLE, f"{about}; model: {models}" if models else about, tuple(sections))


def summary_table(runs: Sequence[PaperRun]) -> Table:
    """Return a row per paper and claim, with the verdict on each data set."""
    names = _data_names(runs)
    rows = []
    for paper in {run.paper.name: run.paper for run in runs}.values():
        by_data = {run.data: run for run in runs if run.paper.name == paper.name}
        for place, claim in enumerate(paper.claims):
            verdicts = [_verdict(by_data[data].result, place) if data in by_data else NOT_TESTABLE for data in names]
            rows.append((paper.name, claim.statement, claim.source, *verdicts))
    columns = ("paper", "what it says", "where", *(f"on {name}" for name in names.values()))
    return text_table(
        "Each claim of each paper, tested here (comparisons that come out so)", columns, rows, grouped=True
    )


def all_json(runs: Sequence[PaperRun]) -> dict[str, Any]:
    """Return the summary, and the document of each run or why there is none."""
    return {
        "clairvit": __version__,
        "command": "reproduce",
        "papers": list(dict.fromkeys(run.paper.name for run in runs)),
        "data": list(dict.fromkeys(run.data for run in runs)),
        "claims": [
            {"paper": run.paper.name, "data": run.data, "claim": claim.statement, "source": claim.source}
            | {"verdict": _word(run.result, place), "comparisons": _verdict(run.result, place)}
            for run in runs
            for place, claim in enumerate(run.paper.claims)
        ],
        "left_out": [{"paper": run.paper.name, "data": run.data, "why": run.missing} for run in runs if run.missing],
        "runs": [reproduction_json(run.result) for run in runs if run.result is not None],
    }


def _data_names(runs: Sequence[PaperRun]) -> Mapping[str, str]:
    """Return data set -> its short name."""
    specs = list(dict.fromkeys(run.data for run in runs))
    return dict(zip(specs, unique_names([data_name(spec) for spec in specs]), strict=True))


def _claim(result: Reproduction | None, place: int) -> ClaimResult | None:
    return None if result is None or place >= len(result.claim_results) else result.claim_results[place]


def _word(result: Reproduction | None, place: int) -> str:
    claim = _claim(result, place)
    return NOT_TESTABLE if claim is None or not claim.comparisons else claim.verdict


def _verdict(result: Reproduction | None, place: int) -> str:
    """Return "holds in part (3 of 5, surely 1)"."""
    claim = _claim(result, place)
    if claim is None or not claim.comparisons:
        return NOT_TESTABLE
    sure = ""
    if claim.fewest and claim.images < claim.fewest:
        sure = ", too few images to be sure"
    elif claim.fewest:
        sure = f", surely {claim.surely}, surely not {claim.surely_not}"
    return f"{claim.verdict} ({claim.true} of {claim.comparisons}{sure})"


def _lead(runs: Sequence[PaperRun]) -> list[Block]:
    """Return what was run, and what that can show."""
    results = [run.result for run in runs if run.result is not None]
    if not results:
        return [Text("Nothing could be computed on this data.", lead=True)]
    verdicts = [_word(run.result, place) for run in runs for place in range(len(run.paper.claims))]
    listed = ", ".join(f"{count} {words}" for word, words in PLURALS.items() if (count := verdicts.count(word)))
    fewest, most = min(result.images for result in results), max(result.images for result in results)
    images = f"{most} images" if fewest == most else f"{fewest} to {most} images"
    blocks: list[Block] = [Text(f"Of {len(verdicts)} claims: {listed} ({images} for each paper).", lead=True)]
    if any(run.data.partition(":")[0] in GENERATED for run in runs if run.result is not None):
        blocks.append(
            Text(
                "Scenes are drawn by a program: marked shapes before a textured background. Their objects and masks "
                "are known exactly, and the built-in model 'scenes' was trained on them. What comes out shows that "
                "every method, measure and table of the papers runs, and how the methods compare on this small model. "
                "It says nothing of the papers' models and photos: for those give --data and --model."
            )
        )
    if most < FEWEST:
        blocks.append(Text(f"With fewer than {FEWEST} images nothing is sure: no interval is given, and no test made."))
    return blocks


def _paper_section(runs: Sequence[PaperRun]) -> Section:
    """Return a paper's results and figures on each data set, then what it prints computed again."""
    paper = runs[0].paper
    names = _data_names(runs)
    parts = []
    for run in runs:
        prefix = "" if len(runs) == 1 else f"{names[run.data]}: "
        if run.result is None:
            parts.append(Section(f"{prefix}left out", [Text(run.missing)]))
            continue
        for part in reproduction_report(run.result, run.figures).sections:
            parts.append(Section(f"{prefix}{part.title}", part.blocks, part.sections))
    parts.append(Section("Printed numbers, computed again", [check_table(paper, paper.check())]))
    return Section(paper.title, [Text(f"{paper.citation}.")], parts)
