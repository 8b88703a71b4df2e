"""Next-token targets: why does a vision-language model write this word next?"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from clairvit.errors import BadInput, ModelUnavailable, UnknownName
from clairvit.models.language import (
    Prompt,
    check_language_model,
    continued,
    encode_prompt,
    load_processor,
    pixel_inputs,
    read_prompt,
    token_names,
    tokenizer_of,
)
from clairvit.models.model import Layout, Model
from clairvit.models.readout import BoundInputs, NextTokenScores, unwrap_readout
from clairvit.targets.base import ScoreContext, Target, TargetBatch


@dataclass(frozen=True)
class NextToken(Target):
    """The word that a vision-language model writes next, after a prompt about the image.

    The score is the logit of one token of the vocabulary at the end of the prompt, or of the answer so far. The layers
    are the blocks of the language model, whose sequence holds the image tokens next to those of the text.

    Args:
        word: A word that is one token of the model; None is the token that the model writes itself.
        prompt: The question. The image comes first, as the model's chat template has it, unless the prompt holds the
            image placeholder itself. None if the model has its `input_ids` (`cv.explain(…, inputs=…)`).
        answer: What the model has written so far: a text, or token ids.
        token: A token by its id, in the place of `word`.
        processor: The model's processor or tokenizer; None is the one that was saved with its weights.

    Example:
        >>> import clairvit as cv
        >>> cv.NextToken("cat", prompt="What is on the sofa?")
        NextToken(word='cat', prompt='What is on the sofa?', answer='', token=None)
        >>> cv.explain("pets", "demo", target=cv.NextToken("cat"))
        Traceback (most recent call last):
        ...
        clairvit.errors.NotApplicable: pets (VisionTransformer) writes no text, and cv.NextToken explains a word of \
