"""Read: from a store back to scores, as `cv.evaluate` gives them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from clairvit.bench.plan import among_of
from clairvit.bench.store import Store
from clairvit.errors import BadInput, ClairWarning, UnknownName
from clairvit.methods.explanation import Cost
from clairvit.methods.spec import resolve_method
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.registry import resolve_metric
from clairvit.metrics.score import Curve, Prediction, Score, Scores

Groups = dict[tuple[str, str], list[dict[str, Any]]]  # method and metric -> rows
FIELDS = (
    *("image", "label", "predicted", "probability", "value", "degenerate", "x", "y", "meaning", "across", "counts"),
    *("forwards", "backwards", "seconds", "note", "options", "better", "method", "metric"),
)


def combinations(store: Store) -> list[tuple[str, str, str, str]]:
    """Model, its hash, data and settings of all that is in a store."""
    _, rows = store.query("select distinct model, model_hash, data, settings from results order by all")
    return [(str(a), str(b), str(c), str(d)) for a, b, c, d in rows]


def scores_of(
    store: Store, model_hash: str, data: str, settings: str, images: Sequence[tuple[str, str]] | None = None
) -> Scores:
    """Every method and metric of one model on one set of images; images in the order of their names.

    With `images` (name and mark of each, as a plan has them) they are those, wherever else they were seen before;
    else all that `data` ever meant. An image that could not be read is in no score, a method that does not fit is in
    `.skipped`.
    """
    records = _records(store, model_hash, settings, data, images)
    if images is not None:
        known: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            known.setdefault(record["image_hash"], []).append(record)
        records = [{**one, "image": name} for name, mark in sorted(images) for one in known.get(mark, ())]
    groups: Groups = {}
    found = Scores()
    found.model_record = {key: value for key, value in store.models().get(model_hash, {}).items() if key != "model"}
    for record in records:
        if record["predicted"] is not None:
            groups.setdefault((record["method"], record["metric"]), []).append(record)
    seen = {
        one["image"]: Prediction(one["image"], one["predicted"], one["probability"], one["label"])
        for own in groups.values()
        for one in own
    }
    found.seen = tuple(seen[image] for image in sorted(seen))
    found.skipped = {
        record["method"]: record["note"]
        for record in records
        if record["predicted"] is None and record["image"] in seen and record["note"]
    }
    made = {key: _score(own, *key) for key, own in _understood(groups).items()}
    for (method, metric), score in made.items():
        luck = {name: made[name, metric] for name in BASELINES if (name, metric) in made}
        found[method, metric] = replace(score, baselines=luck)
    return found


def _understood(groups: Groups) -> Groups:
    """Without methods and metrics that this ClairViT does not know, or not with these options; they are named."""
    odd: dict[str, str] = {}
    for texts, understand in (
        ({one for one, _ in groups}, resolve_method),
        ({one for _, one in groups}, resolve_metric),
    ):
        for text in sorted(texts):
            try:
                understand(text)
            except (BadInput, UnknownName) as error:
                odd[text] = str(error)
    for text, why in odd.items():
        warnings.warn(
            f"'{text}' is in the store and left out here: {why} Another version of ClairViT, or a method of your own, "
            "made these numbers; a query of the store shows them.",
            ClairWarning,
            stacklevel=3,
        )
    return {key: own for key, own in groups.items() if odd.keys().isdisjoint(key)}


def unread(store: Store, model_hash: str, settings: str, images: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Which of the images have no score by any method, not even a baseline: they could not be read. And why."""
    records = _records(store, model_hash, settings, "", images)
    read = {one["image_hash"] for one in records if one["predicted"] is not None}
    why = {one["image_hash"]: one["note"] for one in records if one["image_hash"] not in read}
    return {name: why[mark] for name, mark in images if mark in why}


def _records(
    store: Store, model_hash: str, settings: str, data: str, images: Sequence[tuple[str, str]] | None
) -> list[dict[str, Any]]:
    """Each cell once, in a settled order. Of a metric of whole sets: of this set, or of the largest there is."""
    if images is None:
        which, same = f"data = {_text(data)}", "image_hash, image"
        among = "first_value(among) over (partition by metric order by size desc, among)"
    else:
        marks = [mark for _, mark in images]
        which, same = f"image_hash in ({', '.join(map(_text, dict.fromkeys(marks)))})", "image_hash"
        among = _text(among_of(marks))
    names, rows = store.query(
        "with own as (select *, count(*) over (partition by metric, among) as size from results "
        f"where model_hash = {_text(model_hash)} and settings = {_text(settings)} and {which}), "
        f"fitting as (select *, {among} as wanted from own) "
        f"select model, settings, image_hash, {', '.join(FIELDS)} from fitting where among is null or among = wanted "
        f"qualify row_number() over (partition by {same}, method, metric order by unit, image) = 1 "
        "order by metric, method, image, unit"
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _text(value: str) -> str:
    """As SQL writes it."""
    return "'" + value.replace("'", "''") + "'"


def _score(rows: Sequence[dict[str, Any]], method: str, metric: str) -> Score:
    first, asked = rows[0], resolve_metric(metric)
    values = [math.nan if row["value"] is None else row["value"] for row in rows]
    options, curve = json.loads(first["options"]), None
    if first["x"] is not None:
        x, y = (torch.tensor(part, dtype=torch.float64) for part in (first["x"], [row["y"] for row in rows]))
        curve = Curve(x, y, str(first["meaning"]), str(first["across"]))
    counts = None
    if first["counts"] is not None:
        counts = torch.tensor([row["counts"] for row in rows], dtype=torch.float64).reshape(len(rows), -1, 2)
    seed = dict(part.split("=", 1) for part in str(first["settings"]).split(","))["seed"]
    notes = dict.fromkeys(note for row in rows for note in (row["note"] or "").split("; ") if note)
    return Score(
        metric=metric,
        method=method,
        values=torch.tensor(values, dtype=torch.float64),
        better=first["better"],
        span=asked.span_with(options),
        degenerate=torch.tensor([bool(row["degenerate"]) for row in rows]),
        names=tuple(row["image"] for row in rows),
        model=first["model"],
        settings=options,
        seed=int(seed),
        cost=Cost(first["forwards"], first["backwards"], sum(row["seconds"] for row in rows)),
        curve=curve,
        counts=counts,
        notes=tuple(notes),
    )
