"""Patches before, after and in the middle of other tokens: the maps are those of the usual order, or brute force."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.methods.registry import list_methods
from clairvit.perturbation.token_dropping import drop_strategy
from clairvit.tracing.recording import record
from clairvit.tracing.structure import model_structure
from helpers.custom_vits import (
    DEPTH,
    WIDTH,
    Arranged,
    Block,
    CausalAttention,
    ClassTokenLast,
    HomeMade,
    LanguageModel,
    MaskedCausalAttention,
    MatmulAttention,
)
from helpers.rounding import assert_same, growth, magnified
from helpers.tiny_models import double, strange

TARGET = 3
QUICK = [m.name for m in list_methods() if m.cost.forwards <= 1 and not m.extra_cost.slow]
REMOVALS = [
    "leave-one-out",
    "rise(samples=20)",
    "kernelshap(samples=40)",
    "lime(samples=40)",
    "atman",
    "integrated-gradients(path=token, steps=4)",
]
COMBINED = [
    "genatt+skipplus",
    "attnlrp+plus",
    "rollout+plus",
    "raw-attention+layer:0",
    "attention-flow",
    "legrad(preset=joita)",
]


def images(batch: int = 2) -> Tensor:
    return double("home-matmul", batch=batch)[1]


def wrapped(module: nn.Module, **options: object) -> cv.Model:
    return cv.wrap(module.double(), size=32, **options)  # type: ignore[arg-type]


@functools.cache
def arranged(prefix: int) -> cv.Model:
    return wrapped(strange(lambda: Arranged(prefix)))


# Where the patches lie


@pytest.mark.parametrize("prefix", range(Arranged.OTHERS + 1))
def test_the_tokens_that_depend_on_pixels_are_the_patches(prefix: int) -> None:
    structure = model_structure(arranged(prefix), images())
    layout = structure.layout
    assert layout is not None
    assert (layout.grid, layout.prefix, layout.suffix) == ((4, 4), prefix, Arranged.OTHERS - prefix)
    assert structure.in_order
    read = 16 + Arranged.OTHERS - 1 if prefix < Arranged.OTHERS else Arranged.OTHERS - 1
    assert (layout.pooling, layout.read) == ("token", ((read, 1.0),))


def same_maps(model: cv.Model, usual: cv.Model, methods: list[str]) -> None:
    """Attention does not know the order of its tokens, so that the maps are equal but for rounding."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is zero everywhere")
        options = {"target": TARGET, "skip": True}
        comparison, expected = (cv.compare(m, images(), methods, **options) for m in (model, usual))  # type: ignore[arg-type]
        unstable = [m.name for m in list_methods() if m.name in expected and m.caveats.numerically_unstable]
        single = cv.wrap(usual.module.float(), size=32)
        try:
            rounded = cv.compare(single, images().float(), unstable, **options) if unstable else {}  # type: ignore[arg-type]
        finally:
            usual.module.double()
    assert set(comparison) == set(expected)
    assert comparison.skipped.keys() == expected.skipped.keys()
    for name, explanation in expected.items():
        magnitude = magnified(rounded[name].maps, explanation.maps) if name in rounded else None
        assert_same(comparison[name].maps, explanation.maps, magnitude=magnitude, label=name, dtype=torch.float64)


@pytest.mark.parametrize("prefix", [0, 2])
def test_every_method_gives_the_map_of_the_usual_order(prefix: int) -> None:
    same_maps(arranged(prefix), arranged(Arranged.OTHERS), QUICK)


@pytest.mark.parametrize("prefix", [0, 2])
def test_removals_and_combined_methods_give_the_map_of_the_usual_order(prefix: int) -> None:
    same_maps(arranged(prefix), arranged(Arranged.OTHERS), [*REMOVALS, *COMBINED])


def test_a_class_token_at_the_end_is_read_as_one_at_the_start() -> None:
    last = strange(ClassTokenLast)
    first = strange(lambda: HomeMade(lambda: Block(MatmulAttention)))
    first.load_state_dict(last.state_dict())
    same_maps(
        wrapped(last), wrapped(first), ["raw-attention", "rollout", "genatt", "legrad", "gradcam", "leave-one-out"]
    )