one; expected a vision-language model of transformers (LLaVA, Qwen2-VL, PaliGemma, SmolVLM). Name a class instead.
    """

    word: str | None = None
    prompt: str | None = None
    answer: str | Sequence[int] = ""
    token: int | None = None
    processor: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("word", "prompt"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise BadInput(f"{name}={value!r} was given; expected a text, or None.")
        if self.word is not None and self.token is not None:
            raise BadInput(f"word={self.word!r} and token={self.token!r} were given; expected one of them.")
        if not isinstance(self.answer, str):
            object.__setattr__(self, "answer", tuple(int(number) for number in self.answer))

    def readout(self, model: Model) -> Model:
        """Return the model whose scores are the logits of the next token, [B, vocabulary].

        Raises:
            NotApplicable: The model writes no text about an image.
            ModelUnavailable: There is no tokenizer to read the prompt or the word with.
            BadInput: The word is several tokens, or the prompt does not fit.
        """
        base = model.base or model
        module = unwrap_readout(base.module)
        check_language_model(module, model.name)
        self._token_id(module)
        key = ("next token", self.prompt, self.answer, _Identity(self.processor))
        readout = base._readouts.get(key)
        if readout is not None:
            return readout
        prompt = continued(module, self._prompt(base, module), self.answer_ids(model))
        words = self._vocabulary(module)
        return base.read(
            key,
            last_position,
            readout=functools.partial(
                NextTokenScores, pixel_inputs=pixel_inputs, inputs=prompt.inputs, text=_text(prompt, words)
            ),
            labels=words,
            activation="softmax",
            classifier=True,
            layout=_layout(prompt),
        )

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the logit of the token; without a word, of the token that the model writes for each image."""
        assert context.model is not None
        number = self._token_id(unwrap_readout(context.model.module))
        numbers = context.logits.argmax(-1).tolist() if number is None else [number] * len(context)
        return context.target([_title(context.name(n)) for n in numbers], numbers, [((n, 1.0),) for n in numbers])

    def _prompt(self, base: Model, module: Any) -> Prompt:
        """Return the prompt as token ids: encoded, or those that the model is bound to."""
        size = base.preprocess.size
        bound = base.module.inputs if isinstance(base.module, BoundInputs) else {}
        if "input_ids" in bound:
            if self.prompt is not None:
                raise BadInput(
                    f"prompt={self.prompt!r} and input_ids were given; expected one of them. Leave out the prompt, or "
                    "the inputs."
                )
            return read_prompt(module, bound, size)
        if self.prompt is None:
            raise BadInput(
                "cv.NextToken has no prompt, and the model no input_ids; expected a question, such as "
                "cv.NextToken('cat', prompt='What is this?'), or inputs={'input_ids': …}."
            )
        return encode_prompt(module, self._needed_processor(module), self.prompt, size)

    def _needed_processor(self, module: Any) -> Any:
        """Return the processor; raise ModelUnavailable if there is none with a tokenizer."""
        processor = load_processor(module) if self.processor is None else self.processor
        if tokenizer_of(processor) is None:
            raise ModelUnavailable(
                f"{type(module).__name__} has no tokenizer to read text with: none was saved with its weights. Pass "
                "cv.NextToken(…, processor=AutoProcessor.from_pretrained(…)), or inputs={'input_ids': …} and token=."
            )
        return processor

    def answer_ids(self, model: Model) -> tuple[int, ...]:
        """Return the token ids of what the model has written so far."""
        if not isinstance(self.answer, str):
            return tuple(self.answer)
        module = unwrap_readout(model.module)
        return tuple(_encode(self._needed_processor(module), self.answer)) if self.answer else ()

    def _token_id(self, module: Any) -> int | None:
        """Return the token of the word; None where the model's own is meant. Raise if it is none, or several."""
        if self.word is None:
            size = _vocabulary_size(module)
            if self.token is not None and not 0 <= self.token < size:
                raise BadInput(f"There is no token {self.token}: the model has {size} tokens, from 0 on.")
            return self.token
        processor = self._needed_processor(module)
        # A word inside a text begins with a space, which byte-level tokenizers count to the word.
        spaced = bool(self.answer) and not (isinstance(self.answer, str) and self.answer[-1].isspace())
        forms = [f" {self.word}", self.word] if spaced else [self.word, f" {self.word}"]
        encoded = [_encode(processor, form) for form in forms]
        single = next((numbers[0] for numbers in encoded if len(numbers) == 1), None)
        tokenizer = tokenizer_of(processor)
        if single is None:
            shortest = min(encoded, key=len)
            pieces = [_title(name) for name in token_names(tokenizer, shortest)]
            raise BadInput(
                f"'{self.word}' is {len(shortest)} tokens of this model: {', '.join(map(repr, pieces))}; expected one. "
                f"Explain the first, cv.NextToken(token={shortest[0]}, …), then the next with answer={pieces[0]!r}."
            )
        if single == tokenizer.unk_token_id and self.word != tokenizer.unk_token:
            raise UnknownName(
                f"The model's tokenizer has no token for '{self.word}'; expected a word of its vocabulary, or token=."
            )
        return single

    def _vocabulary(self, module: Any) -> tuple[str, ...]:
        """Return a name for every token of the model: its text, or its number without a tokenizer."""
        processor = load_processor(module) if self.processor is None else self.processor
        return token_names(tokenizer_of(processor), range(_vocabulary_size(module)))


@dataclass(frozen=True, eq=False)
class _Identity:
    """A processor as part of a key: equal to itself alone, and kept as long as the key is."""

    processor: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.processor is self.processor

    def __hash__(self) -> int:
        return id(self.processor)


def _vocabulary_size(module: Any) -> int:
    return int(module.get_output_embeddings().weight.shape[0])


def _layout(prompt: Prompt) -> Layout | None:
    """Return where the image tokens lie in the sequence, whose last token is read; None if they form no grid."""
    if prompt.grid is None:
        return None
    tokens = len(prompt.ids)
    return Layout(prompt.grid, prompt.first, "token", ((tokens - 1, 1.0),), suffix=tokens - prompt.first - prompt.count)


def last_position(output: Any) -> Tensor:
    """Return the scores [B, V] of the last position in the logits [B, N, V] of a language model."""
    logits: Tensor = output.logits
    return logits[:, -1]


def _text(prompt: Prompt, words: Sequence[str]) -> tuple[str, ...]:
    """Return the tokens of the text; PaliGemma's image token is none that it writes."""
    return tuple(words[number] if number < len(words) else f"token {number}" for number in prompt.text_ids)


def _encode(processor: Any, text: str) -> list[int]:
    numbers: list[int] = tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"]
    return numbers


def _title(name: str) -> str:
    """Return the name of a token without the space that begins a word; blanks and line ends in quotes."""
    return name.strip() or repr(name)
