"""Does the answer mean anything? What can be seen of the photo, the weights and the passes of a check.

There is nothing to explain in a photo of one colour or of noise, in a model whose weights look random, and in an answer
that no hidden part changes visibly. None of the opposite says that the answer is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput
from clairvit.methods.runs import Question, TargetList, chunk_size, iter_runs
from clairvit.metrics.check_result import CLEAR_FALL, AnswerCheck, AnswerStatus, Quantity, percent_in_words
from clairvit.models.coerce import ModelLike
from clairvit.models.images import Batch, displayed
from clairvit.models.model import Model
from clairvit.numerics import widened
from clairvit.targets.base import class_name
from clairvit.targets.embedding import image_embedding
from clairvit.tracing.module_state import own_grad_mode

FLAT = 6 / 255  # standard deviation of every channel: below it a photo is nearly of one colour
NOISE = 0.3  # correlation of neighbouring pixels; photos have about 0.9, white noise that was resized about 0.2
TWICE, MORE, TIMES, LOW = 2.0, 0.1, 5.0, 0.15  # of guessing: see `near_guessing`
UNSURE = 0.5  # a probability below it is named
UNRELATED = 0.1  # cosine of two images below which they are not alike
NEIGHBOURS = 5  # whose mean distance says how far an image is from a reference
FEWEST_IMAGES = 20  # of a reference
USUAL = 0.99  # share of images like the reference that are called so


@dataclass(frozen=True, eq=False)
class Reference:
    """Embeddings of images that a model is meant for, and how far each of them is from the others.

    The distance of an image is the mean of 1 − cosine to its five nearest. An image is unlike the reference if it is
    further away than 99 of 100 of the reference's own images are from the others; of fewer than 99 images, than all. Of
    images like those of the reference about one in a hundred (one in n + 1) is called unlike it.

    Args:
        model: The name of the model.
        embeddings: [n, d], of length 1.
        distances: [n], of each image from the others, in rising order.
    """

    model: str
    embeddings: Tensor = field(repr=False)
    distances: Tensor = field(repr=False)

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def limit(self) -> float:
        """Return the distance beyond which an image is unlike the reference."""
        return float(self.distances[min(math.ceil(USUAL * (len(self) + 1)), len(self)) - 1])

    def sentence(self, distance: float) -> str:
        """Return that an image at this distance is unlike the reference, in words."""
        return (
            f"The photo is unlike the {len(self)} reference images: its distance to the nearest is {distance:.2f}, and "
            f"theirs are up to {self.limit:.2f}."
        )

    def distance(self, embeddings: Tensor) -> Tensor:
        """Return the distances [B] of images with these embeddings [B, d] of length 1."""
        if embeddings.shape[-1] != self.embeddings.shape[1]:
            raise BadInput(
                f"The reference holds embeddings of {self.embeddings.shape[1]} numbers, and the images have "
                f"{embeddings.shape[-1]}; expected a reference of the same model: cv.reference(model, images)."
            )
        return _nearest(1 - embeddings.double().cpu() @ self.embeddings.mT)


def _nearest(distances: Tensor) -> Tensor:
    """Return the mean of the five smallest of distances [B, n], [B]."""
    return distances.sort(1).values[:, :NEIGHBOURS].mean(1)


def reference(model: ModelLike, images: object) -> Reference:
    """Return what images that a model is meant for look like to it, so that `check` can tell others apart.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`: photos like those that the model will be used on, at least 20, better 100.

    Returns:
        A `Reference` for `ex.check(reference=…)` and `cv.check_maps(…, reference=…)`.

    Raises:
        BadInput: Fewer than 20 images.

    Example:
        >>> import clairvit as cv, torch
        >>> known = cv.reference("pets", torch.randn(20, 3, 224, 224))
        >>> len(known), cv.explain("pets", "demo").check(reference=known)[0].answer.status
        (20, 'take care')
    """
    question = Question.of(model, images, scored="never")
    parts = [embeddings for _, embeddings in _embed(question)]
    embeddings = torch.cat(parts) if parts else torch.zeros(0, 1)
    if len(embeddings) < FEWEST_IMAGES:
        raise BadInput(
            f"A reference of {len(embeddings)} images was asked for; expected at least {FEWEST_IMAGES}, better 100, "
            "like those that the model is meant for."
        )
    distances = (1 - embeddings @ embeddings.mT).fill_diagonal_(math.inf)
    return Reference(question.model.name, embeddings, _nearest(distances).sort().values)


def embeddings_of(model: Model, pixels: Tensor) -> Tensor:
    """Return the embeddings [B, d] of prepared images, of length 1, in float64 on the CPU; one forward."""
    names = tuple(str(row) for row in range(len(pixels)))
    question = Question.of(model, Batch(pixels, names), scored="never")
    return torch.cat([embeddings for _, embeddings in _embed(question)])


@own_grad_mode()
def _embed(question: Question) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return rows and embeddings of the images, a few at a time."""
    read = image_embedding(question.model)
    asked = Question(read, question.images, TargetList(()), (), None, question.seed, question.execution)
    with closing(iter_runs(asked, (), size=chunk_size(read), label="reference")) as runs:
        return [(run.rows, widened(run.recording.logits.detach()).double().cpu()) for run in runs]


def looks_untrained(module: nn.Module) -> bool:
    """Return whether every normalisation layer still has the weights 1 and biases 0 that it began with.

    Training moves them. False where there is no such layer, or none with weights.
    """
    norms = [dict(layer.named_parameters(recurse=False)) for layer in module.modules() if is_norm(layer)]
    norms = [parameters for parameters in norms if "weight" in parameters and parameters["weight"].ndim == 1]
    return bool(norms) and all(
        bool((parameters["weight"] == 1).all()) and not ("bias" in parameters and bool(parameters["bias"].any()))
        for parameters in norms
    )


def is_norm(layer: nn.Module) -> bool:
    """Return whether a module is a normalisation layer by the name of its class, as LayerNorm2d and LlamaRMSNorm."""
    return "Norm" in type(layer).__name__


def photo_reasons(pixels: Tensor, model: Model) -> tuple[str, ...]:
    """Return why nothing can be explained in one image [C, H, W] or clip [C, T, H, W]: one colour, or noise."""
    frames = pixels.detach().unsqueeze(1) if pixels.ndim == 3 else pixels.detach()
    shown = torch.stack([displayed(frame, model.preprocess) for frame in frames.unbind(1)])  # [T, 3, H, W]
    if float(shown.std((2, 3), unbiased=False).max()) < FLAT:
        return ("The photo is nearly of one colour.",)
    if min(shown.shape[-2:]) > 1 and float(_neighbours(shown)) < NOISE:
        return ("The photo looks like noise: neighbouring pixels have nothing to do with each other.",)
    return ()


def _neighbours(frames: Tensor) -> Tensor:
    """Return the correlation of neighbouring pixels of frames [T, 3, H, W], after the mean of each channel."""
    centred = frames - frames.mean((2, 3), keepdim=True)
    products = (centred[..., 1:] * centred[..., :-1]).mean() + (centred[..., 1:, :] * centred[..., :-1, :]).mean()
    correlation: Tensor = products / (2 * centred.square().mean())
    return correlation


def near_guessing(classes: int) -> float:
    """Return the probability below which an answer is close to guessing, which gives 1 / classes.

    Twice that, but no more than 10 points above it; of many classes five times that, up to 15 %.
    """
    return max(min(TWICE / classes, 1 / classes + MORE), min(TIMES / classes, LOW))


@dataclass(frozen=True)
class AnswerFacts:
    """What a check has seen of one answer.

    Args:
        target: The name of what is scored.
        quantity: What the values are.
        full: The value of the whole image.
        lowest: The lowest value that hiding parts leads to: the mean of random sets of one size, or without what the
            map marks.
        moves: Whether anything changes the score by more than rounding.
        classes: The number of classes.
        is_sigmoid: Whether every class has a probability of its own.
        answer: The index of the class with the highest score, and its probability; None without probabilities.
        is_answer: Whether the target is that class.
        is_image_similarity: Whether the score is the cosine of two images.
        labels: The names of the classes.
    """

    target: str
    quantity: Quantity
    full: float
    lowest: float
    moves: bool
    classes: int
    is_sigmoid: bool
    answer: tuple[int, float] | None
    is_answer: bool
    is_image_similarity: bool
    labels: Sequence[str] = ()

    @property
    def hardly_falls(self) -> bool:
        """Return whether a probability does not fall visibly whatever is hidden."""
        return self.quantity == "probability" and self.full - self.lowest < CLEAR_FALL


def check_answer(facts: AnswerFacts, certain: Sequence[str], possible: Sequence[str] = ()) -> AnswerCheck:
    """Return whether an answer means anything.

    `certain` are reasons of the photo and the model why nothing can be explained, `possible` are reasons to take care.
    """
    nothing, doubts = list(certain), list(possible)
    if not facts.moves:
        nothing.append("The score is the same whatever is hidden.")
    elif facts.is_image_similarity and abs(facts.full) < UNRELATED:
        nothing.append(f"To the model the two photos are not alike: their cosine is {facts.full:.2f}.")
    elif facts.quantity == "probability":
        (nothing if _is_certain(facts) else doubts).extend(_confidence(facts))
    status: AnswerStatus = "nothing to explain" if nothing else "take care" if doubts else "no objection"
    return AnswerCheck(status, (*nothing, *doubts))


def _is_certain(facts: AnswerFacts) -> bool:
    """Return whether the confidence alone says that there is nothing to explain."""
    near_chance = not facts.is_sigmoid and facts.full < near_guessing(facts.classes)
    seen = facts.full >= UNSURE if facts.is_sigmoid else facts.is_answer
    return seen and (facts.hardly_falls or near_chance)


def _confidence(facts: AnswerFacts) -> list[str]:
    """Return what speaks against an answer by its probability, as one sentence; nothing where nothing does."""
    confidence = percent_in_words(facts.full)
    if facts.is_sigmoid and facts.full < UNSURE:
        return [f"The model does not see {facts.target} (confidence {confidence})."]
    near_chance = near_guessing(facts.classes)
    if not facts.is_sigmoid and not facts.is_answer and facts.answer is not None and facts.answer[1] >= near_chance:
        answer = f"{class_name(facts.labels, facts.answer[0])} ({percent_in_words(facts.answer[1])})"
        return [f"The model's answer is {answer}; its confidence in {facts.target} is {confidence}."]
    lead = f"The model's confidence in {facts.target} is {confidence}"
    if not facts.is_sigmoid and facts.full < near_chance:
        return [f"{lead}, and guessing gives {percent_in_words(1 / facts.classes)}."]
    if facts.hardly_falls:
        return [f"{lead} and hardly falls whatever is hidden."]
    if facts.full < UNSURE:
        return [f"The model is unsure: its confidence in {facts.target} is {confidence}."]
    return []
