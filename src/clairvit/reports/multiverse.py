"""A multiverse as tables, JSON values and a chart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from clairvit.papers.multiverse import VERDICTS, ClaimMultiverse, Multiverse, UniverseResult
from clairvit.papers.reproduce import Reproduction
from clairvit.plotting.specification_curve import Specification, specification_curves
from clairvit.reports.blocks import Table
from clairvit.reports.text_tables import text_table


def multiverse_tables(multiverse: Multiverse) -> Iterator[Table]:
    """Yield in how many universes each claim holds, the same for each choice, and what was left out."""
    rows = [(_title(claim), str(len(claim.results)), *_counts(claim)) for claim in multiverse.claims]
    columns = ("the paper says", "universes", *_verdict_columns(multiverse))
    caption = (
        "Multiverse: in how many protocols does a claim hold? (surely: each of its comparisons is significant, p < "
        "0.05 in a paired test, corrected for them; it turns around where each comparison comes out the other way)"
    )
    yield text_table(caption, columns, _without_empty(rows, multiverse), columns[1:])
    for claim in multiverse.claims:
        if len(claim.results) > 1:
            yield _choices_table(claim, multiverse)
    if multiverse.left_out:
        yield text_table(
            "Protocols that this model or data do not allow", ("why",), [(t,) for t in multiverse.left_out]
        )


def _title(claim: ClaimMultiverse) -> str:
    return claim.claim.general or claim.claim.statement


def _counts(claim: ClaimMultiverse) -> list[str]:
    return [str(claim.counts[verdict]) for verdict in VERDICTS]


def _verdict_columns(multiverse: Multiverse) -> list[str]:
    """Return the verdicts; "cannot be said" only where it occurs."""
    unsaid = any(claim.counts["cannot be said"] for claim in multiverse.claims)
    return [verdict for verdict in VERDICTS if unsaid or verdict != "cannot be said"]


def _without_empty(rows: list[tuple[str, ...]], multiverse: Multiverse) -> list[tuple[str, ...]]:
    """Cut the column of "cannot be said" off where it is empty."""
    missing = len(VERDICTS) - len(_verdict_columns(multiverse))
    return [row[: len(row) - missing] for row in rows]


def _choices_table(claim: ClaimMultiverse, multiverse: Multiverse) -> Table:
    """Return the counts of one claim for each alternative of each choice: which choice decides."""
    rows = []
    for dimension in claim.dimensions:
        for alternative in claim.alternatives(dimension):
            part = claim.where(dimension, alternative)
            rows.append((dimension, alternative, str(len(part.results)), *_counts(part)))
    columns = ("choice", "", "universes", *_verdict_columns(multiverse))
    caption = f"{_title(claim)}: by what was chosen"
    return text_table(caption, columns, _without_empty(rows, multiverse), columns[2:], grouped=True)


def multiverse_json(multiverse: Multiverse) -> dict[str, Any]:
    """Return every universe with what it chose and what came out, as JSON values."""
    return {
        "claims": [
            {
                "claim": _title(claim),
                "source": claim.claim.source,
                "universes": len(claim.results),
                "counts": dict(claim.counts),
                "results": [_result_json(result) for result in claim.results],
            }
            for claim in multiverse.claims
        ],
        "left_out": list(multiverse.left_out),
    }


def _result_json(result: UniverseResult) -> dict[str, Any]:
    universe = result.universe
    return {
        "choices": dict(universe.choices),
        "fit": universe.setup.fit,
        "resolution": universe.setup.resolution,
        "metric": universe.metric,
        "methods": dict(universe.methods),
        "verdict": result.verdict,
        **{key: value for key, value in vars(result).items() if key != "universe"},
    }


def multiverse_chart(result: Reproduction) -> Figure | None:
    """Return the specification curve of each claim; None without a multiverse."""
    if result.multiverse is None:
        return None
    panels = {
        _title(claim): [
            Specification(entry.effect, entry.verdict, entry.universe.choices)
            for entry in claim.results
            if entry.comparisons
        ]
        for claim in result.multiverse.claims
    }
    shown = {title: points for title, points in panels.items() if len(points) > 1}
    if not shown:
        return None
    return specification_curves(shown, f"{result.config.paper.title}: {result.images} images, {result.model}")
