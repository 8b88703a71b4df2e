"""Base classes of targets: what the user asks for (`Target`) and its resolved form for one batch (`TargetBatch`).

A `Target` is stated once, for any model: a class, a contrast, a function, a prompt, a region. Two steps lead from it to
a score per image. `Target.readout` returns the model whose scores it is about: the model itself, or one that reads
another output of the same module (`Model.read`). `Target.resolve` turns it into a `TargetBatch`: class names become
indices, "the predicted class" becomes the class of each image, and what is left is a function of those scores. A new
kind of target is one subclass of `Target`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from clairvit._rows import Rows, first, join_rows, joined, per_row, same, union
from clairvit.errors import BadInput, ClairError, NotApplicable
from clairvit.models.activation import Activation, log_probabilities, probabilities
from clairvit.models.model import Model
from clairvit.models.scores import extract_scores
from clairvit.numerics import to_device, widened

Function = Callable[[Tensor], Tensor]  # scores [B, C] -> [B]
ClassWeights = tuple[tuple[int, float], ...]  # (class, weight): the score is Σ weight · score[class]
Row = ClassWeights | Function

# neg_loss is logprob under the name that some papers use.
SCORES = ("logit", "prob", "logprob", "neg_loss", "loss")
_OF_PROBABILITIES = ("prob", "logprob", "neg_loss", "loss")
CUSTOM_SCORE = "custom"  # the score of a user's own function
NO_SCORE = "none"  # nothing is differentiated
ANY_CLASS = "any class"  # the title of a class-agnostic target


def score_values(logits: Tensor, score: str, activation: Activation) -> Tensor:
    """Return one kind of score of every class: logits [..., C] -> [..., C].

    logit: the model's output; prob: p = softmax(logits) or sigmoid(logits), by the activation; logprob and neg_loss:
    log p; loss: -log p. Raw scores have no p: only `logit` is defined. Any other name ("cosine", "custom") says what
    the model's output is, which is taken as it is.
    """
    if score not in _OF_PROBABILITIES:
        return logits
    values = (probabilities if score == "prob" else log_probabilities)(logits, activation)
    if values is None:
        raise no_probability(score)
    return -values if score == "loss" else values


def no_probability(score: str) -> BadInput:
    """Return the error for a kind of score that needs probabilities of a model with raw scores."""
    return BadInput(
        f"The score '{score}' is made of a probability, and this model's scores are raw: they have none; use "
        "score='logit', or load or wrap the model with activation='sigmoid' or 'softmax' if its outputs are logits."
    )


def class_name(labels: Sequence[str], index: int) -> str:
    """Return the label of a class, or "class 7" where the model has no labels."""
    return labels[index] if index < len(labels) else f"class {index}"


class ScoreContext(Rows):
    """What a target is resolved against: the scores of the images, and what they mean."""

    logits: Tensor = per_row()  # [B, C], finite
    labels: Sequence[str] = same(default=())
    score: str = same(default="logit")  # one of SCORES
    score_is_default: bool = same(default=False)
    classifier: bool = same(default=True)
    activation: Activation = same(default="softmax")
    score_is_named: bool = same(default=False)  # by the user, which a target with a kind of its own must see
    model: Model | None = same(default=None)  # the model that the scores are of

    @property
    def classes(self) -> int:
        """Return the number of classes C."""
        return int(self.logits.shape[-1])

    def name(self, index: int) -> str:
        """Return the name of a class."""
        return class_name(self.labels, index)

    def target(self, names: Sequence[str], classes: Sequence[int | None], rows: Sequence[ClassWeights]) -> TargetBatch:
        """Return the target with one weighted sum of class scores per image."""
        return TargetBatch(
            tuple(names),
            tuple(classes),
            self.score,
            tuple(rows),
            score_is_default=self.score_is_default,
            activation=self.activation,
        )


class Target(ABC):
    """What is to be explained, as the user states it; subclasses are frozen dataclasses.

    Attributes:
        class_agnostic: There is no score, and maps do not depend on a class.

    Example:
        >>> import clairvit as cv
        >>> isinstance(cv.Contrast("Bengal", None), cv.targets.Target)
        True
    """

    class_agnostic: ClassVar[bool] = False  # True: there is no score, and maps do not depend on a class

    def readout(self, model: Model) -> Model:
        """Return the model whose scores [B, C] the target is about: `model`, or another output of its module.

        Raises:
            NotApplicable: The model returns nothing that the target could read.
        """
        if model.returns:
            raise NotApplicable(model.returns)
        return model

    @property
    def subtracts(self) -> bool:
        """Return whether the score is a difference in which what several targets share cancels."""
        return False

    @property
    def region_forwards(self) -> int:
        """Return the forward passes per image that `region` runs."""
        return 0

    def region(self, model: Model, pixels: Tensor) -> Tensor | None:
        """Return which part of each image the target is about, for figures: bool [B, H, W]; None: all of it.

        Args:
            model: The model whose scores the target is about.
            pixels: The images, [B, C, H, W].
        """
        return None

    @abstractmethod
    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the target of every image in the context; raise BadInput or UnknownName if there is none."""


