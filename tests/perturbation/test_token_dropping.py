"""Dropping a token is what it says: every tiny model runs on a shorter sequence, checked against attention that looks
away (made from the pixels, on the ordinary forward) and against the sums written out by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.perturbation.attention_override import AttentionOverride, mask_tokens
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.token_dropping import (
    NO_DROPPING,
    DropStrategy,
    drop_strategy,
    droppable_tokens,
    run_tokens,
    select_strategy,
)
from clairvit.tracing.recording import Recording, record
from helpers.custom_vits import HEADS, WIDTH, Block, HomeMade, Lucid, MatmulAttention, mlp
from helpers.module_fingerprint import differences, fingerprint
from helpers.rounding import assert_same, growth
from helpers.tiny_models import STRANGE, TINY, ZOO, cnn, fresh, pixels, shaken, strange, wrapped

# What a person who knows the architectures says; all others have learned position embeddings, and simply drop.
_PLACES = ("beit", "beitv2", "eva02", "dinov3", "relpos", "post-norm")
KNOW_PLACES = {f"timm-{kind}{end}" for kind in _PLACES for end in ("", "-explicit")} & {*TINY} | {
    "home-mask-by-position"
}
WINDOWED = {"timm-sam", "timm-sam-explicit"}
WITHOUT_BLOCKS = {"home-loop"}
DROPPING = [name for name in TINY if name not in WINDOWED | WITHOUT_BLOCKS]


def expected_strategy(name: str) -> DropStrategy:
    if name in WITHOUT_BLOCKS:
        return NO_DROPPING
    return DropStrategy("zero") if name in WINDOWED else DropStrategy("drop", positions=name in KNOW_PLACES)


@functools.cache
def recorded(name: str) -> Recording:
    """Three images in float64."""
    return record(wrapped(name, torch.float64), pixels(name, 3, dtype=torch.float64), differentiable=False)


def some(name: str, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`count` patches of each of the three images, another set in each: (keep [3, patches], kept tokens [3, K])."""
    patches, prefix = ZOO[name].grid[0] * ZOO[name].grid[1], ZOO[name].prefix
    generator = torch.Generator().manual_seed(seed)
    keep = torch.zeros(3, patches, dtype=torch.bool)
    for row in keep:
        row[torch.randperm(patches, generator=generator)[:count]] = True
    lead = torch.arange(prefix).expand(3, -1)
    return keep, torch.cat([lead, keep.nonzero()[:, 1].reshape(3, count) + prefix], 1)


def rounded(name: str) -> dict[str, Any]:
    """Return how far equal results may be apart: transformers' own attention takes every softmax in float32."""
    eager = name.startswith("hf-") and name.endswith("-eager")
    return (
        {"dtype": torch.float32, "growth": growth(ZOO[name].layers + ZOO[name].pools, ZOO[name].tokens)}
        if eager
        else {}
    )


