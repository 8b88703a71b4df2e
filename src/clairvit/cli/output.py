"""Scores, rankings and studies: tables for people, JSON and CSV for machines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clairvit._version import __version__
from clairvit.cli.console import print_line, print_message, print_result_note, table
from clairvit.cli.finish import exit_on_failures, print_document, print_skipped
from clairvit.cli.image_job import Failure, OutputPath, safe_file_name, shortened_stem

if TYPE_CHECKING:
    from clairvit.bench.plan import Plan, Study
    from clairvit.bench.run import Outcome
    from clairvit.bench.store import Store
    from clairvit.methods.recipe import Recipe
    from clairvit.metrics.score import Score, Scores
    from clairvit.selection.ranking import Row
    from clairvit.selection.result import Selection

    ScoreTable = Mapping[str, Mapping[str, Score]]  # metric -> method -> score, the baselines last

METRICS_PER_TABLE = 5
BASELINE_LABELS = {"center": "center (baseline)", "random": "random (baseline)"}
MAX_LISTED = 5  # images that are named; more of them are counted
COUNT_COLUMNS = ("images", "methods", "metrics", "cells", "done", "units", "forwards")


# Scores


def by_metric(scores: Mapping[tuple[str, str], Score]) -> ScoreTable:
    """Return the scores of each metric by method, then those of baselines that were not among the methods."""
    rows: dict[str, dict[str, Score]] = {}
    for (method, metric), score in scores.items():
        rows.setdefault(metric, {})[method] = score
    for row in rows.values():
        for name, baseline in next(iter(row.values())).baselines.items():
            row.setdefault(name, baseline)
    return rows


def print_scores(rows: ScoreTable, methods: Sequence[str]) -> None:
    """Print one row per method and one column per metric: mean ± standard error and, below, the interval."""
    from clairvit.metrics.confidence_intervals import FEWEST
    from clairvit.plotting.labels import ARROWS

    metrics = list(rows)
    count = max(len(score.values) for scores in rows.values() for score in scores.values())
    title = f"{count} image{'s' * (count != 1)}, {_any_score(rows).model}"
    for start in range(0, len(metrics), METRICS_PER_TABLE):
        part = metrics[start : start + METRICS_PER_TABLE]
        names = list(dict.fromkeys(name for metric in part for name in rows[metric]))
        lines = [
            (
                name if name in methods else BASELINE_LABELS.get(name, name),
                *(_score_cell(rows[metric][name], count) if name in rows[metric] else "–" for metric in part),
                str(count),
            )
            for name in names
        ]
        columns = [f"{metric} {ARROWS[next(iter(rows[metric].values())).better]}" for metric in part]
        table(title, ("method", *columns, "n"), lines, right=("n",))
    print_line("↑ higher is better, ↓ lower is better. Mean over images ± standard error, [95 % interval].")
    if any(score.n_valid < FEWEST for scores in rows.values() for score in scores.values()):
        print_line(f"No interval for fewer than {FEWEST} images: they are too few to estimate one.")


def _any_score(rows: ScoreTable) -> Score:
    return next(iter(next(iter(rows.values())).values()))


def _score_cell(score: Score, count: int) -> str:
    """Return '0.213 ± 0.012', below '[0.19, 0.24]' from 6 images on, and 'n = 7' if some images have no value."""
    if not score.n_valid:
        return "undefined\nn = 0"
    error, interval = score.standard_error, _interval(score.interval, digits=4)
    lines = [f"{score.mean:.4g}" + ("" if math.isnan(error) else f" ± {error:.2g}")]
    lines += [interval] if interval else []
    lines += [f"n = {score.n_valid}"] if score.n_valid < count else []
    return "\n".join(lines)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _interval(interval: tuple[float, float], digits: int = 3) -> str:
    low, high = interval
    return "" if math.isnan(low) else f"[{low:.{digits}g}, {high:.{digits}g}]"


def score_document(
    command: str,
    rows: ScoreTable,
    methods: Sequence[str],
    target: str | None,
    unmasked: Sequence[str],
    failures: Sequence[Failure],
) -> dict[str, Any]:
    """Return the content of scores.json."""
    from clairvit.methods.collect import versions

    score = _any_score(rows)
    return {
        "clairvit": __version__,
        "command": command,
        "model": score.model,
        "target": target,
        "seed": score.seed,
        "images": list(score.names),
        "without_mask": list(unmasked),
        "versions": versions(),
        "scores": [
            _score_record(score, score.method not in methods) for scores in rows.values() for score in scores.values()
        ],
        "failed": [vars(failure) for failure in failures],
    }


def _score_record(score: Score, baseline: bool) -> dict[str, Any]:
    content = score.to_dict()
    leading = {name: content.pop(name) for name in ("method", "metric")}
    return {**leading, "baseline": baseline, **content}


def scores_csv(rows: ScoreTable) -> str:
    """Return one line per image, method and metric; the value is empty where it is undefined."""
    from clairvit._io import csv_text

    lines: list[tuple[Any, ...]] = [("image", "method", "metric", "value")]
    for metric, scores in rows.items():
        for method, score in scores.items():
            values = zip(score.names, score.values.tolist(), strict=True)
            lines += [(image, method, metric, value if math.isfinite(value) else "") for image, value in values]
    return csv_text(lines)


def write_scores(out: OutputPath, rows: ScoreTable, document: Mapping[str, object]) -> list[Path]:
    """Write one file, or into the folder scores.json, scores.csv and a picture per metric with curves."""
    from clairvit._io import write_json, write_text

    if out.is_file and out.path.suffix.lower() == ".json":
        return [write_json(document, out.path)]
    if out.is_file:
        return [write_text(scores_csv(rows), out.path)]
    files = [write_json(document, out.path / "scores.json"), write_text(scores_csv(rows), out.path / "scores.csv")]
    curves = {metric: row for metric, row in rows.items() if any(score.curve is not None for score in row.values())}
    if curves:
        from clairvit.plotting.curves import curves_figure
        from clairvit.plotting.save import write_figure

        for metric, row in curves.items():
            files.append(
                write_figure(
                    curves_figure(list(row.values())), out.path / f"{shortened_stem(safe_file_name(metric))}.png"
                )
            )
    return files


def score_notes(
    rows: ScoreTable,
    unmasked: Sequence[str] = (),
    masks: str | None = None,
    detected: Mapping[str, Sequence[tuple[str, float]]] | None = None,
) -> list[str]:
    """Return what a reader of the table must know, each sentence once."""
    notes: list[str] = []
    if unmasked:
        listed = ", ".join(unmasked[:3]) + (", …" if len(unmasked) > 3 else "")
        notes.append(f"{len(unmasked)} without a mask in {masks}, so without a score by masks: {listed}.")
    if detected:
        counts = Counter(name for classes in detected.values() for name in {name for name, _ in classes})
        frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:8]  # the order of a set is random
        listed = ", ".join(f"{name} ({count})" for name, count in frequent) or "nothing"
        empty = sum(not classes for classes in detected.values())
        notes.append(f"Foreground found in the images: {listed}; none in {empty}, which have no score by masks.")
    for scores in rows.values():
        for score in scores.values():
            notes += score.notes
            if score.n_degenerate:
                notes.append(f"{score.n_degenerate} of {len(score.values)} maps of {score.method} are constant.")
    return list(dict.fromkeys(notes))


# Selections of `clairvit choose`


def print_selection(selection: Selection) -> None:
    """Print the ranking, the start layers, and the conclusion in words."""
    from clairvit.plotting.labels import ARROWS

    other_metrics = [metric for metric in selection.metrics if metric != selection.by]
    columns = ("    method", f"{selection.by} {ARROWS[selection.better]}", "gap to best", "p", *other_metrics)
    title = f"{selection.images} image{'s' * (selection.images != 1)}, {selection.model}"
    lines = [_ranking_cells(row, selection, other_metrics) for row in selection.ranking]
    table(title, (*columns, "cost of a map", "front"), lines, right=("p",))
    print_line("Mean over images ± standard error, [95 % interval]; cost: f forwards and b backwards, seconds.")
    print_line(
        "p: paired test against the best, corrected by Holm for having picked it; = no significant difference. "
        "front: ● Pareto-optimal."
    )
    for tuned in selection.tuned.values():
        starts = [
            (str(start), text, _number(mean), _interval(interval), _start_label(start, tuned.best, tuned.half))
            for start, (text, mean, interval) in enumerate(
                zip(tuned.methods, tuned.means, tuned.intervals, strict=True)
            )
        ]
        table(f"{tuned.base} from each layer on", ("layer", "method", tuned.metric, "95 % interval", ""), starts)
    print_skipped(selection.skipped)
    for sentence in selection.answer:
        print_line(sentence)


def print_calibration(recipe: Recipe) -> None:
    """Print the cross-fitted scores of a calibrated method and of the one it is compared with, and the conclusion."""
    from clairvit.methods.calibrated import PRIOR_METHOD

    def cell(row: Mapping[str, Any], name: str) -> str:
        return f"{_number(row[name])} {_interval(row[f'{name}_interval'])}".strip()

    names = ("calibrated", PRIOR_METHOD, "gain")
    rows = [(row["metric"], *(cell(row, name) for name in names)) for row in recipe.ranking]
    title = f"{recipe.images} images, {recipe.model}: cross-fitted means and 95 % intervals"
    table(title, ("metric", *names), rows)
    for sentence in recipe.answer:
        print_line(sentence)


def _ranking_cells(row: Row, selection: Selection, other_metrics: Sequence[str]) -> tuple[str, ...]:
    error = "" if math.isnan(row.standard_error) else f" ± {row.standard_error:.2g}\n{_interval(row.interval)}".rstrip()
    is_best = row.method == selection.best
    backwards = f" + {row.cost.backwards} b" if row.cost.backwards else ""
    return (
        f"{row.rank:>2}  {row.method}" + (" (baseline)" if row.baseline else ""),
        _number(row.mean) + error,
        "best" if is_best else f"{_number(row.gap)}\n{_interval(row.gap_interval)}".strip(),
        "" if is_best else f"{row.p:.2g}{'' if row.differs_from_best else ' ='}",
        *(_number(row.means[metric]) for metric in other_metrics),
        f"{row.cost.forwards} f{backwards}, {row.cost.seconds:.2g} s",
        "●" if row.is_pareto_optimal else "",
    )


def _start_label(start: int, best: int, half: int) -> str:
    return ", ".join([*(["best"] if start == best else []), *(["ceil(L/2)"] if start == half else [])])


def selection_document(selection: Selection, file: Path) -> dict[str, Any]:
    """Return the JSON document of `choose` without the images that failed."""
    return selection.to_dict() | {"files": [str(file)]}


# Studies of `clairvit bench`


def print_plan(study: Study, plan: Plan, as_json: bool = False) -> None:
    """Print one row per model and data set; baselines count as methods."""
    shares: list[dict[str, Any]] = []
    for (model, model_config), (data, data_config) in product(enumerate(study.models), enumerate(study.data)):
        units = [unit for unit in plan.units if (unit.model, unit.data) == (model, data)]
        images, methods, metrics = len(plan.images[data]), len(study.methods), len(study.metrics)
        cells = images * methods * metrics
        share = {
            "model": model_config.spec,
            "data": data_config.spec,
            "images": images,
            "methods": methods,
            "metrics": metrics,
            "cells": cells,
            "done": cells - sum(unit.cells for unit in units),
            "units": len(units),
            "forwards": sum(unit.forwards for unit in units),
        }
        shares.append(share)
    if as_json:
        totals = {"units": len(plan.units), "cells": plan.cells, "done": plan.done, "forwards": plan.forwards}
        print_document("bench", {"plan": {**totals, "shares": shares}})
        return
    rows = [[str(value) for value in share.values()] for share in shares]
    table("The plan", ("model", "data", *COUNT_COLUMNS), rows, COUNT_COLUMNS)
    to_do = f"{len(plan.units)} unit{'s' * (len(plan.units) != 1)} to do, about {plan.forwards} forwards"
    remaining = to_do if plan.units else "nothing is left to do"
    print_line(f"{plan.done} of {plan.cells} cells are done already; {remaining}.")


def print_study(
    store: Store, study: Study, methods: Sequence[str], outcome: Outcome, as_json: bool, quiet: bool
) -> None:
    """Print the scores of this study, whatever else is in the store; what failed makes the exit status 2."""
    from clairvit.bench.plan import settings_of
    from clairvit.bench.results import read_scores, unreadable_images

    documents, failures = [], _unit_failures(study, outcome)
    unread: list[dict[str, str]] = []  # images of sets of which others were read
    for model, weights in enumerate(outcome.plan.hashes):
        for data, images in enumerate(outcome.plan.images):
            spec = study.data[data].spec
            title = f"{study.models[model].spec} on {spec}"
            scores = read_scores(store, weights, spec, settings_of(study), images, study.specs)
            unreadable = unreadable_images(store, weights, settings_of(study), images)
            rows = {  # in the order of the study
                metric: row
                for metric in study.metrics
                if (row := {name: scores[name, metric] for name in study.methods if (name, metric) in scores})
            }
            if len(unreadable) == len(images):
                failures.append(_no_images(title, unreadable))
            elif unreadable:
                unread += [
                    {"model": study.models[model].spec, "data": spec, "image": name, "error": reason}
                    for name, reason in unreadable.items()
                ]
                print_message(_unread_sentence(title, list(unreadable), len(images)))
            if as_json:
                documents.append(_study_document(study, model, data, rows, methods, scores, unreadable))
            elif not quiet:
                _print_study_scores(title, rows, methods, scores, unreadable)
    if as_json:
        failed = [{**vars(unit), "error": error} for unit, error in outcome.failed]
        print_document(
            "bench",
            {"store": str(store.path), "computed": outcome.computed, "results": documents, "failed": failed + unread},
        )
    elif not quiet:
        units = "unit was" if outcome.computed == 1 else "units were"
        print_line(f"{outcome.computed} {units} computed in {outcome.seconds:.1f} s; all is in {store.path}")
    exit_on_failures(outcome.computed, failures, "computed")
    if unread:
        raise typer.Exit(2)


def _unread_sentence(title: str, names: Sequence[str], count: int) -> str:
    unlisted = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    listed = ", ".join(names[:MAX_LISTED]) + unlisted
    return f"{len(names)} of {count} images could not be read and have no scores, {title}: {listed}."


def _no_images(title: str, unreadable: Mapping[str, str]) -> Failure:
    name, reason = next(iter(unreadable.items()))
    message = f"None of the {len(unreadable)} images could be read; expected at least one that can. {name}: {reason}"
    return Failure(title, message)


def _print_study_scores(
    title: str, rows: ScoreTable, methods: Sequence[str], scores: Scores, unreadable: Mapping[str, str]
) -> None:
    print_line(title)
    if rows:
        print_scores(rows, methods)
    else:
        print_line("No scores.")
    for note in score_notes(rows):
        print_result_note(note)
    print_skipped(scores.skipped)
    for name, reason in list(unreadable.items())[:MAX_LISTED]:
        print_line(f"Not read: {name}. {reason}")
    if len(unreadable) > MAX_LISTED:
        print_line(f"… and {len(unreadable) - MAX_LISTED} more images that could not be read.")


def _study_document(
    study: Study,
    model: int,
    data: int,
    rows: ScoreTable,
    methods: Sequence[str],
    scores: Scores,
    unreadable: Mapping[str, str],
) -> dict[str, Any]:
    about = {"model_spec": study.models[model].spec, "data": study.data[data].spec, "skipped": scores.skipped}
    failures = [Failure(name, reason) for name, reason in unreadable.items()]
    if not rows:
        return {**about, "scores": [], "failed": [vars(failure) for failure in failures]}
    document = score_document("bench", rows, methods, study.target, (), failures)
    return {**document, **scores.model_record, **about}


def _unit_failures(study: Study, outcome: Outcome) -> list[Failure]:
    """Return each error once, with the images of all units that have it."""
    names = {data: [name for name, _ in images] for data, images in enumerate(outcome.plan.images)}
    images_by_error: dict[tuple[int, int, str], list[str]] = {}
    for unit, error in outcome.failed:
        images = images_by_error.setdefault((unit.model, unit.data, error), [])
        images += [names[unit.data][row] for row in unit.rows]
    failures = []
    for (model, data, error), images in images_by_error.items():
        unique = list(dict.fromkeys(images))
        unlisted = f" and {len(unique) - MAX_LISTED} more" if len(unique) > MAX_LISTED else ""
        listed = ", ".join(unique[:MAX_LISTED]) + unlisted
        failures.append(Failure(f"{study.models[model].spec} on {study.data[data].spec} ({listed})", error))
    return failures


def print_query(names: Sequence[str], rows: Sequence[Sequence[Any]], as_json: bool) -> None:
    """Print the result of --sql."""
    if as_json:
        values = [[_json_value(value) for value in row] for row in rows]
        print_document("bench", {"columns": list(names), "rows": values})
        return
    cells = [[_query_cell(value) for value in row] for row in rows]
    table(f"{len(rows)} row{'s' * (len(rows) != 1)}", names, cells)


def _json_value(value: Any) -> Any:
    """Return a value of a query as JSON has it; dates and decimals become text."""
    if isinstance(value, list | tuple):
        return [_json_value(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _query_cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
