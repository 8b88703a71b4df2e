"""Attention methods on encoder-decoder models, against the paper's recursion written out on explicit attention."""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import NotApplicable
from clairvit.methods.registry import list_methods
from clairvit.perturbation.token_dropping import drop_strategy
from clairvit.tracing.recording import record
from clairvit.tracing.structure import model_structure
from helpers.custom_vits import WIDTH, Block, HomeMade, MatmulAttention, merge_heads, mlp, split_heads
from helpers.rounding import assert_same
from helpers.tiny_models import strange

TARGET, SIZE = 1, (128, 160)
QUICK = [m.name for m in list_methods() if m.cost.forwards <= 1 and not m.extra_cost.slow]


class Relevance(NamedTuple):
    """A and dA of every attention, [B, H, queries, keys]: encoder, between queries, from queries to the image."""

    encoder: list[tuple[Tensor, Tensor]]
    queries: list[tuple[Tensor, Tensor]]
    cross: list[tuple[Tensor, Tensor]]


def generic_attention(attention: Relevance, query: int, *, cross_first: bool = False) -> Tensor:
    """Eqs 5-11 of Chefer et al., ICCV 2021, letter by letter, [B, N]; `cross_first`: the order within a layer."""

    def weighted(pair: tuple[Tensor, Tensor]) -> Tensor:
        return (pair[0] * pair[1]).clamp(min=0).mean(1)  # eq. 5

    def normalised(R: Tensor) -> Tensor:  # eqs 8, 9
        rest = R - torch.eye(R.shape[-1], dtype=R.dtype)
        return rest / rest.sum(-1, keepdim=True) + torch.eye(R.shape[-1], dtype=R.dtype)

    batch, _, tokens, _ = attention.encoder[0][0].shape
    count = attention.queries[0][0].shape[-1]
    R_ii = torch.eye(tokens, dtype=torch.float64).repeat(batch, 1, 1)
    R_qq = torch.eye(count, dtype=torch.float64).repeat(batch, 1, 1)
    R_qi = torch.zeros(batch, count, tokens, dtype=torch.float64)
    for pair in attention.encoder:
        R_ii = R_ii + weighted(pair) @ R_ii  # eq. 6
    for self_attention, cross in zip(attention.queries, attention.cross, strict=True):
        for is_cross in (True, False) if cross_first else (False, True):
            if is_cross:
                query_factor = R_qq if bool((R_qq == torch.eye(count)).all()) else normalised(R_qq)
                R_qi = R_qi + query_factor.mT @ weighted(cross) @ normalised(R_ii)  # eq. 10
            else:
                R_qi = R_qi + weighted(self_attention) @ R_qi  # eq. 7
                R_qq = R_qq + weighted(self_attention) @ R_qq  # eq. 6
    return R_qi[:, query]


def rolled_out(matrices: list[Tensor]) -> Tensor:
    product = torch.eye(matrices[0].shape[-1], dtype=torch.float64)
    for A in matrices:
        mixed = A.mean(1) + torch.eye(A.shape[-1], dtype=torch.float64)
        product = mixed / mixed.sum(-1, keepdim=True) @ product
    return product


def expected_maps(attention: Relevance, query: int) -> dict[str, Tensor]:
    """What the authors' code shows for a query of DETR, [B, N] each."""
    A, G = attention.cross[-1]
    query_rollout, image = (rolled_out([A for A, _ in pairs]) for pairs in (attention.queries, attention.encoder))
    return {
        "genatt": generic_attention(attention, query),
        "raw-attention": A.mean(1)[:, query],
        "rollout": (query_rollout.mT @ A.mean(1) @ image)[:, query],
        "attcam": (A[:, :, query] * G[:, :, query].mean(-1, keepdim=True)).mean(1).clamp(min=0),
        "gradsam": torch.stack([(A * G).clamp(min=0).mean((1, 2)) for A, G in attention.encoder]).mean(0),
    }


# DETR of transformers


class Detector(nn.Module):
    """DETR; the class scores of one query."""

    def __init__(self, query: int, *, eager: bool = False) -> None:
        super().__init__()
        backbone = hf.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 8, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage4"],
        )
        heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_layers": 2, "decoder_layers": 3}
        config = hf.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            d_model=24,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_queries=5,
            num_labels=4,
            **heads,
        )
        if eager:
            config._attn_implementation = "eager"
        self.detector, self.query = hf.DetrForObjectDetection(config), query

    def forward(self, pixels: Tensor) -> Tensor:
        return self.detector(pixels).logits[:, self.query]


