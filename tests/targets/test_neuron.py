"""Neurons and directions against hooks on named modules, autograd and runs by hand, in float64 on two architectures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable, UnknownName, WrongType
from clairvit.tracing.recording import record
from clairvit.tracing.rules import LINEAR
from clairvit.tracing.trace import run_backward
from helpers import families, tiny_pairs, vision_language
from helpers.module_fingerprint import unchanged
from helpers.rounding import assert_same
from helpers.tiny_models import (
    HEADS,
    STRANGE,
    WIDTH,
    ZOO,
    cnn,
    double,
    fresh_double,
    growth_of,
    pixels,
    shaken,
    strange,
)

LAYER, CHANNEL = 1, 3
DH = WIDTH // HEADS
SITES: list[dict[str, Any]] = [
    {},
    {"where": "attention"},
    {"where": "mlp"},
    {"where": "head", "head": 1},
    {"pool": "token"},
    {"pool": "max"},
    {"patch": 5},
    {"patch": (2, 3), "where": "mlp"},
    {"pool": "token", "where": "head", "head": 2},
]
MODELS = ["timm-deep", "hf-dinov2-sdpa"]


def blocks_of(module: nn.Module) -> nn.ModuleList | nn.Sequential:
    """The blocks of the two architectures, by their names."""
    return module.blocks if hasattr(module, "blocks") else module.dinov2.encoder.layer  # type: ignore[return-value,union-attr]


def hooked_part(block: nn.Module, where: str) -> tuple[nn.Module, bool]:
    """Return the module whose output (or input: True) is the activation, by the names of timm and transformers."""
    timm = hasattr(block, "drop_path1")
    return {
        "block": (block, False),
        "attention": (block.drop_path1 if timm else block.layer_scale1, False),
        "mlp": (block.drop_path2 if timm else block.layer_scale2, False),
        "head": (block.attn.proj if timm else block.attention.o_proj, True),  # type: ignore[union-attr]
    }[where]  # type: ignore[return-value]


@contextmanager
def tokens_at(module: nn.Module, layer: int, where: str) -> Iterator[list[Tensor]]:
    """Yield a list that a forward pass puts the activation [B, N, d] in."""
    part, takes_input = hooked_part(blocks_of(module)[layer], where)
    values: list[Tensor] = []

    def keep(_: nn.Module, args: Any, out: Any) -> None:
        values.append(args[0] if takes_input else out if isinstance(out, Tensor) else out[0])

    hook = part.register_forward_hook(keep)
    try:
        yield values
    finally:
        hook.remove()


def pooled(tokens: Tensor, head: int | None = None, patch: Any = None, pool: str = "mean", columns: int = 4) -> Tensor:
    """Return [B, d] of [B, 1 + patches, d] by hand."""
    if head is not None:
        tokens = tokens[..., head * DH : (head + 1) * DH]
    if patch is not None:
        return tokens[:, 1 + (patch if isinstance(patch, int) else patch[0] * columns + patch[1])]
    return tokens[:, 0] if pool == "token" else tokens[:, 1:].mean(1) if pool == "mean" else tokens[:, 1:].amax(1)


def activation_by_hand(module: nn.Module, images: Tensor, layer: int, site: dict[str, Any]) -> Tensor:
    """Return the activation [B, d] of the whole model, which runs to its end."""
    options = {name: value for name, value in site.items() if name != "where"}
    with tokens_at(module, layer, site.get("where", "block")) as values:
        module(images)
    return pooled(values[0], **options)


@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_score_and_its_gradients_are_those_of_a_hook_and_autograd(name: str, site: dict[str, Any]) -> None:
    model, images = fresh_double(name)
    traced = cv.trace(model, images, target=cv.Neuron(LAYER, CHANNEL, **site))
    assert len(traced.layers) == LAYER + 1  # later blocks take no part
    inputs: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for block in list(blocks_of(model.module))[: LAYER + 1]
    ]
    images.requires_grad_()
    expected = activation_by_hand(model.module, images, LAYER, site)
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(expected[:, CHANNEL].sum(), [images, *inputs])
    assert_same(traced.logits, expected.detach(), growth=growth_of(name))
    bound = growth_of(name)
    assert_same(traced.dpixels, gradients[0], growth=bound)
    for layer, gradient in zip(traced.layers, gradients[1:], strict=True):
        assert gradient.any()
        assert_same(layer.dx, gradient, growth=bound)


@pytest.mark.parametrize("name", MODELS)
def test_a_direction_is_a_product_with_the_tokens(name: str) -> None:
    model, images = double(name)
    w = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with tokens_at(model.module, 0, "block") as values:
        model.module(images)
    tokens = values[0].detach()
    for site in ({}, {"patch": 4}, {"pool": "max"}, {"pool": "token"}):
        for relu in (False, True):
            for vector in (w, w.numpy(), w.tolist()):
                target = cv.targets.Direction(0, vector, 0.25, relu=relu, **site)  # type: ignore[arg-type]
                score = cv.trace(model, images, target=target).logits[:, 0]
                value = tokens @ w + 0.25
                value = value.clamp(min=0) if relu else value
                assert_same(score, pooled(value[..., None], **site)[:, 0])  # type: ignore[arg-type]
    unit = torch.eye(WIDTH, dtype=torch.float64)[CHANNEL]
    channel = cv.explain(model, images, "ixg", target=cv.Neuron(0, CHANNEL))
    direction = cv.explain(model, images, "ixg", target=cv.targets.Direction(0, unit, name="third"))
    assert_same(direction.maps, channel.maps)
    assert direction.targets == ("third",) * 2


def test_the_map_of_a_direction_has_a_closed_form_where_a_block_adds_nothing() -> None:
    """x_out = x: a = 1/n sum_p x_p · w, so that patch p contributes x_p · w / n."""
    model, images = fresh_double("timm-vit")
    with torch.no_grad():
        for linear in (blocks_of(model.module)[0].attn.proj, blocks_of(model.module)[0].mlp.fc2):  # type: ignore[union-attr]
            linear.weight.zero_()
            linear.bias.zero_()
    w = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
    traced = cv.trace(model, images, target=cv.targets.Direction(0, w))
    shares = (traced.layers[0].x[:, 1:] @ w) / 16
    explanation = cv.explain(model, images, "ixg", target=cv.targets.Direction(0, w))
    assert_same(explanation.maps.flatten(1), shares)
    assert_same(explanation.maps.sum((1, 2)), traced.logits[:, 0])


def without_biases(module: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()


@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_contributions_under_the_linear_rules_add_up_to_the_activation(name: str, site: dict[str, Any]) -> None:
    """Attention, norms and slopes held fixed, a model without biases is linear: sum_i x_i · dx_i = a."""
    model, images = fresh_double(name)
    without_biases(model.module)
    target = cv.Neuron(LAYER, CHANNEL, **site)
    traced = cv.trace(model, images, target=target, rules="linear")
    for layer in traced.layers:
        assert_same((layer.x * layer.dx).sum((1, 2)), traced.logits[:, CHANNEL], growth=growth_of(name))


@pytest.mark.parametrize("site", SITES, ids=str)
def test_leaving_out_a_patch_is_running_the_blocks_on_the_other_tokens(site: dict[str, Any]) -> None:
    model, images = double("timm-vit")
    explanation = cv.explain(model, images, "leave-one-out", target=cv.Neuron(LAYER, CHANNEL, **site))
    blocks = blocks_of(model.module)
    first = record(model, images, differentiable=False).inputs[0]
    assert first is not None

    def run(tokens: Tensor) -> Tensor:
        with tokens_at(model.module, LAYER, site.get("where", "block")) as values, torch.no_grad():
            for block in blocks:
                tokens = block(tokens)
        return values[0]

    options = {name: value for name, value in site.items() if name != "where"}
    full = pooled(run(first), **options)[:, CHANNEL]
    index = {5: 5, (2, 3): 11}.get(site.get("patch"))  # type: ignore[arg-type]
    for patch in range(16):
        tokens = run(torch.cat([first[:, : 1 + patch], first[:, 2 + patch :]], 1))
        if index is None:
            left = pooled(tokens, **options)[:, CHANNEL]
        elif patch == index:
            left = torch.zeros_like(full)  # the patch that is read is gone
        else:
            left = tokens[:, 1 + index - (patch < index), CHANNEL]
        assert_same(explanation.maps.flatten(1)[:, patch], full - left, growth=growth_of("timm-vit"))


@pytest.mark.parametrize("name", MODELS)
def test_rollout_ends_at_the_block(name: str) -> None:
    model, images = double(name)
    attention = [layer.A.mean(1) for layer in cv.trace(model, images, target=0).layers]  # of the whole model
    eye = torch.eye(ZOO[name].tokens, dtype=torch.float64)
    for pool, row in (("token", 0), (None, 1 + 5)):
        target = cv.Neuron(0, 0, pool="token") if pool else cv.Neuron(0, 0, patch=5)
        expected = ((attention[0] + eye) / 2)[:, row, 1:]
        assert_same(cv.explain(model, images, "rollout", target=target).maps.flatten(1), expected)
    product = (attention[1] + eye) @ (attention[0] + eye) / 4
    rolled = cv.explain(model, images, "rollout", target=cv.Neuron(1, 0, pool="token"))
    assert_same(rolled.maps.flatten(1), product[:, 0, 1:])


def test_targets_of_one_site_share_a_readout_and_can_be_contrasted() -> None:
    model, images = double("timm-vit")
    a, b = cv.Neuron(1, 2), cv.Neuron(1, 5)
    assert a.readout(model) is b.readout(model)
    assert a.readout(model) is not cv.Neuron(0, 2).readout(model)
    maps = {t: cv.explain(model, images, "ixg", target=t).maps for t in (a, b)}
    assert_same(cv.explain(model, images, "ixg", target=cv.Contrast(a, b)).maps, maps[a] - maps[b])
    both = cv.explain(model, images, "ixg", targets=[a, b])
    assert both.targets == ("layer 1, channel 2",) * 2 + ("layer 1, channel 5",) * 2
    assert_same(both.maps, torch.cat([maps[a], maps[b]]))


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")  # maps that are zero say so
@pytest.mark.parametrize("site", SITES, ids=str)
def test_every_quick_method_has_a_map_or_a_reason(site: dict[str, Any]) -> None:
    model, images = double("timm-vit", batch=1)
    many = cv.compare(model, images, "all", target=cv.Neuron(LAYER, CHANNEL, **site))
    assert len(many) > (20 if site.get("pool") == "max" else 40)
    for explanation in many.values():
        assert explanation.maps.isfinite().all()
    for reason in many.skipped.values():
        assert reason.endswith(".")
    refused = {"rollout", "genatt"} & set(many.skipped)
    assert refused == ({"rollout", "genatt"} if site.get("pool") == "max" else set())


def test_metrics_and_checks_take_a_neuron() -> None:
    model, images = double("timm-vit")
    target = cv.Neuron(LAYER, CHANNEL, where="mlp")
    score = cv.evaluate(model, images, "ixg", "deletion(steps=4)", target=target)
    assert score.values.isfinite().all()
    assert cv.explain(model, images, "ixg", target=target).check()[0].removals
    sweep = cv.intervene_sweep(model, images, kind="head", target=cv.Neuron(LAYER, CHANNEL))
    assert sweep.table.shape == (LAYER + 1, HEADS)
    assert sweep.table.all()


def test_a_model_without_class_scores_has_neurons() -> None:
    config = hf.Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, image_size=32, patch_size=8
    )
    module = shaken(hf.Dinov2Model(config), 0).eval().double()
    model, images = cv.wrap(module, size=32), pixels("timm-vit", dtype=torch.float64)
    traced = cv.trace(model, images, target=cv.Neuron(0, CHANNEL))
    with torch.no_grad():
        tokens = module(images, output_hidden_states=True).hidden_states[1]
    assert_same(traced.logits, tokens[:, 1:].mean(1))


def test_a_pair_of_towers_has_the_neurons_of_its_image_tower() -> None:
    pair, images = tiny_pairs.build("CLIPModel"), tiny_pairs.pixels()
    traced = cv.trace(tiny_pairs.wrapped("CLIPModel", pair), images, target=cv.Neuron(1, CHANNEL, pool="token"))
    with torch.no_grad():
        states = pair.vision_model(images, output_hidden_states=True).hidden_states
    assert_same(traced.logits, states[2][:, 0])


def test_a_patch_of_a_clip_has_a_frame() -> None:
    model, clip = families.videomae()
    traced = cv.trace(model, clip, target=cv.Neuron(0, CHANNEL, patch=(1, 2, 3)))
    with torch.no_grad():
        net: Any = model.module.model.videomae  # type: ignore[union-attr]
        tokens = net.encoder.layer[0](net.embeddings(clip, None))
    assert_same(traced.logits, (tokens if isinstance(tokens, Tensor) else tokens[0])[:, (1 * 4 + 2) * 4 + 3])


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "smolvlm"])
def test_neurons_of_a_vision_language_model_are_those_of_its_language_model(name: str) -> None:
    with vision_language.without_float32():
        module, image = vision_language.tiny_language_model(name), vision_language.images()
        text = vision_language.model_text(name, [1, 3], [4, 11, 12, 14])
        model = cv.wrap(module, size=vision_language.SIDE, mean=0.5, std=0.5)
        traced = cv.trace(model, image, target=cv.Neuron(1, CHANNEL), inputs=text)
        with torch.no_grad():
            states = module(
                **vision_language.model_inputs(name, image), **text, output_hidden_states=True
            ).hidden_states
    assert len(traced.layers) == 2
    assert_same(traced.logits, states[2][:, 2:18].mean(1))
    assert traced.dpixels.any()
    with pytest.raises(BadInput, match="has no class token"):
        cv.trace(model, image, target=cv.Neuron(1, CHANNEL, pool="token"), inputs=text)
    with pytest.raises(cv.ClairError, match="prompt"):
        cv.trace(model, image, target=cv.Neuron(1, CHANNEL))


@pytest.mark.parametrize("name", ["swin", "xcit"])
def test_a_hierarchical_model_has_neurons_of_each_stage(name: str) -> None:
    module = strange(STRANGE[name].make).double()
    images = torch.randn(2, 3, *STRANGE[name].size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    last = len(cv.trace(module, images, target=0).layers) - 1
    blocks = [part for part in module.modules() if type(part).__name__ == STRANGE[name].blocks]
    for layer, grid in ((0, STRANGE[name].first), (last, STRANGE[name].last)):
        values: list[Tensor] = []
        hook = blocks[layer].register_forward_hook(lambda _, args, out, values=values: values.append(out))
        with torch.no_grad():
            module(images)
        hook.remove()
        patch = values[0].reshape(2, grid[0] * grid[1], -1)[:, grid[1] + 1]  # row 1, column 1
        traced = cv.trace(module, images, target=cv.Neuron(layer, 0, patch=(1, 1)))
        assert_same(traced.logits, patch)
        assert traced.dpixels.any()
    with pytest.raises(NotApplicable, match="is not between all its tokens"):
        cv.explain(module, images, "saliency", target=cv.Neuron(0, 0, where="head", head=0))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cv.Neuron(9, 0), BadInput, r"^There is no layer 9: .* has 2; give one from 0 to 1\.$"),
        (lambda: cv.Neuron(0, 99), BadInput, r"^There is no channel 99: layer 0 has \d+; give one from 0 to \d+\.$"),
        (lambda: cv.Neuron(0, 0, where="head", head=7), BadInput, r"^There is no head 7: layer 0 has \d; give"),
        (lambda: cv.Neuron(0, DH, where="head", head=0), BadInput, r"^There is no channel \d+: layer 0, head 0 has \d"),
        (lambda: cv.Neuron(0, 0, patch=16), BadInput, r"^There is no patch 16: layer 0 has 4 × 4; give an index"),
        (lambda: cv.Neuron(0, 0, patch=(0, 4)), BadInput, r"^There is no patch \(0, 4\): layer 0 has 4 × 4; give"),
        (
            lambda: cv.targets.Direction(0, [1.0, 2.0]),
            BadInput,
            r"^The vector has 2 numbers, and layer 0 has \d+ channels;",
        ),
        (lambda: cv.Neuron(-1, 0), BadInput, r"^The layer is -1; expected an integer from 0\.$"),
        (lambda: cv.Neuron(0, 1.5), WrongType, r"^The channel is 1\.5; expected an integer from 0\.$"),  # type: ignore[arg-type]
        (lambda: cv.Neuron(0, 0, head=1), BadInput, r"^where='block' and head=1 were given; expected a head with"),
        (lambda: cv.Neuron(0, 0, where="head"), BadInput, r"^where='head' and head=None were given; expected a head"),
        (lambda: cv.Neuron(0, 0, patch=1, pool="max"), BadInput, r"^patch=1 and pool='max' were given; expected one"),
        (
            lambda: cv.Neuron(0, 0, patch=(1, 2, 3)),
            BadInput,
            r"^There is no patch \(1, 2, 3\): .* \(row, column\) up to",
        ),
        (lambda: cv.Neuron(0, 0, patch=(4, 0)), BadInput, r"^There is no patch \(4, 0\): .* or .* up to \(3, 3\)\.$"),
        (lambda: cv.Neuron(0, 0, where="mpl"), UnknownName, r"^There is no where='mpl'\. .*mlp"),  # type: ignore[arg-type]
        (lambda: cv.Neuron(0, 0, pool="sum"), UnknownName, r"^There is no pool='sum'\. Choose one of: mean, max"),  # type: ignore[arg-type]
        (lambda: cv.targets.Direction(0, [0.0, 0.0]), BadInput, r"^The vector has no number but zero"),
        (lambda: cv.targets.Direction(0, "up"), WrongType, r"^The vector is a str; expected a tensor, array or list"),  # type: ignore[arg-type]
        (
            lambda: cv.targets.Direction(0, [1.0], float("nan")),
            BadInput,
            r"^bias=nan was given; expected a finite number\.$",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_leave_the_model_as_it_was(
    make: Callable[[], cv.targets.Target], error: type[Exception], message: str
) -> None:
    model, images = double("timm-vit", batch=1)
    with unchanged(model.module), pytest.raises(error, match=message):
        cv.explain(model, images, "ixg", target=make())


def test_models_without_such_blocks_are_refused() -> None:
    images = pixels("timm-vit", batch=1)
    with pytest.raises(NotApplicable, match=r"^No attention was seen in .*cv\.Output"):
        cv.explain(strange(cnn), images, "saliency", target=cv.Neuron(0, 0))
    model, _ = double("timm-parallel")
    with pytest.raises(NotApplicable, match="expected one module per block"):
        cv.explain(model, images.double(), "saliency", target=cv.Neuron(0, 0))
    model, _ = double("timm-cait")
    with pytest.raises(BadInput, match="has no class token; expected pool='mean'"):
        cv.explain(model, images.double(), "saliency", target=cv.Neuron(0, 0, pool="token"))
    model, _ = double("home-in-place")
    with pytest.raises(NotApplicable, match="does not add attention and MLP to the residual stream by two sums"):
        cv.explain(model, images.double(), "saliency", target=cv.Neuron(0, 0, where="mlp"))


def test_the_model_stays_as_it_was_and_a_copy_of_a_readout_works() -> None:
    model, images = fresh_double("torchvision-vit")  # its attention is torch's own
    target = cv.Neuron(LAYER, CHANNEL, where="head", head=1)
    with unchanged(model.module):
        expected = cv.explain(model, images, "attnlrp", target=target)
    readout = target.readout(model)
    copied = copy.deepcopy(readout.module)
    assert torch.equal(copied(images), readout.module(images))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    assert not torch.equal(copied(images), readout.module(images))
    assert torch.equal(cv.explain(model, images, "attnlrp", target=target).maps, expected.maps)


def test_rules_reach_the_projections_inside_torch_attention() -> None:
    """The capture that reads a head runs inside that of the trace, which must still know where it is."""
    model, images = double("torchvision-vit")
    recording = record(cv.Neuron(LAYER, 0, where="head", head=0).readout(model), images, rules=("linear",))
    assert [call.kind for call in recording.calls] == ["tokens"] * (LAYER + 1)
    plain = cv.trace(model, images, target=cv.Neuron(LAYER, 0, where="head", head=0))
    assert len(plain.recording.calls) == LAYER + 1
    assert LINEAR in recording.rules
    assert run_backward(recording, plain.target, LINEAR).layers[0].dx.any()
