"""Resolve what the user typed (None, an index, a name, a `Target`, a function, a list of these) into targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.models.activation import Activation, activation_for, probabilities
from clairvit.models.model import Model
from clairvit.numerics import widened
from clairvit.targets.base import (
    SCORES,
    Function,
    ScoreContext,
    Target,
    TargetBatch,
    class_name,
    no_probability,
)
from clairvit.targets.class_ import ClassTarget
from clairvit.targets.function import FunctionTarget

DIFFERENT_OUTPUTS = (
    "The targets of the list read different outputs of the model (regions, queries or tokens of their own for each "
    "image); expected one that all images share. Call this once for each image."
)
TargetLike = None | int | str | Target | Function | Sequence[Any]


def resolve_for(
    model: Model, spec: TargetLike, logits: Tensor, *, score: str | None = None, single: bool = False
) -> tuple[TargetBatch, ...]:
    """Return what the user asked for as targets over the whole batch.

    Args:
        model: The model that the scores are of (`readout_model`): class names, and what the scores mean.
        spec: None (predicted class), class index, class name or its unique beginning, Contrast(a, b), a function of the
            logits [B, C] -> [B], or a list of these: one per image, or several for a single one.
        logits: The model's scores of the images, [B, C].
        score: A name in SCORES; None is the logit, unless a method prefers another.
        single: There is one image, and a list holds several targets of it.

    Returns:
        One target; k targets if `single` and a list of k is given.
    """
    labels, classifier = model.labels, model.classifier
    activation = activation_for(model.activation if classifier else "raw", logits.shape[-1])
    kind = "logit" if score is None else score
    if not isinstance(kind, str) or kind not in SCORES:
        raise UnknownName(
            f"There is no score '{kind}'.{did_you_mean(kind, SCORES)} Choose one of: {', '.join(SCORES)}."
        )
    if kind != "logit" and not classifier:
        raise BadInput(f"The score '{kind}' needs classes, and this model gives an embedding; use score='logit'.")
    if kind != "logit" and activation == "raw":
        raise no_probability(kind)
    _check_finite(logits)
    if classifier and labels and len(labels) != logits.shape[-1]:
        raise BadInput(
            f"The model has {logits.shape[-1]} classes and {len(labels)} labels; expected a label for each class. "
            "Load or wrap it with the right ones (labels=)."
        )
    is_default, is_named = score is None and classifier, score is not None
    context = ScoreContext(logits, labels, kind, is_default, classifier, activation, is_named, model)

    if isinstance(spec, Tensor) or type(spec).__module__ == "numpy":
        spec = spec.tolist()  # type: ignore[union-attr]
    if not isinstance(spec, list | tuple):
        return (as_target(spec).resolve(context),)
    if single:
        if not spec:
            raise BadInput("An empty list of targets was given; name at least one, or leave it out for the prediction.")
        return tuple(as_target(item).resolve(context) for item in spec)
    count = len(context)
    if len(spec) != count:
        alone = " For several targets per image pass targets=[…]." * (count == 1)
        raise BadInput(
            f"{len(spec)} target{'s were' if len(spec) != 1 else ' was'} given for {count} image{'s' * (count != 1)}; "
            f"give one for all, or a list of exactly {count}, one for each image.{alone}"
        )
    return (TargetBatch.concat(as_target(item).resolve(context.take([i])) for i, item in enumerate(spec)),)


def readout_models(model: Model, spec: TargetLike) -> list[Model]:
    """Return the different models whose scores a target, or a list of targets, is about."""
    if isinstance(spec, Tensor) or type(spec).__module__ == "numpy":
        spec = None  # class indices
    items = spec if isinstance(spec, list | tuple) else [spec]
    models = [as_target(item).readout(model) for item in items]
    return list({id(readout): readout for readout in models}.values())


def readout_model(model: Model, spec: TargetLike) -> Model:
    """Return the model whose scores a target is about; raise BadInput for a list that is about several outputs."""
    models = readout_models(model, spec)
    if len(models) > 1:
        raise BadInput(DIFFERENT_OUTPUTS)
    return models[0] if models else model


def check_same_readout(model: Model, spec: TargetLike) -> None:
    """Raise BadInput if a target is about another output of the module than the scores of `model`.

    The scores of two outputs have nothing in common: channel 4 of a block and class 4 are the same column of both.
    """
    if any(readout is not model for readout in readout_models(model.base or model, spec)):
        raise BadInput(
            "The target reads another output of the model than the scores that were computed (a neuron, a prompt, a "
            "region, a query or a token has scores of its own); expected one of the same output. Name it in the call "
            "that runs the model: target=…."
        )


def readouts_by_image(model: Model, spec: TargetLike, count: int) -> list[Model]:
    """Return the model whose scores the target of each of `count` images is about; a list has one per image.

    A model that has inputs with a row per image is one model for each.
    """
    model.check_input_rows(count)
    return readouts_of([model.for_row(row) for row in range(count)], spec)


def readouts_of(models: Sequence[Model], spec: TargetLike) -> list[Model]:
    """Return the model whose scores the target of each image is about, given the model of each image."""
    if not isinstance(spec, list | tuple):
        readouts = {id(model): readout_model(model, spec) for model in models}
        return [readouts[id(model)] for model in models]
    if len(spec) != len(models):
        raise BadInput(f"{len(spec)} targets were given for {len(models)} images; expected one for each.")
    return [as_target(item).readout(model) for model, item in zip(models, spec, strict=True)]


def as_target(spec: Any) -> Target:
    """Return a single target that the user typed as an object."""
    if isinstance(spec, Target):
        return spec
    return FunctionTarget(spec) if callable(spec) else ClassTarget(spec)


def top(
    logits: Tensor, labels: Sequence[str] = (), k: int = 5, *, activation: Activation = "softmax"
) -> list[list[tuple[str, float]]]:
    """Return for each image the k highest classes, best first: (name, probability), or (name, score) if raw.

    Probabilities of a sigmoid are independent: they need not add up to 1.
    """
    _check_finite(logits)
    scores = widened(logits.detach())
    p = probabilities(scores, activation)
    values, classes = (scores if p is None else p).topk(min(k, logits.shape[-1]), dim=-1)
    return [
        [(class_name(labels, c), value) for c, value in zip(row_classes, row_values, strict=True)]
        for row_classes, row_values in zip(classes.tolist(), values.tolist(), strict=True)
    ]


def _check_finite(logits: Tensor) -> None:
    broken = [i + 1 for i, finite in enumerate(logits.detach().isfinite().all(-1).tolist()) if not finite]
    if broken:
        raise BadInput(
            f"The model's scores for image {', '.join(map(str, broken))} are NaN or infinite; expected finite numbers: "
            "check the weights and the preprocessing, or use a wider dtype (float32)."
        )