def photos(rows: int = SIZE[0], cols: int = SIZE[1]) -> Tensor:
    return torch.randn(2, 3, rows, cols, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@functools.cache
def detr(query: int) -> cv.Model:
    return cv.wrap(strange(lambda: Detector(query)).double(), size=SIZE)


@functools.cache
def attention_of_detr(query: int) -> Relevance:
    """By transformers' own explicit attention and autograd, with nothing of ClairViT."""
    module = strange(lambda: Detector(query, eager=True)).double()
    module.load_state_dict(detr(query).module.state_dict())
    output = module.detector(photos(), output_attentions=True)  # type: ignore[operator]
    groups = (output.encoder_attentions, output.decoder_attentions, output.cross_attentions)
    score = output.logits[:, query, TARGET].sum()
    pairs = [
        [(A.detach(), G) for A, G in zip(group, torch.autograd.grad(score, group, retain_graph=True), strict=True)]
        for group in groups
    ]
    return Relevance(*pairs)


def test_a_decoder_is_described() -> None:
    model = detr(1)
    structure = model_structure(model, photos())
    assert [site.kind for site in structure.sites] == ["tokens"] * 2 + ["query", "cross"] * 3
    assert structure.layout == cv.Layout((4, 5), 0, "query", ((1, 1.0),))
    tr = cv.trace(model, photos(), TARGET)
    assert [repr(layer) for layer in tr.decoder[:2]] == [
        "Layer(0 of 6, x not seen, query attention 5×5)",
        "Layer(1 of 6, x not seen, cross attention 5×20)",
    ]


@pytest.mark.parametrize("query", [0, 3])
def test_attention_and_gradients_of_detr(query: int) -> None:
    """The first attention between queries does not see the image, and has a gradient all the same."""
    tr, reference = cv.trace(detr(query), photos(), TARGET), attention_of_detr(query)
    decoder = [pair for layer in zip(reference.queries, reference.cross, strict=True) for pair in layer]
    for layer, (A, G) in zip((*tr.layers, *tr.decoder), (*reference.encoder, *decoder), strict=True):
        assert_same(layer.A, A)
        assert_same(layer.G, G)
    assert tr.decoder[0].G.any()


@pytest.mark.parametrize("query", [0, 3])
def test_maps_of_detr_are_those_of_the_paper(query: int) -> None:
    expected = expected_maps(attention_of_detr(query), query)
    comparison = cv.compare(detr(query), photos(), list(expected), target=TARGET)
    for name, tokens in expected.items():
        assert tokens.any()
        assert_same(comparison[name].maps, tokens.reshape(2, 4, 5), label=name)


def test_another_target_of_one_recording_reads_another_class() -> None:
    tr = cv.trace(detr(0), photos(), TARGET)
    assert_same(tr.retarget(2).decoder[-1].G, cv.trace(detr(0), photos(), 2).decoder[-1].G)


def test_a_target_that_reads_one_query_of_all() -> None:
    """The module returns the scores of all queries, side by side: the target's gradient tells which one it reads."""

    class Flat(Detector):
        def forward(self, pixels: Tensor) -> Tensor:
            return self.detector(pixels).logits.flatten(1)  # [B, 5 queries × 5 classes]

    module = strange(lambda: Flat(0)).double()
    module.load_state_dict(detr(3).module.state_dict())
    model = cv.wrap(module, size=SIZE)
    layout = model_structure(model, photos()).layout
    assert layout is not None
    assert layout.read == tuple((query, 0.2) for query in range(5))
    explanation = cv.explain(model, photos(), "genatt", target=3 * 5 + TARGET)
    assert_same(explanation.maps, cv.explain(detr(3), photos(), "genatt", target=TARGET).maps)


def test_gradient_methods_of_detr_against_autograd() -> None:
    module = detr(1).module
    pixels = photos().requires_grad_()
    inputs: list[Tensor] = []
    layers = module.detector.model.encoder.layers  # type: ignore[union-attr]
    hooks = [
        layer.register_forward_pre_hook(lambda m, args, kw: inputs.append(args[0]), with_kwargs=True)
        for layer in layers
    ]  # type: ignore[union-attr]
    score = module(pixels)[:, TARGET].sum()
    for hook in hooks:
        hook.remove()
    dpixels, *dx = torch.autograd.grad(score, [pixels, *inputs])
    comparison = cv.compare(detr(1), photos(), ["ixg", "cat", "saliency(level=pixel)"], target=TARGET)
    parts = [(x.detach() * g).sum(-1) for x, g in zip(inputs, dx, strict=True)]
    assert_same(comparison["ixg"].maps, parts[0].reshape(2, 4, 5))
    assert_same(comparison["cat"].maps, sum(parts).reshape(2, 4, 5))  # type: ignore[union-attr]
    assert_same(comparison["saliency(level=pixel)"].maps, dpixels.abs().amax(1))


def test_image_tokens_of_detr_add_up_to_the_score_under_the_linear_rules() -> None:
    """Positions and queries enter q and k alone: without biases all of the score comes from the image tokens."""
    module = strange(lambda: Detector(1)).double()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith("bias"):
                parameter.zero_()
    tr = cv.trace(cv.wrap(module, size=SIZE), photos(), TARGET, rules="linear")
    for layer in tr.layers:
        parts = (layer.x * layer.dx).flatten(1)
        assert_same(parts.sum(1), tr.logits[:, TARGET], magnitude=float(parts.abs().sum(1).max()))


def test_every_method_works_or_refuses_on_detr() -> None:
    methods = [
        *QUICK,
        "attention-flow",
        "atman",
        "genatt+plus",
        "rollout+plus",
        "genatt+layer:0",
        "rollout(preset=joita)",
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is zero everywhere")
        comparison = cv.compare(detr(1), photos(), methods, target=TARGET, skip=True)
    assert all(explanation.maps.isfinite().all() for explanation in comparison.values())
    assert {"genatt", "rollout", "transatt", "gradcam", "attnlrp", "decompx", "legrad", "atman"} <= set(comparison)
    assert (
        "not defined for a model that reads the image by the queries of a decoder"
        in comparison.skipped["rollout(preset=joita)"]
    )
    for name in ("alti", "globenc", "attin"):
        assert "by the queries of a decoder, whose layers' inputs are not recorded" in comparison.skipped[name]


# Decoders of another build


class QueryLayer(nn.Module):
    """Cross-attention and attention between queries, in either order, residuals around both."""

    def __init__(self, cross_first: bool) -> None:
        super().__init__()
        self.cross_first = cross_first
        self.q, self.kv, self.qkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.norms, self.mlp = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)), mlp()
        self.kept: list[tuple[bool, Tensor]] = []  # the reference reads A here, where `keep` is set
        self.keep = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_cross: bool) -> Tensor:
        q, k, v = map(split_heads, (q, k, v))
        A = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        if self.keep:
            self.kept.append((is_cross, A))
        return merge_heads(A @ v)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        for is_cross in (True, False) if self.cross_first else (False, True):
            x = self.norms[int(is_cross)](queries)
            parts = (self.q(x), *self.kv(memory).chunk(2, -1)) if is_cross else self.qkv(x).chunk(3, -1)
            queries = queries + self.attend(*parts, is_cross)
        return queries + self.mlp(queries)


