"""Small CLIP and SigLIP models of open_clip and transformers with random weights, and tokenizers for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import clairvit as cv
from clairvit.targets.text import NEUTRAL_PROMPTS
from helpers.tiny_models import shaken

SIZE, PATCH, GRID = 24, 8, (3, 3)
WORDS = ("<pad>", "<end>", "?", "a", "cat", "dog", "red", "car", "photo", "of", "the")
WORDS += tuple(dict.fromkeys(word for prompt in NEUTRAL_PROMPTS for word in prompt.split() if word not in WORDS))
VISION = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**VISION, "vocab_size": len(WORDS), "max_position_embeddings": 8}
TEXT |= {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0}
LENGTH = 8


def tokenizer() -> Any:
    """Return a tokenizer of transformers for a dozen words."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>")


def open_clip_tokenizer(prompts: list[str]) -> Tensor:
    """Return tokens [n, LENGTH] with the end mark as the largest number, which open_clip pools."""
    rows = [[WORDS.index(word) for word in prompt.split()] + [len(WORDS)] for prompt in prompts]
    return torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])


def open_clip_pair() -> nn.Module:
    """Return a CLIP of open_clip, class token pooled."""
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": SIZE, "layers": 3, "width": 16, "head_width": 8, "patch_size": PATCH}
    text = {"context_length": LENGTH, "vocab_size": len(WORDS) + 1, "width": 16, "heads": 2, "layers": 2}
    return open_clip.CLIP(embed_dim=12, vision_cfg=vision, text_cfg=text)


def clip_pair() -> nn.Module:
    """Return a CLIPModel of transformers, class token pooled."""
    transformers = pytest.importorskip("transformers")
    vision = {**VISION, "image_size": SIZE, "patch_size": PATCH}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=vision, projection_dim=12))


def siglip_pair() -> nn.Module:
    """Return a SiglipModel of transformers, attention pooled."""
    transformers = pytest.importorskip("transformers")
    vision = {**VISION, "image_size": SIZE, "patch_size": PATCH}
    text = {**TEXT, "projection_size": 16}
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))


PAIRS: dict[str, Callable[[], nn.Module]] = {
    "open_clip": open_clip_pair,
    "CLIPModel": clip_pair,
    "SiglipModel": siglip_pair,
}


def save_clip(folder: Path) -> Path:
    """Write a CLIPModel with its tokenizer and image processor, and return the folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shaken(clip_pair(), seed=3).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    size = {"height": SIZE, "width": SIZE}
    transformers.CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=size).save_pretrained(folder)
    return folder


def build(name: str) -> Any:
    """Return a pair with random weights, in float64 and evaluation mode."""
    torch.manual_seed(0)
    return shaken(PAIRS[name](), seed=3).double().eval()


def tokenizer_of(name: str) -> Any:
    """Return the tokenizer of a pair."""
    return open_clip_tokenizer if name == "open_clip" else tokenizer()


def wrapped(name: str, pair: nn.Module | None = None) -> cv.Model:
    """Return a pair as a model."""
    pair = build(name) if pair is None else pair
    return cv.wrap(pair, tokenizer=tokenizer_of(name), size=SIZE, mean=0.5, std=0.5)


def pixels(batch: int = 2, size: int = SIZE) -> Tensor:
    """Return preprocessed noise in float64."""
    return torch.randn(batch, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def image_features(pair: Any, images: Tensor) -> Tensor:
    """Return the library's own embeddings [B, d] of images."""
    if hasattr(pair, "encode_image"):
        return pair.encode_image(images)
    features = pair.get_image_features(images)
    return getattr(features, "pooler_output", features)


def text_features(name: str, pair: Any, prompts: list[str]) -> Tensor:
    """Return the library's own embeddings [n, d] of prompts."""
    if name == "open_clip":
        return pair.encode_text(open_clip_tokenizer(prompts))
    padding = "max_length" if name == "SiglipModel" else True
    tokens = tokenizer()(prompts, padding=padding, truncation=True, max_length=LENGTH, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    features = pair.get_text_features(**tokens)
    return getattr(features, "pooler_output", features)


def cosines(name: str, pair: Any, images: Tensor, prompts: list[str]) -> Tensor:
    """Return the cosines [B, n] of images and prompts by the library's own embeddings."""
    return cosine_similarity(image_features(pair, images)[:, None], text_features(name, pair, prompts)[None], dim=-1)


def blocks(pair: Any) -> list[nn.Module]:
    """Return the blocks of the image tower."""
    if hasattr(pair, "visual"):
        return list(pair.visual.transformer.resblocks)
    return list(pair.vision_model.encoder.layers)
