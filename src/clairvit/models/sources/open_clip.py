"""`open_clip:NAME:PRETRAINED`: a zero-shot classifier with prompts, the image encoder without."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clairvit.errors import NotApplicable, UnknownName, did_you_mean
from clairvit.models.load_options import LoadOptions, seeded
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.models.sources.adapters import ZeroShot, drop_submodules
from clairvit.models.sources.file import SUFFIXES, load_state, read_weights
from clairvit.models.sources.hub import abbreviated, extra, fetching, hub_blocked
from clairvit.models.text_encoder import TextEncoder, TextTower, open_clip_tokens


def build(request: LoadOptions) -> Model:
    """Return the zero-shot classifier of the labels as prompts, or the image encoder."""
    tower = image_tower_file(request)
    if tower is not None:
        return _image_tower(request, tower)
    encoder = TextEncoder(functools.partial(open_text_tower, request))
    with opened(request, prompts=request.labels is not None) as (model, tokenizer):
        module: nn.Module = model.visual
        if tokenizer is not None and request.labels is not None:
            text = encoder.remember(request.labels, TextTower(model, open_clip_tokens(tokenizer)).embed(request.labels))
            module = ZeroShot(module, text, model.logit_scale.exp(), getattr(model, "logit_bias", None))
        settings = preprocess(model.visual.preprocess_cfg, request.spec)
    return Model(
        module=module,
        name=request.name,
        preprocess=settings,
        labels=request.labels or (),
        classifier=request.labels is not None,
        text_encoder=encoder,
    )


def image_tower_file(request: LoadOptions) -> Path | None:
    """Return the weights file if it holds the image tower alone; the text tower would stay random."""
    path = Path(request.identifier.partition(":")[2])
    if not request.pretrained or path.suffix not in SUFFIXES or not path.is_file():
        return None
    others = [key for key in read_weights(path, request.spec)[0] if not key.startswith("visual.")]
    return path if not {key.rpartition(".")[2] for key in others} - {"logit_scale", "logit_bias"} else None


def _image_tower(request: LoadOptions, path: Path) -> Model:
    """Return the image encoder of a file without a text tower, which cannot encode prompts."""
    if request.labels is not None:
        raise NotApplicable(
            f"'{path.name}' holds an image tower and no text tower, so it cannot encode labels as prompts. Leave them "
            "out, and give texts as embeddings: cv.Text('a cat', embedding=…)."
        )
    weights = read_weights(path, request.spec)[0]
    tower = {key.removeprefix("visual."): value for key, value in weights.items() if key.startswith("visual.")}
    with opened(dataclasses.replace(request, pretrained=False), prompts=False) as (model, _):
        load_state(model.visual, tower, request.spec, request.identifier.partition(":")[0], library="open_clip")
        return Model(
            model.visual, request.name, preprocess(model.visual.preprocess_cfg, request.spec), classifier=False
        )


def open_text_tower(request: LoadOptions) -> TextTower:
    """Return the text tower of the same model, loaded again; its image tower is not kept."""
    with opened(request, prompts=True) as (model, tokenizer):
        return TextTower(drop_submodules(model, ["visual"]), open_clip_tokens(tokenizer))


@contextmanager
def opened(request: LoadOptions, *, prompts: bool) -> Iterator[tuple[Any, Any]]:
    """Load both towers, and the tokenizer if `prompts` are read; errors inside the block say what could not be."""
    open_clip = extra("open_clip", "clip", request.spec)
    name, weights = split_weights(open_clip, request)
    local = name.startswith("local-dir:") or (weights is not None and Path(weights).exists())
    # prompts may need a tokenizer from the hub even when the weights are random
    blocked = None if local else hub_blocked()
    options: dict[str, Any] = {"force_image_size": request.size} if request.size else {}
    if not request.pretrained:
        options |= {"load_weights": False, "pretrained_text": False}
    component = "weights" if request.pretrained else "text tower or tokenizer"
    with fetching(request.spec, blocked, component=component, local=local), seeded(), torch.no_grad():
        model = open_clip.create_model(name, pretrained=weights, **options).eval()
        yield model, open_clip.get_tokenizer(name) if prompts else None


def split_weights(open_clip: Any, request: LoadOptions) -> tuple[str, str | None]:
    """Return name and weights of 'ViT-B-32:openai'; names of hub and folder have no separate weights."""
    if request.identifier.startswith(("hf-hub:", "local-dir:")):
        return request.identifier, None
    name, _, weights = request.identifier.partition(":")
    models = open_clip.list_models()
    if name not in models:
        raise UnknownName(
            f"open_clip has no model '{name}'.{did_you_mean(name, models)} "
            "Type 'clairvit models open_clip:ViT-*' for a list."
        )
    if not request.pretrained:
        return name, None
    tags = open_clip.list_pretrained_tags_by_model(name)
    if weights not in tags and not Path(weights).is_file():
        problem = (
            f"open_clip has no weights '{weights}' for '{name}'" if weights else f"'{request.spec}' names no weights"
        )
        near = did_you_mean(weights, tags)
        raise UnknownName(f"{problem}.{near} Type 'open_clip:{name}:TAG', one of: {abbreviated(tags)}.")
    return name, weights


def preprocess(config: dict[str, Any], spec: str) -> Preprocess:
    """Return the preprocessing of open_clip's configuration."""
    size = config["size"]
    rows, columns = (size, size) if isinstance(size, int) else size
    mode = config["resize_mode"]
    if mode not in ("shortest", "squash"):
        raise NotApplicable(
            f"'{spec}' asks for images resized by '{mode}', and ClairViT resizes by 'shortest' or 'squash'; preprocess "
            "the images with open_clip's own transform and pass the tensors with cv.wrap(model.visual, …)."
        )
    return Preprocess(
        size=(rows, columns),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        resize=(rows, columns) if mode == "squash" else None,
        interpolation=config["interpolation"],
        keep_ratio=mode != "squash",
    )
