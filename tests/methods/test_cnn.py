"""CNNs without adapters: their stages are found, the CAM family is exact on them, and the rest refuses in words."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.numerics import pick_cells, repeat_cells
from clairvit.tracing.structure import model_structure
from helpers.exact_models import TARGETS
from helpers.method_conditions import METHODS, allow_declared_zeros
from helpers.module_fingerprint import differences, fingerprint
from helpers.reference_cams import cam_by_hand
from helpers.rounding import assert_same
from helpers.tiny_models import cnn, strange

CLASSES = 5
FAMILY = ["gradcam", "gradcam-pp", "hirescam", "gradcam-elementwise", "layercam", "xgradcam", "xgradcam-plus"]
ATTENTION = [m.name for m in METHODS.values() if m.output == "matrix" or m.name in ("legrad", "attcat", "tam")]
ACTIVATIONS = ["cam", *FAMILY, "vanilla", "vanilla-l2", "ixg", "decompx", "cp-lrp", "attnlrp"]


@pytest.fixture(autouse=True)
def _declared_zeros() -> Iterator[None]:
    with warnings.catch_warnings():
        allow_declared_zeros()
        yield


def seasoned(module: nn.Module, seed: int = 3) -> nn.Module:
    """Norms that have seen something: random statistics and affine parts."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            for tensor, low in (
                (part.running_mean, -0.3),
                (part.running_var, 0.5),
                (part.weight, 0.5),
                (part.bias, -0.3),
            ):
                tensor.data = torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + low
    return module.eval()


@functools.cache
def resnet() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return seasoned(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)).double()


