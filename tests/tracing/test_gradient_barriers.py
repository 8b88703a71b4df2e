"""Layers that no gradient comes back through: each is named, gradient methods are refused, the others work."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import clairvit as cv
from clairvit.cli import main
from clairvit.errors import ClairWarning, NotApplicable
from clairvit.methods.spec import resolve_method
from clairvit.tracing.gradient_barriers import Barrier, gradient_barriers
from clairvit.tracing.structure import model_structure
from helpers.module_fingerprint import differences, fingerprint

SIZE = 32
GRADIENT = ("ixg", "genatt", "legrad", "saliency", "gradcam", "attnlrp", "transatt", "smoothgrad(n=2)")
FORWARD = ("raw-attention", "rollout", "attin", "globenc")
PERTURBATION = (
    *("lime(samples=40)", "kernelshap(samples=64)", "rise(samples=20)"),
    *("leave-one-out", "occlusion", "scorecam"),
)


class Linear8bitLt(nn.Module):
    """A linear layer as bitsandbytes keeps it: int8 weights, and here no gradient to its input."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().max() / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(linear.bias.detach().clone())

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T + self.bias


class _NoInputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class LinearNF4(nn.Module):
    """Its output says that it requires a gradient, and its backward gives none."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return _NoInputGradient.apply(x, self.weight)


def vit(pooling: str = "token", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return VisionTransformer(
        img_size=SIZE,
        patch_size=8,
        embed_dim=24,
        depth=3,
        num_heads=3,
        num_classes=5,
        global_pool=pooling,
        class_token=pooling == "token",
    ).eval()


def replaced(module: nn.Module, layer: Callable[[nn.Linear], nn.Module], part: str = "") -> nn.Module:
    """The linear layers whose name contains `part`, replaced."""
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear) and part in name:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, layer(linear))
    return module


def dynamic(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this will move to another package
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)


# What was done to the model -> the first layer that blocks, and how many do
BLOCKED: dict[str, tuple[Callable[[], nn.Module], Barrier, int]] = {
    "dynamic int8": (lambda: dynamic(vit()), Barrier("blocks.0.attn.qkv", "DynamicQuantizedLinear"), 13),
    "dynamic int8, mean": (lambda: dynamic(vit("avg")), Barrier("blocks.0.attn.qkv", "DynamicQuantizedLinear"), 13),
    "8 bit": (lambda: replaced(vit(), Linear8bitLt), Barrier("blocks.0.attn.qkv", "Linear8bitLt"), 13),
    "8 bit, one MLP": (
        lambda: replaced(vit(), Linear8bitLt, "blocks.1.mlp"),
        Barrier("blocks.1.mlp.fc1", "Linear8bitLt"),
        2,
    ),
    "8 bit, head": (lambda: replaced(vit("avg"), Linear8bitLt, "head"), Barrier("head", "Linear8bitLt"), 1),
    "no backward": (lambda: replaced(vit(), LinearNF4, "fc2"), Barrier("blocks.0.mlp.fc2", "LinearNF4"), 3),
}


@pytest.fixture
def pixels() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", BLOCKED)
def test_the_first_layer_is_named(kind: str, pixels: Tensor) -> None:
    make, first, count = BLOCKED[kind]
    barriers = gradient_barriers(make(), pixels)
    assert barriers[0] == first
    assert len(barriers) == count


@pytest.mark.parametrize("kind", BLOCKED)
def test_gradient_methods_are_refused_and_the_others_run(kind: str, pixels: Tensor) -> None:
    make, first, _ = BLOCKED[kind]
    model = cv.wrap(make())
    methods = [*GRADIENT, *FORWARD, *PERTURBATION]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClairWarning)  # no zero map
        warnings.filterwarnings("error", "autograd")  # torch's own warning of an operation without a backward
        warnings.filterwarnings("ignore", "There is a performance drop")
        comparison = cv.compare(model, pixels, methods, target=1, skip=True)
    assert set(comparison.skipped) == {resolve_method(name).text for name in GRADIENT}
    for name, reason in comparison.skipped.items():
        assert f"'{name}' reads gradients" in reason
        assert f"'{first.name}' ({first.type})" in reason
        for works in ("rollout", "raw-attention", "lime", "kernelshap", "rise", "leave-one-out", "occlusion"):
            assert works in reason
    for name, explanation in comparison.items():
        assert explanation.maps.shape == (2, 4, 4), name
        assert explanation.maps.flatten(1).std(1).min() > 0, name


@pytest.mark.parametrize("pooling", ["token", "avg"])
def test_pooling_and_grid_are_those_of_the_model_before(pooling: str, pixels: Tensor) -> None:
    expected = model_structure(cv.wrap(vit(pooling)), pixels)
    for module in (dynamic(vit(pooling)), replaced(vit(pooling), Linear8bitLt)):
        plan = model_structure(cv.wrap(module), pixels)
        assert plan.layout == expected.layout
        assert [part.kind for part in plan.sites] == [part.kind for part in expected.sites]
        assert plan.in_order


def test_maps_are_those_of_the_quantised_weights(pixels: Tensor) -> None:
    """The same arithmetic in a layer that does pass gradients: forward methods cannot tell the two apart."""
    blocked = replaced(vit(), Linear8bitLt).double()
    plain = vit().double()
    for name, layer in plain.named_modules():
        if isinstance(layer, nn.Linear):
            source = blocked.get_submodule(name)
            layer.weight.data = source.weight.double() * source.scale
    images = pixels.double()
    for name in ("rollout", "leave-one-out"):
        pair = [cv.explain(cv.wrap(module), images, name, target=1).maps for module in (blocked, plain)]
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-12)


def test_one_method_and_a_trace_raise(pixels: Tensor) -> None:
    model = cv.wrap(dynamic(vit()))
    for name in ("ixg", "legrad", "genatt+skipplus", "smooth(ixg,n=2)"):
        with pytest.raises(NotApplicable, match=r"'blocks\.0\.attn\.qkv' \(DynamicQuantizedLinear\) and 12 other"):
            cv.explain(model, pixels, name, target=1)
    with pytest.raises(NotApplicable, match="DynamicQuantizedLinear"):
        cv.trace(model, pixels, target=1)


def test_a_cnn_is_not_sent_to_attention_methods(pixels: Tensor) -> None:
    import torchvision

    torch.manual_seed(0)
    model = cv.wrap(dynamic(torchvision.models.resnet18(num_classes=5).eval()))
    with pytest.raises(NotApplicable, match=r"'fc' \(DynamicQuantizedLinear\)") as refusal:
        cv.explain(model, pixels, "gradcam", target=1)
    assert "rollout" not in str(refusal.value)
    assert cv.explain(model, pixels, "rise(samples=8)", target=1).maps.any()


class Positions(nn.Module):
    """Made for its input's shape, whatever its values are."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linspace(0, 1, x.shape[-1], dtype=x.dtype).expand_as(x)