def last_block(recording: Recording, run: Callable[[], object]) -> Tensor:
    """What the last block gives in a run, [B, N, d]."""
    seen: list[Tensor] = []
    block = recording.structure.layers[-1].block
    assert block is not None
    hook = block.register_forward_hook(lambda m, a, out: seen.append(out if isinstance(out, Tensor) else out[0]))
    try:
        with torch.no_grad():
            run()
    finally:
        hook.remove()
    return recording.as_tokens(seen[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["timm-vit", "timm-sam", "home-loop", *sorted(KNOW_PLACES)])
def test_the_way_is_found_in_half_precision_too(name: str, dtype: torch.dtype) -> None:
    half = record(wrapped(name, dtype), pixels(name, 2, dtype=dtype), differentiable=False)
    assert select_strategy(half) == expected_strategy(name)


@pytest.mark.parametrize("name", TINY)
def test_each_model_is_dropped_from_in_the_way_that_its_architecture_asks_for(name: str) -> None:
    assert drop_strategy(recorded(name)) == expected_strategy(name)


@pytest.mark.parametrize("name", [name for name in TINY if name not in WITHOUT_BLOCKS])
def test_keeping_all_tokens_is_the_plain_forward(name: str) -> None:
    recording = recorded(name)
    tokens = droppable_tokens(recording)
    assert tokens is not None
    with torch.no_grad():
        plain = recording.model.logits(recording.pixels)
    assert_same(run_tokens(recording, drop_strategy(recording), tokens, None), plain)
    everything = torch.arange(ZOO[name].tokens).expand(3, -1)
    if name in DROPPING:
        assert_same(run_tokens(recording, drop_strategy(recording), tokens, everything), plain)


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("name", [name for name in DROPPING if ZOO[name].sums_to_one])
def test_dropping_is_masked_attention(name: str, count: int) -> None:
    """At the logits where a token or a pool is read, at the kept tokens after the last block everywhere."""
    recording, tiny = recorded(name), ZOO[name]
    keep, kept = some(name, count)
    shown = torch.cat([keep.new_ones(3, tiny.prefix), keep], 1)
    tokens = droppable_tokens(recording)
    assert tokens is not None

    def with_masked_attention() -> Tensor:
        with torch.no_grad(), AttentionOverride(3, tiny.tokens, mask_tokens(shown)):
            return recording.model.logits(recording.pixels)

    def dropping() -> Tensor:
        return run_tokens(recording, drop_strategy(recording), tokens, kept)

    if tiny.pooling in ("token", "distilled", "map"):
        assert_same(dropping(), with_masked_attention(), **rounded(name))
    rows = kept[..., None].expand(-1, -1, tokens.shape[-1])
    expected = last_block(recording, with_masked_attention).gather(1, rows)
    assert_same(last_block(recording, dropping), expected, **rounded(name))


@pytest.mark.parametrize("name", sorted(set(DROPPING) - KNOW_PLACES))
def test_the_order_of_kept_tokens_does_not_matter(name: str) -> None:
    recording, prefix = recorded(name), ZOO[name].prefix
    tokens, (_, kept) = droppable_tokens(recording), some(name, 6)
    assert tokens is not None
    turned = torch.cat([kept[:, :prefix], kept[:, prefix:].flip(1)], 1)
    strategy = drop_strategy(recording)
    expected = run_tokens(recording, strategy, tokens, kept)
    assert_same(run_tokens(recording, strategy, tokens, turned), expected, **rounded(name))


@pytest.mark.parametrize("name", sorted(KNOW_PLACES))
def test_positions_go_with_their_tokens(name: str) -> None:
    """In another order, tokens and their positions together, the patches are still the same patches."""
    recording, prefix = recorded(name), ZOO[name].prefix
    tokens, (_, kept) = droppable_tokens(recording), some(name, 6)
    assert tokens is not None
    turned = torch.cat([kept[:, :prefix], kept[:, prefix:].flip(1)], 1)
    strategy = drop_strategy(recording)
    assert_same(run_tokens(recording, strategy, tokens, turned), run_tokens(recording, strategy, tokens, kept))
    moved = (kept[:, prefix:] - prefix + 1) % (ZOO[name].tokens - prefix) + prefix  # the same content, one place on
    shifted = tokens.clone()
    for image, (old, new) in enumerate(zip(kept[:, prefix:], moved, strict=True)):
        shifted[image, new] = tokens[image, old]
    elsewhere = torch.cat([kept[:, :prefix], moved], 1)
    gap = run_tokens(recording, strategy, shifted, elsewhere) - run_tokens(recording, strategy, tokens, kept)
    assert gap.abs().max() > 1e-3  # places do matter


# By hand, in float64


def heads_apart(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, N, dh]


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    A = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + bias, -1)
    return (A @ v).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_a_mean_is_the_mean_of_the_kept_tokens() -> None:
    recording = recorded("timm-vit-avg")
    m = recording.model.module
    _, kept = some("timm-vit-avg", 6)
    x = m.patch_embed(recording.pixels)
    x = torch.cat([m.cls_token.expand(3, -1, -1), x], 1) + m.pos_embed
    x = torch.stack([image_tokens[rows] for image_tokens, rows in zip(x, kept, strict=True)])
    for block in m.blocks:
        q, k, v = (heads_apart(t, 3) for t in block.attn.qkv(block.norm1(x)).chunk(3, -1))
        x = x + block.attn.proj(attended(q, k, v))
        x = x + block.mlp(block.norm2(x))
    expected = m.head(m.fc_norm(x[:, 1:].mean(1)))
    tokens = droppable_tokens(recording)
    assert tokens is not None
    assert_same(run_tokens(recording, drop_strategy(recording), tokens, kept), expected)


