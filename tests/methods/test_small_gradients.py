"""Products with a residual keep a signal that is far below the start row's 1/N, and constant maps are flagged."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import ClairWarning
from clairvit.methods.aggregation import Product, Single, Suffixes, _times_power
from clairvit.methods.collect import varies
from clairvit.methods.layer_view import LayerView
from clairvit.methods.registry import METHODS, method
from clairvit.models.model import Layout
from helpers.rounding import assert_same, growth
from helpers.tiny_models import double

SCALE = 1e-6  # of the scores, and so of every gradient
PRODUCTS = (
    *("genatt", "grad-rollout", "genatt+rollout", "transatt", "lrp-rollout", "gmar-l1", "rollout"),
    *("genatt(plus_mode=subnetwork)+plus", "grad-rollout(preset=jacobgil)", "attcam+rollout"),
)


class Scaled(nn.Module):
    """Scores, and so gradients, a million times smaller."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, pixels: Tensor) -> Tensor:
        return self.module(pixels) * SCALE


def mean_pooled() -> nn.Module:
    return VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=3,
        num_heads=3,
        num_classes=5,
        global_pool="avg",
        class_token=False,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit, mean": mean_pooled,
    "beit v2": lambda: timm.create_model(
        "beitv2_base_patch16_224", img_size=64, embed_dim=48, depth=3, num_heads=3, num_classes=5
    ),
    "naflex": lambda: timm.create_model(
        "naflexvit_base_patch16_gap", embed_dim=48, depth=3, num_heads=3, num_classes=5
    ),
    "class token": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=64, embed_dim=48, depth=3, num_heads=3, num_classes=5
    ),
    "attention pool": lambda: timm.create_model(
        "vit_base_patch16_siglip_224", img_size=64, embed_dim=48, depth=3, num_heads=3, num_classes=5
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_float32_shows_what_float64_shows(kind: str) -> None:
    torch.manual_seed(0)
    module = Scaled(MODELS[kind]().eval())
    side = 32 if kind == "vit, mean" else 64
    pixels = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClairWarning)
        single = cv.compare(cv.wrap(module.float()), pixels.float(), PRODUCTS, target=1)
        double = cv.compare(cv.wrap(module.double()), pixels, PRODUCTS, target=1)
    for name, exact in double.items():
        for a, b in zip(single[name].maps.double().flatten(1), exact.maps.flatten(1), strict=True):
            assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.999, name