def images(size: tuple[int, int] = (64, 96)) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def hooked(module: nn.Module, place: str, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Activation and gradient at a named module, [B, C, h, w], by a hook."""
    kept: list[Tensor] = []
    hook = module.get_submodule(place).register_forward_hook(lambda m, i, o: kept.append(o))
    logits = module(pixels.clone().requires_grad_())
    hook.remove()
    score = sum(logits[b, c] for b, c in enumerate(TARGETS))
    return kept[0].detach(), torch.autograd.grad(score, kept[0])[0]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("name", FAMILY)
def test_cam_family_at_each_stage_of_a_resnet(name: str, layer: int) -> None:
    a, g = hooked(resnet(), f"layer{layer + 1}", images())
    rows = [
        cam_by_hand(name, activation_map.flatten(1).T, its.flatten(1).T)
        for activation_map, its in zip(a, g, strict=True)
    ]
    expected = torch.stack(rows).reshape(len(a), *a.shape[2:])
    model = cv.wrap(resnet())
    if name != "gradcam-elementwise":
        maps = cv.explain(model, images(), f"{name}+layer:{layer}", target=TARGETS).maps  # no ReLU under a combinator
        assert_same(maps, expected)
    assert_same(cv.explain(model, images(), name, target=TARGETS, layer=layer).maps, expected.clamp(min=0))
    if layer == 3:
        assert_same(cv.explain(model, images(), name, target=TARGETS).maps, expected.clamp(min=0))


@pytest.mark.parametrize("name", ["gradcam", "hirescam", "ixg"])
def test_layers_of_a_cnn_are_its_stages_on_their_own_grids(name: str, tmp_path: Path) -> None:
    model = cv.wrap(resnet())
    explanation = cv.explain(model, images(), name, target=TARGETS, layers=True)
    assert explanation.layer_names == ("layer1", "layer2", "layer3", "layer4")
    assert explanation.layers is not None
    assert explanation.layers.shape == (4, 2, 16, 24)
    for layer in range(4):
        text = f"{name}+layer:{layer}" if name == "ixg" else f"{name}(layer={layer})"
        alone = cv.explain(model, images(), text, target=TARGETS)
        assert_same(explanation.layer_map(layer), alone.maps)
        assert alone.layer_grids == ()
    if name == "gradcam":
        assert torch.equal(explanation.layer_map(-1), explanation.maps)
    grid = explanation.layer_grids[3]
    assert (grid.name, grid.rows, grid.columns) == ("layer4", 2, 3)
    assert explanation.to_dict()["layer_grids"][0] == {"name": "layer1", "rows": 16, "columns": 24}
    loaded = cv.Explanation.load(explanation.save(tmp_path / "maps.npz"))
    assert loaded.layer_grids == explanation.layer_grids
    assert_same(loaded[1].layer_map(2), explanation.layer_map(2)[1:])
    assert explanation.save(tmp_path / "strip.png", layers=True).stat().st_size > 0


def test_cells_repeated_on_a_finer_grid_come_back() -> None:
    for coarse in range(1, 9):
        cells = torch.arange(float(2 * coarse * 3)).reshape(2, coarse, 3)
        for fine in range(coarse, 20):
            assert torch.equal(pick_cells(repeat_cells(cells, (fine, 7)), (coarse, 3)), cells)
    assert repeat_cells(torch.tensor([[1.0, 2.0]]), (2, 4)).tolist() == [[1, 1, 2, 2], [1, 1, 2, 2]]


def test_layers_that_were_not_asked_for_are_refused_in_words() -> None:
    explanation = cv.explain(cv.wrap(resnet()), images(), "gradcam", target=TARGETS)
    assert explanation.layer_names == ()
    with pytest.raises(BadInput, match=r"computed without its layers; ask for them with .*layers=True"):
        explanation.layer_map(0)


def test_cam_is_the_classifier_row_on_the_last_map() -> None:
    """The paper's own formula, and what it promises: maps and bias add up to the score."""
    module, pixels = resnet(), images()
    a, _ = hooked(module, "layer4", pixels)
    row = module.fc.weight.detach()[TARGETS]  # [B, C]
    expected = torch.einsum("bchw,bc->bhw", a, row) / (a.shape[2] * a.shape[3])
    explanation = cv.explain(cv.wrap(module), pixels, "cam", target=TARGETS)
    assert_same(explanation.maps, expected)
    scores = torch.stack([explanation.logits[b, c] for b, c in enumerate(TARGETS)])
    assert_same(explanation.maps.sum((1, 2)) + module.fc.bias.detach()[TARGETS], scores)


def test_gradcam_is_cam_on_mean_pooling_but_for_its_relu_and_scale() -> None:
    """Where the head is a mean and a linear layer, every position has the same gradient."""
    model = cv.wrap(resnet())
    cam = cv.explain(model, images(), "cam", target=TARGETS).maps
    assert_same(cv.explain(model, images(), "gradcam(relu=false)", target=TARGETS).maps, cam)
    assert_same(cv.explain(model, images(), "hirescam(relu=false)", target=TARGETS).maps, cam)


def test_cam_reads_the_norm_of_a_convnext_head_as_fixed() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 12, 16, 24), num_classes=CLASSES)
    module = module.double().eval()
    with torch.no_grad():
        module.head.norm.weight.uniform_(0.5, 1.5)
        module.head.fc.weight.normal_()
    a, _ = hooked(module, "stages.3", images())
    pooled = a.mean((2, 3))
    sigma = (pooled.var(1, correction=0) + module.head.norm.eps).sqrt()[:, None, None, None]
    normed = module.head.norm.weight.detach()[:, None, None] * (a - a.mean(1, keepdim=True)) / sigma
    expected = torch.einsum("bchw,bc->bhw", normed, module.head.fc.weight.detach()[TARGETS]) / (a.shape[2] * a.shape[3])
    assert_same(cv.explain(cv.wrap(module), images(), "cam", target=TARGETS).maps, expected)


@pytest.mark.parametrize("name", ["vanilla", "vanilla-l2", "ixg"])
def test_token_gradients_are_those_of_the_first_stage(name: str) -> None:
    a, g = hooked(resnet(), "layer1", images())
    expected = {"vanilla": g.sum(1), "vanilla-l2": g.norm(dim=1), "ixg": (a * g).sum(1)}[name]
    assert_same(cv.explain(cv.wrap(resnet()), images(), name, target=TARGETS).maps, expected)


