"""Vision-language models of transformers: what their language model is given for an image and a text.

Such a model reads one sequence of tokens: the text, and at its image placeholders the features that the vision tower
made of the image. The text is encoded once, by the model's own processor or tokenizer, with as many placeholders as
there are features; the images stay pixels [B, 3, H, W], which `pixel_inputs` brings into the form that the model takes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import Tensor, nn

from clairvit.errors import BadInput, ClairError, ModelUnavailable, NotApplicable
from clairvit.models.sources.hf_outputs import image_token_id, is_transformers, next_token_obstacle, writes_text

_SEQUENCE_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # [1, N], of the text
_RESAMPLERS = ("perceiver_config", "qformer_config")  # latents in the place of patches: they have no place in the image
_SPACES = str.maketrans("▁Ġ", "  ")  # marks of SentencePiece and of byte-level BPE
_processors: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def check_language_model(module: nn.Module, name: str) -> None:
    """Raise NotApplicable unless this is a model of transformers that continues a text about one image."""
    if not is_transformers(module) or not writes_text(type(module)):
        raise NotApplicable(
            f"{name} ({type(module).__name__}) writes no text, and cv.NextToken explains a word of one; expected a "
            "vision-language model of transformers (LLaVA, Qwen2-VL, PaliGemma, SmolVLM). Name a class instead."
        )
    obstacle = next_token_obstacle(type(module), module.config)
    if obstacle:
        raise NotApplicable(
            f"{name} ({type(module).__name__}) {obstacle}; expected a decoder that takes an image as a whole, as "
            "tokens of its text (LLaVA 1.5, Qwen2-VL, PaliGemma, SmolVLM)."
        )


# Images


def pixel_inputs(module: nn.Module, pixels: Tensor) -> dict[str, Tensor]:
    """Return pixels [B, 3, H, W] as the inputs of forward: patches with their grid, a list of images, or themselves."""
    config: Any = module.config
    inputs = inspect.signature(module.forward).parameters
    if "image_grid_thw" in inputs:
        vision = config.vision_config
        patches = cut_patches(pixels, vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        grid = [1, pixels.shape[-2] // vision.patch_size, pixels.shape[-1] // vision.patch_size]
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([grid] * len(pixels), device=pixels.device)}
    if "pixel_attention_mask" in inputs:
        # Images of zeros alone are taken for padding and left out, so that such an image gets one other value.
        blank = pixels.detach().flatten(1).any(1).logical_not().to(pixels)[:, None, None, None]
        return {"pixel_values": (pixels + blank * torch.finfo(pixels.dtype).tiny)[:, None]}
    return {"pixel_values": pixels}


def cut_patches(pixels: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """Return the patches [B·rows·cols, 3·frames·patch²] of pixels [B, 3, H, W], in the order of Qwen2-VL's processor.

    The merge × merge patches that become one token follow each other; an image is `frames` equal frames.
    """
    batch, channels, height, width = pixels.shape
    if height % (patch * merge) or width % (patch * merge):
        raise BadInput(
            f"An image of {height} × {width} pixels was given; expected sides that are multiples of {patch * merge}, "
            f"{merge} patches of {patch} pixels."
        )
    rows, cols = height // (patch * merge), width // (patch * merge)
    cells = pixels.reshape(batch, channels, rows, merge, patch, cols, merge, patch)
    cells = cells.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [B, rows, cols, merge, merge, 3, patch, patch]
    repeated = cells.unsqueeze(6).expand(*cells.shape[:6], frames, patch, patch)
    return repeated.reshape(batch * rows * cols * merge**2, channels * frames * patch**2)


@torch.no_grad()
def count_image_tokens(module: nn.Module, size: tuple[int, int]) -> int:
    """Return how many tokens the language model is given for an image of this size, by running the vision tower."""
    parameter = next(p for p in module.parameters() if p.is_floating_point())
    pixels = torch.ones(1, 3, *size, dtype=parameter.dtype, device=parameter.device)
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False  # batch norms keep their statistics
        features = module.get_image_features(**pixel_inputs(module, pixels))  # type: ignore[operator]
    finally:
        for part in training:
            part.training = True
    pooled = getattr(features, "pooler_output", features)
    parts = [pooled] if isinstance(pooled, Tensor) else list(pooled)
    return sum(part.numel() // part.shape[-1] for part in parts)


def image_grid(module: nn.Module, size: tuple[int, int], count: int) -> tuple[int, int] | None:
    """Return rows and columns of `count` image tokens; None where they do not lie on the image in rows."""
    if any(getattr(module.config, name, None) is not None for name in _RESAMPLERS):
        return None
    rows = round(math.sqrt(count * size[0] / size[1]))
    cols = count // max(rows, 1)
    return (rows, cols) if rows * cols == count and rows * size[1] == cols * size[0] else None


# Text


def load_processor(module: nn.Module) -> Any:
    """Return the processor, or the tokenizer, saved where a module's weights came from; None if there is none."""
    if module not in _processors:
        _processors[module] = _saved_processor(module)
    return _processors[module]


