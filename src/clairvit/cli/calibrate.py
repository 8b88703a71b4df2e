"""`clairvit calibrate`: an explanation that is fitted to this model, on these images."""

from __future__ import annotations

import shlex
from pathlib import Path

from clairvit.cli import options
from clairvit.cli.arguments import resolve_metrics
from clairvit.cli.command import Command, ScoringOptions
from clairvit.cli.console import print_line
from clairvit.cli.declare import option
from clairvit.cli.output import print_calibration
from clairvit.errors import BadInput

EXAMPLES = """[bold]Examples[/bold]

clairvit calibrate photos/ --out mine.json, then: clairvit explain cat.jpg --method mine.json

clairvit calibrate photos/ --masks masks/ --backwards 1

clairvit calibrate --data pets:data/oxford-iiit-pet --limit 50

clairvit evaluate others/ --method mine.json,attnlrp+plus --metric insertion-deletion, on other photos
"""


def calibrate(
    images: list[str] | None = options.ANNOTATED_IMAGES,
    *,
    sets: int = option(8, "Random token sets per image and keep rate; there are nine keep rates.", min=2),
    backwards: int | None = option(
        None, "At most so many backward passes per explanation.", shown="one per rule table", min=1
    ),
    metric: list[str] | None = options.metric_list(
        "Metrics, separated by commas or repeated, that state the gain over attnlrp+plus.",
        "insertion-deletion, with masks also ap",
    ),
    question: ScoringOptions,
    out: str = options.out("mine.json", "Where the recipe is written.", "FILE.json"),
    cache: str | None = option(
        None,
        "Where the data of each image are kept, so that an interrupted run continues.",
        "DIR",
        shown="next to --out: mine.cache/",
        panel=options.RESULT,
    ),
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit._io import check_writable
    from clairvit.selection.calibrate import image_metrics

    scored = resolve_metrics(*metric) if metric else []
    metrics = [spec.text for spec in image_metrics(scored)] if metric else None
    file = Path(out)
    if file.suffix.lower() != ".json":
        raise BadInput(f"--out {out} is no name for a recipe; expected one that ends in .json, such as mine.json.")
    check_writable(file)
    command = Command("calibrate", "used", output)
    opened = question.open(command, images, scored)
    with command.progress(f"{len(opened.images)} images"):
        recipe = cv.calibrate(
            opened.model,
            opened.images,
            sets=sets,
            backwards=backwards,
            metrics=metrics,
            cache=cache or file.with_suffix(".cache"),
            **opened.arguments,
        )
    recipe.save(file)

    def show() -> None:
        print_calibration(recipe)
        print_line(f"Wrote {file}; use it by: {shlex.join(question.explain_with('--method', str(file)))}")

    command.finish(recipe.images, lambda: recipe.to_dict() | {"files": [str(file)]}, show)


calibrate.__doc__ = (
    "Fit an explanation to this model: layer maps weighted so that they predict what removing tokens does.\n\n"
    f"{EXAMPLES}"
)
