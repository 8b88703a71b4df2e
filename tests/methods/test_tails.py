"""PLUS and SkipPLUS of methods of the whole image against sub-networks run by hand, block by block, in float64."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.rise import random_masks
from clairvit.methods.spec import resolve_method
from helpers.method_conditions import METHODS, allow_declared_zeros, fits, home_of, short
from helpers.module_fingerprint import differences, fingerprint
from helpers.rounding import assert_same
from helpers.tiny_models import STRANGE, ZOO, fresh, pixels, strange, wrapped

KIND, LAYERS, TARGET, PATCHES = "timm-deep", 5, 3, 16  # an odd number of layers tells ceil from floor; CLS, 4 × 4
SKIP = [3, 4]  # from ceil(5/2) on
MEAN_POOLED = "timm-deep-avg"
GROWTH = 1e3  # times roundings of the score, which is about 1: maps are small differences of it, and sums that cancel
DIVIDES = 1e6  # the rules of lrp divide by sums near zero, so that roundings grow from block to block


@functools.cache
def model_of(kind: str = KIND) -> cv.Model:
    return wrapped(kind, torch.float64)


@functools.cache
def images(kind: str = KIND) -> Tensor:
    return pixels(kind, dtype=torch.float64)


def explained(text: str, kind: str = KIND, **options: Any) -> cv.Explanation:
    return cv.explain(model_of(kind), images(kind), text, target=TARGET, **options)


def tokens_at(layer: int, kind: str = KIND) -> Tensor:
    """x_l, by the modules of timm."""
    module: Any = model_of(kind).module
    with torch.no_grad():
        x = module.norm_pre(module._pos_embed(module.patch_embed(images(kind))))
        for block in module.blocks[:layer]:
            x = block(x)
    return x


def scores_from(layer: int, tokens: Tensor, kind: str = KIND) -> Tensor:
    """f_l(tokens), [B, C], by the modules of timm."""
    module: Any = model_of(kind).module
    for block in module.blocks[layer:]:
        tokens = block(tokens)
    return module.forward_head(module.norm(tokens))


def probability(layer: int, tokens: Tensor, kind: str = KIND) -> Tensor:
    with torch.no_grad():
        return scores_from(layer, tokens, kind).softmax(-1)[:, TARGET]


def gradient(layer: int, tokens: Tensor, kind: str = KIND) -> Tensor:
    leaf = tokens.detach().clone().requires_grad_(True)
    return torch.autograd.grad(scores_from(layer, leaf, kind)[:, TARGET].sum(), leaf)[0]


def prefix(kind: str) -> int:
    return ZOO[kind].prefix


def on_grid(values: Tensor) -> Tensor:
    return values.reshape(len(values), 4, 4)


# Each method by its definition, with f_l for the network and x_l for the image.


def saliency(layer: int, kind: str) -> Tensor:
    return on_grid(gradient(layer, tokens_at(layer, kind), kind)[:, prefix(kind) :].abs().amax(-1))


def integrated_gradients(layer: int, kind: str) -> Tensor:
    x, steps = tokens_at(layer, kind), 4
    start = x.clone()
    start[:, prefix(kind) :] = 0
    mean = sum(gradient(layer, start + (k + 0.5) / steps * (x - start), kind) for k in range(steps)) / steps
    return on_grid(((x - start) * mean)[:, prefix(kind) :].sum(-1))


def leave_one_out(layer: int, kind: str) -> Tensor:
    x, first = tokens_at(layer, kind), prefix(kind)
    without = [torch.cat([x[:, : first + i], x[:, first + i + 1 :]], 1) for i in range(PATCHES)]
    return on_grid(torch.stack([probability(layer, x, kind) - probability(layer, y, kind) for y in without], 1))


def rise(layer: int, kind: str) -> Tensor:
    """The masks are those of an image of 4 × 4 pixels: they depend on the seed and the size alone."""
    x, first = tokens_at(layer, kind), prefix(kind)
    masks = random_masks(6, 2, 0.5, (4, 4), 0)(range(6)).flatten(1)  # [6, 16]
    total = torch.zeros(len(x), PATCHES, dtype=x.dtype)
    for mask in masks:
        masked = x.clone()
        masked[:, first:] *= mask[:, None]
        total += probability(layer, masked, kind)[:, None] * mask
    return on_grid(total / (6 * 0.5))


def shapley(layer: int, kind: str) -> Tensor:
    """The Shapley value of each quarter of the image, by all 2^4 coalitions."""
    x, first = tokens_at(layer, kind), prefix(kind)
    cell = torch.tensor([2 * (row // 2) + column // 2 for row in range(4) for column in range(4)])
    value = {}
    for coalition in itertools.product((False, True), repeat=4):
        kept = torch.tensor(coalition)[cell].nonzero()[:, 0] + first
        value[coalition] = probability(layer, x[:, [*range(first), *kept.tolist()]], kind)
    shares = torch.zeros(len(x), 4, dtype=x.dtype)
    for player in range(4):
        for coalition in itertools.product((False, True), repeat=4):
            if not coalition[player]:
                size = sum(coalition)
                weight = math.factorial(size) * math.factorial(3 - size) / math.factorial(4)
                joined = (*coalition[:player], True, *coalition[player + 1 :])
                shares[:, player] += weight * (value[joined] - value[coalition])
    return on_grid(shares[:, cell])


def lrp(layer: int, kind: str) -> Tensor:
    """R at the input of block l, of one backward through the whole network by the same rules."""
    at_block = cv.trace(model_of(kind), images(kind), target=[TARGET] * 2, rules="lrp").layers[layer]
    return on_grid((at_block.x * at_block.dx).sum(-1)[:, prefix(kind) :])


def deep_taylor(layer: int, kind: str) -> Tensor:
    at_block = cv.trace(model_of(kind), images(kind), target=[TARGET] * 2, rules="deep-taylor").layers[layer]
    return on_grid((at_block.x * at_block.dx).sum(-1)[:, prefix(kind) :]).clamp(min=0)


DEFINITIONS: dict[str, Callable[[int, str], Tensor]] = {
    "saliency": saliency,
    "integrated-gradients(steps=4)": integrated_gradients,
    "leave-one-out": leave_one_out,
    "rise(cells=2,samples=6)": rise,
    "kernelshap(cells=2)": shapley,
    "lrp": lrp,
    "deep-taylor": deep_taylor,
}


# KernelSHAP scores the empty set, and a mean over no tokens is undefined.
OF_MEANS = [text for text in DEFINITIONS if not text.startswith("kernelshap")]


@pytest.mark.parametrize(
    ("text", "kind"), [*((text, KIND) for text in DEFINITIONS), *((text, MEAN_POOLED) for text in OF_MEANS)]
)
def test_plus_adds_up_the_maps_of_the_sub_networks(text: str, kind: str) -> None:
    by_layer = torch.stack([DEFINITIONS[text](layer, kind) for layer in range(LAYERS)])
    magnitude = max(1.0, float(by_layer.abs().max()))
    same = functools.partial(assert_same, magnitude=magnitude, growth=DIVIDES if text == "lrp" else GROWTH)
    plus = explained(f"{text}+plus", kind, layers=True)
    same(plus.maps, by_layer.sum(0))
    same(plus.layers, by_layer)
    skipplus, start, last, single = (
        explained(f"{text}+{combinator}", kind).maps for combinator in ("skipplus", "from:2", "last", "layer:1")
    )
    same(skipplus, by_layer[SKIP].sum(0))
    same(start, by_layer[2:].sum(0))
    same(last, by_layer[-1])
    same(single, by_layer[1])


SHORT = {name: short(name) for name, method in METHODS.items() if method.output == "image" and method.combinators}
MODELS = ["timm-vit", "timm-reg4-gap", "timm-siglip-map", "hf-dinov2-registers-sdpa", "open_clip-nonsquare"]
MODELS += ["home-sequence-first", "home-mean-pool", "timm-deit-distilled-explicit", "timm-cait", "open_clip-coca"]
ON_MODELS = [(text, MODELS[index % len(MODELS)]) for index, text in enumerate(SHORT.values())]


@pytest.mark.parametrize(("text", "kind"), ON_MODELS, ids=lambda value: value)
def test_every_method_of_the_whole_image_can_be_summed(text: str, kind: str) -> None:
    """One model each: the sweep reads the registry, so that a new method is in it at once."""
    if not fits(text, kind):
        kind = home_of(text, *MODELS)
    model, photos = wrapped(kind, torch.float64), pixels(kind, dtype=torch.float64)
    with warnings.catch_warnings():
        allow_declared_zeros()
        explanation = cv.explain(model, photos, f"{text}+plus", target=TARGET)
    assert explanation.maps.shape == (2, *ZOO[kind].grid)
    assert explanation.maps.isfinite().all()
    assert explanation.method == f"{text}+plus"
    spec = resolve_method(f"{text}+plus")
    planned = spec.cost_for(math.prod(ZOO[kind].grid), ZOO[kind].layers)
    assert explanation.cost.backwards == planned.backwards
    if not spec.method.extra_cost.at_most:
        assert explanation.cost.forwards == planned.forwards


@pytest.mark.parametrize(
    "text",
    [
        *("leave-one-out", "lime(samples=20)", "kernelshap(samples=24)", "atman"),
        *("integrated-gradients(path=token,steps=3)", "occlusion(removal=token)", "pami(removal=token)"),
    ],
)
def test_from_the_first_block_on_it_is_the_method_itself(text: str) -> None:
    """Where a method takes tokens away, or follows a path of tokens, f_0 is the network behind the embedding."""
    assert_same(explained(f"{text}+layer:0").maps, explained(text).maps, growth=GROWTH, magnitude=1.0)


@pytest.mark.parametrize(
    "text", ["saliency", "leave-one-out", "tam(steps=2,start_layer=1)", "vit-cx(noise=0,samples=3)"]
)
@pytest.mark.parametrize("layer", [0, 3])
def test_a_tail_is_a_model_of_its_own(text: str, layer: int) -> None:
    tail = cv.tail(model_of(), layer)
    tokens, others = tail.module.inputs_of(images())
    assert_same(tokens.flatten(2).mT, tokens_at(layer)[:, 1:])
    assert_same(others, tokens_at(layer)[:, :1])
    explanation = cv.explain(tail, tokens, text, target=TARGET, inputs={"others": others})
    assert_same(explanation.maps, explained(f"{text}+layer:{layer}").maps, growth=GROWTH, magnitude=1.0)
    assert_same(explanation.logits, explained("saliency").logits)


def test_a_tail_can_be_scored() -> None:
    tail = cv.tail(model_of(), 3)
    tokens, others = tail.module.inputs_of(images())
    scores = cv.evaluate(tail, tokens, "saliency", "deletion(steps=3)", target=TARGET, inputs={"others": others})
    order = saliency(3, KIND).flatten(1).argsort(1, descending=True)
    x = tokens_at(3)
    assert scores.curve is not None
    for column, share in enumerate(scores.curve.x.tolist()):
        for row in range(2):
            kept = [0, *(1 + order[row, round(share * PATCHES) :].sort().values).tolist()]
            expected = probability(3, x[row : row + 1, kept])[0]
            assert_same(scores.curve.y[row, column], expected, growth=GROWTH, magnitude=1.0)


class Counter:
    """How many images went through each block."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.images = [0] * len(blocks)
        for index, block in enumerate(blocks):
            block.register_forward_hook(functools.partial(self._count, index))

    def _count(self, index: int, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.images[index] += len(output)


@pytest.mark.parametrize("text", ["saliency", "leave-one-out", "integrated-gradients(steps=2)", "lime(samples=8)"])
def test_the_passes_are_those_that_are_planned_and_no_block_runs_in_vain(text: str) -> None:
    model = fresh(KIND, torch.float64)
    blocks: Any = model.module.blocks
    counter = Counter(blocks)
    cv.explain(model, images(), f"{text}+from:2", target=TARGET)  # the model is looked at
    counter.images = [0] * LAYERS
    explanation = cv.explain(model, images(), f"{text}+from:2", target=TARGET)
    planned = resolve_method(f"{text}+from:2").cost_for(PATCHES, LAYERS)
    assert (explanation.cost.forwards, explanation.cost.backwards) == (planned.forwards, planned.backwards)
    assert counter.images[:2] == [2, 2]  # the blocks before: once per image
    each = (planned.forwards - 1) // 3  # passes of a sub-network, of which block 2 sees those of one
    assert counter.images[2:] == [2 * (1 + each), 2 * (1 + 2 * each), 2 * (1 + 3 * each)]


def test_sub_networks_are_shared_between_sums() -> None:
    model = fresh(KIND, torch.float64)
    counter = Counter(model.module.blocks)  # type: ignore[arg-type]
    cv.explain(model, images(), "saliency+plus", target=TARGET)
    counter.images = [0] * LAYERS
    cv.compare(model, images(), ["saliency+plus", "saliency+skipplus", "saliency+layer:1"], target=TARGET)
    assert counter.images == [2 * (1 + layer + 1) for layer in range(LAYERS)]  # once from each layer on


def test_the_model_is_what_it_was() -> None:
    model = wrapped(KIND, torch.float64)
    before = fingerprint(model.module)
    explanation = cv.explain(model, images(), "lime(samples=8)+plus", target=TARGET)
    cv.tail(model, 2)
    assert not differences(before, fingerprint(model.module))
    assert torch.equal(explanation.maps, cv.explain(model, images(), "lime(samples=8)+plus", target=TARGET).maps)


@pytest.mark.parametrize("text", ["smoothgrad(n=2)", "lime(samples=8)", "expected-gradients(samples=2)"])
def test_draws_do_not_depend_on_the_batch(text: str) -> None:
    """Tokens are rounded differently in batches of other sizes, so that seeds come from the photo."""
    both = explained(f"{text}+skipplus").maps
    second = cv.explain(model_of(), images()[1:], f"{text}+skipplus", target=TARGET).maps
    assert_same(both[1:], second, growth=GROWTH, magnitude=1.0)


def test_a_note_says_that_nothing_is_scaled_and_long_lists_of_notes_end() -> None:
    notes = [note for note in explained("integrated-gradients(steps=2)+plus").notes if "integrated-gradients" in note]
    assert len(notes) == 5
    assert "7 more notes of this kind" in notes[3]  # two images and five layers, three are shown
    assert "added as they are, none is scaled" in notes[4]


# Refusals


@pytest.mark.parametrize("name", ["random", "center", "counterfactual", "caap", "fullgrad-pixel"])
def test_methods_without_sub_networks_say_why(name: str) -> None:
    assert resolve_method(name).method.combinators == ()
    with pytest.raises(NotApplicable, match=rf"'{name}' .+, so that '\+plus' has nothing to combine"):
        explained(f"{name}+plus")


@pytest.mark.parametrize(
    "text",
    [
        *("saliency(level=pixel)", "lime(features=superpixels)", "integrated-gradients(baseline=black)"),
        *("rise(removal=noise)", "expected-gradients(references=photos/)"),
    ],
)
def test_options_of_pixels_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"which runs '[a-z-]+' on the tokens of a block, and .+ speaks of pixels"):
        resolve_method(f"{text}+plus")


