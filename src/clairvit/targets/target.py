"""Target: the scalar that is explained, one for each image of a batch."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.models.activation import Activation, activation_for, log_probabilities, probabilities

Function = Callable[[Tensor], Tensor]
Row = tuple[tuple[int, float], ...] | Function  # weighted classes, or the user's own function of the output


@dataclass(frozen=True)
class Contrast:
    """Why a rather than b? The score of `a` minus the score of `b`."""

    a: Any
    b: Any


Spec = None | int | str | Contrast | Function | Sequence[Any]


def contrast(a: int | str | None, b: int | str | None) -> Contrast:
    """A target for "why a and not b"; None stands for the predicted class.

    Args:
        a: Class index or name; None is the predicted class.
        b: Class index or name; None is the predicted class.

    Returns:
        A target: the score of `a` minus the score of `b`.

    Example:
        >>> import clairvit as cv
        >>> cv.explain("pets", "demo", "genatt", target=cv.contrast("Bengal", "Egyptian Mau")).targets
        ('Bengal − Egyptian Mau',)
    """
    return Contrast(a, b)


# neg_loss is logprob under the name that some papers use.
SCORES = ("logit", "prob", "logprob", "neg_loss", "loss")


def score_values(logits: Tensor, score: str, activation: Activation) -> Tensor:
    """Return one kind of score of every class: logits [..., C] -> [..., C].

    logit: the model's output; prob: p = softmax(logits) or sigmoid(logits), by the activation; logprob and neg_loss:
    log p; loss: -log p. Raw scores have no p, so that only `logit` is left.
    """
    if score == "logit":
        return logits
    values = (probabilities if score == "prob" else log_probabilities)(logits, activation)
    if values is None:
        raise no_probability(score)
    return -values if score == "loss" else values


def no_probability(score: str) -> BadInput:
    """Return the error for a kind of score that needs probabilities, asked of raw scores."""
    return BadInput(
        f"The score '{score}' is made of a probability, and this model's scores are raw: they have none; use "
        "score='logit', or load or wrap the model with activation='sigmoid' or 'softmax' if its outputs are logits."
    )


@dataclass(frozen=True, eq=False)
class Target:
    """One target for each row of a batch: target(logits [B, C]) -> [B], differentiable.

    Attributes:
        names: The title of the target of each image.
        classes: The class index of each image; None for a contrast or a function.
        score: The kind of score: logit, prob, logprob, …

    Example:
        >>> import clairvit as cv
        >>> cv.trace("pets", "demo", target="Bengal").target.names
        ('Bengal',)
    """

    names: tuple[str, ...]
    classes: tuple[int | None, ...]  # None for a contrast or a function
    score: str
    rows: tuple[Row, ...] = ()  # empty where nothing is differentiated: class-agnostic methods on an embedding
    together: bool = False  # one function for the whole batch, called once
    free: bool = False  # nobody asked for this kind of score: a method may prefer another
    activation: Activation = "softmax"  # what the model's scores mean

    def __len__(self) -> int:
        return len(self.names)

    def __call__(self, logits: Tensor) -> Tensor:
        if logits.ndim != 2 or len(logits) != len(self.rows):
            raise BadInput(
                f"A target for {len(self.rows)} images got scores of shape {list(logits.shape)}; call it on "
                "the batch it was made for, or choose rows with target.take([…])."
            )
        if self.together:
            return _call(self.rows[0], logits)
        if all(isinstance(row, tuple) for row in self.rows):
            return _weighted(self.rows, score_values(_wide(logits), self.score, self.activation))  # type: ignore[arg-type]
        return torch.cat(
            [replace(self.take([i]), together=callable(self.rows[i]))(logits[i : i + 1]) for i in range(len(self))]
        )

    def take(self, rows: Sequence[int]) -> Target:
        """The target of chosen rows, repeated as often as named: for chunks and for many variants of one image."""
        return Target(
            names=tuple(self.names[i] for i in rows),
            classes=tuple(self.classes[i] for i in rows),
            score=self.score,
            rows=tuple(self.rows[i] for i in rows) if self.rows else (),
            together=self.together,
            free=self.free,
            activation=self.activation,
        )

    def preferring(self, score: str) -> Target:
        """Return the same target by another kind of score, if none was asked for; the user's own function stays.

        Where there is no probability, a preference for one falls back to the score itself.
        """
        if self.activation == "raw":
            score = "logit"
        classes = all(isinstance(row, tuple) for row in self.rows)
        return replace(self, score=score) if self.free and classes and self.rows else self


def resolve(
    spec: Spec,
    logits: Tensor,
    labels: Sequence[str] = (),
    *,
    score: str | None = None,
    classifier: bool = True,
    single: bool = False,
    activation: Activation = "softmax",
) -> tuple[Target, ...]:
    """What the user typed, as targets over the whole batch: one, or k when `single` and a list of k is given.

    score: a name in SCORES; None is the logit, unless a method prefers another.
    spec: None (predicted class), class index, class name or its unique beginning, contrast(a, b), a function of the
    logits [B, C] -> [B], or a list of these: one for each image, or several for a single one.
    activation: what the logits mean (`Model.activation`); prob, logprob and loss depend on it, and raw has none.
    """
    activation = activation_for(activation if classifier else "raw", logits.shape[-1])
    if score is None:
        targets = resolve(
            spec, logits, labels, score="logit", classifier=classifier, single=single, activation=activation
        )
        return tuple(replace(target, free=classifier) for target in targets)
    if not isinstance(score, str) or score not in SCORES:
        raise UnknownName(
            f"There is no score '{score}'.{did_you_mean(score, SCORES)} Choose one of: {', '.join(SCORES)}."
        )
    if score != "logit" and not classifier:
        raise BadInput(f"The score '{score}' needs classes, and this model gives an embedding; use score='logit'.")
    if score != "logit" and activation == "raw":
        raise no_probability(score)
    _check_finite(logits)
    if classifier and labels and len(labels) != logits.shape[-1]:
        raise BadInput(
            f"The model has {logits.shape[-1]} classes and {len(labels)} labels; expected a label for each class. "
            "Load or wrap it with the right ones (labels=)."
        )
    count = len(logits)
    if isinstance(spec, Tensor) or type(spec).__module__ == "numpy":
        spec = spec.tolist()  # type: ignore[union-attr]
    if not isinstance(spec, list | tuple):
        return (replace(_one(spec, range(count), logits, labels, score, classifier), activation=activation),)
    if single:
        if not spec:
            raise BadInput("An empty list of targets was given; name at least one, or leave it out for the prediction.")
        return tuple(
            replace(_one(part, range(count), logits, labels, score, classifier), activation=activation) for part in spec
        )
    if len(spec) != count:
        alone = " For several targets per image pass targets=[…]." * (count == 1)
        raise BadInput(
            f"{len(spec)} target{'s were' if len(spec) != 1 else ' was'} given for {count} image{'s' * (count != 1)}; "
            f"give one for all, or a list of exactly {count}, one for each image.{alone}"
        )
    joined = _join([_one(part, [i], logits, labels, score, classifier) for i, part in enumerate(spec)])
    return (replace(joined, activation=activation),)


def top(
    logits: Tensor, labels: Sequence[str] = (), k: int = 5, *, activation: Activation = "softmax"
) -> list[list[tuple[str, float]]]:
    """Return for each image the k highest classes, best first: (name, probability), or (name, score) if raw.

    Probabilities of a sigmoid are independent: they need not add up to 1.
    """
    _check_finite(logits)
    wide = _wide(logits.detach())
    chances = probabilities(wide, activation)
    values, classes = (wide if chances is None else chances).topk(min(k, logits.shape[-1]), dim=-1)
    return [
        [(class_name(labels, c), value) for c, value in zip(row, numbers, strict=True)]
        for row, numbers in zip(classes.tolist(), values.tolist(), strict=True)
    ]


def class_name(labels: Sequence[str], index: int) -> str:
    return labels[index] if index < len(labels) else f"class {index}"


def find_class(spec: int | str, labels: Sequence[str], classes: int) -> int:
    """The index of a class given by index, name or unique beginning of a name, whatever the case."""
    if not isinstance(spec, str):
        try:
            return _in_range(operator.index(spec), classes)
        except TypeError as error:
            raise BadInput(f"A class was given as {type(spec).__name__}; expected its index or its name.") from error
    wanted = spec.strip()
    if wanted in labels and labels.count(wanted) == 1:
        return labels.index(wanted)
    if re.fullmatch(r"-?\d{1,18}", wanted) and wanted not in labels:
        return _in_range(int(wanted), classes)
    if not labels:
        raise BadInput(
            f"The class '{spec}' was asked for by name, but this model has no class names; give an index from 0 to "
            f"{classes - 1}, or labels=[…] when you load it."
        )
    low = wanted.lower()
    spaced = low.replace("_", " ")  # as folders are named
    by_name = [i for i, label in enumerate(labels) if label.lower() in (low, spaced)]
    by_synonym = [i for i, label in enumerate(labels) if low in (part.strip().lower() for part in label.split(","))]
    by_start = [i for i, label in enumerate(labels) if low and label.lower().startswith(low)]
    matches = by_name or by_synonym or by_start
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(f"'{labels[i]}' ({i})" for i in matches[:6]) + (", …" if len(matches) > 6 else "")
        raise BadInput(
            f"The class '{spec}' could be any of {len(matches)}: {listed}; type more of the name, or the index."
        )
    raise UnknownName(
        f"There is no class '{spec}' among the model's {len(labels)}.{did_you_mean(wanted, labels)} "
        f"Type a class name, or an index from 0 to {classes - 1}."
    )


def _one(spec: Any, rows: Iterable[int], logits: Tensor, labels: Sequence[str], score: str, classifier: bool) -> Target:
    """One spec for all these rows."""
    here = logits[list(rows)]
    if callable(spec):
        _try_out(spec, here)
        name = getattr(spec, "__name__", type(spec).__name__)
        name = "custom target" if name == "<lambda>" else name
        return Target((name,) * len(here), (None,) * len(here), "custom", (spec,) * len(here), together=True)
    if isinstance(spec, Contrast):
        first, second = (_classes(part, here, labels, classifier) for part in (spec.a, spec.b))
        same = [class_name(labels, a) for a, b in zip(first, second, strict=True) if a == b]
        if same:
            raise BadInput(f"contrast of '{same[0]}' with itself is 0 everywhere; name two different classes.")
        pairs = list(zip(first, second, strict=True))
        names = tuple(f"{class_name(labels, a)} − {class_name(labels, b)}" for a, b in pairs)
        return Target(names, (None,) * len(pairs), score, tuple(((a, 1.0), (b, -1.0)) for a, b in pairs))
    chosen = _classes(spec, here, labels, classifier)
    names = tuple(class_name(labels, c) for c in chosen)
    return Target(names, tuple(chosen), score, tuple(((c, 1.0),) for c in chosen))


def _classes(spec: Any, logits: Tensor, labels: Sequence[str], classifier: bool) -> list[int]:
    """The class of each row: None is what the model predicts there."""
    if spec is None:
        if not classifier:
            raise BadInput(
                "This model gives an embedding, so it predicts no class; load it with prompts "
                '(labels=["a cat", "a dog"]), or pass target= an index or a function of the output.'
            )
        return [int(c) for c in logits.argmax(-1)]
    if isinstance(spec, bool) or not (isinstance(spec, str) or hasattr(spec, "__index__")):
        raise BadInput(
            f"The target {spec!r} is a {type(spec).__name__}; expected a class index, a class name, contrast(a, b), a "
            "function of the output, or a list of these."
        )
    return [find_class(spec, labels, logits.shape[-1])] * len(logits)


def _in_range(index: int, classes: int) -> int:
    if not 0 <= index < classes:
        raise BadInput(f"There is no class {index}: the model has {classes}; give an index from 0 to {classes - 1}.")
    return index


def _weighted(rows: Sequence[tuple[tuple[int, float], ...]], scores: Tensor) -> Tensor:
    """[B, C] -> [B]: each row's own weighted classes, gathered so that no other class gets a gradient of 0 · inf."""
    width = max(len(row) for row in rows)
    padded = [(*row, *(((0, 0.0),) * (width - len(row)))) for row in rows]
    index = torch.tensor([[c for c, _ in row] for row in padded], device=scores.device)
    weight = torch.tensor([[w for _, w in row] for row in padded], device=scores.device, dtype=scores.dtype)
    return (scores.gather(1, index) * weight).sum(1)