def _joined_score(scores: Sequence[str]) -> str:
    """Return the kind of score of several targets: the first that is not the user's own function."""
    return next((score for score in scores if score != CUSTOM_SCORE), CUSTOM_SCORE)


class TargetBatch(Rows):
    """One target per row of a batch: target(output) -> [B], differentiable.

    Rows can be taken and repeated (for chunks, and for variants of one image); targets whose rows are independent of
    each other (`by_row`) can be joined.

    The output is what the module returned: scores [B, C], or a tuple, mapping or dataclass that holds them.

    Attributes:
        names: The title of the target of each image.
        classes: The class index of each image; None for a contrast or a function.
        score: The kind of score: logit, prob, logprob, …

    Example:
        >>> import clairvit as cv
        >>> cv.trace("pets", "demo", target="Bengal").target.names
        ('Bengal',)
    """

    names: tuple[str, ...] = per_row()  # the title of each row
    classes: tuple[int | None, ...] = per_row()  # None for a contrast or a function
    score: str = joined(_joined_score)
    rows: tuple[Row, ...] = per_row(default=(), join=join_rows)  # empty where nothing is differentiated
    is_batch_function: bool = joined(lambda values: False, default=False)  # one function for the batch, called once
    score_is_default: bool = first(default=False)  # the user named no kind of score: a method may prefer another
    activation: Activation = first(default="softmax")  # what the model's scores mean
    notes: tuple[str, ...] = union(default=())  # what is worth saying of the score, a sentence each

    @property
    def class_agnostic(self) -> bool:
        """Return whether there is no score: maps that need one cannot be made."""
        return not self.rows

    @property
    def sums_classes(self) -> bool:
        """Return whether every row is a weighted sum of class scores, and none the user's own function."""
        return all(isinstance(row, tuple) for row in self.rows)

    @property
    def is_single_class(self) -> bool:
        """Return whether every row is the score of one class, not a sum, a difference or a function."""
        return all(self.single_class_rows)

    @property
    def single_class_rows(self) -> tuple[bool, ...]:
        """Return for each row whether it is the score of one class; one entry for a function of the whole batch."""
        return tuple(isinstance(row, tuple) and len(row) == 1 and row[0][1] == 1 for row in self.rows)

    def __call__(self, output: Any) -> Tensor:
        """Return the score of each row [B] of the module's output: Σ weight · score of its classes, or its function."""
        logits = output if isinstance(output, Tensor) else extract_scores(output)
        if logits.ndim != 2 or len(logits) != len(self.rows):
            raise BadInput(
                f"A target for {len(self.rows)} images got scores of shape {list(logits.shape)}; call it on "
                "the batch it was made for, or choose rows with target.take([…])."
            )
        if self.is_batch_function:
            function = self.rows[0]
            assert callable(function)
            return call_function(function, logits)
        if not self.sums_classes:
            return self._by_function(logits)
        # Classes are gathered: a product with a one-hot matrix would give other classes a gradient of 0 · inf.
        scores = score_values(widened(logits), self.score, self.activation)
        rows = [row for row in self.rows if isinstance(row, tuple)]
        width = max(map(len, rows))
        padded = [(*row, *(((0, 0.0),) * (width - len(row)))) for row in rows]
        index = to_device([[c for c, _ in row] for row in padded], scores.device)  # [B, width]
        weight = to_device([[w for _, w in row] for row in padded], scores.device, scores.dtype)
        return (scores.gather(1, index) * weight).sum(1)

    def _by_function(self, logits: Tensor) -> Tensor:
        """Return the scores [B] of rows that are functions; rows of one function, as of variants, are one call."""
        rows_of: dict[Any, list[int]] = {}
        for index, row in enumerate(self.rows):
            rows_of.setdefault(id(row) if callable(row) else "classes", []).append(index)
        scores = []
        for indices in rows_of.values():
            part = self.take(indices)
            scores.append(replace(part, is_batch_function=not part.sums_classes)(logits[indices]))
        order = torch.tensor([index for indices in rows_of.values() for index in indices], device=logits.device)
        return torch.cat([values.to(scores[0].dtype) for values in scores])[order.argsort()]

    def by_row(self, logits: Tensor) -> TargetBatch:
        """Return the same target with one function per row, so that rows can be taken, repeated and joined.

        A function of the whole batch is called with the scores `logits` [B, C] of all images, of which it is given
        one row anew.
        """
        if not self.is_batch_function:
            return self
        fixed = widened(logits.detach())
        rows = tuple(_row_function(self.rows[0], fixed, row) for row in range(len(self)))
        return replace(self, rows=rows, is_batch_function=False)

    def with_preferred_score(self, score: str) -> TargetBatch:
        """Return the same target by another kind of score if the user named none; a user's own function stays.

        Where there is no probability, a preference for one falls back to the score itself.
        """
        if self.activation == "raw":
            score = "logit"
        return replace(self, score=score) if self.score_is_default and self.sums_classes and self.rows else self