def test_a_product_of_maps_without_matrices_is_refused() -> None:
    with pytest.raises(NotApplicable, match=r"'saliency' says one number for each patch. Use saliency\+plus"):
        resolve_method("saliency+rollout")


class ReadsTwoDepths(nn.Module):
    """A head that reads the tokens after the second and after the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = wrapped(KIND, torch.float64).module

    def forward(self, image: Tensor) -> Tensor:
        vit: Any = self.vit
        x = vit._pos_embed(vit.patch_embed(image))
        early = x
        for index, block in enumerate(vit.blocks):
            x = block(x)
            early = x if index == 1 else early
        return vit.forward_head(vit.norm(x)) + vit.forward_head(vit.norm(early))


def test_a_head_that_reads_earlier_blocks_too_is_refused() -> None:
    model = cv.wrap(ReadsTwoDepths(), name="two depths", size=32)
    reason = r"two depths has no sub-network that begins with the tokens at block 3: its scores depend on more than"
    with pytest.raises(NotApplicable, match=reason):
        cv.explain(model, images(), "saliency+layer:3", target=TARGET)
    with pytest.raises(NotApplicable, match=reason):
        cv.tail(model, 3)
    cv.explain(model, images(), "saliency+layer:1", target=TARGET)  # both are behind block 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("swin", "its layers do not all work on the same tokens"),
        ("home-loop", "its blocks are not one module each"),
    ],
)
def test_models_without_one_sequence_of_tokens_are_refused(kind: str, reason: str) -> None:
    if kind in ZOO:
        model, photos = wrapped(kind), pixels(kind)
    else:
        other = STRANGE[kind]
        model, photos = cv.wrap(strange(other.make), size=other.size), torch.randn(1, 3, *other.size)
    with pytest.raises(NotApplicable, match=rf"has no sub-network that begins with the tokens at block \d: {reason}"):
        cv.explain(model, photos, "leave-one-out+plus", target=1)


def test_a_convolutional_network_is_refused() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5))
    with pytest.raises(NotApplicable, match=r"'saliency\+plus' needs the layers of a Vision Transformer"):
        cv.explain(cv.wrap(module, size=32, name="cnn"), images().float(), "saliency+plus", target=1)


def test_there_is_no_such_layer() -> None:
    with pytest.raises(BadInput, match=r"Layer 5 was asked of a model with 5 layers"):
        cv.tail(model_of(), 5)


def test_a_tail_asks_for_its_other_tokens() -> None:
    tail = cv.tail(model_of(), 1)
    tokens, _ = tail.module.inputs_of(images())
    with pytest.raises(BadInput, match=r"The tail was given none as its 1 tokens that are no patches"):
        cv.explain(tail, tokens, "saliency", target=TARGET)
