"""How many images a printed difference needs, as a table."""

from __future__ import annotations

from clairvit.papers.needed_images import MOST_IMAGES, NeededImages
from clairvit.papers.reproduce import Reproduction
from clairvit.plotting.labels import UNDEFINED
from clairvit.reports.blocks import Table
from clairvit.reports.text_tables import short_number, text_table

MOST_ROWS = 24  # beyond which only methods next to each other in rank are listed; the JSON has all


def needed_table(result: Reproduction) -> Table:
    """Return the differences that the paper prints on the compared data, with the images that each needs."""
    paper = result.config.paper
    of_table = [entry for entry in result.needed if result.table is None or entry.data == result.table.data]
    listed = of_table if len(of_table) <= MOST_ROWS else [entry for entry in of_table if entry.next_in_rank]
    rows = [
        (
            entry.measure,
            f"{entry.better} – {entry.other}",
            short_number(entry.difference, 3),
            short_number(entry.deviation, 3),
            _count(entry),
            paper.images if entry.had is None else str(entry.had),
        )
        for entry in listed
    ]
    columns = ("measure", "printed difference", "of", "deviation", "images it needs", "images the paper had")
    kinds = {entry.estimated_on for entry in of_table}
    own = f"our {max(entry.estimated_from for entry in of_table)} images ({result.config.data.spec}, {result.model})"
    source = " and ".join(
        words for kind, words in (("ours", own), ("paper's", "the paper's own numbers by image")) if kind in kinds
    )
    shortened = "" if len(listed) == len(of_table) else "; methods next to each other in rank, the JSON has all"
    caption = (
        "How many images a difference needs: a paired test at 5 % shows it with 80 % power, the standard deviation of "
        f"the paired differences being that on {source}{shortened}"
    )
    return text_table(caption, columns, rows, columns[2:5], grouped=True)


def _count(entry: NeededImages) -> str:
    if entry.images is not None:
        return f"{entry.images:,}".replace(",", " ")
    return UNDEFINED if entry.difference == 0 else f"> {MOST_IMAGES:,}".replace(",", " ")
