"""Parts of a reproduction beside its means: images, the chosen start layer, right and wrong predictions, cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clairvit._cost import Cost
from clairvit.papers.correctness import CorrectnessSplit
from clairvit.papers.cost import CostResult
from clairvit.papers.per_image import ImageScores
from clairvit.papers.reproduce import Reproduction
from clairvit.papers.tuning import TunedStart
from clairvit.plotting.labels import ARROWS, UNDEFINED
from clairvit.reports.blocks import Table
from clairvit.reports.multiverse import multiverse_json, multiverse_tables
from clairvit.reports.needed_images import needed_table
from clairvit.reports.text_tables import short_number, text_table

MOST_IMAGES = 40  # in a table; the JSON has all


def extra_tables(result: Reproduction) -> Iterator[Table]:
    """Yield the tables of what this reproduction has."""
    if result.table is not None and result.table.per_image and result.by_image:
        yield _image_table(result)
    if result.tuned is not None:
        yield _start_table(result.tuned)
    if result.by_correctness:
        yield _correctness_table(result)
    if result.costs:
        yield _cost_table(result.costs)
    if result.needed:
        yield needed_table(result)
    if result.multiverse is not None:
        yield from multiverse_tables(result.multiverse)


def extra_json(result: Reproduction) -> dict[str, Any]:
    """Return the same as JSON values; a key is there where its part is."""
    document: dict[str, Any] = {"training": dict(result.training)} if result.training else {}
    if result.tuned is not None:
        tuned = result.tuned
        document["tuned"] = {"methods": list(tuned.methods), "images": tuned.images, **tuned.start.to_dict()}
    if result.by_correctness:
        document["by_correctness"] = [_split_json(split) for split in result.by_correctness]
    if result.costs:
        document["costs"] = [_cost_json(cost) for cost in result.costs]
    if result.needed:
        document["images_needed"] = [needed.to_dict() for needed in result.needed]
    if result.multiverse is not None:
        document["multiverse"] = multiverse_json(result.multiverse)
    if result.by_image:
        document["by_image"] = [_image_json(image) for image in result.by_image]
    return document


def _image_table(result: Reproduction) -> Table:
    """Return a row per image with what the paper prints by image; its own numbers beside ours of images it names."""
    table = result.table
    assert table is not None
    keys = [(method, measure) for method in table.methods for measure in table.per_image]
    named = any(image.printed for image in result.by_image)
    rows = []
    for image in result.by_image[:MOST_IMAGES]:
        sure = "" if image.probability is None else f" ({image.probability:.0%})"
        texts = [short_number(image.values.get(key, math.nan), 3) for key in keys]
        if named:
            printed = [short_number(image.printed.get(key, math.nan), 3) for key in keys]
            texts = [f"{text} / {value}" for text, value in zip(texts, printed, strict=True)]
        rows.append((image.image, f"{image.predicted}{sure}", *texts))
    count = len(result.by_image)
    shown = f"the first {MOST_IMAGES} of {count} images, all are in the JSON" if count > MOST_IMAGES else ""
    beside = f"ours / the paper's of its image of that name ({table.source})" if named else ""
    parts = [part for part in ("By image", shown, beside) if part]
    columns = [f"{measure}, {method}" for method, measure in keys]
    return text_table("; ".join(parts), ("image", "predicted", *columns), rows, columns)


def _image_json(image: ImageScores) -> dict[str, Any]:
    return {
        "image": image.image,
        "predicted": image.predicted,
        "probability": image.probability,
        "label": image.label,
        "scores": _by_method(image.values),
        "paper": None if image.printed_as is None else {"image": image.printed_as, "scores": _by_method(image.printed)},
    }


def _by_method(values: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Return method -> measure -> value."""
    nested: dict[str, dict[str, float]] = {}
    for (method, measure), value in values.items():
        nested.setdefault(method, {})[measure] = value
    return nested


def _start_table(tuned: TunedStart) -> Table:
    """Return the score of each start layer, with the one that was chosen."""
    start = tuned.start
    rows = []
    for layer, (mean, error, (low, high)) in enumerate(
        zip(start.means, start.standard_errors, start.intervals, strict=True)
    ):
        names = [name for name, at in (("chosen, m*", start.best), ("ceil(L/2)", start.half)) if at == layer]
        interval = UNDEFINED if math.isnan(low) else f"[{short_number(low, 3)}, {short_number(high, 3)}]"
        rows.append((str(layer), short_number(mean), short_number(error, 2), interval, ", ".join(names)))
    columns = ("m", start.metric, "standard error", "95 % interval", "")
    caption = (
        f"{tuned.tuning.method} from layer m on: the start of {' and '.join(tuned.methods)}, chosen on {tuned.images} "
        f"images that are not scored ({tuned.tuning.source})"
    )
    return text_table(caption, columns, rows, columns[:4])


