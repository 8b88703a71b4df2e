"""CAAP against module hooks and against the model written out, patch by patch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.activation_patching import layer_range
from clairvit.perturbation.removal import rise_kernel
from helpers.custom_vits import Lucid
from helpers.exact_models import TARGETS, build, images_for, randomised, wrapped
from helpers.module_fingerprint import differences, fingerprint
from helpers.reference_vit import Run, ViT, attend, read_out, transform, written_out
from helpers.rounding import assert_same
from helpers.tiny_models import STRANGE, cnn, double, strange

KINDS = ["plain", "registers", "avg-no-cls", "map", "rope-swiglu", "torchvision", "grouped", "swiglu-packed"]


def stream(vit: ViT, pixels: Tensor) -> list[Tensor]:
    """The block inputs x^0 … x^L of an image, computed by the model written out."""
    inputs = [vit.embed(pixels)]
    for attention, mlp in vit.blocks:
        inputs.append(transform(mlp, attend(attention, inputs[-1]).end).end)
    return inputs


def patched_logits(vit: ViT, base: Tensor, other: list[Tensor], token: int, layers: range) -> Tensor:
    """Logits of the images `base` whose token has the activations `other` at the inputs of these layers."""
    x = vit.embed(base)
    for index, (attention, mlp) in enumerate(vit.blocks):
        if index in layers:
            x = torch.cat([x[:, :token], other[index][:, token : token + 1], x[:, token + 1 :]], 1)
        x = transform(mlp, attend(attention, x).end).end
    return read_out(vit, Run(x=[x]), x).logits


def by_hand(vit: ViT, base: Tensor, other: Tensor, layers: range) -> Tensor:
    """The target's score with each patch's token in turn, [B, rows, cols]."""
    with torch.no_grad():
        activations = stream(vit, other)
        tokens = range(vit.prefix, activations[0].shape[1])
        logits = torch.stack([patched_logits(vit, base, activations, token, layers) for token in tokens], 1)
    return logits[torch.arange(len(base)), :, TARGETS].unflatten(1, vit.grid)


def scores(module: nn.Module, pixels: Tensor) -> Tensor:
    return module(pixels).detach()[torch.arange(len(pixels)), TARGETS][:, None, None]


def maps_of(module: nn.Module, pixels: Tensor, name: str) -> Tensor:
    return cv.explain(wrapped(module), pixels, name, target=TARGETS).maps


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_written_out_gives_the_same_in_both_directions(kind: str) -> None:
    module = build(kind, depth=4)
    pixels, vit = images_for(module), written_out(module)
    neutral = torch.zeros_like(pixels)  # the mean colour
    inserted = by_hand(vit, neutral, pixels, range(1, 3))  # the middle of four layers
    assert_same(maps_of(module, pixels, "caap"), inserted - scores(module, neutral))
    assert_same(maps_of(module, pixels, "caap(relative=false)"), inserted)
    removed = by_hand(vit, pixels, neutral, range(1, 3))
    assert_same(maps_of(module, pixels, "caap(direction=remove)"), scores(module, pixels) - removed)
    assert (inserted.flatten(1).std(1) > 1e-3).all()


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 4), (3, 4), (1, 4)])
def test_the_layers_are_those_of_the_option(start: int, stop: int) -> None:
    module = build("plain", depth=4)
    pixels, vit = images_for(module), written_out(module)
    inserted = by_hand(vit, torch.zeros_like(pixels), pixels, range(start, stop))
    assert_same(maps_of(module, pixels, f"caap(start={start},stop={stop},relative=false)"), inserted)


def test_neutral_images_are_those_of_the_option() -> None:
    module = build("plain", depth=4)
    pixels, vit = images_for(module), written_out(module)
    kernel = rise_kernel().to(pixels).expand(3, 1, -1, -1)
    blurred = nn.functional.conv2d(pixels, kernel, padding=5, groups=3)
    for name, neutral in (("black", torch.full_like(pixels, -1.0)), ("blur", blurred)):  # mean 0.5, std 0.5
        inserted = by_hand(vit, neutral, pixels, range(1, 3))
        assert_same(maps_of(module, pixels, f"caap(neutral={name},relative=false)"), inserted)


def test_hooks_on_the_modules_give_the_same() -> None:
    """One patch and one image at a time, with nothing of the library: hooks that record, hooks that overwrite."""
    module = build("registers", depth=4)
    pixels = images_for(module)
    recorded: dict[int, Tensor] = {}

    def hooked(before: Any) -> Tensor:
        hooks = [block.register_forward_pre_hook(before(index)) for index, block in enumerate(module.blocks)]
        with torch.no_grad():
            logits = module(image)
        for hook in hooks:
            hook.remove()
        return logits

    def record(index: int) -> Any:
        return lambda _, args: recorded.update({index: args[0].clone()})

    def overwrite(index: int) -> Any:
        def before(_: nn.Module, args: Any) -> Any:
            if index not in (1, 2):
                return None
            tokens = args[0].clone()
            tokens[0, 5 + patch] = recorded[index][0, 5 + patch]  # a class token and four registers
            return (tokens, *args[1:])

        return before

    expected = torch.zeros(2, 15, dtype=torch.float64)
    for row in range(2):
        image = pixels[row : row + 1]
        hooked(record)
        image = torch.zeros_like(image)
        for patch in range(15):
            expected[row, patch] = hooked(overwrite)[0, TARGETS[row]]
    assert_same(maps_of(module, pixels, "caap(relative=false)").flatten(1), expected)


def test_a_residual_outside_the_module_is_patched_too() -> None:
    """Lucid adds x to the attention module's output next to it: x there must be the patched one."""
    module = randomised(Lucid(4).double().eval(), 0)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(image: Tensor, other: list[Tensor] | None = None, token: int = 0) -> tuple[Tensor, list[Tensor]]:
        x, inputs = module.tokens(image), []
        for index, (attention, feed_forward) in enumerate(module.blocks):
            if other is not None and index in (1, 2):
                x = torch.cat([x[:, :token], other[index][:, token : token + 1], x[:, token + 1 :]], 1)
            inputs.append(x)
            x = attention(x) + x
            x = feed_forward(x) + x
        return module.head(module.norm(x)[:, 0]), inputs

    with torch.no_grad():
        _, activations = run(pixels)
        rows = [run(torch.zeros_like(pixels), activations, token)[0] for token in range(1, 17)]
    expected = torch.stack(rows, 1)[torch.arange(2), :, TARGETS].unflatten(1, (4, 4))
    model = cv.wrap(module, size=(32, 32))
    explanation = cv.explain(model, pixels, "caap(relative=false)", target=TARGETS)
    assert_same(explanation.maps, expected)
    assert explanation.notes[-1] == "caap: activations of layers 1 to 2 of 4"


