"""Embeddings of images as scores: what prompts and other images are compared with, by the cosine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from clairvit.errors import NotApplicable
from clairvit.models.model import Model
from clairvit.models.readout import Readout
from clairvit.models.scores import extract_scores
from clairvit.models.sources.adapters import embedding_part
from clairvit.numerics import widened
from clairvit.targets.base import ScoreContext, TargetBatch

COSINE = "cosine"


def image_embedding(model: Model) -> Model:
    """Return the model whose scores are the image's embedding e / ‖e‖, [B, d]: one for all prompts and images.

    The length is divided out inside the model, so that rule tables treat it as the norm that it is, and a cosine with
    a fixed vector is a linear function of these scores.
    """
    base = model.base or model
    return base.read(
        "embedding",
        unit_embedding,
        readout=lambda _, function: Readout(embedding_part(base), function),
        classifier=False,
    )


def unit_embedding(output: Any) -> Tensor:
    """Return the embeddings in a module's output with length 1, [B, d]."""
    return normalize(extract_scores(output), dim=-1)


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear function of unit embeddings: <e, direction> + offset, [n, d] -> [n]."""

    direction: Tensor  # [d]
    offset: float = 0.0

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return one number per embedding."""
        values = widened(embeddings)
        return values @ self.direction.to(values) + self.offset


def projection_target(context: ScoreContext, titles: Sequence[str], score: str, projection: Projection) -> TargetBatch:
    """Return the target of all images in the context by one linear function of their embeddings."""
    if projection.direction.shape != context.logits.shape[-1:]:
        raise NotApplicable(
            f"The image embedding has {context.logits.shape[-1]} numbers and the one it is compared with "
            f"{projection.direction.shape[-1]}; expected embeddings of one space, as those of a CLIP or SigLIP model."
        )
    count = len(context)
    return TargetBatch(tuple(titles), (None,) * count, score, (projection,) * count, activation="raw")