def test_dropping_tokens_keeps_those_before_and_after_the_patches() -> None:
    """Rows of the sequence that are run, against the model's own blocks on the same rows."""
    model = arranged(2)
    recording = record(model, images(1), differentiable=False)
    assert drop_strategy(recording).mode == "drop"
    scores = cv.explain(model, images(1), "leave-one-out", target=TARGET, score="logit").maps.flatten()
    module = model.module
    assert isinstance(module, Arranged)
    tokens = module.tokens(images(1))
    for patch in (0, 7, 15):
        rows = [row for row in range(21) if row != 2 + patch]
        logits = module.head(module.norm(module.through(tokens[:, rows]))[:, -1])
        expected = (model.logits(images(1)) - logits)[0, TARGET]
        assert_same(scores[patch], expected.detach(), magnitude=float(logits.abs().max()))


@pytest.mark.parametrize(("group", "rows"), [("prefix", [0, 1]), ("patches", range(2, 18)), ("suffix", [18, 19, 20])])
def test_patching_selects_the_tokens_of_a_group(group: str, rows: list[int]) -> None:
    model = arranged(2)
    module = model.module
    assert isinstance(module, Arranged)
    tokens = module.tokens(images()).clone()
    tokens[:, list(rows)] = 0
    expected = module.head(module.norm(module.through(tokens))[:, -1])
    site = cv.Site(0, tokens=group)  # type: ignore[arg-type]
    assert_same(cv.intervene(model, images(), {site: "zero"}).intervened, expected.detach())


# A layout that is stated


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"suffix": -1}, "suffix=-1 was given; expected the number of tokens after the patches"),
        ({"suffix": 2, "read": ((21, 1.0),)}, r"outside the 19 tokens; expected 0…18"),
    ],
)
def test_layouts_that_cannot_be(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        cv.Layout(grid=(4, 4), prefix=1, pooling="token", **arguments)  # type: ignore[arg-type]


def test_default_rows_of_a_layout_with_a_suffix() -> None:
    assert cv.Layout((2, 2), 0, "token", suffix=1).read == ((4, 1.0),)
    assert cv.Layout((2, 2), 1, "token", suffix=1).read == ((0, 1.0),)
    assert cv.Layout((2, 2), 1, "avg", suffix=3).read == tuple((row, 0.25) for row in range(1, 5))
    assert cv.Layout((1, 2), 0, "mixed", suffix=1).read == ((2, 0.5), (0, 0.25), (1, 0.25))


def test_patch_values_are_padded_to_all_tokens() -> None:
    layout = cv.Layout((1, 2), 1, "token", suffix=2)
    assert layout.pad_patches(torch.tensor([[3.0, 4.0]]), 1.0).tolist() == [[1, 3, 4, 1, 1]]
    assert layout.pad_patches(torch.tensor([True, False]), True).tolist() == [True, True, False, True, True]
    assert list(range(5))[layout.patch_slice] == [*layout.patch_rows] == [1, 2]
    assert layout.other_rows == (0, 3, 4)


def test_a_layout_of_another_length_is_refused() -> None:
    layout = cv.Layout((4, 4), 1, "token", suffix=7)
    with pytest.raises(BadInput, match="4 × 4 patches and 1 prefix tokens and 7 suffix tokens, 24 together"):
        cv.trace(wrapped(strange(lambda: Arranged(2)), layout=layout), images())


# Image tokens between the words of a causal language model

BETWEEN_WORDS = cv.Layout((4, 4), LanguageModel.BEFORE, "token", ((20, 1.0),), LanguageModel.AFTER)


@functools.cache
def language_model(attention: type[nn.Module]) -> cv.Model:
    return wrapped(strange(lambda: LanguageModel(attention)), layout=BETWEEN_WORDS)


CAUSAL = [CausalAttention, MaskedCausalAttention]


def reference_attention(model: cv.Model) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """A and dA [B, H, N, N], and x and dx [B, N, d], of the causal layers, written out with autograd."""
    module = model.module
    assert isinstance(module, LanguageModel)
    x = module.sequence(images())
    inputs, weights = [], []
    for block in module.blocks:
        assert isinstance(block, Block)
        attention = block.attention
        x.retain_grad()
        inputs.append(x)
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in attention.qkv(block.norm(x)).chunk(3, -1))  # type: ignore[operator]
        future = torch.ones(21, 21, dtype=torch.bool).triu(1)
        A = (q @ k.mT / 8**0.5).masked_fill(future, float("-inf")).softmax(-1)
        A.retain_grad()
        weights.append(A)
        x = x + attention.out((A @ v).transpose(1, 2).flatten(2))  # type: ignore[operator]
        x = x + block.mlp(x)
    module.head(module.norm(x)[:, -1])[:, TARGET].sum().backward()
    module.zero_grad()
    gradients = [t.grad for t in (*weights, *inputs)]
    assert all(gradient is not None for gradient in gradients)
    values = [t.detach() for t in (*weights, *gradients, *inputs)]  # type: ignore[union-attr]
    return values[:3], values[3:6], values[9:12], values[6:9]


