"""Set-up: what a reproduction is asked for, on which images, and in words what is not as in the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.data.dataset import ImageDataset
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.methods.spec import resolve_method
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.inference import FEWEST
from clairvit.metrics.score import Scores
from clairvit.models.model import Model
from clairvit.papers.paper import Measure, Paper, Table

TARGETS = ("predicted", "label")
FEW = 30  # images


@dataclass(frozen=True)
class ReproductionConfig:
    """What is to be reproduced, on what."""

    preset: Paper
    model: ModelConfig
    data: DataConfig
    effort: str = "usual"
    target: str | None = None  # None: the paper's; "predicted" or "label"
    seed: int = 0

    @property
    def aim(self) -> str | None:
        """As a study has it."""
        chosen = self.check_target()
        return None if chosen == "predicted" else chosen

    def check_target(self) -> str:
        """Return the target that is asked for, or the paper's; refuse one that is not known."""
        chosen = self.target or self.preset.target or "predicted"
        if chosen not in TARGETS:
            raise BadInput(f"target='{chosen}' was given; expected one of {', '.join(TARGETS)}.")
        return chosen


def instead(preset: Paper, given: Sequence[str]) -> Paper:
    """With other methods of ours under the paper's names: "FocusViT=focusvit(m=8)"."""
    known = {one.name: one for one in preset.entrants}
    for text in given:
        name, equals, method = text.partition("=")
        if not equals or name not in known:
            raise UnknownName(
                f"'{text}' names no method of '{preset.name}'.{did_you_mean(name, known)} Type NAME=METHOD, "
                f"such as '{preset.entrants[-1].name}={preset.entrants[-1].method}'."
            )
        known[name] = replace(known[name], method=resolve_method(method).text)
    return replace(preset, entrants=tuple(known.values()))


@dataclass(frozen=True, eq=False)
class LoadedData:
    """The images, and what the user should know of them."""

    dataset: ImageDataset
    words: str  # which, how many of how many
    masks: str = ""  # where masks come from, where that is not the data set itself
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # classes of the data that the model does not have


Said = Iterator[tuple[str, str]]  # what about, and a sentence


def differences(
    wish: ReproductionConfig,
    model: Model,
    shown: LoadedData,
    scores: Scores,
    measures: Sequence[Measure],
    table: Table | None,
) -> Said:
    """What is not as in the paper, in words."""
    yield from _on_what(wish, model, shown, len(scores.seen), table)
    yield from _how(wish, shown, measures)
    yield from _lost(scores, measures)
    for note in shown.notes:
        yield "data", note
    for note in dict.fromkeys(note for score in scores.values() for note in score.notes):
        yield "note", note
    for gap in wish.preset.gaps:
        yield "protocol", gap


def _on_what(wish: ReproductionConfig, model: Model, shown: LoadedData, count: int, table: Table | None) -> Said:
    preset = wish.preset
    size = sum(p.numel() for p in model.module.parameters()) / 1e6
    yield "model", f"Here {model.name} ({size:.1f} million parameters); in the paper {preset.models}."
    yield "data", f"Here {shown.words}; in the paper {preset.data}; how many images: {preset.images}."
    if table is not None:
        same = preset.tables_of.get(wish.data.spec.partition(":")[0]) == table.data
        words = "the paper has them for this data" if same else "the paper has none for this data"
        yield "numbers", f"Beside ours stand those on {table.data} ({table.source}): {words}."
    if count < FEW:
        few = (
            f"an interval, and any claim, takes {FEWEST}"
            if count < FEWEST
            else "look at the intervals before the ranks"
        )
        yield "images", f"{count} images say little: {few}."


def _how(wish: ReproductionConfig, shown: LoadedData, measures: Sequence[Measure]) -> Said:
    preset = wish.preset
    yield "protocol", f"In the paper: {preset.protocol}."
    yield "target", f"Maps and scores are of the {'true' if wish.aim == 'label' else 'predicted'} class."
    texts = [*(one.method for one in preset.entrants), *(one.metric for one in measures)]
    changed = ", ".join(preset.at(wish.effort, text) for text in texts if preset.at(wish.effort, text) != text)
    if changed:
        fewer = f"fewer samples than the protocol's ({changed})"
        yield "effort", f"effort '{wish.effort}': {fewer}; effort 'paper' takes all."
    if shown.masks:
        yield "masks", f"Masks are from {shown.masks}."
    if preset.void == "object":
        yield "masks", "Void pixels (borders of trimaps, 255 in VOC) count as object, as in the paper's code."
    for one in preset.measures:
        if one not in measures:
            yield "measures", f"{one.name} is left out: the data has no masks."


def _lost(scores: Scores, measures: Sequence[Measure]) -> Said:
    """Images, methods and values without a number, or with one that says little."""
    for limit in sorted({one.above for one in measures if one.above is not None}):
        sure = sum(one.probability is not None and one.probability > limit for one in scores.seen)
        own = ", ".join(one.name for one in measures if one.above == limit)
        yield "images", f"{sure} of {len(scores.seen)} are predicted with more than {limit:.0%}: {own} are of these."
    for method, why in scores.skipped.items():
        yield "methods", f"{method} is left out. {why}"
    for key, score in scores.items():
        if score.n_invalid:
            yield "undefined", f"{key[1]} of {key[0]} is undefined on {score.n_invalid} of {len(score.values)} images."
    flat = {method: score for (method, _), score in scores.items() if score.n_degenerate and method not in BASELINES}
    for method, score in flat.items():
        share = f"{score.n_degenerate} of {len(score.values)}"
        yield "constant", f"Maps of {method} are constant on {share} images: the order of their patches is a lottery."
