"""The verb `mistakes`: every wrong or unsure answer, and the patches that made the difference.

All images are answered by one forward. Those that are listed are read again: one forward and backward for the contrast
map (answer − true class), one pass for each number of top patches that is removed, and `draws` passes without as many
random patches. `audit/mistake_table.py` has the rules of kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from clairvit.audit.mistake_table import (
    ORDERS,
    ConfusedPair,
    MistakeRules,
    Mistakes,
    Order,
    confused_pairs,
)
from clairvit.data.dataset import ErrorHandler, ImageDataset
from clairvit.data.truth import folder_classes
from clairvit.errors import BadInput, ClairError, NotApplicable, UnknownName, did_you_mean
from clairvit.methods.explain import run_by_default
from clairvit.methods.planner import misfits, run_all, spent_on
from clairvit.methods.runs import OnError, Question, Run, TargetList, class_indices, error_handler, iter_runs
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.context import EvalContext, fraction_counts, planar_maps
from clairvit.models.activation import probabilities
from clairvit.models.coerce import ModelLike
from clairvit.models.images import displayed, list_images
from clairvit.perturbation.removal import check_removal
from clairvit.targets.base import class_name
from clairvit.targets.contrast import Contrast
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.trace import run_backward

FOLDERS = "folders"
NAME = "mistakes"  # of the progress, and of notes
PARTS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # of the patches that are removed
DRAWS = 3  # random sets of patches
PHOTOS = 24  # photos that are kept


def mistakes(
    model: ModelLike,
    images: Any,
    method: str | MethodSpec | None = None,
    *,
    labels: Sequence[int | str | None] | str | None = None,
    by: Order = "cost",
    confident: float = 0.8,
    far: int = 5,
    unsure: float = 0.5,
    parts: Sequence[float] = PARTS,
    draws: int = DRAWS,
    photos: int = PHOTOS,
    removal: str = "token",
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Mistakes:
    """List every wrong or unsure answer, with its kind, its contrast map, and the patches that made the difference.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`: a classifier of one class per image (softmax).
        images: As in `cv.evaluate`; read a few at a time. The labels of a data set are used as `labels`.
        method: The method of the contrast maps, the answer − the true class; None is the default for the model.
        labels: The true class of each image, or None; "folders": the names of the files' folders are the classes.
            Without any only unsure answers are listed.
        by: What wrong answers are ordered by, largest first: "cost", −log p of the true class, or "confidence", p of
            the answer. Unsure answers that are not wrong come after them, the least sure first.
        confident: The probability from which an answer is confident, and from which two share it between them.
        far: The last place of the list of classes that is not far down.
        unsure: The probability below which a right answer, or one without a true class, is listed.
        parts: The shares of the patches that are removed, the top ones of the contrast map, to find what is enough.
        draws: How many random sets of as many patches are removed for comparison.
        photos: How many photos are kept for pictures.
        removal: How patches are removed: token (dropped from the sequence), mean, blur, …
        on_error: As in `cv.evaluate`.
        seed: The seed of everything random.
        batch_size: At most so many perturbed images in one pass; None: chosen by size.
        autocast: "bfloat16" makes perturbed passes faster and less exact.
        inputs: As in `cv.explain`.

    Returns:
        `Mistakes`, the worst first: `.kinds`, `.pairs`, `.needed`, `.to_pandas()`, `.save("mistakes.html")`.

    Raises:
        BadInput: Images, labels or options that cannot be used.
        UnknownName: A method, class or order that does not exist.
        NotApplicable: The model does not answer by one class, or the method does not fit it or has no contrast maps.

    Example:
        >>> import clairvit as cv
        >>> result = cv.mistakes("pets", ["demo"], labels=["Beagle"])
        >>> result
        Mistakes(pets: 1 wrong, 0 unsure of 1 answers)
        >>> result.kinds
        ('far down',)
    """
    by = check_order(by)
    rules = MistakeRules(confident, far, unsure)
    shares = tuple(float(share) for share in parts)
    if not shares or not all(0 < share < 1 for share in shares):
        raise BadInput(f"parts={parts!r} was given; expected shares of the patches between 0 and 1, such as {PARTS}.")
    for name, count in (("draws", draws), ("photos", photos)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise BadInput(f"{name}={count!r} was given; expected a number from 0.")
    check_removal(removal)
    spec = None if method is None else resolve_method(method)
    classes = _labels_of(images, labels)
    question = Question.of_dataset(
        model, images, labels=classes, seed=seed, batch_size=batch_size, autocast=autocast, inputs=inputs
    )
    request = Request(rules, by, tuple(sorted(set(shares))), draws, photos, removal, error_handler(on_error))
    answered = _answer(question, request)
    if not answered.listed:
        return _none(question, request, answered, "" if spec is None else spec.text)
    about = _about_contrasts(question, answered)
    if spec is not None:
        return _collect(about, request, answered, spec)
    result, notes = run_by_default(about, lambda default, _: _collect(about, request, answered, default))
    return replace(result, notes=(*result.notes, *notes))


def check_order(by: str) -> Order:
    """Return the order; raise UnknownName if there is none of that name."""
    for name in get_args(Order):
        if by == name:
            return name  # type: ignore[no-any-return]
    raise UnknownName(f"There is no order {by!r}; expected one of {', '.join(ORDERS)}.{did_you_mean(str(by), ORDERS)}")


def _labels_of(images: Any, labels: Sequence[int | str | None] | str | None) -> Sequence[int | str | None] | None:
    """Return the true classes; those of "folders" are the names of the files' folders."""
    if isinstance(images, ImageDataset) and labels is not None:
        raise BadInput("labels were given with a data set that is opened already; expected its own, without labels=.")
    if not isinstance(labels, str):
        return labels
    if labels != FOLDERS:
        raise BadInput(f"labels={labels!r} was given; expected a list of classes, one per image, or '{FOLDERS}'.")
    files = list_images(images)[0]
    if not files or not all(isinstance(file, str | Path) for file in files):
        raise BadInput(f"labels='{FOLDERS}' was given for images that are not files; expected paths or a folder.")
    return folder_classes([str(file) for file in files])


@dataclass(frozen=True, eq=False)
class Request:
    """What is listed, and how parts are looked for."""

    rules: MistakeRules
    by: Order
    parts: tuple[float, ...]
    draws: int
    photos: int
    removal: str
    on_error: ErrorHandler | None


@dataclass(frozen=True)
class Answer:
    """The answer to one image.

    Args:
        row: The row of the image in the data set.
        name: The name of the image.
        predicted, second: The first two classes.
        first_probability, second_probability: Theirs.
        true: The true class; None where it is not known.
        true_probability: NaN where it is not known.
        rank: The place of the true class, from 1; None where it is not known.
    """

    row: int
    name: str
    predicted: int
    second: int
    first_probability: float
    second_probability: float
    true: int | None
    true_probability: float
    rank: int | None

    @property
    def is_wrong(self) -> bool:
        """Return whether the true class is known and another one."""
        return self.rank is not None and self.rank > 1

    @property
    def other(self) -> int:
        """Return the class that the answer is contrasted with: the true one, or the second where it is none."""
        return self.true if self.is_wrong and self.true is not None else self.second

    def order(self, by: Order) -> tuple[bool, float, int]:
        """Return the key by which answers are sorted."""
        if not self.is_wrong:
            return True, self.first_probability, self.row
        return False, self.true_probability if by == "cost" else -self.first_probability, self.row


@dataclass(eq=False)
class Answered:
    """All answers: those that are listed in their order, and counts of the others."""

    listed: list[Answer] = field(default_factory=list)
    images: int = 0
    labelled: int = 0
    wrong: int = 0
    classes: list[tuple[str, str]] = field(default_factory=list)  # (true, predicted) of images with a true class
    left_out: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def pairs(self) -> tuple[ConfusedPair, ...]:
        """Return how often each true class was given each other answer."""
        return confused_pairs(self.classes)


@own_grad_mode()
def _answer(question: Question, request: Request) -> Answered:
    """Return the model's answers to all images: one forward each."""
    answered = Answered()

    def on_error(name: str, error: ClairError) -> None:
        assert request.on_error is not None
        answered.left_out.append((name, str(error)))
        request.on_error(name, error)

    handler = None if request.on_error is None else on_error
    with closing(iter_runs(question, (), on_error=handler, label="answers")) as runs:
        for run in runs:
            for answer in _answers(run):
                _add(answered, answer, run.model.labels, request.rules)
            answered.notes += [note for note in run.batch.notes if note not in answered.notes]
    if not answered.images:
        raise BadInput("None of the images could be read; expected at least one that can.")
    answered.listed.sort(key=lambda answer: answer.order(request.by))
    dataset = question.images
    assert isinstance(dataset, ImageDataset)
    unlabelled = answered.images - answered.labelled
    answered.notes[:0] = (*question.model.assumptions, *dataset.notes)
    if not answered.labelled:
        answered.notes.append("no true classes are known, so only unsure answers are listed")
    elif unlabelled:
        answered.notes.append(f"the true class of {unlabelled} images is not known; they are listed where unsure")
    return answered


def _answers(run: Run) -> list[Answer]:
    """Return the answers of a run; raise NotApplicable for a model that does not answer by one class."""
    logits, activation = run.logits.double().cpu(), run.model.activation
    reason = ""
    if not run.model.classifier:
        reason = "its output is an embedding"
    elif activation == "sigmoid":
        reason = "its classes do not exclude each other (sigmoid)"
    elif activation != "softmax":
        reason = "its outputs are no classes"
    elif logits.shape[1] < 2:
        reason = "it has a single output"
    if reason:
        raise NotApplicable(
            f"{run.model.name} gives no answer that could be wrong: {reason}; expected a classifier of one class per "
            "image (softmax)."
        )
    if not bool(logits.isfinite().all()):
        raise BadInput(f"{run.model.name} gives NaN or infinite scores for some images; expected finite ones.")
    p = probabilities(logits, activation)
    assert p is not None
    order = logits.argsort(dim=1, descending=True, stable=True)
    places = order.argsort(dim=1)
    classes = class_indices(run.batch.labels, run.model, logits.shape[1]) or [None] * len(run.rows)
    return [
        Answer(
            row=row,
            name=run.batch.names[i],
            predicted=int(order[i, 0]),
            second=int(order[i, 1]),
            first_probability=float(p[i, order[i, 0]]),
            second_probability=float(p[i, order[i, 1]]),
            true=true,
            true_probability=math.nan if true is None else float(p[i, true]),
            rank=None if true is None else int(places[i, true]) + 1,
        )
        for i, (row, true) in enumerate(zip(run.rows, classes, strict=True))
    ]


def _add(answered: Answered, answer: Answer, labels: Sequence[str], rules: MistakeRules) -> None:
    """Count an answer, and list it if it is wrong or unsure."""
    answered.images += 1
    if answer.true is not None:
        answered.labelled += 1
        answered.wrong += answer.is_wrong
        answered.classes.append((class_name(labels, answer.true), class_name(labels, answer.predicted)))
    if rules.is_listed(answer.first_probability, answer.rank):
        answered.listed.append(answer)


def _about_contrasts(question: Question, answered: Answered) -> Question:
    """Return the question about the listed images, in their order: why the answer rather than the other class?"""
    contrasts = [Contrast(answer.predicted, answer.other) for answer in answered.listed]
    listed = question.take([answer.row for answer in answered.listed])
    return replace(listed, targets=TargetList((contrasts,), needed=True))


@own_grad_mode()
def _collect(question: Question, request: Request, answered: Answered, spec: MethodSpec) -> Mistakes:
    """Return the contrast map of each listed image and the patches that made the difference."""
    if not spec.method.class_specific:
        raise NotApplicable(
            f"'{spec.text}' gives the same map for every class, so it has none of a difference; expected a method that "
            "depends on the class, such as attnlrp+plus."
        )
    misfits([spec], question.models, skip=False)
    parts: list[Mistakes] = []
    with closing(iter_runs(question, [spec], label=NAME)) as runs:
        for run in runs:
            parts.append(_collect_run(run, request, answered, spec, question.seed))
            del run
    return Mistakes.concat(parts)


def _collect_run(run: Run, request: Request, answered: Answered, spec: MethodSpec, seed: int) -> Mistakes:
    """Return the rows of a few listed images."""
    trace = run_backward(run.recording, run.targets[0], None)
    (result,) = run_all([spec], run.recording, run.targets, seed=seed)[spec.text]
    if result.error is not None:
        raise result.error
    assert result.maps is not None
    maps = planar_maps(result.maps.detach(), trace)
    context = EvalContext(trace=trace, specs=(spec,), raw=(maps,), seed=seed)
    answers = [answered.listed[row] for row in run.rows]
    sizes = tuple(dict.fromkeys(fraction_counts(context.patches, request.parts)))
    differences, wins = _without_top(context, answers, sizes, request.removal)
    unranked = (context.degenerate | context.invalid)[0].tolist()  # no patch is above another
    needed = [
        None if unranked[row] else next((k for k, win in zip(sizes, of_row, strict=True) if win), None)
        for row, of_row in enumerate(wins.tolist())
    ]
    labels, grid = run.model.labels, context.maps.shape[2:]
    counts = torch.tensor([count or 0 for count in needed], device=context.rank.device)
    kept = [row < request.photos and run.batch.pixels.ndim == 4 for row in run.rows]
    return Mistakes(
        rows=tuple(answer.row for answer in answers),
        names=run.batch.names,
        true=tuple(None if answer.true is None else class_name(labels, answer.true) for answer in answers),
        predicted=tuple(class_name(labels, answer.predicted) for answer in answers),
        second=tuple(class_name(labels, answer.second) for answer in answers),
        probabilities=torch.tensor(
            [(answer.first_probability, answer.second_probability) for answer in answers], dtype=torch.float64
        ),
        true_probabilities=torch.tensor([answer.true_probability for answer in answers], dtype=torch.float64),
        ranks=tuple(answer.rank for answer in answers),
        kinds=tuple(
            request.rules.kind(answer.first_probability, answer.second_probability, answer.rank) for answer in answers
        ),
        contrasts=run.targets[0].names,
        maps=context.maps[0].cpu(),
        parts=(context.rank[0] < counts[:, None]).reshape(-1, *grid).cpu(),
        needed=tuple(needed),
        random_wins=_random_wins(context, answers, needed, request),
        differences=differences,
        photos=tuple(
            _photo(run, row) if is_kept else None for row, is_kept in zip(range(len(kept)), kept, strict=True)
        ),
        sizes=sizes,
        cost=spent_on(run.recording, [spec]),
        notes=(*answered.notes, *result.notes, *context.notes_log.notes),
        **_facts(run.model.name, seed, request, answered, spec.text),
    )


def _facts(model: str, seed: int, request: Request, answered: Answered, method: str) -> dict[str, Any]:
    """Return the fields that are the same for all rows."""
    return {
        "model": model,
        "method": method,
        "by": request.by,
        "rules": request.rules,
        "removal": request.removal,
        "draws": request.draws,
        "seed": seed,
        "images": answered.images,
        "labelled": answered.labelled,
        "wrong": answered.wrong,
        "pairs": answered.pairs,
        "left_out": tuple(answered.left_out),
    }


def _without_top(
    context: EvalContext, answers: Sequence[Answer], sizes: Sequence[int], removal: str
) -> tuple[Tensor, Tensor]:
    """Return logit differences [B, 1 + S], and whether the other class is the answer without the top patches [B, S]."""
    predicted, other = ([getattr(answer, name) for answer in answers] for name in ("predicted", "other"))

    def score(logits: Tensor, images: list[int]) -> Tensor:
        rows = torch.arange(len(images), device=logits.device)
        a, b = ([classes[image] for image in images] for classes in (predicted, other))
        scores = logits.double()
        is_other = logits.argmax(1) == torch.tensor(b, device=logits.device)
        return torch.stack([scores[rows, a] - scores[rows, b], is_other.double()], 1)

    keep = torch.stack([context.rank[0] >= size for size in sizes], 1)  # [B, S, patches]
    with context.probe(removal, NAME, len(sizes)) as probe:
        scores = probe.score_kept(keep, score).cpu()
    whole = score(context.trace.logits.detach(), list(range(len(answers))))[:, :1].cpu()
    return torch.cat([whole, scores[..., 0]], 1), scores[..., 1] > 0


def _random_wins(
    context: EvalContext, answers: Sequence[Answer], needed: Sequence[int | None], request: Request
) -> tuple[int | None, ...]:
    """Return without how many random sets, as large as those that made the difference, the other class wins too."""
    rows = [row for row, count in enumerate(needed) if count is not None]
    wins: list[int | None] = [None] * len(needed)
    if not rows or not request.draws:
        return tuple(wins)
    counts = torch.tensor([needed[row] or 0 for row in rows], device=context.rank.device)
    places = [context.tie_order(context.patches, "mistakes/random patches", draw) for draw in range(request.draws)]
    keep = torch.stack([place[rows] >= counts[:, None] for place in places], 1)  # [rows, draws, patches]
    images = torch.tensor(rows).repeat_interleave(request.draws)

    def is_other(logits: Tensor, of: list[int]) -> Tensor:
        return logits.argmax(1) == torch.tensor([answers[image].other for image in of], device=logits.device)

    with context.probe(request.removal, NAME, request.draws) as probe:
        won = probe.score_pairs(images, keep.flatten(0, 1), is_other).reshape(len(rows), request.draws)
    for row, count in zip(rows, won.sum(1).tolist(), strict=True):
        wins[row] = int(count)
    return tuple(wins)


def _photo(run: Run, row: int) -> Tensor:
    """Return one image as the model saw it, uint8 [H, W, 3]."""
    shown = displayed(run.batch.pixels[row], run.model.preprocess)
    return (255 * shown).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def _none(question: Question, request: Request, answered: Answered, method: str) -> Mistakes:
    """Return the result of a model without a wrong or unsure answer."""
    empty = torch.zeros(0, 0, 0, dtype=torch.float64)
    return Mistakes(
        rows=(),
        names=(),
        true=(),
        predicted=(),
        second=(),
        probabilities=torch.zeros(0, 2, dtype=torch.float64),
        true_probabilities=torch.zeros(0, dtype=torch.float64),
        ranks=(),
        kinds=(),
        contrasts=(),
        maps=empty,
        parts=empty > 0,
        needed=(),
        random_wins=(),
        differences=torch.zeros(0, 1, dtype=torch.float64),
        photos=(),
        sizes=(),
        notes=tuple(answered.notes),
        **_facts(question.model.name, question.seed, request, answered, method),
    )
