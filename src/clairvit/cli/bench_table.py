"""What `clairvit bench` prints: the plan, the scores, what a query found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clairvit._version import __version__
from clairvit.cli.console import line, table
from clairvit.cli.evaluate import notes
from clairvit.cli.finish import end, print_left_out
from clairvit.cli.image_job import Failure
from clairvit.cli.scores import document, print_scores

if TYPE_CHECKING:
    from clairvit.bench.plan import Plan, Study
    from clairvit.bench.run import Outcome
    from clairvit.bench.store import Store
    from clairvit.metrics.score import Score, Scores

    Rows = dict[str, dict[str, Score]]  # metric -> method -> score

NAMED = 5  # images that are listed; more of them are counted
RIGHT = ("images", "methods", "metrics", "cells", "done", "units", "forwards")


def print_plan(study: Study, plan: Plan, as_json: bool = False) -> None:
    """A line for each model and data; baselines are among the methods."""
    shares = [_share(study, plan, model, data) for model in range(len(study.models)) for data in range(len(study.data))]
    totals = {"units": len(plan.units), "cells": plan.cells, "done": plan.done, "forwards": plan.forwards}
    if as_json:
        _print({"plan": {**totals, "shares": shares}})
        return
    table("The plan", ("model", "data", *RIGHT), [[str(value) for value in one.values()] for one in shares], RIGHT)
    line(f"{plan.done} of {plan.cells} cells are done already; {_left(plan)}.")


def _left(plan: Plan) -> str:
    if not plan.units:
        return "nothing is left to do"
    return f"{len(plan.units)} unit{'s' * (len(plan.units) != 1)} to do, about {plan.forwards} forwards"


def _share(study: Study, plan: Plan, model: int, data: int) -> dict[str, Any]:
    own = [unit for unit in plan.units if (unit.model, unit.data) == (model, data)]
    images, methods, metrics = len(plan.images[data]), len(study.methods), len(study.metrics)
    cells = images * methods * metrics
    return {
        "model": study.models[model].spec,
        "data": study.data[data].spec,
        "images": images,
        "methods": methods,
        "metrics": metrics,
        "cells": cells,
        "done": cells - sum(unit.cells for unit in own),
        "units": len(own),
        "forwards": sum(unit.forwards for unit in own),
    }


def report(store: Store, study: Study, methods: Sequence[str], outcome: Outcome, as_json: bool, quiet: bool) -> None:
    """The scores of this study, whatever else is in the store; what could not be computed makes the exit status 2."""
    from clairvit.bench.plan import settings_of
    from clairvit.bench.results import scores_of, unread

    results, failures = [], _failures(study, outcome)
    for place, weights in enumerate(outcome.plan.hashes):
        for data, images in enumerate(outcome.plan.images):
            spec = study.data[data].spec
            scores = scores_of(store, weights, spec, settings_of(study), images)
            lost = unread(store, weights, settings_of(study), images)
            rows = _in_order(scores, study)
            if len(lost) == len(images):
                failures.append(_nothing(f"{study.models[place].spec} on {spec}", lost))
            if as_json:
                results.append(_document(study, place, data, rows, methods, scores, lost))
            elif not quiet:
                _print_scores(f"{study.models[place].spec} on {spec}", rows, methods, scores, lost)
    if as_json:
        _print({"store": str(store.path), "computed": outcome.computed, "results": results, "failed": _failed(outcome)})
    elif not quiet:
        many = "unit was" if outcome.computed == 1 else "units were"
        line(f"{outcome.computed} {many} computed in {outcome.seconds:.1f} s; all is in {store.path}")
    end(range(outcome.computed), failures, "computed")


def _nothing(where: str, lost: Mapping[str, str]) -> Failure:
    name, why = next(iter(lost.items()))
    return Failure(
        where, f"None of the {len(lost)} images could be read; expected at least one that can. {name}: {why}"
    )


def _in_order(scores: Scores, study: Study) -> Rows:
    found: Rows = {}
    for metric in study.metrics:
        own = {method: scores[method, metric] for method in study.methods if (method, metric) in scores}
        if own:
            found[metric] = own
    return found


def _print_scores(title: str, rows: Rows, methods: Sequence[str], scores: Scores, lost: Mapping[str, str]) -> None:
    line(title)
    if rows:
        print_scores(rows, methods)
    else:
        line("No scores.")
    for note in notes(rows, (), None, {}):
        line(f"Note: {note}")
    print_left_out(scores.skipped)
    for name, why in list(lost.items())[:NAMED]:
        line(f"Not read: {name}. {why}")
    if len(lost) > NAMED:
        line(f"… and {len(lost) - NAMED} more images that could not be read.")


def _document(
    study: Study,
    model: int,
    data: int,
    rows: Rows,
    methods: Sequence[str],
    scores: Scores,
    lost: Mapping[str, str],
) -> dict[str, Any]:
    about = {"model_spec": study.models[model].spec, "data": study.data[data].spec, "skipped": scores.skipped}
    unread = [Failure(name, why) for name, why in lost.items()]
    if not rows:
        return {**about, "scores": [], "failed": [vars(failure) for failure in unread]}
    return {**document(rows, methods, study.target, (), unread), "command": "bench", **scores.model_record, **about}


def _failed(outcome: Outcome) -> list[dict[str, Any]]:
    return [{**vars(unit), "error": error} for unit, error in outcome.failed]


def _failures(study: Study, outcome: Outcome) -> list[Failure]:
    """What went wrong, each error once for all units that have it."""
    names = {data: [name for name, _ in images] for data, images in enumerate(outcome.plan.images)}
    alike: dict[tuple[int, int, str], list[str]] = {}
    for unit, error in outcome.failed:
        own = alike.setdefault((unit.model, unit.data, error), [])
        own += [names[unit.data][row] for row in unit.rows]
    found = []
    for (model, data, error), images in alike.items():
        listed = list(dict.fromkeys(images))
        some = ", ".join(listed[:NAMED]) + (f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "")
        found.append(Failure(f"{study.models[model].spec} on {study.data[data].spec} ({some})", error))
    return found


def print_query(names: Sequence[str], rows: Sequence[Sequence[Any]], as_json: bool) -> None:
    if as_json:
        _print({"columns": list(names), "rows": [[_plain(value) for value in row] for row in rows]})
        return
    table(f"{len(rows)} row{'s' * (len(rows) != 1)}", names, [[_said(value) for value in row] for row in rows])


def _plain(value: Any) -> Any:
    """As JSON has it; NaN and infinity are null, dates and decimals text."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _said(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print(content: Mapping[str, Any]) -> None:
    from clairvit.plotting.save import dumps

    print(dumps({"clairvit": __version__, "command": "bench", **content}))
