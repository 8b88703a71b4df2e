"""Embeddings of images as scores: what prompts and other images are compared with, by the cosine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.model import Model
from clairvit.models.readout import Readout
from clairvit.models.scores import extract_scores
from clairvit.models.sources.adapters import embedding_part
from clairvit.numerics import widened
from clairvit.targets.base import ScoreContext, TargetBatch

COSINE = "cosine"
DIFFERENCE_OF = {COSINE: "difference of cosines", "logit": "difference of logits"}


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


def compares_embeddings(model: Model) -> bool:
    """Return whether a model's scores are the image's embedding, for a prompt or another image."""
    return getattr(model.module, "function", None) is unit_embedding


def unit_embedding(output: Any) -> Tensor:
    """Return the embeddings in a module's output with length 1, [B, d]."""
    return normalize(extract_scores(output), dim=-1)


@dataclass(frozen=True, eq=False, repr=False)
class Embeddings:
    """Unit embeddings that were given, [n, d]; equal by their numbers."""

    values: Tensor

    @classmethod
    def of(cls, values: Any, what: str) -> Embeddings:
        """Return vectors [d] or [n, d] with length 1; raise BadInput for anything else, `what` says of what."""
        if isinstance(values, cls):
            return values
        try:
            is_list = isinstance(values, list | tuple)
            tensor = torch.as_tensor(values, dtype=torch.float64 if is_list else None).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:  # of lists of anything
            raise BadInput(f"{what} is a {type(values).__name__}; expected numbers [d] or [n, d].") from error
        tensor = widened(tensor if tensor.is_floating_point() else tensor.double())
        tensor = tensor[None] if tensor.ndim == 1 else tensor
        if tensor.ndim != 2 or not tensor.numel():
            raise BadInput(f"{what} has shape {list(tensor.shape)}; expected numbers [d] or [n, d].")
        if not bool(tensor.isfinite().all()) or not bool(tensor.any(1).all()):
            raise BadInput(f"{what} holds NaN, infinity or zeros alone; expected finite numbers.")
        return cls(normalize(tensor, dim=-1))

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Embeddings) and torch.equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash(self.values.numpy().tobytes())

    def __repr__(self) -> str:
        return f"{len(self)} embedding{'s' * (len(self) != 1)} of {self.values.shape[1]} numbers"


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear function of unit embeddings: <e, direction> + offset, [n, d] -> [n]."""

    direction: Tensor  # [d]
    offset: float = 0.0

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return one number per embedding."""
        values = widened(embeddings)
        return values @ self.direction.to(values) + self.offset


def projection_target(
    context: ScoreContext, titles: Sequence[str], score: str, projection: Projection, notes: tuple[str, ...] = ()
) -> TargetBatch:
    """Return the target of all images in the context by one linear function of their embeddings."""
    if projection.direction.shape != context.logits.shape[-1:]:
        raise NotApplicable(
            f"The image embedding has {context.logits.shape[-1]} numbers and the one it is compared with "
            f"{projection.direction.shape[-1]}; expected embeddings of one space, as those of a CLIP or SigLIP model."
        )
    count = len(context)
    return TargetBatch(tuple(titles), (None,) * count, score, (projection,) * count, notes=notes, activation="raw")
