"""The greedy answer of a vision-language model, as targets: one per token that it writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from clairvit.errors import BadInput
from clairvit.methods.runs import Question
from clairvit.models.coerce import ModelLike
from clairvit.models.images import Batch
from clairvit.models.readout import unwrap_readout
from clairvit.models.sources.hf_outputs import image_token_id
from clairvit.targets.token import NextToken
from clairvit.tracing.module_state import frozen_eval, own_grad_mode


@own_grad_mode()
def generate(
    model: ModelLike, image: Any, prompt: str | None = None, *, max_tokens: int = 16, **target: Any
) -> list[NextToken]:
    """Return the model's greedy answer about one image, as one target per token.

    Explained together they make a strip of maps: `cv.explain(model, image, targets=cv.generate(model, image, prompt))`.

    Args:
        model: A vision-language model of transformers, as in `cv.explain`.
        image: One image.
        prompt: The question, as in `cv.NextToken`.
        max_tokens: The longest answer, in tokens; it ends before the model's end-of-text token, or an image token.
        **target: Further arguments of `cv.NextToken`: processor=, answer=.

    Returns:
        A target per token: the prompt with the tokens before it as the answer so far.

    Raises:
        BadInput: Several images were given, or the answer is empty.
        NotApplicable: The model writes no text about an image.

    Example:
        >>> import clairvit as cv
        >>> cv.generate("pets", "demo", "What is this?")
        Traceback (most recent call last):
        ...
        clairvit.errors.NotApplicable: pets (VisionTransformer) writes no text, and cv.NextToken explains a word of \
one; expected a vision-language model of transformers (LLaVA, Qwen2-VL, PaliGemma, SmolVLM). Name a class instead.
    """
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise BadInput(f"max_tokens={max_tokens!r} was given; expected a whole number from 1 on.")
    question = Question.of(model, image, scored="never", one_batch=True)
    step, batch = NextToken(prompt=prompt, **target), question.images
    assert isinstance(batch, Batch)
    if len(batch) != 1:
        raise BadInput(f"{len(batch)} images were given; expected one, because each has an answer of its own.")
    answer = step.answer_ids(question.model)
    targets: list[NextToken] = []
    for _ in range(max_tokens):
        readout = replace(step, answer=answer).readout(question.model)
        with frozen_eval(readout.module), torch.no_grad():
            number = int(readout.logits(batch.pixels)[0].argmax())
        if number in _end_tokens(unwrap_readout(readout.module)):  # nothing follows
            break
        targets.append(replace(step, answer=answer, token=number))
        answer = (*answer, number)
    if not targets:
        raise BadInput("The model answers nothing: its first token ends the text. Name a word: cv.NextToken('cat', …).")
    return targets


def _end_tokens(module: Any) -> tuple[int | None, ...]:
    """Return the tokens that end an answer: the model's own, and the image placeholder, which is no text."""
    image = image_token_id(module.config)
    for config in (getattr(module, "generation_config", None), module.config, module.config.get_text_config()):
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            return (image, end) if isinstance(end, int) else (image, *end)
    return (image,)