class QueryModel(HomeMade):
    """A ViT encoder whose patches are read by learned queries; the head reads one of them."""

    def __init__(self, queries: int, cross_first: bool) -> None:
        super().__init__(lambda: Block(MatmulAttention))
        self.query_tokens = nn.Parameter(torch.zeros(1, queries, WIDTH))
        self.decoder = nn.ModuleList(QueryLayer(cross_first) for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        memory, queries = self.through(self.tokens(image)), self.query_tokens.expand(len(image), -1, -1)
        for layer in self.decoder:
            queries = layer(queries, memory)
        return self.head(self.norm(queries)[:, 2])


def small_images() -> Tensor:
    return photos(32, 32)


@functools.cache
def query_model(queries: int, cross_first: bool) -> cv.Model:
    return cv.wrap(strange(lambda: QueryModel(queries, cross_first)).double(), size=32)


def attention_of_queries(module: QueryModel) -> Relevance:
    """A and dA, by taps in the model's own code."""
    kept: list[Tensor] = []
    taps = [
        block.attention.attn_drop.register_forward_hook(lambda m, args, A: kept.append(A)) for block in module.blocks
    ]  # type: ignore[union-attr]
    layers = [layer for layer in module.decoder if isinstance(layer, QueryLayer)]
    for layer in layers:
        layer.keep = True
    score = module(small_images())[:, TARGET].sum()
    of_decoder = [pair for layer in layers for pair in layer.kept]
    for tap in taps:
        tap.remove()
    for layer in layers:
        layer.keep = False
        layer.kept.clear()
    groups = (kept, [A for cross, A in of_decoder if not cross], [A for cross, A in of_decoder if cross])
    return Relevance(
        *(
            [(A.detach(), G) for A, G in zip(g, torch.autograd.grad(score, g, retain_graph=True), strict=True)]
            for g in groups
        )
    )


@pytest.mark.parametrize("cross_first", [False, True])
@pytest.mark.parametrize("queries", [5, 17])
def test_decoders_are_recognised_by_gradients_not_by_shapes(queries: int, cross_first: bool) -> None:
    """With 17 queries and 17 tokens every attention is 17 × 17."""
    model = query_model(queries, cross_first)
    structure = model_structure(model, small_images())
    order = ["cross", "query"] if cross_first else ["query", "cross"]
    assert [site.kind for site in structure.sites] == ["tokens"] * 2 + order * 2
    assert structure.layout == cv.Layout((4, 4), 1, "query", ((2, 1.0),))
    module = model.module
    assert isinstance(module, QueryModel)
    attention = attention_of_queries(module)
    expected = generic_attention(attention, 2, cross_first=cross_first)[:, 1:].reshape(2, 4, 4)
    assert_same(cv.explain(model, small_images(), "genatt", target=TARGET).maps, expected)


@pytest.mark.parametrize("cross_first", [False, True])
def test_tokens_are_dropped_before_a_decoder(cross_first: bool) -> None:
    """The shorter sequence goes through the encoder, and the queries read it."""
    model = query_model(5, cross_first)
    assert drop_strategy(record(model, small_images(), differentiable=False)).mode == "drop"
    explanation = cv.explain(model, small_images(), "leave-one-out", target=TARGET, score="logit")
    module = model.module
    assert isinstance(module, QueryModel)
    with torch.no_grad():
        rows = [row for row in range(17) if row != 1 + 6]
        memory = module.through(module.tokens(small_images())[:, rows])
        queries = module.query_tokens.expand(2, -1, -1)
        for layer in module.decoder:
            queries = layer(queries, memory)
        logits = module(small_images())
        expected = (logits - module.head(module.norm(queries)[:, 2]))[:, TARGET]
    assert_same(explanation.maps.flatten(1)[:, 6], expected, magnitude=float(logits.abs().max()))


def test_learned_queries_that_do_not_attend_to_each_other_are_a_pool() -> None:
    class Pool(QueryModel):
        def forward(self, image: Tensor) -> Tensor:
            memory, queries = self.through(self.tokens(image)), self.query_tokens.expand(len(image), -1, -1)
            layer = self.decoder[0]
            assert isinstance(layer, QueryLayer)
            pooled = layer.attend(layer.q(queries), *layer.kv(memory).chunk(2, -1), True)
            return self.head(self.norm(pooled)[:, 2])

    model = cv.wrap(strange(lambda: Pool(5, False)).double(), size=32)
    structure = model_structure(model, small_images())
    assert [site.kind for site in structure.sites] == ["tokens", "tokens", "pool"]
    assert structure.layout == cv.Layout((4, 4), 1, "map", ((2, 1.0),))


def test_a_decoder_that_reads_other_keys_is_refused() -> None:
    class TwoMaps(QueryModel):
        def forward(self, image: Tensor) -> Tensor:
            memory, queries = self.through(self.tokens(image)), self.query_tokens.expand(len(image), -1, -1)
            queries = self.decoder[0](queries, memory[:, :9])
            return self.head(self.norm(self.decoder[1](queries, memory))[:, 2])

    model = cv.wrap(strange(lambda: TwoMaps(5, False)).double(), size=32)
    with pytest.raises(NotApplicable, match="from 5 queries to 9 keys, which are not its 17 image tokens"):
        cv.explain(model, small_images(), "genatt", target=TARGET)
    assert cv.explain(model, small_images(), "ixg", target=TARGET).maps.any()


def test_rows_without_relevance_stay_zero() -> None:
    """No gradient between queries: R_qq − I has rows of zeros, and R̄_qq = I."""
    from clairvit.methods.encoder_decoder import generic_attention_relevance

    generator = torch.Generator().manual_seed(0)
    cross = torch.rand(1, 3, 4, dtype=torch.float64, generator=generator)
    image = torch.rand(1, 4, 4, dtype=torch.float64, generator=generator)
    read = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    relevance = generic_attention_relevance(
        [image], [(False, torch.zeros(1, 3, 3, dtype=torch.float64)), (True, cross)], read
    )
    expected = cross[:, 1] + cross[:, 1] @ (image / image.sum(-1, keepdim=True))[0]
    assert_same(relevance, expected)