# Any CNN

ZOO: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "torchvision-resnet50": (
        lambda: torchvision.models.resnet50(width_per_group=8, num_classes=CLASSES),
        ["layer1", "layer2", "layer3", "layer4"],
    ),
    "torchvision-densenet": (
        lambda: torchvision.models.DenseNet(4, (2, 2, 2, 2), 8, num_classes=CLASSES),
        ["features.denseblock1", "features.denseblock2", "features.denseblock3", "features.norm5"],
    ),
    "torchvision-efficientnet": (
        lambda: torchvision.models.efficientnet_b0(num_classes=CLASSES),
        ["features.1", "features.2", "features.3", "features.5", "features.8"],
    ),
    "torchvision-squeezenet": (
        lambda: torchvision.models.squeezenet1_1(num_classes=CLASSES),
        ["features.4", "features.7", "features.12"],
    ),
    "torchvision-mobilenet": (
        lambda: torchvision.models.mobilenet_v3_small(num_classes=CLASSES),
        ["features.0", "features.1", "features.3", "features.8", "features.12"],
    ),
    "timm-resnet": (lambda: timm.create_model("resnet10t"), ["layer1", "layer2", "layer3", "layer4"]),
    "timm-convnext": (
        lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1)),
        ["stages.0", "stages.1", "stages.2", "stages.3"],
    ),
    "timm-regnet": (lambda: timm.create_model("regnetx_002"), ["stem", "s1", "s2", "s3", "s4"]),
    "home": (cnn, ["2", "4"]),
}


@functools.cache
def build_cnn(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return seasoned(ZOO[kind][0]())


@pytest.mark.parametrize("kind", ZOO)
def test_any_cnn_has_stages(kind: str) -> None:
    module, pixels = build_cnn(kind), images((96, 128)).float()
    model = cv.wrap(module)
    stages = model_structure(model, pixels).stages
    assert [stage.name for stage in stages] == ZOO[kind][1]
    before = fingerprint(module)
    tr = cv.trace(model, pixels, target=TARGETS)
    assert [layer.name for layer in tr.layers] == ZOO[kind][1]
    for layer, stage in zip(tr.layers, stages, strict=True):
        assert layer.x.shape == layer.dx.shape
        assert layer.x.shape[1] == stage.grid[0] * stage.grid[1]
        assert layer.grid == stage.grid
        with pytest.raises(NotApplicable, match=f"feature map of '{stage.name}'.*gradient method"):
            _ = layer.A
    comparison = cv.compare(
        model, pixels, [f"{m}(relu=false)" if METHODS[m].relu else m for m in ACTIVATIONS], target=TARGETS
    )
    for name, explanation in comparison.items():
        first = name.startswith(("ixg", "vanilla", "decompx", "cp-lrp", "attnlrp"))
        assert explanation.maps.shape == (2, *stages[0 if first else -1].grid), name
        assert explanation.maps.isfinite().all(), name
        # ConvNeXt reads its stages through LayerNorm, so its gradients add up to zero as a ViT's do.
        assert explanation.maps.flatten(1).std(1).min() > 0 or (kind, name) == ("timm-convnext", "vanilla")
    assert differences(before, fingerprint(module)) == []


def test_an_activation_in_place_after_the_stage_does_not_corrupt_it() -> None:
    """DenseNet's last norm is overwritten by its ReLU: value and gradient are both those after it."""
    module, pixels = copy.deepcopy(build_cnn("torchvision-densenet")).double(), images((64, 64))
    layer = cv.trace(cv.wrap(module), pixels, target=TARGETS).layers[-1]
    features = module.features(pixels).detach().relu().requires_grad_()
    scores = module.classifier(features.mean((2, 3)))
    (g,) = torch.autograd.grad(sum(scores[b, c] for b, c in enumerate(TARGETS)), features)
    assert (layer.x >= 0).all()
    assert_same(layer.x, features.detach().flatten(2).transpose(1, 2))
    assert_same(layer.dx, g.flatten(2).transpose(1, 2))


def test_a_shared_activation_is_found_by_its_call() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(inplace=True)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.b(self.act(self.a(x)))).mean((2, 3)))

    module, pixels = strange(Shared).double(), images((32, 32))
    actual = [(stage.name, stage.call, stage.grid) for stage in model_structure(cv.wrap(module), pixels).stages]
    assert actual == [("act", 0, (16, 16)), ("act", 1, (8, 8))]  # 8 channels on 8 × 8 cells are channels first
    x = cv.trace(cv.wrap(module), pixels, target=TARGETS).layers[1].x
    expected = module.act(module.b(module.act(module.a(pixels)))).flatten(2).transpose(1, 2)
    assert_same(x, expected.detach())


