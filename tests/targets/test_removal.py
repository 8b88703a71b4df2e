"""Removing a patch is hiding its key from every attention: leave-one-out against masks handed to torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import clairvit as cv
from helpers import dense_models, tiny_pairs
from helpers.rounding import assert_same
from helpers.tiny_models import double


class HiddenKey(TorchFunctionMode):
    """Hide one key from every attention call between so many tokens."""

    def __init__(self, key: int, tokens: int) -> None:
        self.key, self.tokens, self.calls = key, tokens, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and args[1].shape[-2] == self.tokens:
            assert kwargs.get("attn_mask") is None
            mask = torch.zeros(self.tokens, dtype=args[0].dtype)
            mask[self.key] = -torch.inf
            kwargs["attn_mask"], self.calls = mask.expand(args[0].shape[-2], -1), self.calls + 1
        if func is F.multi_head_attention_forward and args[1].shape[0] == self.tokens:
            hidden = torch.zeros(args[1].shape[1], self.tokens, dtype=torch.bool)
            hidden[:, self.key] = True
            kwargs["key_padding_mask"], self.calls = hidden, self.calls + 1
        return func(*args, **kwargs)


def yolos_without_positions() -> tuple[cv.Model, Tensor, nn.Module]:
    """YOLOS adds positions between its blocks, which are zero without biases."""
    module = dense_models.without_biases(dense_models.yolos()).double()
    return cv.wrap(module, size=dense_models.SIZE, mean=0.5, std=0.5), dense_models.images(1), module


def pair(name: str) -> tuple[cv.Model, Tensor, nn.Module]:
    module = tiny_pairs.build(name)
    return tiny_pairs.wrapped(name, module), tiny_pairs.pixels(1), module


def classifier(name: str) -> tuple[cv.Model, Tensor, nn.Module]:
    model, images = double(name, batch=1)
    return model, images, model.module


Make = Callable[[], tuple[cv.Model, Tensor, nn.Module]]
# name -> the model, the number of its layers with a pool, and the target
CASES: dict[str, tuple[Make, int, Callable[[Tensor], Any]]] = {
    "class, timm": (lambda: classifier("timm-vit"), 2, lambda _: 3),
    "class, transformers": (lambda: classifier("hf-vit-sdpa"), 2, lambda _: 3),
    "Contrast": (lambda: classifier("timm-vit"), 2, lambda _: cv.Contrast(3, 1)),
    "Output": (lambda: classifier("timm-vit"), 2, lambda _: cv.Output(lambda output: output[:, 1] ** 3)),
    "Similar, timm": (lambda: classifier("timm-vit"), 2, lambda images: cv.Similar(images[0].flip(-1))),
    "Similar, CLIP": (lambda: pair("CLIPModel"), 3, lambda images: cv.Similar(images[0].flip(-1))),
    "Text, CLIP": (lambda: pair("CLIPModel"), 3, lambda _: cv.Text("a red car")),
    "Text, open_clip": (lambda: pair("open_clip"), 3, lambda _: cv.Text("a red car", against=["a photo"])),
    "Text, SigLIP": (lambda: pair("SiglipModel"), 4, lambda _: cv.Text("a red car", score="logit")),
    "Neuron, timm": (lambda: classifier("timm-vit"), 2, lambda _: cv.Neuron(1, 5, pool="token")),
    "Neuron, transformers": (lambda: classifier("hf-dinov2-sdpa"), 1, lambda _: cv.Neuron(0, 5, pool="token")),
    "Query": (yolos_without_positions, 4, lambda _: cv.Query(3, "sky")),
    "side of a box": (yolos_without_positions, 4, lambda _: cv.Query(3, box="left")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_removed_patch_is_a_hidden_key(name: str) -> None:
    make, layers, ask = CASES[name]
    model, images, _ = make()
    target = ask(images)
    traced = cv.trace(model, images, target=target)
    layout, score = traced.layout, traced.target
    assert score is not None
    maps = cv.explain(model, images, "leave-one-out", target=target, score=None if score.score != "logit" else "logit")
    whole = score(traced.logits).detach()
    for patch in (0, layout.patches // 2, layout.patches - 1):
        with HiddenKey(layout.prefix + patch, layout.tokens) as hidden:
            scores = (
                target.readout(model).logits(images) if isinstance(target, cv.targets.Target) else model.logits(images)
            )
        assert hidden.calls == layers
        left = score(scores).detach()
        assert_same(maps.maps.flatten()[patch], (whole - left)[0], magnitude=max(1.0, float(whole.abs().max())))