@pytest.mark.filterwarnings("ignore:.*the score stays the same whatever is removed")
@pytest.mark.parametrize("kind", ["home-in-place", "home-sequence-first", "timm-vit"])
def test_the_model_stays_as_it_was_and_a_patch_of_the_same_image_changes_nothing(kind: str) -> None:
    """Activations of the image itself, inserted into itself, give its own score for every patch."""
    model, image = double(kind)
    before = fingerprint(model.module)
    blank = torch.zeros_like(image)
    explanation = cv.explain(model, blank, "caap(direction=remove)", target=3)  # the neutral image is the image
    assert_same(explanation.maps, torch.zeros_like(explanation.maps), magnitude=float(explanation.logits.abs().max()))
    assert differences(before, fingerprint(model.module)) == []


def test_middle_layers() -> None:
    assert [layer_range(None, None, count) for count in (1, 2, 3, 4, 12)] == [
        *(range(1), range(2), range(1, 2), range(1, 3), range(4, 8)),
    ]
    assert layer_range(3, None, 12) == range(3, 8)
    assert layer_range(10, None, 12) == range(10, 11)
    assert layer_range(None, 2, 12) == range(1, 2)


@pytest.mark.parametrize("options", ["start=4", "start=2,stop=2", "stop=5", "stop=0"])
def test_layers_that_do_not_exist_are_refused(options: str) -> None:
    module = build("plain", depth=4)
    with pytest.raises(BadInput, match=r"for a model of 4 layers; expected 0 ≤ start < stop ≤ 4"):
        maps_of(module, images_for(module), f"caap({options})")


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")
def test_models_without_a_token_for_each_patch_are_refused() -> None:
    swin = STRANGE["swin"]
    for module, size, reason in (
        (strange(swin.make), swin.size, "Layer 2 works on 16 tokens, not on the 64"),
        (cnn().eval(), (32, 32), "no attention"),
    ):
        with pytest.raises(NotApplicable, match=reason):
            cv.explain(cv.wrap(module, size=size), torch.randn(1, 3, *size), "caap", target=1)