def _correctness_table(result: Reproduction) -> Table:
    """Return a row per method with its scores for right / wrong predictions by each measure."""
    splits = {(split.method, split.measure): split for split in result.by_correctness}
    measures = [m for m in result.config.paper.measures if any(key[1] == m.name for key in splits)]
    methods = dict.fromkeys(split.method for split in result.by_correctness)
    most = {kind: max(getattr(split, kind).images for split in result.by_correctness) for kind in ("right", "wrong")}
    rows = [
        (
            method,
            *(_split_text(splits.get((method, measure.name)), most["right"], most["wrong"]) for measure in measures),
        )
        for method in methods
    ]
    columns = ("method", *(f"{measure.name} {ARROWS[measure.better]}" for measure in measures))
    caption = (
        f"Right / wrong predictions apart: {most['right']} images are classified rightly, {most['wrong']} wrongly (*: "
        "the 95 % interval of the difference leaves out 0; each for itself, not corrected for their number)"
    )
    return text_table(caption, columns, rows)


def _split_text(split: CorrectnessSplit | None, right: int, wrong: int) -> str:
    """Return "0.42 / 0.35*", with the numbers of images where they are not those of the caption."""
    if split is None:
        return UNDEFINED
    text = f"{short_number(split.right.mean, 3)} / {short_number(split.wrong.mean, 3)}{'*' if split.differs else ''}"
    counts = split.right.images, split.wrong.images
    return text if counts == (right, wrong) else f"{text} (n = {counts[0]} / {counts[1]})"


def _split_json(split: CorrectnessSplit) -> dict[str, Any]:
    return {
        "method": split.method,
        "measure": split.measure,
        "right": dict(vars(split.right)),
        "wrong": dict(vars(split.wrong)),
        "difference": split.right.mean - split.wrong.mean,
        "interval": list(split.interval),
    }


def _cost_table(costs: Sequence[CostResult]) -> Table:
    rows = []
    for cost in costs:
        low, high = cost.interval
        rows += [
            (cost.claim.statement, "passes of one map", _passes_of_both(cost)),
            (cost.claim.statement, "ratio of times here", f"{cost.ratio:.2f}, 95 % interval [{low:.2f}, {high:.2f}]"),
            (cost.claim.statement, "verdict", cost.verdict),
            (cost.claim.statement, "what the passes say", _consequence(cost)),
        ]
    rounds, device, sources = costs[0].rounds, costs[0].device, ", ".join(dict.fromkeys(c.claim.source for c in costs))
    caption = f"What the paper says of cost ({sources}): one image at a time, {rounds} rounds in turn on {device}"
    return text_table(caption, ("the paper says", "", "measured"), rows, grouped=True)


def _passes_of_both(cost: CostResult) -> str:
    return f"{cost.claim.method}: {_passes(cost.method)}; {cost.claim.baseline}: {_passes(cost.baseline)}"


def _passes(cost: Cost) -> str:
    """Return "1 forward + 1 backward"."""
    forwards = f"{cost.forwards} forward{'s' * (cost.forwards != 1)}"
    return f"{forwards} + {cost.backwards} backward{'s' * (cost.backwards != 1)}" if cost.backwards else forwards


def _consequence(cost: CostResult) -> str:
    """Return what the number of passes alone says about the claim."""
    if not cost.extra_passes:
        return "as many passes: no difference follows from them"
    extra = f"{cost.extra_passes} more pass{'es' * (cost.extra_passes != 1)}"
    if math.isnan(cost.work_needed):
        return f"{extra}: slower, by how much depends on the model"
    return (
        f"{extra}: {cost.claim.ratio:g} times would need other work that takes as long as {cost.work_needed:.1f} passes"
    )


def _cost_json(cost: CostResult) -> dict[str, Any]:
    return {
        "claim": cost.claim.statement,
        "source": cost.claim.source,
        "method": {"name": cost.claim.method, **_cost_values(cost.method)},
        "baseline": {"name": cost.claim.baseline, **_cost_values(cost.baseline)},
        "printed_ratio": cost.claim.ratio,
        "ratio": cost.ratio,
        "interval": list(cost.interval),
        "rounds": cost.rounds,
        "device": cost.device,
        "verdict": cost.verdict,
        "work_needed": cost.work_needed,
    }


def _cost_values(cost: Cost) -> dict[str, float]:
    return {"forwards": cost.forwards, "backwards": cost.backwards, "seconds": cost.seconds}