def _call(function: Any, logits: Tensor) -> Tensor:
    """The user's own function, held to [B] finite numbers."""
    try:
        value = function(logits)
    except Exception as error:
        raise BadInput(
            f"The target function failed on the model's output {list(logits.shape)} ({type(error).__name__}: {error}); "
            "expected a function of the scores [B, classes] that returns one number for each image."
        ) from error
    if isinstance(value, Tensor) and value.ndim == 0 and len(logits) == 1:
        value = value[None]
    if not isinstance(value, Tensor) or value.shape != logits.shape[:1]:
        seen = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise BadInput(
            f"The target function returned {seen} for scores {list(logits.shape)}; expected a tensor [{len(logits)}], "
            "one number for each image, like lambda scores: scores[:, 3]."
        )
    return value


def _try_out(function: Function, logits: Tensor) -> None:
    """Call it once on a copy, so that a mistake is found before the expensive part."""
    with torch.inference_mode(False), torch.enable_grad():
        value = _call(function, logits.detach().clone().requires_grad_())
    if not value.requires_grad:
        raise BadInput(
            "The target function's result does not depend on the scores in a way that has a gradient; leave out "
            "argmax, detach, item and no_grad."
        )
    if not bool(value.detach().isfinite().all()):
        raise BadInput("The target function returned NaN or infinite values; expected finite numbers.")


def _join(parts: Sequence[Target]) -> Target:
    """One target per image, each resolved on its own, as one for the batch."""
    score = next((p.score for p in parts if p.score != "custom"), "custom")
    return Target(
        names=tuple(p.names[0] for p in parts),
        classes=tuple(p.classes[0] for p in parts),
        score=score,
        rows=tuple(p.rows[0] for p in parts),
    )


def _check_finite(logits: Tensor) -> None:
    bad = [i + 1 for i, fine in enumerate(logits.detach().isfinite().all(-1).tolist()) if not fine]
    if bad:
        raise BadInput(
            f"The model's scores for image {', '.join(map(str, bad))} are NaN or infinite; expected finite numbers: "
            "check the weights and the preprocessing, or use a wider dtype (float32)."
        )


def _wide(logits: Tensor) -> Tensor:
    """Half precision is too coarse for probabilities."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
