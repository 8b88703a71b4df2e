"""Layers too large for N×N tensors are read in tiles of rows, or as sums over entries: the same maps, less memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import clairvit as cv
from clairvit.methods.aggregation import Product, Single, Suffixes, Total, VectorAggregation
from clairvit.methods.explanation import Comparison
from clairvit.methods.flow import Flow
from clairvit.methods.layer_product import LayerProduct
from clairvit.methods.layer_view import LayerView, RunContext
from clairvit.methods.spec import resolve_method
from clairvit.tracing import attention_call as attention_calls
from clairvit.tracing import attention_reductions
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.recorders.head_replay import HeadReplay
from helpers.attention_calls import attention_call
from helpers.method_conditions import METHODS, fits
from helpers.operations import PeakBytes
from helpers.rounding import assert_same
from helpers.tiny_models import pixels, wrapped

TARGET = 3
ONE_TRACE = [name for name, method in METHODS.items() if not method.slow and method.family != "perturbation"]
PLAIN = [f"{name}(relu=false)" if METHODS[name].relu else name for name in ONE_TRACE]
OPTIONS = [
    *("genatt+skipplus", "genatt(fusion=max)", "rollout(preset=joita)", "rollout(plus_mode=subnetwork)+plus"),
    *("rollout(preset=jacobgil)", "grad-rollout(preset=jacobgil)", "grad-rollout(preset=cmi)"),
    *("gmar-l1(preset=joita,normalise=none)", "focusvit(head_weights=uniform)+rollout", "legrad+plus"),
]
# A class token, registers with mean pooling, an attention pool, scores with a bias, attention written out
KINDS = ["timm-vit", "timm-reg4-gap", "timm-siglip-map", "timm-beit", "timm-deit-distilled-explicit"]
ROWS = 5  # of a tile


def read_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every layer a large one, with tiles of `ROWS` query rows."""
    monkeypatch.setattr(attention_calls, "TILE_SHARE", 0.0)
    monkeypatch.setattr(attention_calls, "SMALLEST_TILE_BYTES", 1)
    monkeypatch.setattr(attention_reductions, "SMALLEST_TILE_ROWS", ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_large_layers_give_the_maps_of_small_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image, model = pixels(kind, dtype=torch.float64), wrapped(kind, torch.float64)
    names = [name for name in (*PLAIN, *OPTIONS) if fits(name, kind)]

    def maps() -> Comparison:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cv.compare(model, image, names, target=TARGET, layers=True, skip=True)

    small = maps()
    sums: list[int] = []
    from_sums = LayerProduct.from_sums
    monkeypatch.setattr(LayerProduct, "from_sums", lambda *args: sums.append(len(args[0])) or from_sums(*args))
    read_in_tiles(monkeypatch)
    in_tiles = maps()
    assert sums == []  # without a kernel, tiles are quicker
    monkeypatch.setattr(LayerView, "reads_sums", True)
    as_sums = maps()
    assert max(sums) >= 6
    for large in (in_tiles, as_sums):
        assert large.skipped.keys() == small.skipped.keys()
        for name, explanation in small.items():
            assert_same(large[name].maps, explanation.maps, dtype=torch.float64, label=name)
            if explanation.layers is not None:
                assert_same(large[name].layers, explanation.layers, dtype=torch.float64, label=name)


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")  # maps that are zero, as their methods declare
def test_no_tensor_is_as_large_as_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods of the plain table and `legrad` but for one that compares all entries: no A or G of all rows."""
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    queries: list[int] = []

    def watched(name: str) -> None:
        compute = getattr(AttentionCall, name)

        def counted(call: AttentionCall, *args: Any) -> Tensor:
            matrix: Tensor = compute(call, *args)
            queries.append(matrix.shape[-2])
            return matrix

        monkeypatch.setattr(AttentionCall, name, counted)

    names = [name for name in PLAIN if set(method_tables(name)) <= {"plain"}]
    assert {"rollout", "genatt", "gradsam", "gmar-l1", "legrad", "attcat", "tokentm", "focusvit"} <= set(names)
    cv.compare(model, image, names, target=TARGET, skip=True)  # the model's structure is looked at once
    for matrix in ("A", "G", "S"):
        watched(matrix)
    cv.compare(model, image, names, target=TARGET, skip=True)
    assert max(queries) == 17
    queries.clear()
    read_in_tiles(monkeypatch)
    cv.compare(model, image, names, target=TARGET, skip=True)
    assert max(queries) == ROWS
    cv.compare(model, image, [*names, "rollout(discard_ratio=0.5)"], target=TARGET, skip=True)
    assert max(queries) == 17


def peak_bytes(run: Callable[[], object]) -> int:
    run()  # the model's structure is looked at once
    with PeakBytes() as count:
        run()
    return count.peak


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")  # maps that are zero, as their methods declare
@pytest.mark.parametrize("side", [13, 21])  # N / (L·dh) = 0.9 and 2.3; ViT-L/14 at 518 pixels has 0.9
def test_peak_memory_of_all_plain_methods_is_that_of_a_plain_pass(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve blocks: what is kept per layer next to the graph, or made for all layers at once, goes beyond the bound.

    LeGrad took 1.15 when the head was run on the tokens of all layers at once, 1.11 where it reads the tokens
    themselves (`pool=model`) and the gradients of all layers were kept.
    """
    monkeypatch.setattr(attention_calls, "SMALLEST_TILE_BYTES", 1)
    module = timm.models.vision_transformer.VisionTransformer(
        img_size=4 * side, patch_size=4, embed_dim=32, depth=12, num_heads=2, num_classes=10
    )
    model = cv.wrap(module.eval().requires_grad_(False), size=4 * side)
    image = torch.randn(1, 3, 4 * side, 4 * side, generator=torch.Generator().manual_seed(0))

    def plain_pass() -> Tensor:
        leaf = image.clone().requires_grad_(True)
        return torch.autograd.grad(model.logits(leaf)[:, TARGET].sum(), leaf)[0]

    names = [name for name in PLAIN if set(method_tables(name)) <= {"plain"} and family(name) != "decomposition"]
    bound = 1.05 * peak_bytes(plain_pass)
    for methods in (names, ["legrad"], ["legrad(pool=model)"]):
        peak = peak_bytes(lambda methods=methods: cv.compare(model, image, methods, target=TARGET, skip=True))
        assert peak <= bound, methods


def test_the_head_is_run_on_parts_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeGrad where the tokens of all layers are too many for the head at once: the same maps."""
    model, image = wrapped("timm-deep", torch.float64), pixels("timm-deep", dtype=torch.float64)
    replay, sizes = HeadReplay.replay, []

    def watched(recorder: HeadReplay, tokens: Tensor, end: Tensor) -> Tensor:
        sizes.append(len(tokens) // len(image))
        return replay(recorder, tokens, end)

    monkeypatch.setattr(HeadReplay, "replay", watched)
    expected = cv.explain(model, image, "legrad", target=TARGET, layers=True)
    assert sizes == [5]
    monkeypatch.setattr(attention_calls, "SMALLEST_TILE_BYTES", 1)
    in_parts = cv.explain(model, image, "legrad", target=TARGET, layers=True)
    assert sizes == [5, 2, 2, 1]
    assert_same(in_parts.layers, expected.layers, dtype=torch.float64)
    assert_same(in_parts.maps, expected.maps, dtype=torch.float64)


def family(name: str) -> str:
    return resolve_method(name).method.family


def method_tables(name: str) -> tuple[str, ...]:
    return tuple(map(str, resolve_method(name).tables))


@pytest.mark.parametrize(
    "aggregation",
    [
        *(Single(-1), Total(), Total(rows="all", mean=True), Suffixes(normalise="rows")),
        *(
            Product(normalise=kind, residual=residual)
            for kind in ("none", "rows", "columns")
            for residual in (1.0, 0.3)
        ),
        *(Product(residual=2.5, normalise="rows"), Product(residual=0.0, normalise="rows")),
    ],
    ids=str,
)
def test_a_product_with_tiles_is_a_step(aggregation: VectorAggregation) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = torch.rand(3, 2, 13, 13, dtype=torch.float64, generator=generator)
    layers[1, :, 4] = 0  # a row of zeros stays one
    read = torch.rand(1, 13, dtype=torch.float64, generator=generator)
    expected = row = aggregation.start_row(read)
    for matrix in layers:
        product = LayerProduct(aggregation, row, read, keep_layer=True)
        for rows in (slice(0, 5), slice(5, 10), slice(10, 13)):
            product.add_tile(matrix[:, rows], rows)
        row, expected = product.advance(), aggregation.step(expected, matrix, read)
        assert_same(row, expected, dtype=torch.float64)
        assert_same(product.layer_row(), (read @ matrix)[:, 0], dtype=torch.float64)


def test_attention_flow_keeps_its_matrices() -> None:
    assert not isinstance(Flow(), VectorAggregation)


def test_the_stated_form_of_a_layer_map_is_the_map() -> None:
    """Every method that states `heads`, also with other options: sum_h w_h f(A_h, G_h) is what its function returns."""
    model, image = wrapped("timm-vit", torch.float64), pixels("timm-vit", dtype=torch.float64)
    trace = cv.trace(model, image, target=TARGET)
    view = LayerView(trace.layers[1], RunContext(trace))
    stated = set()
    for name in (*PLAIN, "gmar-l1(preset=joita)", "gmar-l2(preset=joita)", "focusvit(head_weights=uniform)"):
        spec = resolve_method(name)
        form = spec.requires.heads
        if form is not None:
            weights = None if form.weights is None else form.weights(view)
            returned = spec.method.function(view, **dict(spec.options))
            assert_same(view.weighted(form.entry, weights), returned, dtype=torch.float64, label=name)
            stated.add(spec.method.name)
    assert stated >= {"raw-attention", "rollout", "genatt", "gradsam", "grad-rollout", "gmar-l1", "gmar-l2", "focusvit"}
    for other in ("genatt(fusion=max)", "rollout(discard_ratio=0.5)", "grad-rollout(preset=jacobgil)"):
        assert resolve_method(other).requires.heads is None


@pytest.mark.parametrize(("queries", "layers", "expected"), [(197, 12, False), (1370, 24, True), (785, 12, True)])
def test_a_layer_is_large_if_its_attention_outweighs_the_values(queries: int, layers: int, expected: bool) -> None:
    """ViT-B/16 at 224 pixels is not; ViT-L/14 at 518 and ViT-B/8 at 224 are. Meta tensors: only shapes count."""
    call, _ = attention_call(1, 1, 2, width=64)
    call.v = call.q = torch.empty(8, 16 if layers == 24 else 12, queries, 64, device="meta")
    limit = attention_calls.tile_bytes(call, layers)
    assert attention_calls.is_large(call, layers) == expected
    assert limit == max(2**22, call.v.numel() * layers)  # a quarter of all values, 4 bytes each