def class_agnostic_target(count: int) -> TargetBatch:
    """Return the target of class-agnostic maps of so many images: it has a title and no score."""
    return TargetBatch((ANY_CLASS,) * count, (None,) * count, NO_SCORE)


def call_function(function: Function, logits: Tensor) -> Tensor:
    """Return the user's function of the scores [B, C]; raise BadInput unless it returns a tensor [B]."""
    try:
        value = function(logits)
    except (ClairError, torch.OutOfMemoryError):  # a message of ours, and what callers halve their batches for
        raise
    except Exception as error:  # the user's own code may raise anything
        raise BadInput(
            f"The target function failed on the model's output {list(logits.shape)} ({type(error).__name__}: {error}); "
            "expected a function of the scores [B, classes] that returns one number per image."
        ) from error
    if isinstance(value, Tensor) and value.ndim == 0 and len(logits) == 1:
        value = value[None]
    if not isinstance(value, Tensor) or value.shape != logits.shape[:1]:
        returned = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise BadInput(
            f"The target function returned {returned} for scores {list(logits.shape)}; expected a tensor "
            f"[{len(logits)}], one number per image, like lambda scores: scores[:, 3]."
        )
    return value


def _row_function(function: Any, logits: Tensor, row: int) -> Function:
    """Return the value of one row [1] by a function of the whole batch: scores [1, C] replace that row of `logits`."""

    def value(scores: Tensor) -> Tensor:
        index = torch.tensor([row], device=scores.device)
        return call_function(function, logits.to(scores).index_put((index,), scores))[row : row + 1]

    return value