def turned_by(x: Tensor, angles: tuple[Tensor, Tensor], pairs: bool) -> Tensor:
    """x cos + rot(x) sin, with neighbours as pairs (EVA) or the two halves as pairs (DINOv3)."""
    sin, cos = angles
    if pairs:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        other = torch.cat([-second, first], -1)
    return x * cos + other * sin


@torch.no_grad()
@pytest.mark.parametrize(("name", "pairs"), [("timm-eva02", True), ("timm-dinov3", False)])
def test_rotary_angles_are_those_of_the_kept_patches(name: str, pairs: bool) -> None:
    recording = recorded(name)
    m, tiny = recording.model.module, ZOO[name]
    _, kept = some(name, 6)
    x = m.patch_embed(recording.pixels)
    x = x.flatten(1, -2) if x.ndim == 4 else x
    lead = [t.expand(3, -1, -1) for t in (m.cls_token, getattr(m, "reg_token", None)) if t is not None]
    if m.pos_embed is not None:
        x = torch.cat([*lead, x], 1) + m.pos_embed
    else:
        x = torch.cat([*lead, x], 1)
    x = torch.stack([image_tokens[rows] for image_tokens, rows in zip(x, kept, strict=True)])
    places = kept[:, tiny.prefix :] - tiny.prefix
    sin, cos = (half[places][:, None] for half in m.rope.get_embed(list(tiny.grid)).chunk(2, -1))  # [3, 1, K, dh]
    for block in m.blocks:
        attn = block.attn
        y = block.norm1(x)
        if getattr(attn, "qkv", None) is None:
            q, k, v = attn.q_proj(y), attn.k_proj(y), attn.v_proj(y)
        else:
            bias = None if attn.q_bias is None else torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
            q, k, v = nn.functional.linear(y, attn.qkv.weight, attn.qkv.bias if bias is None else bias).chunk(3, -1)
        q, k, v = (heads_apart(t, 3) for t in (q, k, v))
        q, k = attn.q_norm(q), attn.k_norm(k)
        q, k = (
            torch.cat([t[:, :, : tiny.prefix], turned_by(t[:, :, tiny.prefix :], (sin, cos), pairs)], 2) for t in (q, k)
        )
        y = attn.proj(attn.norm(attended(q, k, v)))
        x = x + (y if block.gamma_1 is None else block.gamma_1 * y)
        y = block.mlp(block.norm2(x))
        x = x + (y if block.gamma_2 is None else block.gamma_2 * y)
    expected = m.head(m.fc_norm(m.norm(x)[:, tiny.prefix :].mean(1)))
    tokens = droppable_tokens(recording)
    assert tokens is not None
    assert_same(run_tokens(recording, drop_strategy(recording), tokens, kept), expected)


