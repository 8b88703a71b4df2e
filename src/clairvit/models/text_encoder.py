"""Text encoders: the text tower of an image-and-text model (CLIP, SigLIP), opened when the first prompt is encoded."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from clairvit.errors import BadInput, ClairError, NotApplicable
from clairvit.models.readout import evaluation_copy
from clairvit.models.scores import extract_scores
from clairvit.models.submodules import submodules, tensors_of
from clairvit.numerics import widened

Tokenizer = Callable[..., Any]
TRANSFORMERS = ("get_text_features", "get_image_features")
OPEN_CLIP = ("encode_text", "encode_image")


@dataclass(frozen=True, eq=False)
class TextTower:
    """A module that embeds texts, the tokenizer of its input, and what turns a cosine into the model's logit.

    logit = scale · cos(image, text) + bias; the bias is SigLIP's, None for a model without one.
    """

    module: nn.Module
    tokenize: Callable[[list[str]], Mapping[str, Tensor] | Tensor]

    @property
    def scale(self) -> float:
        """Return the factor of the cosine in the model's logit, exp(logit_scale)."""
        return float(self.module.logit_scale.detach().double().exp())  # type: ignore[operator]

    @property
    def bias(self) -> float | None:
        """Return the bias of the model's logit; None where it has none."""
        bias = getattr(self.module, "logit_bias", None)
        return None if bias is None else float(bias.detach())

    def embed(self, prompts: Sequence[str]) -> Tensor:
        """Return the features [n, d] of prompts as the module computes them, in evaluation mode."""
        module: Any = evaluation_copy(self.module)
        tokens = self.tokenize(list(prompts))
        device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(tokens, Tensor):
                return extract_scores(module.encode_text(tokens.to(device)))
            return extract_scores(module.get_text_features(**{key: value.to(device) for key, value in tokens.items()}))


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """Unit embeddings of prompts, each computed once; the text tower is opened when it is first needed.

    Args:
        open_tower: Return the text tower: load it from the model's source, or take it from the user's module.

    Example:
        >>> import clairvit as cv
        >>> cv.load("pets").text_encoder is None
        True
    """

    open_tower: Callable[[], TextTower]
    _towers: list[TextTower] = field(default_factory=list, repr=False)
    _embeddings: dict[str, Tensor] = field(default_factory=dict, repr=False)  # prompt -> [d]
    _versions: list[tuple[Any, ...]] = field(default_factory=list, repr=False)  # of the weights they were made with
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def tower(self) -> TextTower:
        """Return the text tower, opened at the first call."""
        with self._lock:
            if not self._towers:
                self._towers.append(self.open_tower())
            return self._towers[0]

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Return the unit embeddings [n, d] of prompts.

        Raises:
            BadInput: A prompt is no string, or empty.
            ModelUnavailable: The text tower or its tokenizer cannot be loaded.
        """
        checked = check_prompts(prompts)
        with self._lock:
            self._forget_if_changed()
            missing = [prompt for prompt in dict.fromkeys(checked) if prompt not in self._embeddings]
            if missing:
                self.remember(missing, self.tower.embed(missing))
                self._versions[:] = self._versions or [_weights_versions(self.tower.module)]
            return torch.stack([self._embeddings[prompt] for prompt in checked])

    def remember(self, prompts: Sequence[str], features: Tensor) -> Tensor:
        """Keep the features [n, d] of prompts and return them with unit length."""
        unit = normalize(widened(features.detach()), dim=-1)
        if not bool(unit.isfinite().all()):
            raise BadInput(
                "The text tower's embeddings are NaN or infinite; expected finite numbers: check its weights."
            )
        self._embeddings.update(zip(prompts, unit.unbind(), strict=True))
        return unit

    def _forget_if_changed(self) -> None:
        """Drop the embeddings if the weights of an open tower were changed or replaced: the user may train it."""
        if not self._towers:
            return
        versions = _weights_versions(self._towers[0].module)
        if self._versions != [versions]:
            if self._versions:
                self._embeddings.clear()
            self._versions[:] = [versions]


_SAMPLED = 64  # numbers of a tensor


def _weights_versions(module: nn.Module) -> tuple[Any, ...]:
    """Return what changes with the weights: identity, version and a sample of the numbers of each tensor."""
    tensors = [tensor.detach() for part in submodules(module) for _, tensor in tensors_of(part) if tensor.numel()]
    samples = [tensor.flatten()[:: max(1, tensor.numel() // _SAMPLED)].double() for tensor in tensors]
    numbers = torch.cat(samples).cpu().numpy().tobytes() if samples else b""
    return (*((tensor.data_ptr(), tensor.shape, _version(tensor)) for tensor in tensors), numbers)


def _version(parameter: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one made in inference mode, which does not count."""
    return 0 if parameter.is_inference() else parameter._version


def check_prompts(prompts: Any) -> tuple[str, ...]:
    """Return prompts as a tuple; raise BadInput for anything but strings with words in them."""
    listed = (prompts,) if isinstance(prompts, str) else prompts
    if not isinstance(listed, list | tuple) or not listed:
        raise BadInput(f"{prompts!r} was given as prompts; expected a list of strings such as ['a red car'].")
    for prompt in listed:
        if not isinstance(prompt, str):
            raise BadInput(
                f"The prompt {prompt!r} is a {type(prompt).__name__}; expected a string such as 'a red car'."
            )
        if not prompt.strip():
            raise BadInput("An empty prompt was given; expected words that describe what to look for: 'a red car'.")
    return tuple(listed)


def is_pair(module: nn.Module) -> bool:
    """Return whether a module embeds images and texts: a CLIP or SigLIP of transformers, open_clip or OpenAI."""
    return any(all(callable(getattr(module, name, None)) for name in names) for names in (TRANSFORMERS, OPEN_CLIP))


