"""The verb `logit_lens`: the scores that the model's own head would give after each block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.runs import Question
from clairvit.models.coerce import ModelLike
from clairvit.models.images import Batch
from clairvit.perturbation.activation_patching import BlockOutputs
from clairvit.perturbation.site_edits import check_layers, check_whole_blocks
from clairvit.tracing.module_state import frozen_eval, own_grad_mode
from clairvit.tracing.recorders.head_replay import HeadReplay
from clairvit.tracing.recording import record
from clairvit.tracing.structure import model_structure
from clairvit.tracing.trace import Trace


@own_grad_mode()
@torch.no_grad()
def logit_lens(model: ModelLike | Trace, images: Any = None) -> Tensor:
    """Apply the model's own head to the output of each block: the scores as if the later blocks were left out.

    score[l] = head(x_l), where x_l is the output of block l, and the head is everything that follows the last block:
    norm, pooling and classifier (nostalgebraist, 2020). The last one is the model's score, up to rounding.

    Args:
        model: As in `cv.explain`, or a `cv.trace`, whose model and images are used.
        images: As in `cv.explain`, all of them one batch; None with a trace.

    Returns:
        The scores [L, B, C].

    Raises:
        BadInput: Images next to a trace, or none without one.
        NotApplicable: The model's blocks are no modules, or attend inside windows.

    Example:
        >>> import clairvit as cv
        >>> scores = cv.logit_lens("pets", "demo")
        >>> scores.shape
        torch.Size([12, 1, 37])
    """
    if isinstance(model, Trace):
        if images is not None:
            raise BadInput("A trace and images were given; expected one of them, as a trace has images of its own.")
        wrapped, pixels = model.recording.model, model.pixels.detach()
    elif images is None:
        raise BadInput("No images were given; expected images, or a trace: cv.logit_lens(cv.trace(model, images)).")
    else:
        question = Question.of(model, images, scored="never", one_batch=True)
        assert isinstance(question.images, Batch)
        wrapped, pixels = question.model, question.images.pixels
    structure = model_structure(wrapped, pixels)
    with frozen_eval(wrapped.module), BlockOutputs(structure) as blocks:
        recording = record(wrapped, pixels, differentiable=False, recorders=(HeadReplay,))
    check_layers(recording, "the logit lens")
    check_whole_blocks(recording)
    replay = recording[HeadReplay].replay
    scores: list[Tensor] = []
    for call in recording.calls:
        output = blocks.outputs[call.block]
        if output is None or recording.end is None or output.shape != recording.end.shape:
            raise NotApplicable(f"A block of {wrapped.name} gives no tokens that its head could read.")
        scores.append(replay(output, recording.logits))
    return torch.stack(scores)
