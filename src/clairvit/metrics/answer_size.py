"""Answer size: how many top patches alone keep the model's answer, or change it when they are hidden.

For a target that is the model's answer, sizes k_1 < … < k_S and the top k patches of a map:

    keep     k is enough where the top k patches alone leave the answer as it is; all patches always are
    change   k is enough where the answer is another one without the top k patches

The answer size is the smallest k that is enough and all larger sizes are, too. `certify` takes a quantile of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.metrics.context import EvalContext
from clairvit.metrics.registry import metric
from clairvit.numerics import to_device
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import ScoreFunction
from clairvit.perturbation.removal import Removal
from clairvit.targets.base import TargetBatch

Change = Literal["keep", "change"]
SIZES = 20
Sizes = Annotated[
    int,
    Range(ge=2, example=20),
    Doc("how many sizes are tried: P · (j / sizes)² patches, j = 1 … sizes, so that small ones lie closest"),
]
UNDEFINED = (
    "an image whose target is not the model's answer has none, nor has a model that does not answer by one class"
)


def size_grid(patches: int, sizes: int = SIZES) -> tuple[int, ...]:
    """Return the sizes that are tried, rising: P · (j / sizes)² rounded, at least 1, each once; the last one is P."""
    rounded = ((2 * patches * j * j + sizes * sizes) // (2 * sizes * sizes) for j in range(1, sizes + 1))
    return tuple(sorted({max(1, size) for size in rounded}))


def passes(patches: int, sizes: int = SIZES, **_: object) -> Cost:
    """Return the passes for one map: one for each size but all patches."""
    return Cost(len(size_grid(patches, sizes)) - 1)


# The answer


def why_no_answer(target: TargetBatch, classes: int) -> str:
    """Return why a target among so many outputs is no answer that could be kept, as part of a sentence; "": it is one.

    An answer is the class with the highest score, or that one of two classes is above the other.
    """
    if target.activation == "sigmoid":
        return "its classes do not exclude each other (sigmoid)"
    if target.activation != "softmax":
        return "its outputs are no classes"
    if classes < 2:
        return "it has a single output"
    rows = [row if isinstance(row, tuple) else () for row in target.rows]
    is_pair = [tuple(weight for _, weight in row) in ((1.0,), (1.0, -1.0)) for row in rows]
    return "" if is_pair and all(is_pair) else "the target is neither a class nor a contrast of two classes"


def answer_is_target(target: TargetBatch) -> ScoreFunction:
    """Return a function (logits [n, C], images [n]) -> 1 where the answer is the target, else 0, [n] in float64.

    A class is the answer where its score is the highest, a contrast a − b where the score of a is above that of b.
    """
    rows = [row if isinstance(row, tuple) else () for row in target.rows]
    classes = [row[0][0] for row in rows]
    rivals = [row[1][0] if len(row) == 2 else -1 for row in rows]  # -1: all other classes

    def is_target(logits: Tensor, images: list[int]) -> Tensor:
        index = to_device([classes[image] for image in images], logits.device)
        rival = to_device([rivals[image] for image in images], logits.device)
        above = logits.gather(1, index[:, None])[:, 0] > logits.gather(1, rival.clamp(min=0)[:, None])[:, 0]
        return torch.where(rival < 0, logits.argmax(1) == index, above).double()

    return is_target


# Sizes


def enough(context: EvalContext, sizes: Tensor, change: Change, removal: str, name: str) -> Tensor:
    """Return whether each of `sizes` [S], below the number of patches, is enough, bool [M, B, S]."""
    top = context.rank[:, :, None, :] < sizes[:, None]  # [M, B, S, patches]
    methods, images, count, patches = top.shape
    keep = (top if change == "keep" else ~top).transpose(0, 1).reshape(images, methods * count, patches)
    with context.probe(removal, name, methods * count) as probe:
        is_target = probe.score_kept(keep, answer_is_target(context.target)) > 0
    is_target = is_target.reshape(images, methods, count).transpose(0, 1)
    return is_target if change == "keep" else ~is_target


def answer_sizes(context: EvalContext, sizes: int, change: Change, removal: str, name: str) -> Tensor:
    """Return the answer size in patches of each map, [M, B] in float64; infinite where hiding changes nothing.

    It is defined where the target is the model's answer for the whole image.
    """
    *tried, patches = size_grid(context.patches, sizes)
    holds = enough(context, torch.tensor(tried, dtype=torch.long, device=context.rank.device), change, removal, name)
    smallest = smallest_from_which(holds, tried)
    return smallest.clamp(max=patches) if change == "keep" else smallest  # all patches are the image itself


def smallest_from_which(holds: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the smallest of rising `sizes` from which on `holds` [..., S] is true, [...]; infinity where it is not."""
    from_here = holds.flip(-1).int().cumprod(-1).flip(-1).bool()
    values = torch.tensor(sizes, dtype=torch.float64, device=holds.device)
    smallest = torch.full(holds.shape[:-1], math.inf, dtype=torch.float64, device=holds.device)
    for k in range(len(sizes) - 1, -1, -1):
        smallest = torch.where(from_here[..., k], values[k], smallest)
    return smallest


def _shares(context: EvalContext, sizes: int, change: Change, removal: str, name: str) -> Tensor:
    """Return answer sizes over the number of patches, [M, B]; 1 where hiding changes nothing, NaN without an answer."""
    reason = why_no_answer(context.target, int(context.trace.logits.shape[1]))
    if reason:
        context.notes_log.note(f"{name}: there is no answer of {context.model.name} that could be kept: {reason}")
        return torch.full(context.degenerate.shape, math.nan, dtype=torch.float64, device=context.rank.device)
    images = list(range(len(context.trace.logits)))
    is_answer = answer_is_target(context.target)(context.trace.logits, images) > 0
    values = answer_sizes(context, sizes, change, removal, name).clamp(max=context.patches) / context.patches
    return values.masked_fill(~is_answer, math.nan)


@metric(
    "sufficient-size",
    family="faithfulness",
    better="lower",
    span=(0, 1),
    paper="ours, after Carter et al., AISTATS 2019",
    undefined=UNDEFINED,
    rank_only=True,
    cost=passes,
)
def sufficient_size(context: EvalContext, sizes: Sizes = SIZES, removal: Removal = "token") -> Tensor:
    """Return the share of the patches, most relevant first, that alone keep the model's answer: low if few suffice.

    The smallest k of the sizes tried such that the model's answer is the same from the top k patches alone, and from
    every larger number tried; over the number of patches. The answer is the class with the highest score, or for a
    contrast a − b that a is above b. NaN where the target is not the model's answer. `cv.certify` turns a quantile of
    it into a guarantee.
    """
    return _shares(context, sizes, "keep", removal, "sufficient-size")


@metric(
    "necessary-size",
    family="faithfulness",
    better="lower",
    span=(0, 1),
    paper="ours, after Carter et al., AISTATS 2019",
    undefined=UNDEFINED,
    rank_only=True,
    cost=passes,
)
def necessary_size(context: EvalContext, sizes: Sizes = SIZES, removal: Removal = "token") -> Tensor:
    """Return the share of the patches, most relevant first, whose removal changes the model's answer: low if few do.

    The smallest k of the sizes tried such that the model's answer is another one without the top k patches, and without
    every larger number tried; over the number of patches, 1 where none changes it. As `sufficient-size` else.
    """
    return _shares(context, sizes, "change", removal, "necessary-size")
