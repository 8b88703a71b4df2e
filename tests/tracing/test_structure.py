"""Models that are no plain ViT: an error says which methods do not fit, why, and what to type instead. Others work."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import clairvit as cv
from clairvit.errors import BadInput, CaptureError, NotApplicable
from clairvit.methods.registry import list_methods
from clairvit.models.scores import extract_scores
from clairvit.tracing.structure import model_structure
from helpers.custom_vits import (
    PATCH,
    WIDTH,
    Block,
    BrokenInPlaceBlock,
    HomeMade,
    MatmulAttention,
    MeanPool,
    SortedByWindows,
)
from helpers.rounding import assert_same
from helpers.tiny_models import CLASSES, STRANGE, build, cnn, double, pixels, strange, wrapped

TARGET = 3
ATTENTION = [m.name for m in list_methods() if m.family in ("attention", "gradient × attention")]


@functools.cache
def model_of(kind: str, dtype: torch.dtype = torch.float32) -> cv.Model:
    return cv.wrap(strange(STRANGE[kind].make).to(dtype), name=kind)


def image_of(kind: str) -> Tensor:
    return torch.randn(2, 3, *STRANGE[kind].size, generator=torch.Generator().manual_seed(1))


# Windows, stages and channels


@pytest.mark.parametrize("method", ATTENTION)
@pytest.mark.parametrize("kind", STRANGE)
def test_attention_methods_refuse(kind: str, method: str) -> None:
    """One clear sentence, and the names it offers do work (next test)."""
    with pytest.raises(NotApplicable) as refusal:
        cv.explain(model_of(kind), image_of(kind), method, target=TARGET)
    message = str(refusal.value)
    assert f"This model attends {STRANGE[kind].attends} (" in message
    assert "not between all image tokens, which attention methods need" in message
    assert "Use a gradient method: ixg, saliency or gradcam." in message


@pytest.mark.parametrize("kind", STRANGE)
def test_gradient_methods_work(kind: str) -> None:
    facts = STRANGE[kind]
    maps_by_method = {
        method: cv.explain(model_of(kind), image_of(kind), method, target=TARGET).maps
        for method in (
            "ixg",
            "saliency",
            "gradcam(relu=false)",
            "decompx",
            "attnlrp",
            "ixg+last",
            "ixg+layer:1",
            "random",
            "center",
        )
    }
    grids = {method: tuple(maps.shape[1:]) for method, maps in maps_by_method.items()}
    assert grids == {
        "ixg": facts.first,
        "saliency": facts.first,
        "gradcam(relu=false)": facts.last,
        "decompx": facts.first,
        "attnlrp": facts.first,
        "ixg+last": facts.last,
        "ixg+layer:1": facts.first,
        "random": facts.first,
        "center": facts.first,
    }
    for maps in maps_by_method.values():
        assert len(maps) == 2
        assert maps.isfinite().all()
        assert maps.flatten(1).std(1).min() > 0


@pytest.mark.parametrize("kind", STRANGE)
def test_ixg_is_that_of_a_hook_on_the_first_block(kind: str) -> None:
    """The numbers lie where they belong: a feature map [B, h, w, d] or [B, d, h, w] is read the right way round."""
    expected_structure, module = STRANGE[kind], strange(STRANGE[kind].make).double().requires_grad_(False)
    image = image_of(kind).double()
    seen: list[Tensor] = []
    first = next(part for part in module.modules() if type(part).__name__ == expected_structure.blocks)
    first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    score = extract_scores(module(image.clone().requires_grad_()))[:, TARGET].sum()
    (x,) = seen
    product = (x * torch.autograd.grad(score, x)[0]).detach()
    if x.ndim == 4 and x.shape[1:3] != expected_structure.first:
        product = product.movedim(1, -1)
    expected = product.sum(-1).reshape(2, *expected_structure.first)
    model = cv.wrap(strange(expected_structure.make).double(), size=expected_structure.size)
    assert_same(cv.explain(model, image, "ixg", target=TARGET).maps, expected, magnitude=float(product.abs().max()))


@pytest.mark.parametrize("kind", ["swin", "swin-v2", "hf-swin", "maxvit"])
def test_sums_over_stages_are_sums_of_single_layers_on_the_finest_grid(kind: str) -> None:
    """Each cell of a coarser layer is spread evenly over the finest cells: np.kron of a map, where sizes divide."""
    model, image = model_of(kind, torch.float64), image_of(kind).double()
    explanation = cv.explain(model, image, "cat", target=TARGET)
    count = len(cv.trace(model, image, target=TARGET).layers)
    layer_maps = [cv.explain(model, image, f"cat+layer:{index}", target=TARGET).maps for index in range(count)]
    rows, cols = explanation.maps.shape[-2:]
    assert (rows, cols) == max(tuple(layer_map.shape[-2:]) for layer_map in layer_maps)
    expected = torch.zeros_like(explanation.maps)
    for layer_map in layer_maps:
        down, right = rows // layer_map.shape[-2], cols // layer_map.shape[-1]
        assert (layer_map.shape[-2] * down, layer_map.shape[-1] * right) == (rows, cols)
        block = torch.ones(down, right, dtype=torch.float64)
        expected += torch.stack([torch.kron(cells, block) for cells in layer_map]) / block.numel()
    magnitude = float(torch.stack([layer_map.abs().max() for layer_map in layer_maps]).sum())
    assert_same(explanation.maps, expected, magnitude=magnitude)
    assert any("added on the finest grid" in note for note in explanation.notes)


@pytest.mark.parametrize("kind", ["xcit", "xcit-nonsquare"])
def test_sums_over_blocks_of_channel_attention_work(kind: str) -> None:
    """XCiT keeps its tokens, so summing over its layers makes sense."""
    assert cv.explain(model_of(kind), image_of(kind), "cat", target=TARGET).maps.shape[1:] == STRANGE[kind].first


@pytest.mark.parametrize("kind", STRANGE)
def test_compare_leaves_out_what_does_not_fit_and_says_why(kind: str) -> None:
    comparison = cv.compare(model_of(kind), image_of(kind), ["ixg", "rollout", "genatt"], target=TARGET, skip=True)
    assert list(comparison) == ["ixg"]
    assert set(comparison.skipped) == {"rollout", "genatt"}
    assert all(STRANGE[kind].attends in why for why in comparison.skipped.values())


@pytest.mark.parametrize("kind", STRANGE)
def test_layers_of_a_trace_refuse_too(kind: str) -> None:
    tr = cv.trace(model_of(kind), image_of(kind), target=TARGET)
    for name in ("A", "G", "S"):
        with pytest.raises(NotApplicable, match="not between all image tokens"):
            getattr(tr.layers[0], name)
    assert tr.layers[0].x.shape == tr.layers[0].dx.shape


@pytest.mark.parametrize("kind", STRANGE)
def test_every_method_works_or_refuses(kind: str) -> None:
    """Nothing else: no traceback of torch, no map of one cell, no row for another image."""
    quick = [m.name for m in list_methods() if m.cost.forwards <= 1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is zero everywhere")  # a ReLU may leave nothing
        comparison = cv.compare(model_of(kind), image_of(kind), quick, target=TARGET, skip=True)
    assert {"ixg", "saliency", "gradcam", "random"} <= set(comparison)
    assert {"rollout", "genatt", "legrad"} <= set(comparison.skipped)
    for method, explanation in comparison.items():
        assert tuple(explanation.maps.shape) in {(2, *STRANGE[kind].first), (2, *STRANGE[kind].last)}, method
    assert all("Use " in why for why in comparison.skipped.values())


def test_tokens_in_another_order_make_no_map() -> None:
    """Their map would look fine and be wrong; the pixels tell where a token really is."""
    size = 64
    image = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    model = cv.wrap(strange(SortedByWindows))
    for method in ("raw-attention", "genatt", "ixg", "legrad", "gradcam"):
        with pytest.raises(NotApplicable, match=r"do not lie row by row on the image.* pixel gradients: saliency"):
            cv.explain(model, image, method, target=TARGET)
    assert cv.explain(model, image, "saliency", target=TARGET).maps.shape == (2, size // PATCH, size // PATCH)


@pytest.mark.parametrize(("levels", "message"), [(2, "do not form a grid on the image"), (3, "do not lie row by row")])
def test_feature_maps_of_windows_are_no_grid(levels: int, message: str) -> None:
    """NesT: [B, windows, N, d] looks like [B, h, w, d]; with 3 levels there are 16 windows of 16, as in a real grid."""
    from timm.models.nest import Nest

    small = {"embed_dims": (12,) * levels, "num_heads": (2,) * levels, "depths": (2,) * levels}
    model = cv.wrap(strange(lambda: Nest(img_size=64, num_levels=levels, num_classes=CLASSES, **small)))
    image = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(NotApplicable, match=message):
        cv.explain(model, image, "ixg", target=TARGET)


def test_gradients_of_one_image_through_batch_norm() -> None:
    """Torch's own gradient is wrong here for a batch of one (see capture.py), so the reference is a batch of two."""
    model, image = double("home-batchnorm-stem")
    both = cv.trace(model, image, target=TARGET).dpixels
    alone = cv.trace(model, image[:1], target=TARGET).dpixels
    assert_same(alone, both[:1])