@torch.no_grad()
def test_relative_biases_are_those_between_the_kept_tokens() -> None:
    recording = recorded("timm-beit")
    m = recording.model.module
    _, kept = some("timm-beit", 6)
    x = torch.cat([m.cls_token.expand(3, -1, -1), m.patch_embed(recording.pixels)], 1)
    x = x if m.pos_embed is None else x + m.pos_embed
    x = torch.stack([image_tokens[rows] for image_tokens, rows in zip(x, kept, strict=True)])
    for block in m.blocks:
        attn = block.attn
        qkv = nn.functional.linear(
            block.norm1(x), attn.qkv.weight, torch.cat([attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias])
        )
        q, k, v = (heads_apart(t, 3) for t in qkv.chunk(3, -1))
        bias = torch.stack(
            [attn.relative_position_bias_table[attn.relative_position_index[rows][:, rows]] for rows in kept]
        ).permute(0, 3, 1, 2)  # [3, H, K, K]
        x = x + block.gamma_1 * attn.proj(attended(q, k, v, bias))
        x = x + block.gamma_2 * block.mlp(block.norm2(x))
    expected = m.head(m.fc_norm(x[:, 1:].mean(1)))
    tokens = droppable_tokens(recording)
    assert tokens is not None
    assert_same(run_tokens(recording, drop_strategy(recording), tokens, kept), expected)


# What it costs, and what is left when nothing is


def probed(name: str, keep: Tensor, removal: str = "token") -> tuple[Tensor, Probe]:
    trace = cv.trace(wrapped(name, torch.float64), pixels(name, 2, dtype=torch.float64), target=3)
    with probing(trace, removal, label="test", forwards=keep.shape[1]) as probe:
        return probe.score_kept(keep), probe


def test_blocks_see_fewer_tokens_and_images_are_embedded_once() -> None:
    """Each pass takes one stand-in image through the patch embedding, however many variants it runs."""
    model = fresh("timm-vit")
    trace = cv.trace(model, pixels("timm-vit", 2), target=3)
    seen: list[tuple[int, ...]] = []
    through: list[int] = []
    model.module.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(tuple(args[0].shape[:2])))
    model.module.blocks[1].register_forward_pre_hook(lambda m, args: seen.append(tuple(args[0].shape[:2])))
    keep = torch.zeros(1, 5, 16, dtype=torch.bool)
    keep[0, :, :6] = True
    with probing(trace, "token", label="test", forwards=5) as probe:
        seen.clear()
        model.module.patch_embed.register_forward_pre_hook(lambda m, args: through.append(len(args[0])))
        probe.score_kept(keep)
    assert seen[1:] == [(10, 7)], "a pass of two images with five variants, class token and six patches each"
    assert through == [1]


def test_without_patches_the_class_token_speaks_alone() -> None:
    probed_scores, probe = probed("timm-vit", torch.zeros(1, 2, 16, dtype=torch.bool))
    m = probe.trace.recording.model.module
    with torch.no_grad():
        x = (m.cls_token + m.pos_embed[:, :1]).expand(2, -1, -1)
        for block in m.blocks:
            x = block(x)
        expected = m.head(m.norm(x)[:, 0])[:, 3]
    assert_same(probed_scores, expected[:, None].expand(-1, 2))


@pytest.mark.parametrize("name", ["timm-vit-avg", "timm-siglip-gap", "timm-siglip-map", "hf-dinov2-sdpa", "timm-eva02"])
def test_without_patches_there_is_no_mean_and_tokens_are_zeroed(name: str) -> None:
    patches = ZOO[name].grid[0] * ZOO[name].grid[1]
    keep = torch.zeros(1, 3, patches, dtype=torch.bool)
    keep[0, 1, :4] = True  # a variant with patches in between stays itself
    probed_scores, probe = probed(name, keep)
    tokens = droppable_tokens(probe.trace.recording)
    assert tokens is not None
    zeroed = tokens.clone()
    zeroed[:, ZOO[name].prefix :] = 0
    expected = run_tokens(probe.trace.recording, probe.strategy, zeroed, None)[:, 3]
    assert_same(probed_scores[:, 0], expected)
    assert_same(probed_scores[:, 2], expected)
    alone, _ = probed(name, keep[:, 1:2])
    assert_same(probed_scores[:, 1:2], alone)


