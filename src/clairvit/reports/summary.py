"""The first section of a report: the result in plain words, for readers who know neither the metrics nor the tests."""

from __future__ import annotations

import math

import numpy as np

from clairvit.methods.plain_language import plain_words
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.confidence_intervals import FEWEST
from clairvit.metrics.score import leads
from clairvit.plotting.labels import count_images
from clairvit.plotting.series import RANDOM
from clairvit.reports.blocks import Block, Item, Items, Section, Text
from clairvit.reports.ranking import agreement
from clairvit.reports.sections import compare_with_random, first_gap
from clairvit.reports.study_results import StoreContents, StudyResults

DISAGREE = 0.0  # rank correlation below which two metrics order methods the other way round


def summary_section(contents: StoreContents) -> Section:
    """Return which method is best, how sure that is, on what images, and what the study cannot show."""
    scored = [results for results in contents.results if results.methods and results.key_metric is not None]
    if not scored:
        return Section("In short", [Text("There is no score of a method yet, so no method can be recommended.")])
    blocks: list[Block] = []
    for results in scored:
        name = f"{results.model} on {results.data}: " if len(scored) > 1 else ""
        items = [Item(_certainty(results), "How sure?"), Item(_images(results), "On what images?")]
        if results is scored[-1]:
            items.append(Item(_limits(scored), "What can it not show?"))
        blocks += [Text(f"{name}{_best(results)}", lead=True), Items(tuple(items))]
    return Section("In short", blocks)


def title_of(spec: MethodSpec) -> str:
    """Return 'Grad-CAM (gradcam)'; the name alone where it has no other."""
    title = plain_words(spec).title
    return spec.text if title == spec.text else f"{title} ({spec.text})"


def _best(results: StudyResults) -> str:
    best, others = results.specs.method(results.methods[0]), results.methods[1:]
    if others:
        by = f"over {len(results.metrics)} metrics" if len(results.metrics) > 1 else f"by {results.key_metric}"
        text = f"of {len(results.methods)} methods, {title_of(best)} is the best {by}."
    else:
        text = f"{title_of(best)} is the only method that was scored."
    return f"{text[0].upper()}{text[1:]} What it does: {plain_words(best).sentence}"


def _certainty(results: StudyResults) -> str:
    """Return whether the first place, and the lead over random maps, may be chance."""
    gap = first_gap(results)
    sentences = []
    if gap is not None and gap.rival != RANDOM:
        rival = title_of(results.specs.method(gap.rival))
        if gap.certain is None:
            sentences.append(f"Fewer than {FEWEST} images cannot say whether it is really better than {rival}.")
        elif not gap.certain:
            sentences.append(f"It cannot be told from {rival} by {gap.metric}: on other images the order may change.")
        elif gap.difference > 0:
            sentences.append(f"Its lead over the next, {rival}, is more than chance explains by {gap.metric}.")
        else:
            sentences.append(f"By {gap.metric} alone {rival} is better, by more than chance explains.")
    return " ".join([*sentences, _against_random(results)])


def _against_random(results: StudyResults) -> str:
    """Return by how many metrics, and on how many images, the first method is better than random maps."""
    best, metric = results.methods[0], results.key_metric
    verdicts = [compare_with_random(results.by_method(name)).get(best) for name in results.metrics]
    words = [verdict[0] for verdict in verdicts if verdict is not None]
    score, random = results.scores.get((best, metric or "")), results.scores.get((RANDOM, metric or ""))
    if not words or score is None or random is None:
        return "Random maps were not scored, so nothing says whether it is better than chance."
    ahead = leads(score, random)
    text = f"It is better than a random map by {words.count('better')} of {len(words)} metrics"
    if "worse" in words:
        text += f" and worse by {words.count('worse')}"
    return f"{text}; by {metric} on {int((ahead > 0).sum())} of {count_images(len(ahead))}."


def _images(results: StudyResults) -> str:
    predictions = results.scores.predictions
    text = f"{count_images(len(predictions))} of {results.data}"
    labelled = [prediction for prediction in predictions if prediction.label is not None]
    if labelled:
        right = sum(prediction.label == prediction.predicted for prediction in labelled)
        text += f"; the model is right on {right} of {len(labelled)}"
    return f"{text}."


def _limits(scored: list[StudyResults]) -> str:
    """Return what no number of this study can show."""
    text = (
        "Whether the same holds for other models, or for images unlike these. A good score says that a map points at "
        "what the model uses; it does not say that the model is right, or that it looks at the right thing."
    )
    opposed = [pair for results in scored if (pair := _opposed(results)) is not None]
    if opposed:
        text += f" The metrics do not ask for the same: {' and '.join(opposed[0])} order the methods in opposite ways."
    return text


def _opposed(results: StudyResults) -> tuple[str, str] | None:
    """Return the two metrics with the lowest rank correlation, if it is negative."""
    matrix = agreement(results.scores, results.methods, results.metrics)
    if not np.isfinite(matrix).any():
        return None
    row, column = np.unravel_index(np.nanargmin(matrix), matrix.shape)
    lowest = float(matrix[row, column])
    return None if math.isnan(lowest) or lowest >= DISAGREE else (results.metrics[row], results.metrics[column])
