"""`clairvit choose`: the most faithful method for this model, on these images."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from clairvit.cli import options
from clairvit.cli.arguments import resolve_methods, resolve_metrics, split_methods
from clairvit.cli.command import Command, ScoringOptions
from clairvit.cli.console import print_line
from clairvit.cli.declare import option
from clairvit.cli.output import print_selection, selection_document
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.metrics.registry import MetricSpec

EXAMPLES = """[bold]Examples[/bold]

clairvit choose photos/

clairvit choose photos/ --masks masks/ --out recipe.json, then: clairvit explain cat.jpg --recipe recipe.json

clairvit choose photos/ --method attnlrp+plus,genatt+skipplus,lime --metric 'deletion,insertion' --by mean-rank

clairvit choose photos/ --tune-start focusvit,genatt,ixg

clairvit choose photos/ --calibrate

clairvit choose --data pets:data/oxford-iiit-pet --limit 100 --model timm:vit_base_patch16_224
"""


def choose(
    images: list[str] | None = options.ANNOTATED_IMAGES,
    *,
    method: list[str] | None = options.method_list(
        "Methods, separated by commas or repeated; random and center are always there.",
        "well-known ones that need one trace each",
    ),
    metric: list[str] | None = options.metric_list(
        "Metrics, separated by commas or repeated; the first one ranks, unless --by says otherwise.",
        "insertion-deletion,faithfulness-correlation, with masks also ap,pointing-game",
    ),
    by: str = option(
        "first",
        "What ranks: the first metric, the mean rank over all faithfulness metrics, or one of the metrics.",
        "first|mean-rank|METRIC",
    ),
    tune_start: list[str] | None = option(
        None, "Find the best start layer of these methods, FocusViT's m*: focusvit,genatt,decompx,ixg.", "A,B,…"
    ),
    calibrate: bool = option(
        False, "Fit a calibrated method too, and rank it by cross-fitted scores; 8 or more images."
    ),
    question: ScoringOptions,
    maps: str = options.MAPS,
    out: str = options.out("recipe.json", "Where the recipe is written.", "FILE.json"),
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.selection.start_layer import base_method

    methods = resolve_methods(*method) if method else None
    metrics = resolve_metrics(*metric) if metric else None
    tuned = [base_method(text) for text in split_methods(*tune_start)] if tune_start else []
    _check(by, metrics, maps, out)
    command = Command("choose", "scored", output)
    opened = question.open(command, images, metrics or [])
    with command.progress(f"{len(opened.images)} images"):
        selection = cv.choose(
            opened.model,
            opened.images,
            methods,
            metrics,
            normalize=maps,
            by=by,
            tune_start=tuned,
            calibrate=calibrate,
            **opened.arguments,
        )
    file = selection.save(out)

    def show() -> None:
        print_selection(selection)
        print_line(f"Wrote {file}; use it by: {shlex.join(question.explain_with('--recipe', str(file)))}")

    command.finish(len(selection.scores.predictions), lambda: selection_document(selection, file), show)


choose.__doc__ = (
    f"Find the most faithful method for this model on these images, with its statistical certainty.\n\n{EXAMPLES}"
)


def _check(by: str, metrics: list[MetricSpec] | None, maps: str, out: str) -> None:
    from clairvit.metrics.context import check_map_transform
    from clairvit.metrics.registry import resolve_metric
    from clairvit.selection.choose import METRICS, WITH_MASKS, criterion

    criterion(by, metrics or [resolve_metric(text) for text in (*METRICS, *WITH_MASKS)])
    check_map_transform(maps)
    if Path(out).suffix.lower() != ".json":
        raise BadInput(f"--out {out} is no name for a recipe; expected one that ends in .json, such as recipe.json.")
