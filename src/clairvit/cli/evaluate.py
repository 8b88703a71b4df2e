"""`clairvit evaluate`: methods scored by metrics on any number of images."""

from __future__ import annotations

from pathlib import Path

from clairvit.bench import METHODS, METRICS
from clairvit.cli import options
from clairvit.cli.arguments import ALL, resolve_methods, resolve_metrics, split_methods
from clairvit.cli.command import Command, ScoringOptions
from clairvit.cli.console import print_line, print_result_note
from clairvit.cli.finish import print_skipped
from clairvit.cli.image_job import output_path
from clairvit.cli.output import by_metric, print_scores, score_document, score_notes, write_scores
from clairvit.errors import BadInput

FILE_SUFFIXES = (".json", ".csv")
EXAMPLES = """[bold]Examples[/bold]

clairvit evaluate demo

clairvit evaluate photos/ --method attnlrp+plus,rollout --metric 'deletion,insertion(removal=blur)' --out scores/

clairvit evaluate photos/ --masks masks/ --metric iou,pointing-game --out scores.csv

clairvit evaluate --data pets:data/oxford-iiit-pet --limit 50 --metric ap,deletion

clairvit evaluate images/ --masks trimaps/ --mask-kind trimap --truth folders --target label --metric ap,faf
"""


def evaluate(
    images: list[str] | None = options.ANNOTATED_IMAGES,
    *,
    method: list[str] | None = options.method_list(options.METHODS_HELP, ",".join(METHODS)),
    metric: list[str] | None = options.metric_list(options.METRICS_HELP, ",".join(METRICS)),
    question: ScoringOptions,
    maps: str = options.MAPS,
    out: str = options.out("out/", "A folder (scores.json, scores.csv and pictures of curves) or one file: .json .csv"),
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit.metrics.context import check_map_transform

    typed = method or METHODS
    methods, metrics = resolve_methods(*typed), resolve_metrics(*(metric or METRICS))
    check_map_transform(maps)
    path = output_path(out, check_suffix)
    command = Command("evaluate", "scored", output)
    opened = question.open(command, images, metrics)
    with command.progress(f"{len(methods)} methods, {len(metrics)} metrics"):
        scores = cv.evaluate(
            opened.model,
            opened.images,
            methods,
            metrics,
            normalize=maps,
            skip=ALL in split_methods(*typed),
            **opened.arguments,
        )
    if not scores:
        command.stop()
    rows, names = by_metric(scores), [spec.text for spec in methods]
    target = question.readouts.title(question.target)
    document = score_document("evaluate", rows, names, target, scores.unmasked, command.failures)
    document |= {**scores.model_record, "foreground": opened.detected, "skipped": scores.skipped}
    files = write_scores(path, rows, document)

    def show() -> None:
        print_scores(rows, names)
        print_skipped(scores.skipped)
        for note in score_notes(rows, scores.unmasked, question.annotations.masks, opened.detected):
            print_result_note(note)
        for file in files:
            print_line(f"Wrote {file}")

    command.finish(len(document["images"]), lambda: {**document, "files": [str(file) for file in files]}, show)


evaluate.__doc__ = f"Score methods by metrics, with confidence intervals and random baselines.\n\n{EXAMPLES}"


def check_suffix(path: Path) -> None:
    """Raise BadInput for a file that is neither 'scores.json' nor 'scores.csv'."""
    if path.suffix.lower() not in FILE_SUFFIXES:
        raise BadInput(
            f"'{path}' ends in '{path.suffix}'; write scores to a name that ends in {' or '.join(FILE_SUFFIXES)}, or "
            "to a folder, which gets pictures of the curves too."
        )
