"""Similarity targets: what makes the image like another one?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.models.readout import evaluation_copy
from clairvit.targets.base import ScoreContext, Target, TargetBatch
from clairvit.targets.embedding import COSINE, Projection, image_embedding, projection_target

SIMILAR_TO = "similar to "  # and the other image: the name of the target


@dataclass(frozen=True, eq=False)
class Similar(Target):
    """The similarity of the image and another one: s = cos(e(image), e(other)), of the model's embeddings e.

    The embedding is what the linear head of a classifier is given, the output of a model without classes, or the image
    tower's output of CLIP and SigLIP. The other image stays as it is; `cv.match` explains both directions.

    Args:
        image: The other image: a path, PIL image, uint8 array, or preprocessed float tensor; for a model of clips
            another clip, as `cv.explain` takes it.
        name: Its name in titles; that of its file unless given.

    Example:
        >>> import clairvit as cv
        >>> cv.explain("pets", "demo", "ixg", target=cv.Similar("demo")).targets
        ('similar to demo',)
    """

    image: Any
    name: str = ""

    def readout(self, model: Model) -> Model:
        """Return the model whose scores are the image's embedding."""
        return image_embedding(model)

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the cosine of each image's embedding and the other image's."""
        if context.model is None:
            raise NotApplicable("The similarity of two images needs the model that embeds them.")
        embedding, name = self._embedded(context.model)
        title = f"{SIMILAR_TO}{self.name or PurePath(name).name or name}"
        return projection_target(context, [title] * len(context), COSINE, Projection(embedding))

    def _embedded(self, model: Model) -> tuple[Tensor, str]:
        """Return the unit embedding [d] of the other image, and its name."""
        batch = prepare(self.image, model)
        if len(batch) != 1:
            raise BadInput(f"cv.Similar got {len(batch)} images; expected one that others are compared with.")
        evaluated = replace(model, module=evaluation_copy(model.module))
        with torch.inference_mode(False), torch.no_grad():
            embedding = evaluated.logits(batch.pixels)[0]
        if not bool(embedding.isfinite().all()):
            raise BadInput(f"The embedding of {batch.names[0]} is NaN or infinite; expected finite numbers.")
        return embedding, batch.names[0]
