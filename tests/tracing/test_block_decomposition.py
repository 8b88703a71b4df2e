"""Inside a block: the sum after attention and the vectors in it, for every way of writing a block."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

import clairvit as cv
from clairvit.errors import NotApplicable
from clairvit.tracing.block_decomposition import BlockDecomposition
from clairvit.tracing.linearised import shifted
from clairvit.tracing.recorders.op_log import OpLog
from clairvit.tracing.recording import record
from helpers.custom_vits import WIDTH, Block, HomeMade, MatmulAttention
from helpers.rounding import assert_same
from helpers.tiny_models import TINY, ZOO, build, fresh, pixels, strange, wrapped
from helpers.transformers_names import value_and_output, vit_layers

FITTING = [kind for kind in TINY if "residual" not in ZOO[kind].lacks and kind != "home-loop"]


def recorded(kind: str, dtype: torch.dtype = torch.float64):
    return record(wrapped(kind, dtype), pixels(kind, dtype=dtype), differentiable=False, recorders=(OpLog,))


@pytest.mark.parametrize("kind", FITTING)
def test_the_vectors_add_up_to_the_stream_after_attention(kind: str) -> None:
    """sum_j T_ij and the biases on the way are x_mid, whoever wrote the block."""
    recording = recorded(kind)
    for index, call in enumerate(recording.calls):
        inside = BlockDecomposition.of(recording, index)
        parts = inside.vectors(value_bias=True)
        added = (call.A() @ parts.f).sum(1) * parts.spread  # [B, N, d]
        constant = tuple(map(torch.zeros_like, inside.attended))
        for link in inside.to_sum:  # a chain: x + g(0) at its end
            constant = shifted(link, constant)
        assert_same(added + recording.as_tokens(constant[0]), inside.x_mid)
        assert_same(parts.x, recording.as_tokens(recording.inputs[index]))


@pytest.mark.parametrize("kind", FITTING)
def test_values_without_bias_are_what_a_block_without_biases_would_have(kind: str) -> None:
    """v is affine in x once the norm's spread is fixed: its linear part is what all biases at zero leave."""
    module = build(kind).double()
    model = cv.wrap(module, size=ZOO[kind].size, classifier=ZOO[kind].classifier)
    recording = record(model, pixels(kind, dtype=torch.float64), differentiable=False, recorders=(OpLog,))
    first = recording.structure.layers[0].block
    inside = BlockDecomposition.of(recording, 0)
    plain = inside.values(bias=False)
    with torch.no_grad():
        for name, p in first.named_parameters():
            if name.endswith("bias") and "position" not in name:
                p.zero_()
    start = recording.inputs[0].clone()
    bare = record(recording.model, recording.pixels, differentiable=False, start=start)
    assert_same(plain, bare.calls[0].v)


# Post-norm blocks and torch's own layers, by explicit weights


def norm(module: nn.LayerNorm, v: Tensor, at: Tensor | None = None) -> Tensor:
    """With the true spread of `at` and no bias; the whole norm if `at` is left out."""
    if at is None:
        return layer_norm(v, (WIDTH,), module.weight, module.bias, module.eps)
    spread = (at.var(-1, unbiased=False, keepdim=True) + module.eps).sqrt()
    return module.weight * (v - v.mean(-1, keepdim=True)) / spread


def post_norm_vectors(layer: nn.TransformerEncoderLayer, x: Tensor, A: Tensor) -> Tensor:
    """T [B, i, j, d] of x + attention(x), without biases."""
    Wv = layer.self_attn.in_proj_weight[-WIDTH:]
    v = (x @ Wv.T).unflatten(-1, (A.shape[1], -1)).transpose(1, 2)
    T = torch.einsum("bhij,bhjv->bijhv", A, v).flatten(3) @ layer.self_attn.out_proj.weight.T
    diagonal = torch.arange(T.shape[1])
    T[:, diagonal, diagonal] += x
    return T


@torch.no_grad()
def test_norms_of_a_post_norm_block() -> None:
    """GlobEnc's two norms and ALTI's one: the residual stream goes through them, the MLP is passed by."""
    module = build("home-encoder-post-norm").double()
    model, image = cv.wrap(module), pixels("home-encoder-post-norm", dtype=torch.float64)
    tr = cv.trace(model, image, target=0)
    for index, layer in enumerate(module.blocks):
        x, A = tr.layers[index].x, tr.layers[index].A
        T = post_norm_vectors(layer, x, A)
        x_mid = x + layer.self_attn(x, x, x, need_weights=False)[0]
        s = norm(layer.norm1, x_mid)
        before_norm2 = s + layer.linear2(nn.functional.gelu(layer.linear1(s)))
        T1 = norm(layer.norm1, T, x_mid[:, :, None])
        T2 = norm(layer.norm2, T1, before_norm2[:, :, None])
        for name, expected in {
            "globenc(ln=none)": T.norm(dim=-1),
            "globenc(ln=next)": T1.norm(dim=-1),
            "globenc(ln=attention)": T1.norm(dim=-1),
            "globenc": T2.norm(dim=-1),
        }.items():
            maps = cv.explain(model, image, f"{name}+layer:{index}").maps
            assert_same(maps.flatten(1), expected[:, 0, 1:])
        near = s[:, :, None].abs().sum(-1) - (s[:, :, None] - T1).abs().sum(-1)
        C = near.clamp(min=0) / near.clamp(min=0).sum(-1, keepdim=True)
        assert_same(cv.explain(model, image, f"alti+layer:{index}").maps.flatten(1), C[:, 0, 1:])