class Frozen(nn.Module):
    """A container that runs its part under no_grad: the container is to blame, not the part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.part(x)


def test_what_passes_a_gradient_or_needs_none_is_no_barrier(pixels: Tensor) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.vit = Positions(), vit()
            nn.init.zeros_(self.vit.head.weight)  # no gradient either, but the output does not follow the input

        def forward(self, x: Tensor) -> Tensor:
            return self.vit(x + self.positions(x))

    assert gradient_barriers(Net(), pixels) == ()


def test_containers_and_rounding_are_barriers(pixels: Tensor) -> None:
    frozen = vit()
    frozen.blocks[1].mlp = Frozen(frozen.blocks[1].mlp)
    assert gradient_barriers(frozen, pixels) == (Barrier("blocks.1.mlp", "Frozen"),)
    head = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 8), Step(), nn.Linear(8, 5))
    assert gradient_barriers(head, pixels) == (Barrier("2", "Step"),)


class Step(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x * 64) / 64


@pytest.mark.parametrize("make", [vit, lambda: replaced(vit(), Linear8bitLt)])
def test_the_model_is_left_as_it_was(make: Callable[[], nn.Module], pixels: Tensor) -> None:
    module = make().train()
    before = fingerprint(module)
    gradient_barriers(module, pixels)
    with pytest.raises(AssertionError, match="Input width"):
        gradient_barriers(module, pixels[..., :7])
    assert not differences(before, fingerprint(module))


def test_command_line_leaves_them_out_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = cv.wrap(dynamic(vit()), size=SIZE, name="quantised")
    monkeypatch.setattr("clairvit.load", lambda *_, **__: model)
    assert main(["compare", "demo", "--methods", "rollout,ixg,leave-one-out", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert set(result["methods"]) == {"rollout", "leave-one-out"}
    assert "'blocks.0.attn.qkv' (DynamicQuantizedLinear)" in result["skipped"]["ixg"]
    assert main(["compare", "demo", "--methods", "ixg,genatt"]) == 2
    assert "DynamicQuantizedLinear" in capsys.readouterr().err
    assert main(["explain", "demo", "--method", "ixg"]) == 2
    printed = capsys.readouterr()
    assert "DynamicQuantizedLinear" in printed.err
    assert "Traceback" not in printed.err