def _saved_processor(module: nn.Module) -> Any:
    import transformers

    from clairvit.models.sources.hub import first_line, hub_blocked, offline, quiet

    location = str(getattr(getattr(module, "config", None), "name_or_path", "") or "")
    if not location:
        return None
    local = Path(location).is_dir() or hub_blocked() is not None
    for automatic in (transformers.AutoProcessor, transformers.AutoTokenizer):
        try:
            with quiet(), offline() if local else nullcontext():
                processor = automatic.from_pretrained(location, trust_remote_code=False, local_files_only=local)
        except ImportError as error:  # a processor of SmolVLM spells numbers with another package
            raise ModelUnavailable(f"The processor of '{location}' cannot be used: {first_line(error)}.") from error
        except (OSError, ValueError, KeyError, AttributeError):  # none was saved there: the other is looked for
            continue
        if tokenizer_of(processor) is not None:
            return processor
    return None


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a processor, which may be one itself; None if it has none."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None


@dataclass(frozen=True, eq=False)
class Prompt:
    """A text about an image as a language model reads it; the next token is to be predicted.

    Args:
        inputs: The inputs of forward besides the image, with one row for all images.
        size: Rows and columns of the image in pixels.
        first: The position of the first image token.
        count: The number of image tokens, which follow each other.
        grid: Rows and columns of the image tokens; None where they form no grid.
    """

    inputs: Mapping[str, Tensor]
    size: tuple[int, int]
    first: int
    count: int
    grid: tuple[int, int] | None

    @property
    def ids(self) -> Tensor:
        """Return the token ids of the whole sequence, [N]."""
        return self.inputs["input_ids"][0]

    @property
    def text_ids(self) -> list[int]:
        """Return the token ids before and after the image tokens."""
        ids: list[int] = self.ids.tolist()
        return ids[: self.first] + ids[self.first + self.count :]


def encode_prompt(module: nn.Module, processor: Any, prompt: str, size: tuple[int, int]) -> Prompt:
    """Return a prompt as the model's processor writes it, with a placeholder for every image token."""
    names = inspect.signature(module.forward).parameters
    if not hasattr(processor, "image_processor") and "token_type_ids" in names:
        raise ModelUnavailable(
            f"{type(module).__name__} has a tokenizer and no processor, which says which tokens attend in both "
            "directions; pass cv.NextToken(…, processor=AutoProcessor.from_pretrained(…))."
        )
    try:
        text = _templated(module, processor, prompt)
        encoded = _run_processor(processor, text, size)
    except ClairError:
        raise
    except Exception as error:  # processors and chat templates are code of their own, and raise anything
        raise BadInput(
            f"The model's processor cannot read the prompt {prompt!r} ({type(error).__name__}: {error}); expected a "
            "text with one image placeholder, or with none."
        ) from error
    return read_prompt(
        module, {name: encoded[name] for name in _SEQUENCE_INPUTS if name in encoded and name in names}, size
    )


def _run_processor(processor: Any, text: str, size: tuple[int, int]) -> Any:
    """Return what a processor makes of a text and a blank image in one piece, or a tokenizer of the text."""
    start = tokenizer_of(processor).bos_token
    # A chat template that begins a text itself is not begun twice.
    options: dict[str, Any] = {"add_special_tokens": False} if start and text.startswith(start) else {}
    if not hasattr(processor, "image_processor"):
        return processor([text], return_tensors="pt", **options)
    if hasattr(processor.image_processor, "do_image_splitting"):
        options["do_image_splitting"] = False
    blank = Image.new("RGB", (size[1], size[0]))
    return processor(images=[blank], text=[text], return_tensors="pt", **options)