@torch.no_grad()
def test_a_norm_between_attention_and_residual() -> None:
    """timm's ResPost blocks: x + norm(attention(x)); the spread is the query's, the vector the key's."""
    module = build("timm-post-norm").double()
    model, image = cv.wrap(module, size=ZOO["timm-post-norm"].size), pixels("timm-post-norm", dtype=torch.float64)
    tr = cv.trace(model, image, target=0)
    block, x, A = module.blocks[1], tr.layers[1].x, tr.layers[1].A
    v = (x @ block.attn.qkv.weight[-WIDTH:].T).unflatten(-1, (A.shape[1], -1)).transpose(1, 2)
    T = torch.einsum("bhij,bhjv->bijhv", A, v).flatten(3) @ block.attn.proj.weight.T
    T = norm(block.norm1, T, block.attn(x, shared_rel_pos=None)[:, :, None])
    diagonal = torch.arange(T.shape[1])
    T[:, diagonal, diagonal] += x
    maps = cv.explain(model, image, "globenc+last").maps
    assert_same(maps.flatten(1), T.norm(dim=-1).mean(1))


@torch.no_grad()
def test_transformers() -> None:
    """A ViT of transformers, by the weights in its state dict."""
    kind = "hf-vit-sdpa"
    module = build(kind).double()
    model, image = cv.wrap(module, size=ZOO[kind].size), pixels(kind, dtype=torch.float64)
    layer, last = vit_layers(module.vit)[1], cv.trace(model, image, target=0).layers[1]
    value, output = value_and_output(layer.attention)
    h = norm(layer.layernorm_before, last.x, last.x)
    v = (h @ value.weight.T).unflatten(-1, (last.A.shape[1], -1)).transpose(1, 2)
    T = torch.einsum("bhij,bhjv->bijhv", last.A, v).flatten(3) @ output.weight.T
    assert_same(cv.explain(model, image, "attin").maps.flatten(1), T.norm(dim=-1)[:, 0, 1:])


# What cannot be taken apart is refused


class Gated(Block):
    """Attention times a gate made of the tokens: what a key adds depends on the query's gate."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x)) * torch.sigmoid(x)
        return x + self.mlp(x)


class Beside(Block):
    """Attention and MLP from the same input, added at once."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.attention(self.norm(x)) + self.mlp(x))


class WithoutResidual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(self.norm(x)))


@pytest.mark.parametrize("block", [Gated, Beside, WithoutResidual])
def test_other_blocks_are_refused(block: type[nn.Module]) -> None:
    model = cv.wrap(strange(lambda: HomeMade(lambda: block(MatmulAttention))))
    with pytest.raises(
        NotApplicable, match=r"Layer \d does not add its attention to its own input .* genatt or legrad"
    ):
        cv.explain(model, pixels("timm-vit"), "globenc")


class NormOfGroups(Block):
    """The attention's result is normalised in two groups of channels: a token has two spreads."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.attention(self.norm(x)).unflatten(-1, (2, -1))
        x = x + nn.functional.layer_norm(inner, inner.shape[-1:]).flatten(-2)
        return x + self.mlp(x)


def test_a_norm_over_a_part_of_a_token_is_refused() -> None:
    model = cv.wrap(strange(lambda: HomeMade(lambda: NormOfGroups(MatmulAttention))))
    with pytest.raises(NotApplicable, match=r"is over \[2, 17, 2, 1\], not over whole tokens; expected one spread"):
        cv.explain(model, pixels("timm-vit"), "globenc")


class WritesIntoSlices(Block):
    """The first token's attention is overwritten after the fact: the log cannot know what it was."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.attention(self.norm(x))
        scaled = inner * 0.5
        with torch.no_grad():
            inner[:, :1] = 0
        x = x + scaled
        return x + self.mlp(x)


def test_writing_into_slices_is_refused() -> None:
    model = cv.wrap(strange(lambda: HomeMade(lambda: WritesIntoSlices(MatmulAttention))))
    with pytest.raises(NotApplicable, match="overwrites a tensor"):
        cv.explain(model, pixels("timm-vit"), "globenc")


# The operation log


def test_no_operations_are_logged_unless_required() -> None:
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    assert OpLog not in record(model, image).recorders
    assert record(model, image, recorders=(OpLog,))[OpLog].steps


def test_the_operation_log_keeps_no_graph() -> None:
    log = record(wrapped("timm-vit"), pixels("timm-vit"), recorders=(OpLog,))[OpLog]
    assert not any(t.requires_grad for step in log.steps for t in (*step.inputs, *step.outputs))


def test_an_operation_log_is_freed_without_the_garbage_collector() -> None:
    model, image = fresh("timm-vit"), pixels("timm-vit")
    cv.compare(model, image, ["alti", "tokentm", "globenc"], target=1)
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        cv.compare(model, image, ["alti", "tokentm", "globenc"], target=1)
        assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= before
    finally:
        gc.enable()