def test_channels_last_memory_changes_nothing() -> None:
    module, pixels = copy.deepcopy(build_cnn("timm-resnet")).double(), images((64, 64))
    usual = cv.explain(cv.wrap(module), pixels, "gradcam(relu=false)", target=TARGETS).maps
    other = cv.wrap(copy.deepcopy(module).to(memory_format=torch.channels_last))
    maps = cv.explain(other, pixels.to(memory_format=torch.channels_last), "gradcam(relu=false)", target=TARGETS).maps
    assert_same(maps, usual)


# What is refused, and what else works


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_methods_refuse_in_words(name: str) -> None:
    with pytest.raises(NotApplicable, match=r"no attention .*'layer.'.*Use .*gradcam"):
        cv.explain(cv.wrap(resnet()), images(), name, target=TARGETS)


def test_stages_of_different_grids_keep_their_totals_when_added_up() -> None:
    model = cv.wrap(copy.deepcopy(resnet()).double())
    pixels = images().double()
    total = cv.explain(model, pixels, "ixg+plus", target=TARGETS).maps
    stages = [cv.explain(model, pixels, f"ixg+layer:{index}", target=TARGETS).maps for index in range(4)]
    assert total.shape == stages[0].shape  # the finest comes first
    expected = torch.stack([stage.sum((-2, -1)) for stage in stages]).sum(0)
    magnitude = float(sum(stage.abs().sum((-2, -1)).max() for stage in stages))
    assert_same(total.sum((-2, -1)), expected, magnitude=magnitude)


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(BadInput, match="model with 4 layers"):
        cv.explain(cv.wrap(resnet()), images(), "gradcam+layer:9", target=TARGETS)


def test_pixel_methods_have_the_size_of_the_image() -> None:
    model = cv.wrap(resnet())
    for name in ("saliency", "smoothgrad(n=2)", "integrated-gradients(steps=2)"):
        assert cv.explain(model, images(), name, target=TARGETS).maps.shape == (2, 64, 96)
    for name in ("random", "center", "ixg(level=pixel)"):
        assert cv.explain(model, images(), name, target=TARGETS).maps.shape == (2, 2, 3)


@pytest.mark.slow
def test_integrated_gradients_on_the_first_feature_map_are_complete() -> None:
    """path=token goes from an empty first feature map to the real one; many steps.

    2 % is the error of the midpoint rule with 400 steps on a path that crosses the kinks of ReLUs; computed in float64,
    where rounding is nothing against it.
    """
    module, pixels = resnet(), images((32, 32))
    explanation = cv.explain(
        cv.wrap(module), pixels, "integrated-gradients(path=token,steps=400)", target=TARGETS, layers=False
    )
    assert "completeness" in explanation.notes[0]
    empty = module.fc(
        module.avgpool(module.layer4(module.layer3(module.layer2(torch.zeros(1, 64, 8, 8).double())))).flatten(1)
    )
    rise = torch.stack([explanation.logits[b, c] - empty[0, c].detach() for b, c in enumerate(TARGETS)])
    torch.testing.assert_close(explanation.maps.sum((1, 2)), rise, rtol=0.02, atol=0.02 * float(rise.abs().max()))