def encoder_of(module: nn.Module, tokenizer: Any = None, name: str = "") -> TextEncoder | None:
    """Return the text encoder of the user's own module; None if it has no text tower.

    Args:
        module: A CLIP or SigLIP of transformers, open_clip or OpenAI.
        tokenizer: Its tokenizer (open_clip.get_tokenizer(NAME), transformers' AutoTokenizer or AutoProcessor). None:
            of a transformers model the one that was saved with its weights, on this disk.
        name: The model's name, for messages.

    Raises:
        BadInput: The tokenizer cannot be called, or was given for a module without a text tower.
    """
    if not is_pair(module):
        if tokenizer is not None:
            raise BadInput(
                f"tokenizer= was given for {name}, which has no text tower; expected a module with get_text_features "
                "or encode_text, such as CLIPModel. Leave it out."
            )
        return None
    of_transformers = hasattr(module, TRANSFORMERS[0])
    if of_transformers:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds one
    if tokenizer is not None and not callable(tokenizer):
        raise BadInput(
            f"tokenizer={tokenizer!r} was given; expected a tokenizer, such as open_clip.get_tokenizer('ViT-B-32') or "
            "transformers.AutoTokenizer.from_pretrained(…)."
        )

    def open_tower() -> TextTower:
        chosen = tokenizer if tokenizer is not None or not of_transformers else _saved_tokenizer(module)
        if chosen is None:
            advice = (
                "transformers.AutoTokenizer.from_pretrained(…)" if of_transformers else "open_clip.get_tokenizer(…)"
            )
            raise NotApplicable(
                f"{name} has a text tower, and nothing says which tokenizer reads its prompts. Pass it: "
                f"cv.wrap(module, tokenizer={advice})."
            )
        tokenize = transformers_tokens(module, chosen) if of_transformers else open_clip_tokens(chosen)
        return TextTower(module, tokenize)

    return TextEncoder(open_tower)


def transformers_tokens(module: Any, tokenizer: Tokenizer) -> Callable[[list[str]], Mapping[str, Tensor]]:
    """Return the function from prompts to the inputs of a text tower of transformers."""
    # SigLIP was trained on full-length padding and reads the last token; the others stop at the end mark
    padding = "max_length" if "siglip" in module.config.model_type else True
    length = module.config.text_config.max_position_embeddings

    def tokenize(prompts: list[str]) -> Mapping[str, Tensor]:
        whole = _call(tokenizer, prompts)["input_ids"]
        _check_lengths(prompts, [len(row) for row in whole], length)
        tokens = _call(tokenizer, prompts, padding=padding, truncation=True, max_length=length, return_tensors="pt")
        _check_known_words(tokenizer, prompts, tokens["input_ids"])
        taken = inspect.signature(module.get_text_features).parameters
        return {key: value for key, value in tokens.items() if key in taken}

    return tokenize


def _check_lengths(prompts: list[str], lengths: Sequence[int], most: int) -> None:
    """Raise BadInput for a prompt that is longer than the text tower reads, whose end would be left out."""
    for prompt, length in zip(prompts, lengths, strict=True):
        if length > most:
            raise BadInput(
                f"The prompt '{prompt[:40]}…' has {length} tokens, and the text tower reads {most}; expected a shorter "
                "one, because its end would be left out."
            )


def _check_known_words(tokenizer: Any, prompts: list[str], tokens: Tensor) -> None:
    """Raise BadInput for a prompt of unknown words alone: transformers makes a tokenizer without words of no files."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    for prompt, row in zip(prompts, tokens.tolist(), strict=True):
        if special.issuperset(row):
            raise BadInput(
                f"The tokenizer knows no word of '{prompt}'; expected the tokenizer of the model's text tower. Are its "
                "files (tokenizer.json) next to the weights?"
            )


def open_clip_tokens(tokenizer: Tokenizer) -> Callable[[list[str]], Tensor]:
    """Return the function from prompts to the tokens [n, length] of a text tower of open_clip."""

    def tokenize(prompts: list[str]) -> Tensor:
        tokens = _call(tokenizer, prompts)
        if not isinstance(tokens, Tensor):
            raise BadInput(
                f"The tokenizer returned a {type(tokens).__name__}; expected a tensor of tokens [prompts, length], as "
                "open_clip.get_tokenizer(NAME) gives."
            )
        encode = getattr(tokenizer, "encode", None)  # of open_clip's own: the words without start and end
        if callable(encode):
            _check_lengths(prompts, [len(encode(prompt)) + 2 for prompt in prompts], tokens.shape[-1])
        return tokens

    return tokenize


def _call(tokenizer: Tokenizer, prompts: list[str], **options: Any) -> Any:
    """Return the tokens of prompts; raise BadInput with the tokenizer's own error."""
    try:
        return tokenizer(prompts, **options)
    except ClairError:
        raise
    except Exception as error:  # tokenizers of several libraries, or the user's own code
        raise BadInput(
            f"The tokenizer failed on {prompts!r} ({type(error).__name__}: {error}); expected the tokenizer that "
            "belongs to the model's text tower."
        ) from error


def _saved_tokenizer(module: Any) -> Tokenizer | None:
    """Return the tokenizer saved where a module's weights came from: a folder, or the hub's cache on this disk."""
    location = str(getattr(module.config, "name_or_path", "") or "")
    if not location:
        return None
    import transformers

    from clairvit.models.sources.hub import offline, quiet

    try:
        with quiet(), offline():
            tokenizer: Tokenizer = transformers.AutoTokenizer.from_pretrained(
                location, trust_remote_code=False, local_files_only=True
            )
    except (OSError, ValueError, KeyError):  # none was saved there
        return None
    return tokenizer