def matrices(layers: int, tokens: int, scale: float) -> Tensor:
    """[layers, 2, N, N] in float64, not negative."""
    drawn = torch.rand(layers, 2, tokens, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return drawn * scale


def multiplied(over: Product, layers: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """The product multiplied out, and what its identities alone pass on, [2, N] each."""
    identity = torch.eye(layers.shape[-1], dtype=torch.float64)
    row, passed = read.expand(2, -1), read.expand(2, -1)
    for matrix in layers:
        whole = matrix + over.residual * identity
        sums = whole.sum(-1) if over.normalise != "none" else torch.ones_like(row)
        if over.normalise == "rows":
            whole = whole / sums[..., None]
        elif over.normalise == "columns":
            whole = whole / sums[:, None]
        row = (row[:, None] @ whole)[:, 0]
        passed = passed * over.residual / sums
    return row, passed


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize("pooling", ["token", "avg", "mixed", "map"])
@pytest.mark.parametrize(
    "over",
    [
        Product(),
        Product(normalise="rows"),
        Product(normalise="columns"),
        Product(residual=2.5, normalise="rows"),
        Product(residual=0.5),
        Product(residual=0.0),
        Product(residual=0.0, normalise="rows"),
    ],
)
def test_a_product_is_the_product_less_what_all_patches_share(over: Product, pooling: str, scale: float) -> None:
    layout = Layout((2, 3), 1, "avg" if pooling == "map" else pooling)
    layers = matrices(4, layout.tokens, scale)
    read = torch.zeros(1, layout.tokens, dtype=torch.float64)
    for index, weight in layout.read:
        read[0, index] = weight
    if pooling == "map":
        read = torch.rand(1, layout.tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    row, passed = multiplied(over, layers, read)
    shared = passed[:, 1:].amin(1, keepdim=True) if pooling != "map" else torch.zeros(2, 1)
    state = over.start_row(read)
    for matrix in layers:
        state = over.step(state, matrix, read)
    assert_same(over.finish(state, 4, layout)[:, 1:], (row - shared)[:, 1:], magnitude=max(1.0, float(row.max())))
    together = over.steps(over.start_row(read), layers, read)
    assert_same(over.finish(together, 4, layout), over.finish(state, 4, layout))


@pytest.mark.parametrize("pooling", ["token", "avg"])
@pytest.mark.parametrize("normalise", ["none", "rows", "columns"])
def test_a_sum_of_rollouts_is_the_sum_of_their_maps(pooling: str, normalise: str) -> None:
    layout = Layout((2, 3), 1, pooling)
    layers = matrices(4, layout.tokens, 0.1)  # the last one first
    read = torch.zeros(1, layout.tokens, dtype=torch.float64)
    for index, weight in layout.read:
        read[0, index] = weight
    product, suffixes = Product(normalise=normalise), Suffixes(normalise=normalise)
    total = sum(
        product.finish(product.steps(product.start_row(read), layers[:count], read), 4, layout) for count in range(1, 5)
    )
    assert_same(suffixes.finish(suffixes.steps(suffixes.start_row(read), layers, read), 4, layout), total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_map_and_a_faint_one_differ(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    base = torch.full((16,), 0.0625, dtype=dtype)
    faint = base.clone()
    faint[3] += 100 * eps * 0.0625
    rounded = base.clone()
    rounded[3] += 2 * eps * 0.0625
    maps = torch.stack([base, rounded, faint, torch.zeros(16, dtype=dtype)])
    assert varies(maps).tolist() == [False, False, True, False]
    assert varies(base[:1])  # one cell


def test_a_constant_map_is_flagged() -> None:
    def even(layer: LayerView) -> Tensor:
        return torch.full_like(layer.x[..., 0], 0.25)

    with METHODS.restored():
        method("even", family="gradient", paper="a test", output="tokens", aggregation=Single(0))(even)
        torch.manual_seed(0)
        model, pixels = cv.wrap(mean_pooled().eval()), torch.randn(1, 3, 32, 32)
        with pytest.warns(ClairWarning, match="even: the map of image 1 is the same everywhere"):
            explanation = cv.explain(model, pixels, "even", target=1)
    assert any("is the same everywhere, up to rounding" in note for note in explanation.notes)


# Products of nothing but gradients (grad-rollout's preset `cmi`, globenc's rollout): too small for the format


def products_of(over: Product | Suffixes, layers: Tensor, read: Tensor, layout: Layout) -> Tensor:
    """Return the map of layers that are read one by one, by steps of several, and as vector × matrix; all are equal."""
    single, several, vector = (over.start_row(read) for _ in range(3))
    for layer in layers:
        single = over.step(single, layer, read)
        left = over.left(vector, read, layer.sum(-1))
        vector = over.advance(vector, (left[:, None] @ layer)[:, 0], layer.sum(-1))
    several = over.steps(several, layers, read)
    maps = [over.finish(row, len(layers), layout) for row in (single, several, vector)]
    assert_same(maps[1], maps[0])
    assert_same(maps[2], maps[0])
    return maps[0]


@pytest.mark.parametrize("power", [-100, -40, -20, 20])
def test_a_product_beyond_float32_is_a_multiple_of_itself(power: int) -> None:
    """Twelve layers of 2^-100 give 2^-1200, which not even float64 holds."""
    layout = Layout((2, 3), 1, "token")
    read = torch.zeros(1, 7)
    read[0, 0] = 1
    unit, over = matrices(12, 7, 1.0).float(), Product(residual=0.0)
    maps, reference = (products_of(over, layers, read, layout) for layers in (unit * 2.0**power, unit))
    assert maps.isfinite().all()
    assert (maps != 0).all()
    assert torch.equal(maps / maps.amax(1, keepdim=True), reference / reference.amax(1, keepdim=True))


@pytest.mark.parametrize("scale", [1e-12, 1.0])
def test_a_sum_of_plain_products_is_the_sum(scale: float) -> None:
    layout = Layout((2, 3), 1, "token")
    read = torch.zeros(1, 7, dtype=torch.float64)
    read[0, 0] = 1
    layers = matrices(5, 7, scale)
    row, total = read.expand(2, -1), torch.zeros(2, 7, dtype=torch.float64)
    for layer in layers:
        row = torch.bmm(row[:, None], layer)[:, 0]
        total = total + row
    assert_same(products_of(Suffixes(residual=0.0), layers, read, layout), total)


def test_a_product_that_the_format_holds_is_the_plain_one_bit_by_bit() -> None:
    layout = Layout((2, 3), 1, "avg")
    read = torch.zeros(1, 7)
    read[0, 1:] = 1 / 6
    layers = matrices(9, 7, 1e-3).float()
    row = read.expand(2, -1)
    for layer in layers:
        row = torch.bmm(row[:, None], layer)[:, 0]
    product = Product(residual=0.0)
    assert torch.equal(product.finish(product.steps(product.start_row(read), layers, read), 9, layout), row)


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-252, 253)[:, None]
    for dtype in (torch.float32, torch.float64):
        powers = _times_power(torch.ones(len(exponents), 1, dtype=dtype), exponents.to(dtype))
        assert powers.flatten().tolist() == [
            float(torch.tensor(math.ldexp(1.0, int(e)), dtype=dtype)) for e in exponents.flatten()
        ]


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    layout = Layout((2, 3), 1, "token")
    read = torch.zeros(1, 7)
    read[0, 0] = 1
    product = Product(residual=0.0)
    for value, expected in ((0.0, 0.0), (math.nan, math.nan), (math.inf, math.nan)):  # 0 · ∞, as in the plain product
        row = product.steps(product.start_row(read), torch.full((2, 1, 7, 7), value), read)
        assert_same(product.finish(row, 2, layout), torch.full((1, 7), expected))


def test_cmi_gradient_rollout_of_faint_gradients_has_a_map() -> None:
    """The CMI report's product of gradients: 1e-50 in float64, where float32 gave zeros and a head was blamed."""
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=2, num_classes=5).double()
    exact = cv.explain(cv.wrap(module, size=32), images, "grad-rollout(preset=cmi)", target=3).maps
    faint = cv.wrap(Scaled(Scaled(module)).float(), size=32)  # every gradient 1e-12 times as large
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClairWarning)
        maps = cv.explain(faint, images.float(), "grad-rollout(preset=cmi)", target=3).maps
    relative, expected = (m / m.amax((1, 2), keepdim=True) for m in (maps.double(), exact))
    assert_same(relative, expected, dtype=torch.float32, growth=growth(depth=4 * 27, width=96))


def test_a_zero_map_of_gradients_that_arrive_does_not_blame_the_head() -> None:
    model, images = double("timm-vit", 1)
    with METHODS.restored():

        @cv.method("nothing-left", output="matrix", aggregation=Product(residual=0.0))
        def nothing_left(layer: LayerView) -> Tensor:
            return layer.A.mean(1) * 0

        with pytest.warns(ClairWarning, match="gradients reach the tokens, but its formula keeps nothing of them"):
            cv.explain(model, images, "nothing-left", target=3)
