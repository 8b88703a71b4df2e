"""Translate autograd errors into messages about the user's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.checkpoint import CheckpointError

from clairvit.errors import CaptureError, NotApplicable

CHECKPOINTED = (
    "An attention call is not part of the gradient graph; expected a plain differentiable forward. "
    "Switch off gradient checkpointing (torch.utils.checkpoint) and torch.no_grad() inside the model."
)


def no_attention(stage: str, index: int) -> NotApplicable:
    """Return the error for a layer of a CNN that was asked for its attention."""
    return NotApplicable(
        f"This model has no attention that can be read (a CNN, say): its layer {index} is the feature map of "
        f"'{stage}', and attention between image tokens was asked for.",
        alternative="a gradient method",
    )


@contextmanager
def translate_autograd_errors() -> Iterator[None]:
    """Translate errors of a backward through the user's model."""
    try:
        yield
    except CheckpointError as error:
        raise CaptureError(
            "The model runs parts of its forward again in the backward pass (torch.utils.checkpoint), where a trace "
            "cannot follow; expected a plain forward. Switch off gradient checkpointing inside the model."
        ) from error
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise CaptureError(
            "The model overwrites a tensor that its own gradient needs; expected a differentiable forward. "
            "Look for x += … in its blocks and write x = x + …."
        ) from error
