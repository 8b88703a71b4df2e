"""Variants of different lengths in one pass: the same scores as one length at a time, in fewer passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.models.model import Layout
from clairvit.perturbation import probe as probe_module
from clairvit.perturbation.attention_override import KeyMask
from clairvit.perturbation.batching import length_buckets
from clairvit.perturbation.probe import probing
from clairvit.perturbation.token_dropping import can_pad, drop_strategy, padded_rows
from clairvit.tracing.recording import record
from helpers.tiny_models import TINY, ZOO, fresh, pixels, wrapped

# Class tokens, positions that go with the tokens, and pools of attention; means count every token.
PADDED = [
    "timm-vit",
    "timm-dinov2-reg4",
    "home-mask-by-position",
    "hf-vit-eager",
    "open_clip-coca",
    "home-torch-encoder",
]
MIXES_HEADS = "timm-cait"  # after the softmax, so that masked tokens have weight


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every length share a pass, as small models do on a GPU."""
    monkeypatch.setitem(probe_module.PASS_OVERHEAD, "cpu", 10**9)


def some_patches(name: str, images: int, variants: int) -> Tensor:
    """Return bool [images, variants, patches] with 0, 1, … and all patches kept."""
    rows, columns = ZOO[name].grid
    generator = torch.Generator().manual_seed(3)
    shares = torch.linspace(0, 1, variants)[:, None]
    return torch.rand(images, variants, rows * columns, generator=generator) <= shares


def scores(name: str, keep: Tensor) -> tuple[Tensor, int]:
    """Return the scores [B, V] in float64 and the number of passes of the first block."""
    model = fresh(name, torch.float64)
    trace = cv.trace(model, pixels(name, 2, dtype=torch.float64), target=1)
    can_pad(trace.recording)  # the passes of the test are not counted
    passes = 0
    block = trace.recording.structure.layers[0].block
    assert block is not None

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = block.register_forward_hook(count)
    try:
        with probing(trace, "token", label="test", forwards=keep.shape[1]) as probe:
            values = probe.score_kept(keep)
    finally:
        hook.remove()
    return values, passes


@pytest.mark.parametrize("name", PADDED)
def test_padded_variants_have_the_scores_of_unpadded_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = some_patches(name, 2, 7)
    apart, many = scores(name, keep)
    monkeypatch.setitem(probe_module.PASS_OVERHEAD, "cpu", 10**9)
    together, few = scores(name, keep)
    rounding = 1e-5 if name == "hf-vit-eager" else 1e-10  # its softmax is taken in float32
    assert torch.allclose(apart, together, rtol=rounding, atol=rounding / 100)
    without_any = name == "open_clip-coca"  # its pool reads patches: with none left, all are run as zeros
    assert (many, few) == (keep.sum(-1).unique().numel(), 1 + without_any)


@pytest.mark.parametrize("name", TINY)
def test_models_are_padded_unless_the_head_takes_a_mean_or_heads_are_mixed(name: str) -> None:
    recording = record(wrapped(name, torch.float64), pixels(name, 1, dtype=torch.float64), differentiable=False)
    layout = recording.structure.layout
    assert layout is not None
    drops = drop_strategy(recording).mode == "drop"
    expected = drops and layout.pooling in ("token", "distilled", "map") and name != MIXES_HEADS
    assert can_pad(recording) == expected


@pytest.mark.usefixtures("padding")
@pytest.mark.parametrize("name", ["timm-vit-avg", MIXES_HEADS])
def test_others_are_run_one_length_at_a_time(name: str) -> None:
    keep = some_patches(name, 2, 4)
    assert scores(name, keep)[1] == keep.sum(-1).unique().numel()


def test_rows_that_are_not_kept_follow_those_that_are() -> None:
    layout = Layout(grid=(2, 2), prefix=1, suffix=1, pooling="token")
    keep = torch.tensor([[True, False, True, True], [False, False, False, True]])
    rows, visible = padded_rows(layout, keep, longest=3)
    assert rows is not None
    assert rows.tolist() == [[0, 1, 3, 4, 5], [0, 4, 1, 2, 5]]
    assert visible.tolist() == [[True] * 5, [True, True, False, False, True]]
    rows, visible = padded_rows(layout, torch.ones(1, 4, dtype=torch.bool), longest=4)
    assert rows is None
    assert visible.all()


@pytest.mark.parametrize(
    ("overhead", "expected"),
    [
        (0, [[1], [0, 3], [2]]),
        (2, [[1, 0], [3], [2]]),  # 9 with 7: two tokens of padding
        (4, [[1, 0, 3], [2]]),
        (100, [[1, 0, 3, 2]]),
    ],
)
def test_a_bucket_takes_in_shorter_ones_within_the_overhead(overhead: int, expected: list[list[int]]) -> None:
    assert length_buckets([7, 9, 2, 7], overhead) == expected
    assert length_buckets([], overhead) == []


def test_a_masked_key_is_seen_by_no_other_token() -> None:
    """Fused attention of torch with a boolean, an additive and a causal mask, against attention without the key."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    visible = torch.tensor([[True, True, True, False, True], [True, False, True, True, True]])
    bias = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    attention = nn.functional.scaled_dot_product_attention
    for given, causal in ((None, False), (bias, False), (bias > -1, False), (None, True)):
        with KeyMask(visible) as key_mask:
            masked = attention(q, k, v, attn_mask=given, is_causal=causal)
        assert key_mask.calls == 1
        for image, rows in enumerate(row.nonzero()[:, 0] for row in visible):
            inner = None if given is None else given[rows][:, rows]
            alone = attention(
                q[image, :, rows], k[image, :, rows], v[image, :, rows], attn_mask=inner, is_causal=causal
            )
            assert torch.allclose(masked[image, :, rows], alone, rtol=1e-12, atol=1e-12)