@pytest.mark.parametrize("attention", CAUSAL)
def test_layers_are_the_attention_between_the_tokens_of_the_layout(attention: type[nn.Module]) -> None:
    model = language_model(attention)
    structure = model_structure(model, images())
    assert [site.kind for site in structure.sites] == ["encoder"] * 2 + ["tokens"] * 3
    tr = cv.trace(model, images(), target=TARGET)
    A, G, x, dx = reference_attention(model)
    for layer, *expected in zip(tr.layers, A, G, x, dx, strict=True):
        for values, reference in zip((layer.A, layer.G, layer.x, layer.dx), expected, strict=True):
            assert_same(values, reference)


@pytest.mark.parametrize("attention", CAUSAL)
def test_maps_of_image_tokens_between_words(attention: type[nn.Module]) -> None:
    model = language_model(attention)
    A, G, x, dx = reference_attention(model)
    methods = ["raw-attention", "rollout", "genatt", "gradsam", "ixg", "cat"]
    comparison = cv.compare(model, images(), methods, target=TARGET)
    identity = torch.eye(21, dtype=torch.float64)
    rolled = relevance = identity.expand(2, -1, -1)
    for a, g in zip(A, G, strict=True):
        mixed = a.mean(1) + identity
        rolled = mixed / mixed.sum(-1, keepdim=True) @ rolled
        relevance = relevance + (a * g).clamp(min=0).mean(1) @ relevance
    expected = {
        "raw-attention": A[-1].mean(1)[:, -1],
        "rollout": rolled[:, -1],
        "genatt": relevance[:, -1],
        "gradsam": torch.stack([(a * g).clamp(min=0).mean((1, 2)) for a, g in zip(A, G, strict=True)]).mean(0),
        "ixg": (x[0] * dx[0]).sum(-1),
        "cat": torch.stack([(a * g).sum(-1) for a, g in zip(x, dx, strict=True)]).sum(0),
    }
    for name, tokens in expected.items():
        assert_same(comparison[name].maps, tokens[:, 3:19].reshape(2, 4, 4), label=name)


