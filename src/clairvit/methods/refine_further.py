"""Refine an explanation by further passes, or by as many as fit in a time; passes that were run already are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clairvit._rows import join_rows, take_rows
from clairvit.errors import BadInput
from clairvit.execution import ExecutionOptions
from clairvit.methods.explain import maps_of_question
from clairvit.methods.explanation import Explanation
from clairvit.methods.refined import check_seconds, refined_further
from clairvit.methods.runs import Question, TargetList, chunk_size
from clairvit.methods.spec import resolve_method
from clairvit.models.images import Batch
from clairvit.models.state_hash import state_hash
from clairvit.perturbation.random_sets import BLOCK

Clock = Callable[[], float]
FIRST_STEP = 2 * BLOCK  # passes that are run to see how long one takes
SPENDABLE = 0.9  # of the time that is left: later steps may take longer than the first
WORTHWHILE = 0.1  # further passes, over those that were run, below which no step is begun


def refine_explanation(
    explanation: Explanation,
    passes: int | None = None,
    *,
    seconds: float | None = None,
    batch_size: int | None = None,
    autocast: str | None = None,
    clock: Clock = time.perf_counter,
) -> Explanation:
    """Refine the maps of an explanation; what `Explanation.refine` does."""
    if (passes is None) == (seconds is None):
        given = "neither was" if passes is None else "both were"
        raise BadInput(f"Expected passes= or seconds=, and {given} given: ex.refine(256), or ex.refine(seconds=2).")
    if not len(explanation):
        raise BadInput("The explanation has no maps; expected at least one to refine.")
    if explanation.origin is None:
        raise BadInput(
            "This explanation was read from a file, or joined from several models, and holds no model; expected one "
            "that was just made. Explain the images again with the number of passes: cv.explain(model, images, "
            "passes=256)."
        )
    if any(state_hash(model.module) != explanation.weights_hash for model in explanation.origin.models[:1]):
        raise BadInput(
            "The weights of the model are not those that were explained; expected the same model. Explain the images "
            "again."
        )
    execution = ExecutionOptions.from_caller(batch_size, autocast)
    if passes is not None:
        return _refined(explanation, passes, execution)
    assert seconds is not None
    check_seconds(seconds)
    return _refined_within(explanation, seconds * len(explanation), execution, clock)


def passes_spent(explanation: Explanation) -> int:
    """Return how many passes have refined the maps so far."""
    return 0 if explanation.refinement is None else explanation.refinement.passes


def _refined_within(explanation: Explanation, seconds: float, execution: ExecutionOptions, clock: Clock) -> Explanation:
    """Return the maps refined step by step until no step of a worthwhile size fits in the time that is left.

    The time of a step over its passes is above that of a pass, as every step records the images anew, so that the next
    step takes no longer than foreseen.
    """
    ends = clock() + seconds
    refined, step = explanation, FIRST_STEP
    while step >= max(BLOCK, WORTHWHILE * passes_spent(refined)):
        began = clock()
        refined = _refined(refined, passes_spent(refined) + step, execution)
        now = clock()
        step = int(SPENDABLE * max(ends - now, 0.0) / max((now - began) / step, 1e-9)) // BLOCK * BLOCK
    return refined


def _refined(explanation: Explanation, passes: int, execution: ExecutionOptions) -> Explanation:
    """Return the maps refined by so many passes in all, a few images of one model at a time."""
    spec = resolve_method(explanation.method)
    assert explanation.origin is not None
    order: list[int] = []
    parts: list[Explanation] = []
    for rows, model, target in explanation.origin.groups():
        for start in range(0, len(rows), chunk_size(model)):
            places = list(range(start, min(start + chunk_size(model), len(rows))))
            part = explanation.take([rows[place] for place in places])
            known = None if part.refinement is None else part.refinement.scores
            images = Batch(part.pixels.to(model.device), part.names)
            question = Question(
                model, images, TargetList((target.take(places),)), ((model,),), None, explanation.seed, execution
            )
            (refined,) = maps_of_question(question, [refined_further(spec, passes, known)]).values()
            parts.append(refined)
            order += [rows[place] for place in places]
    inverse = sorted(range(len(order)), key=order.__getitem__)

    def joined(name: str) -> Any:
        """Return the values of a field for all maps, in their order."""
        values = join_rows([getattr(part, name) for part in parts])
        return None if values is None else take_rows(values, inverse)

    return replace(
        explanation,
        **{name: joined(name) for name in ("maps", "standard_error", "refinement")},
        **{name: getattr(parts[0], name) for name in ("method", "score", "family", "class_specific", "signed")},
        layers=None,
        heads=None,
        chosen=None,
        checked=None,
        certified=None,
        layer_grids=(),
        cost=sum((part.cost for part in parts), explanation.cost),
        notes=tuple(dict.fromkeys(note for part in (explanation, *parts) for note in part.notes)),
    )