def test_windows_keep_their_number_and_tokens_are_zeroed() -> None:
    keep, _ = some("timm-sam", 6)
    probed_scores, probe = probed("timm-sam", keep[:2, None])
    tokens = droppable_tokens(probe.trace.recording)
    assert tokens is not None
    expected = run_tokens(probe.trace.recording, DropStrategy("zero"), tokens * keep[:2, :, None], None)[:, 3]
    assert_same(probed_scores[:, 0], expected)
    assert (probed_scores[:, 0] - probe.original).abs().min() > 1e-3


# Strangers


def strategy_of(module: nn.Module, size: tuple[int, int]) -> DropStrategy:
    """Found without a trace left on the module."""
    model = cv.wrap(module.eval(), name="stranger", size=size)
    recording = record(model, torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)))
    before = fingerprint(module)
    strategy = select_strategy(recording)
    assert differences(before, fingerprint(module)) == []
    return strategy


@pytest.mark.parametrize("name", STRANGE)
def test_windows_stages_and_channels_are_zeroed(name: str) -> None:
    assert strategy_of(strange(STRANGE[name].make), STRANGE[name].size).mode == "zero"


def test_a_cnn_has_no_tokens() -> None:
    assert strategy_of(strange(cnn), (32, 32)) == NO_DROPPING


SMALL: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
SMALL |= {"image_size": 32, "patch_size": 8, "num_labels": 7}
HF: dict[str, Callable[[], nn.Module]] = {
    "Beit": lambda: hf.BeitForImageClassification(hf.BeitConfig(**SMALL, use_relative_position_bias=True)),
    "Data2VecVision": lambda: hf.Data2VecVisionForImageClassification(
        hf.Data2VecVisionConfig(**SMALL, use_relative_position_bias=True)
    ),
    # Its rotation splits a sequence by the length of the angles.
    "DINOv3ViT": lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SMALL, num_register_tokens=4)),
}


@pytest.mark.parametrize("name", HF)
def test_transformers_with_places_are_dropped_from(name: str) -> None:
    assert strategy_of(shaken(HF[name](), 0), (32, 32)) == DropStrategy("drop", positions=True)


class AddedBias(MatmulAttention):
    """An N × N bias that is added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, 17, 17))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attn_drop((self.scores(q, k) + self.bias).softmax(-1)) @ v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5


class BiasedLoop(Lucid):
    """Attention modules with a bias, and residuals beside them: no module is a whole block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH), AddedBias()), mlp()]) for _ in range(3)
        )


def test_positions_are_cut_where_no_module_is_a_whole_block() -> None:
    assert strategy_of(shaken(BiasedLoop(), 0), (32, 32)) == DropStrategy("drop", positions=True)


