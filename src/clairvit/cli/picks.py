"""A pick as tables and sentences for people, and as JSON for machines."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit._version import __version__
from clairvit.cli.console import line, table
from clairvit.cli.finish import print_left_out
from clairvit.cli.image_job import Failure

if TYPE_CHECKING:
    from clairvit.selection.ranking import Row
    from clairvit.selection.result import Selection


def print_pick(pick: Selection) -> None:
    """The ranking, the starts, and the answer in words."""
    from clairvit.plotting.measures import ARROWS

    others = [metric for metric in pick.metrics if metric != pick.by]
    columns = ("    method", f"{pick.by} {ARROWS[pick.better]}", "gap to best", "p", *others)
    lines = [
        (
            f"{row.rank:>2}  {row.method}" + (" (baseline)" if row.baseline else ""),
            _number(row.mean)
            + (
                ""
                if math.isnan(row.standard_error)
                else f" ± {row.standard_error:.2g}\n{_range(row.interval)}".rstrip()
            ),
            "best" if row.method == pick.best else f"{_number(row.gap)}\n{_range(row.gap_interval)}".strip(),
            "" if row.method == pick.best else f"{row.p:.2g}{'' if row.apart else ' ='}",
            *(_number(row.means[metric]) for metric in others),
            _effort(row),
            "●" if row.on_front else "",
        )
        for row in pick.ranking
    ]
    title = f"{pick.images} image{'s' * (pick.images != 1)}, {pick.model}"
    table(title, (*columns, "cost of a map", "front"), lines, right=("p",))
    line("Mean over images ± standard error, [95 % interval]; cost: f forwards and b backwards, seconds.")
    line("p: paired test against the best, corrected by Holm for having picked it; = cannot be told apart.")
    for own in pick.tuned.values():
        starts = [
            (str(start), text, _number(mean), _range(interval), _mark(start, own.best, own.half))
            for start, (text, mean, interval) in enumerate(zip(own.methods, own.means, own.intervals, strict=True))
        ]
        table(f"{own.base} from each layer on", ("layer", "method", own.metric, "95 % interval", ""), starts)
    print_left_out(pick.skipped)
    for sentence in pick.answer:
        line(sentence)


def _mark(start: int, best: int, half: int) -> str:
    return ", ".join([*(["best"] if start == best else []), *(["ceil(L/2)"] if start == half else [])])


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _range(interval: tuple[float, float]) -> str:
    return "" if math.isnan(interval[0]) else f"[{interval[0]:.3g}, {interval[1]:.3g}]"


def _effort(row: Row) -> str:
    backward = f" + {row.cost.backwards} b" if row.cost.backwards else ""
    return f"{row.cost.forwards} f{backward}, {row.cost.seconds:.2g} s"


def document(pick: Selection, file: Path, failures: list[Failure]) -> dict[str, Any]:
    """Everything that is known, for machines."""
    from clairvit.methods.collect import versions
    from clairvit.methods.recipe import plain

    found: dict[str, Any] = plain(
        {
            "clairvit": __version__,
            "command": "choose",
            "model": pick.model,
            "weights": pick.weights,
            **pick.model_record,
            "best": pick.best,
            "clear": pick.clear,
            "tied": pick.tied,
            "by": pick.by,
            "better": pick.better,
            "metrics": pick.metrics,
            "settings": pick.settings,
            "seed": pick.seed,
            "images": [one.image for one in pick.scores.seen],
            "ranking": [asdict(row) for row in pick.ranking],
            "front": pick.front,
            "groups": pick.groups,
            "agreement": [{"metrics": pair, "spearman": rho} for pair, rho in pick.agreement.items()],
            "tuned": [own.as_document() for own in pick.tuned.values()],
            "answer": pick.answer,
            "skipped": pick.skipped,
            "versions": versions(),
            "files": [str(file)],
            "failed": [vars(failure) for failure in failures],
        }
    )
    return found