# No attention seen at all


class Outside(torch.autograd.Function):
    """An attention kernel that torch cannot look into, as xformers' or flash-attn's."""

    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = np.exp(q.numpy() @ k.numpy().swapaxes(-1, -2) * q.shape[-1] ** -0.5)
        return torch.from_numpy(scores / scores.sum(-1, keepdims=True) @ v.numpy())

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gradient, gradient, gradient


class OutsideAttention(MatmulAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Outside.apply(q, k, v)


@pytest.mark.parametrize("method", [m.name for m in list_methods() if m.aggregation is not None])
def test_no_attention_call_is_a_loud_error(method: str) -> None:
    model = cv.wrap(strange(lambda: HomeMade(lambda: Block(OutsideAttention))), name="my model")
    with pytest.raises(NotApplicable) as refusal:
        cv.explain(model, pixels("timm-vit"), method, target=TARGET)
    message = str(refusal.value)
    assert message.startswith(f"my model: no attention call was seen, and '{method}' needs")
    assert "xformers" in message
    assert "flash-attn" in message
    assert "Use saliency" in message


def test_saliency_of_a_cnn_has_the_size_of_the_image() -> None:
    maps = cv.explain(cv.wrap(strange(cnn)), pixels("timm-vit"), "saliency", target=TARGET).maps
    assert maps.shape == (2, 32, 32)
    assert maps.std() > 0


def test_a_layout_gives_a_cnn_a_grid() -> None:
    model = cv.wrap(strange(cnn), layout=cv.Layout((4, 4), 0, "avg"))
    for method in ("saliency", "random", "center"):
        assert cv.explain(model, pixels("timm-vit"), method, target=TARGET).maps.shape == (2, 4, 4)


# The user knows better


def test_layout_given_is_layout_used() -> None:
    model, image = double("timm-vit")
    usual = cv.explain(model, image, "genatt", target=TARGET).maps
    with_layout = cv.wrap(build("timm-vit").double(), layout=cv.Layout((2, 8), 1, "token"))
    assert_same(cv.explain(with_layout, image, "genatt", target=TARGET).maps, usual.reshape(2, 2, 8))
    assert cv.trace(with_layout, image, target=TARGET).layout == cv.Layout((2, 8), 1, "token", ((0, 1.0),))


def test_layout_given_says_which_rows_are_read() -> None:
    model, image = double("timm-vit")
    A = cv.trace(model, image, target=TARGET).layers[-1].A.mean(1)
    for layout, row in [
        (cv.Layout((4, 4), 1, "avg"), A[:, 1:].mean(1)),
        (cv.Layout((4, 4), 1, "token", ((3, 0.5), (4, 0.5))), (A[:, 3] + A[:, 4]) / 2),
        (cv.Layout((4, 4), 1, "mixed"), A[:, 0] / 2 + A[:, 1:].mean(1) / 2),
    ]:
        maps = cv.explain(cv.wrap(build("timm-vit").double(), layout=layout), image, "raw-attention").maps
        assert_same(maps, row[:, 1:].reshape(2, 4, 4))


@pytest.mark.parametrize(
    ("pooling", "rows"), [("token", [0]), ("map", [0]), ("distilled", [0, 1]), ("avg", [2, 3, 4, 5])]
)
def test_layout_knows_the_usual_rows(pooling: str, rows: list[int]) -> None:
    assert dict(cv.Layout((2, 2), 2, pooling).read) == {row: 1 / len(rows) for row in rows}


@pytest.mark.parametrize("layout", [cv.Layout((4, 4), 0, "avg"), cv.Layout((5, 5), 1, "token")], ids=["16", "26"])
@pytest.mark.parametrize("method", ["raw-attention", "genatt", "ixg", "saliency"])
def test_layout_that_does_not_fit_is_refused(layout: cv.Layout, method: str) -> None:
    model = cv.wrap(build("timm-vit"), layout=layout)
    with pytest.raises(BadInput, match=rf"{layout.tokens} together.* is between 17; .*Leave layout out"):
        cv.explain(model, pixels("timm-vit"), method, target=TARGET)


def test_unknown_grid_asks_for_a_layout() -> None:
    """Nobody could guess the grid of 13 tokens of 24 × 40 pixels; with a layout, everything works."""

    class Odd(MeanPool):
        def tokens(self, image: Tensor) -> Tensor:
            return super().tokens(image)[:, :13]

    image = pixels("home-mean-pool")
    module = strange(Odd)
    for method in ("raw-attention", "ixg", "random"):
        with pytest.raises(NotApplicable, match=r"layout=cv\.Layout\("):
            cv.explain(cv.wrap(module), image, method, target=TARGET)
    with_layout = cv.wrap(module, layout=cv.Layout((1, 13), 0, "avg"))
    for method in ("raw-attention", "ixg", "legrad", "random"):
        assert cv.explain(with_layout, image, method, target=TARGET).maps.shape == (2, 1, 13)


def test_structure_is_found_once_per_image_size() -> None:
    model = wrapped("timm-vit")
    assert model_structure(model, pixels("timm-vit")) is model_structure(model, pixels("timm-vit", batch=1, seed=5))


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (48, 16)])
def test_one_model_many_image_sizes(size: tuple[int, int]) -> None:
    """A model that takes any size gets the grid of each image."""
    import timm

    module = strange(
        lambda: timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=PATCH,
            embed_dim=WIDTH,
            depth=2,
            num_heads=3,
            num_classes=CLASSES,
            dynamic_img_size=True,
        )
    )
    model = cv.wrap(module)
    for rows, cols in ((32, 32), size):
        maps = cv.explain(model, torch.randn(1, 3, rows, cols), "genatt", target=TARGET).maps
        assert maps.shape == (1, rows // PATCH, cols // PATCH)


# Ways back that are blocked


class Checkpointed(HomeMade):
    reentrant = True

    def __init__(self) -> None:
        super().__init__(lambda: Block(MatmulAttention))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("method", ["rollout", "ixg", "genatt", "legrad"])
def test_checkpointing_in_user_code_is_named(method: str, reentrant: bool) -> None:
    module = strange(Checkpointed)
    module.reentrant = reentrant
    with pytest.raises(CaptureError, match=r"[Ss]witch off gradient checkpointing") as refusal:
        cv.explain(cv.wrap(module), pixels("timm-vit"), method, target=TARGET)
    assert "torch.utils.checkpoint" in str(refusal.value)


def test_no_grad_inside_the_model_is_named() -> None:
    class Frozen(HomeMade):
        def through(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().through(x)

    with pytest.raises(NotApplicable, match=r"under torch\.no_grad\(\) from 'blocks\.0\.norm' \(LayerNorm\) on"):
        cv.explain(cv.wrap(strange(lambda: Frozen(lambda: Block(MatmulAttention)))), pixels("timm-vit"), "ixg")


def test_overwritten_tokens_are_named() -> None:
    module = strange(lambda: HomeMade(lambda: BrokenInPlaceBlock(MatmulAttention)))
    with pytest.raises(CaptureError, match=r"overwrites a tensor .* write x = x \+"):
        cv.explain(cv.wrap(module), pixels("timm-vit"), "ixg", target=TARGET)
    assert cv.explain(cv.wrap(module), pixels("timm-vit"), "rollout").maps.std() > 0  # needs no way back


def test_random_depth_is_named() -> None:
    """A model that takes another path the next time cannot be matched with what was found out about it."""

    class Moody(HomeMade):
        runs = 0

        def through(self, x: Tensor) -> Tensor:
            self.runs += 1
            for block in self.blocks[: 1 + self.runs % 2]:
                x = block(x)
            return x

    model = cv.wrap(strange(lambda: Moody(lambda: Block(MatmulAttention))))
    with pytest.raises(CaptureError, match=r"2 attention calls.*|1 attention calls.*") as refusal:
        cv.explain(model, pixels("timm-vit"), "ixg", target=TARGET)
    assert "expected the same path every time" in str(refusal.value)