@pytest.mark.parametrize("attention", CAUSAL)
def test_every_method_works_or_refuses_between_words(attention: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is zero everywhere")
        comparison = cv.compare(
            language_model(attention), images(), [*QUICK, *COMBINED, *REMOVALS], target=TARGET, skip=True
        )
    assert all(explanation.maps.isfinite().all() for explanation in comparison.values())
    assert {"attnlrp", "attnlrp+plus", "genatt", "legrad", "ag-cam", "gradcam", "leave-one-out", "atman"} <= set(
        comparison
    )
    assert all("Use " in why or "use " in why for why in comparison.skipped.values())


def test_ag_cam_of_scores_ignores_masked_keys() -> None:
    maps = [cv.explain(language_model(kind), images(), "ag-cam(norm=none)", target=TARGET).maps for kind in CAUSAL]
    assert_same(*maps)
    assert maps[0].isfinite().all()


@pytest.mark.parametrize("attention", CAUSAL)
def test_tokens_between_words_are_dropped_as_by_masking(attention: type[nn.Module]) -> None:
    model = language_model(attention)
    module = model.module
    assert isinstance(module, LanguageModel)
    with torch.no_grad():
        x = module.sequence(images(1))
        rows = [row for row in range(21) if row != 3 + 6]
        expected = (model.logits(images(1)) - module.head(module.norm(module.through(x[:, rows]))[:, -1]))[0, TARGET]
    explanation = cv.explain(model, images(1), "leave-one-out", target=TARGET, score="logit")
    assert not any("cannot be dropped" in note for note in explanation.notes)
    assert_same(explanation.maps.flatten()[6], expected, magnitude=float(model.logits(images(1)).abs().max()))


def test_words_and_patches_add_up_to_the_score_under_the_linear_rules() -> None:
    """Words and patches together add up to the score at every layer, once biases and norms' shifts are zero."""
    module = strange(lambda: LanguageModel(CausalAttention)).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    model = cv.wrap(module, size=32, layout=BETWEEN_WORDS)
    tr = cv.trace(model, images(), target=TARGET, rules="linear")
    sums = torch.stack([(layer.x * layer.dx).sum((1, 2)) for layer in tr.layers])
    magnitude = max(float((layer.x * layer.dx).abs().sum((1, 2)).max()) for layer in tr.layers)
    assert_same(sums, tr.logits[:, TARGET].expand(3, -1), magnitude=magnitude, growth=growth(3 * 12, 21 * WIDTH * 3))


# YOLOS: detection tokens after the patches


class OneQuery(nn.Module):
    """The class scores of one detection token."""

    def __init__(self, attention: str = "sdpa", query: int = 1) -> None:
        super().__init__()
        sizes = {"hidden_size": 24, "num_hidden_layers": DEPTH, "num_attention_heads": 3, "intermediate_size": 40}
        config = hf.YolosConfig(**sizes, image_size=[64, 64], patch_size=16, num_detection_tokens=4, num_labels=6)
        config._attn_implementation = attention
        self.detector, self.query = hf.YolosForObjectDetection(config), query

    def forward(self, pixels: Tensor) -> Tensor:
        return self.detector(pixels).logits[:, self.query]


def photos() -> Tensor:
    return torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@functools.cache
def yolos(query: int = 1) -> cv.Model:
    return cv.wrap(strange(lambda: OneQuery(query=query)).double(), size=64)


@pytest.mark.parametrize("query", [0, 3])
def test_yolos_reads_a_token_after_its_patches(query: int) -> None:
    layout = model_structure(yolos(query), photos()).layout
    assert layout == cv.Layout((4, 4), 1, "token", ((17 + query, 1.0),), 4)


def test_maps_of_yolos_against_its_own_attention() -> None:
    model, eager = yolos(), strange(lambda: OneQuery("eager")).double()
    eager.load_state_dict(model.module.state_dict())
    eager.requires_grad_(False)
    pixels = photos().requires_grad_()
    A = eager.detector(pixels, output_attentions=True)  # type: ignore[operator]
    A, scores = A.attentions, A.logits[:, 1, TARGET]
    G = torch.autograd.grad(scores.sum(), A, retain_graph=True)
    (dpixels,) = torch.autograd.grad(scores.sum(), pixels)
    relevance = torch.eye(21, dtype=torch.float64).expand(2, -1, -1)
    for a, g in zip(A, G, strict=True):
        relevance = relevance + (a * g).clamp(min=0).mean(1).detach() @ relevance
    comparison = cv.compare(model, photos(), ["genatt", "raw-attention", "saliency(level=pixel)"], target=TARGET)
    assert_same(comparison["genatt"].maps, relevance[:, 18, 1:17].reshape(2, 4, 4))
    assert_same(comparison["raw-attention"].maps, A[-1].detach().mean(1)[:, 18, 1:17].reshape(2, 4, 4))
    assert_same(comparison["saliency(level=pixel)"].maps, dpixels.abs().amax(1))


def test_tokens_of_yolos_are_dropped_as_by_masking() -> None:
    """Dropping a patch equals hiding it from every token's attention: the detection tokens stay."""
    model = yolos()
    recording = record(model, photos(), differentiable=False)
    assert drop_strategy(recording).mode == "drop"
    dropped = cv.explain(model, photos(), "leave-one-out", target=TARGET, score="logit")
    eager = strange(lambda: OneQuery("eager")).double()
    eager.load_state_dict(model.module.state_dict())
    eager.requires_grad_(False)
    softmax = nn.functional.softmax
    column = torch.zeros(21, dtype=torch.float64)
    for patch in (0, 10, 15):
        column.zero_()[1 + patch] = float("-inf")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(nn.functional, "softmax", lambda x, *a, **k: softmax(x + column, *a, **k))
            hidden = eager(photos())[:, TARGET]
        expected = eager(photos())[:, TARGET] - hidden
        assert_same(dropped.maps.flatten(1)[:, patch], expected, magnitude=float(hidden.abs().max()))


def test_yolos_with_a_hundred_detection_tokens() -> None:
    """More tokens than patches are no obstacle: YOLOS' own number of queries."""

    def make() -> nn.Module:
        module = OneQuery()
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40}
        module.detector = hf.YolosForObjectDetection(
            hf.YolosConfig(**sizes, image_size=[64, 64], patch_size=8, num_detection_tokens=100, num_labels=6)
        )
        return module

    layout = model_structure(cv.wrap(strange(make).double(), size=64), photos()).layout
    assert layout == cv.Layout((8, 8), 1, "token", ((1 + 64 + 1, 1.0),), 100)