class Detached(AddedBias):
    """Nothing tells that its scores depend on the tokens, and with one patch left lengths do not tell either."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).detach()


def test_a_model_that_one_patch_alone_would_break_is_found_out() -> None:
    assert strategy_of(shaken(HomeMade(lambda: Block(AddedBias)), 0), (32, 32)) == DropStrategy("drop", positions=True)
    assert strategy_of(shaken(HomeMade(lambda: Block(Detached)), 0), (32, 32)) == DropStrategy("zero")


def test_the_caller_s_autocast_does_not_blur_the_trial() -> None:
    model, seen = fresh("timm-vit"), []
    recording = record(model, pixels("timm-vit"), differentiable=False)
    model.module.blocks[1].mlp.fc2.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert select_strategy(recording) == DropStrategy("drop")
    assert {*seen} == {torch.float32}


def test_convit_keeps_what_it_made_for_its_own_number_of_tokens() -> None:
    """It makes its relative places anew whenever the number of tokens is another one: no other number suits it."""
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 3, "local_up_to_layer": 2, "num_classes": 7}
    assert strategy_of(shaken(timm.create_model("convit_tiny", **small), 0), (32, 32)).mode != "drop"


class Remembering(MatmulAttention):
    """Adds a bias that it keeps for each number of tokens that it has seen, and for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.by_length: dict[int, Tensor] = {}
        self.register_buffer("latest", torch.zeros(17), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.by_length:
            self.by_length[x.shape[1]] = x.new_ones(x.shape[1])
        self.latest = self.by_length[x.shape[1]]
        self.longest = max(self.by_length)
        return super().forward(x) + self.latest[:, None]


def test_what_a_model_remembers_of_shorter_sequences_is_forgotten() -> None:
    module = shaken(HomeMade(lambda: Block(Remembering)), 0).eval()
    model = cv.wrap(module, size=(32, 32))
    trace = cv.trace(model, pixels("home-matmul"), target=3)
    before, lengths = fingerprint(module), [list(block.attention.by_length) for block in module.blocks]
    keep = torch.rand(1, 9, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    with probing(trace, "token", label="test", forwards=9) as probe:
        assert probe.strategy == DropStrategy("drop")
        probe.score_kept(keep)
    assert differences(before, fingerprint(module)) == []
    assert [list(block.attention.by_length) for block in module.blocks] == lengths == [[17], [17]]


def test_a_blank_image_and_a_head_of_zeros_do_not_hide_how_a_model_is_built() -> None:
    for name in ("timm-eva02", "timm-sam", "timm-vit"):
        model = fresh(name)
        for p in model.module.head.parameters():
            torch.nn.init.zeros_(p)
        blank = record(model, torch.zeros(1, 3, 32, 32), differentiable=False)
        assert select_strategy(blank) == expected_strategy(name)


class NormOutside(HomeMade):
    """x + attention(norm(x)), in a loop: no module is handed the stream itself."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(MatmulAttention))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.attention(block.norm(x))
            x = x + block.mlp(x)
        return x


@pytest.mark.parametrize("says_the_same", [False, True])
def test_a_stream_that_is_never_handed_over_cannot_be_replaced(says_the_same: bool) -> None:
    """Not even a head that says the same of everything makes it look so."""
    module = shaken(NormOutside(), 0)
    if says_the_same:
        nn.init.zeros_(module.head.weight)
    assert strategy_of(module, (32, 32)) == NO_DROPPING


class FirstPlaces(HomeMade):
    """Adds positions inside the blocks, and to a shorter sequence those that come first: dropping would be wrong."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(MatmulAttention))
        for block in self.blocks:
            block.norm.register_forward_pre_hook(lambda m, args: (args[0] + 3 * self.pos_embed[:, : args[0].shape[1]],))


def test_a_model_that_takes_dropped_tokens_for_others_is_found_out() -> None:
    assert strategy_of(shaken(FirstPlaces(), 0), (32, 32)).mode == "zero"


def test_errors_of_a_shorter_sequence_rule_a_strategy_out_and_others_are_raised() -> None:
    class Strict(HomeMade):
        def __init__(self, error: type[Exception]) -> None:
            super().__init__(lambda: Block(MatmulAttention))
            self.error = error

        def through(self, x: Tensor) -> Tensor:
            x = super().through(x)
            if x.shape[1] != 17:
                raise self.error("a shorter sequence")
            return x

    assert strategy_of(shaken(Strict(ZeroDivisionError), 0), (32, 32)) == DropStrategy("zero")
    with pytest.raises(torch.OutOfMemoryError):
        strategy_of(shaken(Strict(torch.OutOfMemoryError), 0), (32, 32))
    with pytest.raises(AttributeError, match="a shorter sequence"):  # no error of a length: it is the user's to see
        strategy_of(shaken(Strict(AttributeError), 0), (32, 32))
