"""`clairvit mistakes`: every wrong or unsure answer, and the patches that made the difference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, image_source
from clairvit.cli.arguments import single_method
from clairvit.cli.command import Command
from clairvit.cli.console import print_line, print_result_note, table
from clairvit.cli.declare import option
from clairvit.cli.image_job import refuse_url_output

if TYPE_CHECKING:
    from clairvit.audit.mistake_table import Mistakes

MOST_LISTED = 40  # answers and pairs in a table
EXAMPLES = """[bold]Examples[/bold]

clairvit mistakes photos/ --truth folders --out mistakes.html

clairvit mistakes --data pets:data/oxford-iiit-pet --limit 200 --by confidence --out mistakes.csv

clairvit mistakes photos/ --unsure 0.7, without true classes: the unsure answers
"""


def mistakes(
    images: list[str] | None = options.ANNOTATED_IMAGES,
    *,
    method: list[str] | None = options.method_list(
        "The method of the contrast maps: one of 'clairvit methods'.", "attnlrp+plus where it fits the model"
    ),
    by: str = option("cost", "What wrong answers are sorted by, largest first.", "cost|confidence"),
    confident: float = option(0.8, "The probability from which an answer is confident.", min=0, max=1),
    far: int = option(5, "The last place of the list of classes that is not far down.", min=1),
    unsure: float = option(
        0.5, "Right answers, and those without a true class, are listed below this probability.", min=0, max=1
    ),
    photos: int = option(12, "At most so many photos in a picture or page.", min=1),
    removal: str = option("token", "How patches are removed: token, mean, blur, …"),
    data: options.DataOptions,
    truth: str | None = options.TRUTH,
    model: str = options.model_name(),
    model_options: options.ModelOptions,
    run_options: options.RunOptions,
    out: str | None = options.out(
        None, "Where the result is written: .html (a page), .png .jpg .pdf .svg, .json or .csv.", "FILE"
    ),
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit._io import check_writable
    from clairvit._tables import SUFFIXES, check_suffix
    from clairvit.audit.mistake_table import HTML, PICTURES
    from clairvit.audit.mistakes import check_order
    from clairvit.methods.spec import resolve_method
    from clairvit.perturbation.removal import check_removal

    order = check_order(by)
    check_removal(removal)
    typed = single_method(method, "mistakes")
    spec = None if typed is None else resolve_method(typed)
    if out is not None:
        refuse_url_output(out)
        check_suffix(out, (*PICTURES, HTML, *SUFFIXES))
        check_writable(Path(out))
    run_options.check()
    model_options.preprocess()
    command = Command("mistakes", "answered", output)
    annotations = Annotations(truth=truth)
    source, failures = image_source(images, data, annotations, [], None, run_options.seed)
    command.failures.extend(failures)
    if source.is_empty:
        command.stop()
    net = model_options.load(model)
    opened = source.open(net, by_label=False).images
    command.notes((*net.assumptions, *opened.notes))
    with command.progress(f"{len(opened)} images"):
        result = cv.mistakes(
            net,
            opened,
            spec,
            by=order,
            confident=confident,
            far=far,
            unsure=unsure,
            photos=photos,
            removal=removal,
            on_error=command.on_error,
            **run_options.arguments(),
        )
    has_photos = any(photo is not None for photo in result.photos)
    drawn = out is not None and (has_photos or Path(out).suffix.lower() not in PICTURES)
    files = [str(result.save(out, photos))] if out is not None and drawn else []

    def document() -> dict[str, Any]:
        return result.to_dict(values=False) | {"files": files}

    def show() -> None:
        _print(result)
        for file in files:
            print_line(f"Wrote {file}")
        if out is not None and not files:
            print_line(f"{out} was not written: no answer is wrong or unsure.")

    command.finish(result.images, document, show)


mistakes.__doc__ = f"List wrong and unsure answers, each with the patches that made the difference.\n\n{EXAMPLES}"


def _print(result: Mistakes) -> None:
    """Print the answers in their order, the confused pairs, and how many there are."""
    from clairvit.numerics import percent

    rows = []
    for record in result[:MOST_LISTED]._table():
        true = "" if math.isnan(record["true_probability"]) else percent(record["true_probability"])
        needed = "–" if record["needed"] is None else f"{record['needed']} of {record['patches']}"
        answer, then = (
            f"{record[name]} {percent(record[value])}"
            for name, value in (("predicted", "probability"), ("second", "second_probability"))
        )
        rows.append((record["image"], f"{record['true'] or '–'} {true}".rstrip(), answer, then, record["kind"], needed))
    columns = ("image", "true class", "answer", "then", "kind", "patches")
    if rows:
        table(f"Wrong and unsure answers of {result.model}, by {result.by}", columns, rows, right=("patches",))
    if len(result) > MOST_LISTED:
        print_line(f"… and {len(result) - MOST_LISTED} more; --json lists all of them.")
    pairs = [
        (
            pair.true,
            pair.predicted,
            f"{pair.count} of {pair.of}",
            percent(pair.share),
            "" if math.isnan(pair.low) else f"{100 * pair.low:.0f} … {100 * pair.high:.0f} %",
        )
        for pair in result.pairs[:MOST_LISTED]
    ]
    if pairs:
        heading = ("true class", "answer", "images", "share", "95 % interval")
        table("Confused classes", heading, pairs, right=heading[2:])
    print_line(result.sentence)
    if len(result):
        print_line(f"Kinds: {', '.join(f'{count} {kind}' for kind, count in result.kind_counts.items())}.")
    for note in result.notes:
        print_result_note(note)
