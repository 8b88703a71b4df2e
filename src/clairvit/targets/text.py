"""Text targets: how well does a prompt describe the image, by CLIP, SigLIP and their like?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from clairvit.errors import BadInput, NotApplicable, UnknownName, did_you_mean
from clairvit.models.model import Model
from clairvit.models.text_encoder import check_prompts
from clairvit.targets.base import ScoreContext, Target, TargetBatch
from clairvit.targets.embedding import Projection, image_embedding, projection_target

TextScore = Literal["cosine", "logit"]


@dataclass(frozen=True)
class Text(Target):
    """The similarity of the image and a prompt, for models with a text tower (CLIP, SigLIP).

    s = cos(image, prompt), or with `against` cos(image, prompt) − mean_k cos(image, against_k), so that what any text
    finds in the image cancels. All prompts read one embedding of the image: several cost one forward pass.

    Args:
        prompt: What to look for, taken word for word.
        against: Neutral prompts whose mean similarity is subtracted: ["a photo", "a picture"].
        score: "cosine" in −1…1, or "logit", the model's own scale · cosine + bias; `cv.explain(…, score="logit")`
            asks for the latter too.

    Raises:
        BadInput: A prompt is no string, or empty.

    Example:
        >>> import clairvit as cv
        >>> cv.Text("a red car", against=["a photo"])
        Text(prompt='a red car', against=('a photo',), score='cosine')
        >>> cv.Contrast(cv.Text("a cat"), cv.Text("a dog")).a.prompt
        'a cat'
    """

    prompt: str
    against: Sequence[str] = ()
    score: TextScore = "cosine"

    def __post_init__(self) -> None:
        if isinstance(self.prompt, list | tuple):
            raise BadInput(
                f"cv.Text got {len(self.prompt)} prompts in a list; expected one string. For several side by side pass "
                "targets=[cv.Text(a), cv.Text(b)]."
            )
        check_prompts([self.prompt])
        against = (self.against,) if isinstance(self.against, str) else tuple(self.against)
        object.__setattr__(self, "against", check_prompts(against) if against else ())
        if self.score not in get_args(TextScore):
            near = did_you_mean(str(self.score), get_args(TextScore))
            raise UnknownName(f"There is no score '{self.score}' of a prompt.{near} Choose cosine or logit.")

    @property
    def title(self) -> str:
        """Return the prompt, and what its similarity is compared with."""
        if len(self.against) < 2:
            return " − ".join((self.prompt, *self.against))
        return f"{self.prompt} − mean of {len(self.against)} prompts"

    def readout(self, model: Model) -> Model:
        """Return the model whose scores are the image's embedding."""
        if model.text_encoder is None:
            raise NotApplicable(
                f"{model.name} has no text tower, so it cannot compare an image with '{self.prompt}'. Use a CLIP or "
                "SigLIP model, such as 'open_clip:ViT-B-32:openai', or name a class."
            )
        return image_embedding(model)

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the cosine of each image's embedding and the prompt's."""
        encoder = None if context.model is None else context.model.text_encoder
        if encoder is None:
            raise NotApplicable(f"'{self.prompt}' needs a model with a text tower, such as CLIP or SigLIP.")
        embeddings = encoder.encode((self.prompt, *self.against))
        direction, offset = embeddings[0], 0.0
        if self.against:
            direction = direction - embeddings[1:].mean(0)
        score = "logit" if context.score_is_named else self.score  # no other kind can be named: an embedding has none
        if score == "logit":
            direction = encoder.tower.scale * direction
            offset = 0.0 if self.against else encoder.tower.bias or 0.0  # equal biases cancel
        return projection_target(context, [self.title] * len(context), score, Projection(direction, offset))
