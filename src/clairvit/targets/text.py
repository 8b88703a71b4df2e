"""Text targets: how well does a prompt describe the image, by CLIP, SigLIP and their like?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from clairvit.errors import BadInput, NotApplicable, UnknownName, did_you_mean
from clairvit.models.model import Model
from clairvit.models.text_encoder import check_prompts
from clairvit.targets.base import ScoreContext, Target, TargetBatch
from clairvit.targets.embedding import DIFFERENCE_OF, Embeddings, Projection, image_embedding, projection_target

TextScore = Literal["cosine", "logit"]
NEUTRAL = "neutral"  # as `against`: the neutral prompts below, or nothing for a given embedding
# Prompts about everyday things, whose mean stands for what any text has in common (docs/targets.md#neutral-prompts)
NEUTRAL_PROMPTS = tuple(
    f"a photo of a {name}"
    for name in (
        *("plane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "table", "dog", "horse"),
        *("motorbike", "person", "potted plant", "sheep", "sofa", "train", "screen"),
    )
)


@dataclass(frozen=True)
class Text(Target):
    """The similarity of the image and a prompt, for models that embed images and texts (CLIP, SigLIP).

    s = cos(image, prompt) − mean_k cos(image, neutral_k): what any text finds in the image cancels. With
    `against=None` s = cos(image, prompt). All prompts read one embedding of the image: several cost one forward pass.

    Args:
        prompt: What to look for, taken word for word; next to `embedding` a name for it.
        against: What is subtracted: "neutral", the 20 `NEUTRAL_PROMPTS`; prompts of your own, ["a photo", "a picture"];
            None or [], nothing. Next to `embedding`: other embeddings [k, d], or nothing.
        score: "cosine" in −1…1, or "logit", the model's own scale · cosine + bias; `cv.explain(…, score="logit")`
            asks for the latter too.
        embedding: The prompt's embedding [d], from a text tower that belongs to the model, where the model itself has
            none; it is scaled to length 1. `cv.targets.text_features` reads many from a file.

    Raises:
        BadInput: A prompt is no string, or empty; embeddings that are no finite numbers.

    Example:
        >>> import clairvit as cv
        >>> cv.Text("a red car", against=["a photo"])
        Text(prompt='a red car', against=('a photo',), score='cosine')
        >>> cv.Contrast(cv.Text("a cat"), cv.Text("a dog")).a.prompt
        'a cat'
        >>> cv.Text("cat", embedding=[0.6, 0.8], against=[[1.0, 0.0]])
        Text(prompt='cat', against=1 embedding of 2 numbers, score='cosine')
    """

    prompt: str
    against: Any = NEUTRAL
    score: TextScore = "cosine"
    embedding: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.prompt, list | tuple):
            raise BadInput(
                f"cv.Text got {len(self.prompt)} prompts in a list; expected one string. For several side by side pass "
                "targets=[cv.Text(a), cv.Text(b)]."
            )
        check_prompts([self.prompt])
        if self.embedding is not None:
            embedding = Embeddings.of(self.embedding, f"The embedding of '{self.prompt}'")
            if len(embedding) != 1:
                raise BadInput(f"{len(embedding)} embeddings were given for '{self.prompt}'; expected one, [d].")
            object.__setattr__(self, "embedding", embedding)
        object.__setattr__(self, "against", self._checked_against())
        if self.score not in get_args(TextScore):
            near = did_you_mean(str(self.score), get_args(TextScore))
            raise UnknownName(f"There is no score '{self.score}' of a prompt.{near} Choose cosine or logit.")

    def _checked_against(self) -> str | tuple[str, ...] | Embeddings:
        """Return what is subtracted: "neutral", prompts, or embeddings."""
        against = self.against
        if isinstance(against, str):
            return against if against == NEUTRAL else check_prompts([against])
        if against is None or (isinstance(against, list | tuple) and not against):
            return ()
        is_prompts = isinstance(against, list | tuple) and any(isinstance(item, str) for item in against)
        if self.embedding is None:
            return check_prompts(against)
        if is_prompts:
            raise BadInput(
                f"'{self.prompt}' is given as an embedding, and against= as prompts, which no text tower encodes; "
                "expected embeddings, [k, d]."
            )
        return Embeddings.of(against, f"What '{self.prompt}' is compared with")

    @property
    def title(self) -> str:
        """Return the prompt, and the prompts of one's own that its similarity is compared with."""
        if not isinstance(self.against, tuple) or not self.against:
            return self.prompt
        if len(self.against) == 1:
            return f"{self.prompt} − {self.against[0]}"
        return f"{self.prompt} − mean of {len(self.against)} prompts"

    @property
    def subtracts(self) -> bool:
        """Return whether the similarity to other texts is subtracted."""
        if self.embedding is not None:
            return isinstance(self.against, Embeddings)
        return bool(self.against)

    def readout(self, model: Model) -> Model:
        """Return the model whose scores are the image's embedding."""
        if self.embedding is None:
            self._check_tower(model)
        return image_embedding(model)

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the cosine of each image's embedding and the prompt's, minus the mean cosine of the others."""
        score = "logit" if context.score_is_named else self.score  # no other kind can be named: an embedding has none
        if self.embedding is None or score == "logit":
            self._check_tower(context.model)
        direction, others = self._embeddings(context.model)
        offset = 0.0
        if others is not None:
            direction = direction - others.mean(0)
        if score == "logit":
            assert context.model is not None
            assert context.model.text_encoder is not None
            tower = context.model.text_encoder.tower
            direction = tower.scale * direction
            offset = 0.0 if others is not None else tower.bias or 0.0  # equal biases cancel
        kind = score if others is None else DIFFERENCE_OF[score]
        count = len(context)
        return projection_target(
            context, [self.title] * count, kind, Projection(direction, offset), (self.note(score),)
        )

    def _embeddings(self, model: Model | None) -> tuple[Tensor, Tensor | None]:
        """Return the unit embedding of the prompt [d], and those that it is compared with [k, d]."""
        if self.embedding is not None:
            others = self.against.values if isinstance(self.against, Embeddings) else None
            return self.embedding.values[0], others
        assert model is not None
        assert model.text_encoder is not None
        prompts = NEUTRAL_PROMPTS if self.against == NEUTRAL else self.against
        embedding = model.text_encoder.encode([self.prompt])[0]  # alone, so that errors are about this prompt
        return embedding, model.text_encoder.encode(prompts) if prompts else None

    def note(self, score: str) -> str:
        """Return what the score of this prompt is, in one sentence."""
        if isinstance(self.against, Embeddings):
            other = f"the mean {score} of {len(self.against)} other texts that were given"
        elif self.embedding is not None:
            return (
                f"'{self.prompt}': the score is the {score} of image and text alone, of which most is common to all "
                "texts. No other texts were given to compare it with: add against=."
                if self.against == NEUTRAL
                else f"'{self.prompt}': the score is the {score} of image and text alone."
            )
        elif self.against == NEUTRAL:
            other = f"the mean {score} of {len(NEUTRAL_PROMPTS)} neutral prompts ('{NEUTRAL_PROMPTS[0]}', …)"
        elif self.against:
            other = f"the mean {score} of " + ", ".join(f"'{prompt}'" for prompt in self.against)
        else:
            return f"'{self.prompt}': the score is the {score} of image and text alone."
        return f"'{self.prompt}': the score is the {score} of image and text minus {other}; no probability."

    def _check_tower(self, model: Model | None) -> None:
        """Raise NotApplicable for a model without a text tower."""
        if model is not None and model.text_encoder is not None:
            return
        name = "The model" if model is None else model.name
        if self.embedding is not None:
            raise NotApplicable(
                f"{name} has no text tower, to which the scale of a logit belongs; expected score='cosine' for a given "
                "embedding."
            )
        raise NotApplicable(
            f"{name} has no text tower, so it cannot compare an image with '{self.prompt}'. Use a CLIP or SigLIP "
            "model, such as 'open_clip:ViT-B-32:openai', give the prompt's embedding (embedding=), or name a class."
        )