def _templated(module: nn.Module, processor: Any, prompt: str) -> str:
    """Return the prompt with an image placeholder: its own, else that of the chat template, else one before it."""
    config: Any = module.config
    tokens = tokenizer_of(processor)
    image = tokens.convert_ids_to_tokens(image_token_id(config))
    if image is None:
        raise BadInput(
            f"The tokenizer has no token {image_token_id(config)}, the image placeholder of {type(module).__name__}; "
            "expected the tokenizer that belongs to the model."
        )
    written = (image, getattr(processor, "image_token", None), getattr(processor, "boi_token", None))
    if any(isinstance(placeholder, str) and placeholder in prompt for placeholder in written):
        return prompt
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        text: str = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return text
    marks = (getattr(config, f"vision_{end}_token_id", None) for end in ("start", "end"))
    start, end = ("" if mark is None else tokens.convert_ids_to_tokens(mark) or "" for mark in marks)
    return f"{start}{image}{end}{prompt}"


def read_prompt(module: nn.Module, inputs: Mapping[str, Any], size: tuple[int, int]) -> Prompt:
    """Return token ids [1, N] and what comes with them as a prompt; one placeholder becomes as many as needed."""
    ids = inputs["input_ids"]
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
        raise BadInput("input_ids has another shape than [1, tokens]; expected the token ids of one text.")
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.all()):
        raise BadInput("attention_mask hides some of input_ids; expected a text without padding.")
    token = image_token_id(module.config)
    places = torch.eq(ids[0], -1 if token is None else token).nonzero().flatten().tolist()
    if not places or places != list(range(places[0], places[0] + len(places))):
        seen = "no image placeholder" if not places else "image placeholders at several places"
        raise BadInput(
            f"The prompt has {seen} (token {token}); expected one image in it. The model's own processor adds the "
            "placeholder to a text without one."
        )
    first, given = places[0], len(places)
    count = count_image_tokens(module, size) if given == 1 else given
    index = torch.tensor([*range(first), *[first] * count, *range(first + given, ids.shape[1])])
    sequences = {name: inputs[name].cpu()[:, index] for name in _SEQUENCE_INPUTS if name in inputs}
    sequences.pop("attention_mask", None)  # all ones
    others = {name: value for name, value in inputs.items() if name not in (*_SEQUENCE_INPUTS, "image_grid_thw")}
    return _with_positions(module, Prompt({**others, **sequences}, size, first, count, image_grid(module, size, count)))


def continued(module: nn.Module, prompt: Prompt, answer: Sequence[int]) -> Prompt:
    """Return the prompt with the tokens of an answer behind it; they are of the causal part of the text."""
    if not answer:
        return prompt
    if image_token_id(module.config) in answer:
        raise BadInput(
            f"The answer holds token {image_token_id(module.config)}, the image placeholder; expected a text alone."
        )
    more = {"input_ids": list(answer), "token_type_ids": [_answer_type(module)] * len(answer)}
    sequences = {
        name: torch.cat([value, value.new_tensor([more.get(name, [0] * len(answer))])], 1)
        for name, value in prompt.inputs.items()
        if name in _SEQUENCE_INPUTS
    }
    return _with_positions(module, replace(prompt, inputs={**prompt.inputs, **sequences}))


def _answer_type(module: nn.Module) -> int:
    """Return the type of an answer's tokens: 1 in PaliGemma, whose prefix of type 0 attends in both directions."""
    return int(getattr(module.config, "model_type", "") == "paligemma")


def _with_positions(module: nn.Module, prompt: Prompt) -> Prompt:
    """Return the prompt with the rotary positions [3, 1, N] of models that place image tokens in rows and columns.

    Left out, such a model computes them and keeps a part of them as an attribute.
    """
    core: Any = getattr(module, "model", module)
    if not hasattr(core, "get_rope_index"):
        return prompt
    ids, config = prompt.inputs["input_ids"], core.config
    types = torch.eq(ids, config.image_token_id).int()
    patch = config.vision_config.patch_size
    grid = torch.tensor([[1, prompt.size[0] // patch, prompt.size[1] // patch]])
    positions, _ = core.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
    inputs = {name: value for name, value in prompt.inputs.items() if name != "mm_token_type_ids"}
    return replace(prompt, inputs={**inputs, "position_ids": positions})


def token_names(tokenizer: Any, numbers: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token, a space in the place of the tokenizer's marks; "token 7" where it has none."""
    known = 0 if tokenizer is None else len(tokenizer)
    pieces = [tokenizer.convert_ids_to_tokens(number) if number < known else None for number in numbers]
    return tuple(
        f"token {number}" if piece is None else piece.translate(_SPACES)
        for number, piece in zip(numbers, pieces, strict=True)
    )
