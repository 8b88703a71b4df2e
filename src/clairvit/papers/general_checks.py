"""Checks of any paper: whether its claims, means and ranks follow from the numbers that it prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from clairvit.papers.paper import Claim, Finding, Paper, Table

HALF_A_DIGIT = 0.5  # of the last printed digit: what rounding may move


def check_tables(paper: Paper) -> list[Finding]:
    """Compare each claim with each printed table, and printed means with the means over images."""
    return [*_claims(paper), *_means(paper)]


def _claims(paper: Paper) -> Iterator[Finding]:
    """Yield whether a claim follows from a table, where the table has numbers for it."""
    sign = {measure.name: 1 if measure.better == "higher" else -1 for measure in paper.measures}
    sign |= {} if paper.area is None else {paper.area: 1}
    for claim in paper.claims:
        for table in paper.tables:
            gaps = {
                (measure, *pair): sign[measure] * (table.value(measure, pair[0]) - table.value(measure, pair[1]))
                for measure in claim.measures
                for pair in claim.pairs
            }
            printed = {key: gap for key, gap in gaps.items() if not math.isnan(gap)}
            if printed:
                yield _finding(claim, table, printed)


def _finding(claim: Claim, table: Table, gaps: dict[tuple[str, str, str], float]) -> Finding:
    true = sum(gap > 0 for gap in gaps.values())
    wrong = [
        f"{measure}: {winner} is not better than {loser}" for (measure, winner, loser), gap in gaps.items() if gap <= 0
    ]
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    numbers = f"{true} of {len(gaps)} printed comparisons" + (f"; {'; '.join(wrong[:3])}{more}" if wrong else "")
    return Finding(f"{claim.statement} (by the table on {table.data})", table.source, true == len(gaps), numbers)


def _means(paper: Paper) -> Iterator[Finding]:
    """Yield whether a printed mean is that of the numbers by image, to the digits that are printed."""
    for table in paper.tables:
        for measure, rows in table.per_image.items():
            for method, values in rows.items():
                mean, printed = statistics.fmean(values), table.value(measure, method)
                if mean == printed:
                    continue  # no mean is printed: this one was computed
                digits = len(f"{printed!r}".partition(".")[2])
                yield Finding(
                    f"The mean {measure} of {method} is {printed} on {table.data}",
                    table.source,
                    abs(mean - printed) <= HALF_A_DIGIT * 10**-digits * (1 + 1e-9),
                    f"mean over {len(values)} images: {mean:.{digits + 2}f}",
                )
