"""One small ViT written in many ways that give equal logits, in float64: what the equivalence tests compare.

`Base` names a reference ViT (its pooling, norm, activation, MLP). A `Variant` writes one part of it otherwise, with the
same weights; many of these forms are in no library. Equal networks must get equal maps, or a refusal, or a note.
"""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, PATCH, WIDTH, HEADS, DEPTH, HIDDEN, CLASSES = 24, 8, 12, 3, 2, 20, 5
PATCHES, HEAD_WIDTH = (SIZE // PATCH) ** 2, WIDTH // HEADS


@dataclass(frozen=True)
class Base:
    """A reference ViT, written with torch's own modules."""

    pooling: str = "cls"  # or "mean"
    norm: str = "layer"  # or "rms"
    eps: float = 1e-6
    activation: str = "gelu"  # "gelu-tanh", "silu"
    gated: bool = False  # activation(gate(x)) * up(x) in the MLP


PLAIN = Base()
MEAN = Base(pooling="mean")
NO_EPS = Base(eps=0.0)
RMS = Base(norm="rms")
SILU = Base(activation="silu")
TANH = Base(activation="gelu-tanh")
GATED = Base(activation="silu", gated=True)


class Attention(nn.Module):
    """Explicit multi-head attention with one qkv layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.qkv(x))
        return self.proj(merge(attend(q, k, v)))


def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, H, N, dh] of [B, N, 3 d]."""
    q, k, v = qkv.unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
    return q, k, v


def merge(heads: Tensor) -> Tensor:
    """Return [B, N, d] of heads [B, H, N, dh]."""
    return heads.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q kᵀ / sqrt(dh)) v."""
    return (q @ k.transpose(-2, -1) * HEAD_WIDTH**-0.5).softmax(-1) @ v


class Mlp(nn.Module):
    """Two linear layers, or three with a gate."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN) if base.gated else None
        activations = {"gelu": nn.GELU(), "gelu-tanh": nn.GELU("tanh"), "silu": nn.SiLU()}
        self.act: nn.Module = activations[base.activation]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        return self.fc2(hidden if self.up is None else hidden * self.up(x))


class Block(nn.Module):
    def __init__(self, base: Base) -> None:
        super().__init__()
        norm = nn.RMSNorm if base.norm == "rms" else nn.LayerNorm
        self.norm1: nn.Module = norm(WIDTH, eps=base.eps)
        self.norm2: nn.Module = norm(WIDTH, eps=base.eps)
        self.attn: nn.Module = Attention()
        self.mlp: nn.Module = Mlp(base)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """The reference: every part is an attribute, so that a variant replaces one."""

    def __init__(self, base: Base = PLAIN) -> None:
        super().__init__()
        self.image_size, self.pooling = SIZE, base.pooling
        self.embed: nn.Module = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, PATCHES + 1, WIDTH))
        self.blocks: nn.Module = nn.ModuleList(Block(base) for _ in range(DEPTH))
        self.norm: nn.Module = (nn.RMSNorm if base.norm == "rms" else nn.LayerNorm)(WIDTH, eps=base.eps)
        self.head: nn.Module = nn.Linear(WIDTH, CLASSES)

    def patches(self, image: Tensor) -> Tensor:
        return self.embed(image).flatten(2).transpose(1, 2)

    def tokens(self, image: Tensor) -> Tensor:
        patches = self.patches(image)
        return torch.cat([self.cls.expand(len(patches), -1, -1), patches], 1) + self.pos

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = block(x)
        return x

    def pool(self, x: Tensor) -> Tensor:
        return x[:, 0] if self.pooling == "cls" else x[:, 1:].mean(1)

    def forward(self, image: Tensor) -> Any:
        return self.head(self.pool(self.norm(self.encode(self.tokens(image)))))


def reference(base: Base = PLAIN, seed: int = 0) -> ViT:
    """Return a reference ViT in float64 whose norms, biases and positions are all random."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = ViT(base).double().eval()
    torch.random.set_rng_state(state)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "norm" in name:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * (0.6 if parameter.ndim == 1 else 0.9 / math.sqrt(parameter[0].numel())))
    return model


def images(count: int = 1, seed: int = 0) -> Tensor:
    """Return random images [B, 3, 24, 24] in float64."""
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Change = Callable[[ViT], nn.Module | None]


@dataclass(frozen=True)
class Variant:
    """A way to write a reference ViT: `change` edits a copy of it, or returns another module around it."""

    name: str
    base: Base
    change: Change

    def build(self) -> nn.Module:
        """Return the module, with the weights of `reference(self.base)`."""
        model = reference(self.base)
        return (self.change(model) or model).eval()


VARIANTS: dict[str, Variant] = {}


def variant(name: str, base: Base = PLAIN) -> Callable[[Change], Change]:
    """Register a variant."""

    def register(change: Change) -> Change:
        assert name not in VARIANTS
        VARIANTS[name] = Variant(name, base, change)
        return change

    return register


def blocks_of(model: ViT) -> Iterator[Block]:
    return iter(model.blocks)  # type: ignore[call-overload, no-any-return]


class Written(nn.Module):
    """A part written as a function of (module with the weights, input)."""

    def __init__(self, source: nn.Module, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.source, self.function = source, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.source, x)


# Attention


def with_attention(name: str, base: Base = PLAIN) -> Callable[[Callable[[Attention], nn.Module]], None]:
    """Register a module that takes the place of every block's `Attention`."""

    def register(convert: Callable[[Attention], nn.Module]) -> None:
        def change(model: ViT) -> None:
            for block in blocks_of(model):
                block.attn = convert(block.attn)  # type: ignore[arg-type]

        variant(f"attention: {name}", base)(change)

    return register


def with_attending(name: str) -> Callable[[Callable[[Tensor, Tensor, Tensor], Tensor]], None]:
    """Register another formula of softmax(q kᵀ / sqrt(dh)) v, on [B, H, N, dh]."""

    def register(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        def forward(source: Attention, x: Tensor) -> Tensor:
            return source.proj(merge(formula(*split(source.qkv(x)))))

        with_attention(name)(lambda source: Written(source, forward))

    return register


with_attending("fused")(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
with_attending("fused, with a mask of zeros")(
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(q.shape[-2], k.shape[-2]).to(q))
)
with_attending("scale on q")(lambda q, k, v: ((q * HEAD_WIDTH**-0.5) @ k.mT).softmax(-1) @ v)
with_attending("scale on both")(lambda q, k, v: ((q / HEAD_WIDTH**0.25) @ (k / HEAD_WIDTH**0.25).mT).softmax(-1) @ v)
with_attending("operator module")(
    lambda q, k, v: torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)).div(math.sqrt(HEAD_WIDTH)), dim=3), v)
)
with_attending("keys before queries")(lambda q, k, v: ((k @ q.mT) / math.sqrt(HEAD_WIDTH)).softmax(-2).mT @ v)
with_attending("values before weights")(lambda q, k, v: (v.mT @ ((q @ k.mT) / math.sqrt(HEAD_WIDTH)).softmax(-1).mT).mT)
with_attending("einsum")(
    lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(HEAD_WIDTH)).softmax(-1), v
    )
)


@with_attending("heads in the batch")
def _heads_in_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return torch.bmm(torch.baddbmm(torch.zeros(1).to(q), q, k.mT, alpha=HEAD_WIDTH**-0.5).softmax(-1), v).unflatten(
        0, (-1, HEADS)
    )


@with_attending("softmax as exponentials")
def _exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * HEAD_WIDTH**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ v


@with_attending("softmax by logsumexp")
def _logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * HEAD_WIDTH**-0.5
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v


@with_attending("exp of log_softmax")
def _log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * HEAD_WIDTH**-0.5).log_softmax(-1).exp() @ v


@with_attending("normalised after the values")
def _late_normaliser(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.exp(q @ k.mT * HEAD_WIDTH**-0.5)
    return (weights @ v) / weights.sum(-1, keepdim=True)


@with_attending("sum of products, no matmul")
def _no_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * HEAD_WIDTH**-0.5
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


@with_attending("queries in two chunks")
def _chunked_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([attend(part, k, v) for part in q.split(5, -2)], -2)


@with_attending("queries in two fused chunks")
def _chunked_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([F.scaled_dot_product_attention(part, k, v) for part in q.split(5, -2)], -2)


@with_attending("vmap over heads")
def _vmapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(attend, in_dims=1, out_dims=1)(q, k, v)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT * HEAD_WIDTH**-0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights = ctx.saved_tensors
        of_weights = gradient @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * HEAD_WIDTH**-0.5
        return of_scores @ k, of_scores.mT @ q, weights.mT @ gradient


with_attending("an autograd function")(lambda q, k, v: _AttentionFunction.apply(q, k, v))


def head_layers(source: Attention, part: int, head: int) -> nn.Linear:
    """Return the linear layer of q (0), k (1) or v (2) of one head."""
    rows = slice(part * WIDTH + head * HEAD_WIDTH, part * WIDTH + (head + 1) * HEAD_WIDTH)
    layer = nn.Linear(WIDTH, HEAD_WIDTH).double()
    layer.weight.data, layer.bias.data = source.qkv.weight.data[rows].clone(), source.qkv.bias.data[rows].clone()
    return layer


class Head(nn.Module):
    """One head as a module: the style of nanoGPT and of many tutorials."""

    def __init__(self, source: Attention, head: int, fused: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (head_layers(source, part, head) for part in range(3))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return F.scaled_dot_product_attention(q, k, v) if self.fused else attend(q, k, v)


class HeadModules(nn.Module):
    def __init__(self, source: Attention, fused: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(source, head, fused) for head in range(HEADS))
        self.proj = source.proj

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class ProjectedHeads(HeadModules):
    """Each head's output goes through its own columns of the projection, and the results are summed."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.proj.weight.split(HEAD_WIDTH, 1)
        return sum(F.linear(head(x), w) for head, w in zip(self.heads, weights, strict=True)) + self.proj.bias


class HeadWithQkv(nn.Module):
    """One head with a joint qkv layer of its own."""

    def __init__(self, source: Attention, head: int) -> None:
        super().__init__()
        layers = [head_layers(source, part, head) for part in range(3)]
        self.qkv = nn.Linear(WIDTH, 3 * HEAD_WIDTH).double()
        self.qkv.weight.data = torch.cat([layer.weight.data for layer in layers])
        self.qkv.bias.data = torch.cat([layer.bias.data for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.qkv(x).chunk(3, -1))


class HeadsWithQkv(nn.Module):
    def __init__(self, source: Attention) -> None:
        super().__init__()
        self.heads = nn.ModuleList(HeadWithQkv(source, head) for head in range(HEADS))
        self.proj = source.proj

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.stack([head(x) for head in self.heads], 2).flatten(2))


with_attention("heads as modules")(HeadModules)
with_attention("heads as fused modules")(lambda source: HeadModules(source, fused=True))
with_attention("heads projected one by one")(ProjectedHeads)
with_attention("heads with a qkv each")(HeadsWithQkv)


def _looped(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Attention], nn.Module]:
    def forward(source: Attention, x: Tensor) -> Tensor:
        q, k, v = split(source.qkv(x))
        return source.proj(torch.cat([attention(q[:, h], k[:, h], v[:, h]) for h in range(HEADS)], -1))

    return lambda source: Written(source, forward)


with_attention("a loop over heads")(_looped(attend))
with_attention("a loop over fused heads")(_looped(F.scaled_dot_product_attention))


@with_attention("two calls, of two heads and of the third")
def _two_calls(source: Attention) -> nn.Module:
    def forward(source: Attention, x: Tensor) -> Tensor:
        q, k, v = split(source.qkv(x))
        parts = [F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h]) for h in (slice(0, 2), slice(2, 3))]
        return source.proj(merge(torch.cat(parts, 1)))

    return Written(source, forward)


@with_attention("separate q, k, v layers")
def _separate(source: Attention) -> nn.Module:
    def forward(source: Attention, x: Tensor) -> Tensor:
        parts = zip(source.qkv.weight.chunk(3), source.qkv.bias.chunk(3), strict=True)
        q, k, v = (F.linear(x, w, b).unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(1, 2) for w, b in parts)
        return source.proj(merge(F.scaled_dot_product_attention(q, k, v)))

    return Written(source, forward)


@with_attention("nn.MultiheadAttention")
def _multi_head(source: Attention) -> nn.Module:
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    attention.in_proj_weight.data, attention.in_proj_bias.data = source.qkv.weight.data, source.qkv.bias.data
    attention.out_proj.weight.data, attention.out_proj.bias.data = source.proj.weight.data, source.proj.bias.data
    return Written(attention, lambda attention, x: attention(x, x, x, need_weights=False)[0])


@with_attention("nn.MultiheadAttention that returns weights")
def _multi_head_weights(source: Attention) -> nn.Module:
    attention = _multi_head_of(source)
    return Written(attention, lambda attention, x: attention(x, x, x, average_attn_weights=False)[0])


def _multi_head_of(source: Attention) -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    attention.in_proj_weight.data, attention.in_proj_bias.data = source.qkv.weight.data, source.qkv.bias.data
    attention.out_proj.weight.data, attention.out_proj.bias.data = source.proj.weight.data, source.proj.bias.data
    return attention


@with_attention("values and projection in one matrix")
def _absorbed(source: Attention) -> nn.Module:
    def forward(source: Attention, x: Tensor) -> Tensor:
        q, k, v = split(source.qkv(x))
        columns = source.proj.weight.unflatten(1, (HEADS, HEAD_WIDTH)).permute(1, 2, 0)  # [H, dh, d]
        return attend(q, k, v @ columns).sum(1) + source.proj.bias

    return Written(source, forward)


@with_attention("bias of the values behind the attention")
def _late_value_bias(source: Attention) -> nn.Module:
    def forward(source: Attention, x: Tensor) -> Tensor:
        q, k, _ = split(source.qkv(x))
        weight, bias = source.qkv.weight[2 * WIDTH :], source.qkv.bias[2 * WIDTH :]
        v = F.linear(x, weight).unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(1, 2)
        return source.proj(merge(attend(q, k, v)) + bias)

    return Written(source, forward)


# Norms


def with_norm(name: str, base: Base = PLAIN) -> Callable[[Callable[[Any, Tensor], Tensor]], None]:
    """Register another formula of every block's norms and of the last: of the norm's module and x [B, N, d]."""

    def register(formula: Callable[[Any, Tensor], Tensor]) -> None:
        def change(model: ViT) -> None:
            for block in blocks_of(model):
                block.norm1, block.norm2 = Written(block.norm1, formula), Written(block.norm2, formula)
            model.norm = Written(model.norm, formula)

        variant(f"norm: {name}", base)(change)

    return register


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def variance(x: Tensor) -> Tensor:
    return centred(x).pow(2).mean(-1, keepdim=True)


with_norm("F.layer_norm")(lambda n, x: F.layer_norm(x, (WIDTH,), n.weight, n.bias, n.eps))
with_norm("torch.native_layer_norm")(lambda n, x: torch.native_layer_norm(x, (WIDTH,), n.weight, n.bias, n.eps)[0])
with_norm("aten.layer_norm")(lambda n, x: torch.ops.aten.layer_norm(x, (WIDTH,), n.weight, n.bias, n.eps))
with_norm("weight and bias behind it")(lambda n, x: F.layer_norm(x, (WIDTH,), eps=n.eps) * n.weight + n.bias)
with_norm("* rsqrt")(lambda n, x: centred(x) * torch.rsqrt(variance(x) + n.eps) * n.weight + n.bias)
with_norm("/ sqrt")(lambda n, x: centred(x) / torch.sqrt(variance(x) + n.eps) * n.weight + n.bias)
with_norm("/ sqrt of x.var")(
    lambda n, x: (
        n.weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + n.eps).sqrt() + n.bias
    )
)
with_norm("/ (std + eps)", NO_EPS)(
    lambda n, x: n.weight * centred(x) / (x.std(-1, keepdim=True, unbiased=False) + n.eps) + n.bias
)
with_norm("** -0.5")(lambda n, x: centred(x) * (variance(x) + n.eps) ** -0.5 * n.weight + n.bias)
with_norm("** 0.5")(lambda n, x: centred(x) / (variance(x) + n.eps) ** 0.5 * n.weight + n.bias)
with_norm("E[x²] − E[x]²")(
    lambda n, x: (
        centred(x) / ((x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2 + n.eps).sqrt() * n.weight + n.bias
    )
)
with_norm("reciprocal")(
    lambda n, x: centred(x).mul((variance(x) + n.eps).sqrt().reciprocal()).mul(n.weight).add(n.bias)
)
with_norm("1 / sqrt")(lambda n, x: centred(x) * (1 / (variance(x) + n.eps).sqrt()) * n.weight + n.bias)
with_norm("exp and log")(lambda n, x: centred(x) * torch.exp(-0.5 * torch.log(variance(x) + n.eps)) * n.weight + n.bias)
with_norm("a length")(
    lambda n, x: (
        F.normalize(centred(x), dim=-1, eps=0.0) * math.sqrt(WIDTH) * n.weight + n.bias
        if n.eps == 0
        else centred(x) / torch.sqrt(centred(x).norm(dim=-1, keepdim=True) ** 2 / WIDTH + n.eps) * n.weight + n.bias
    )
)
with_norm("F.normalize", NO_EPS)(lambda n, x: F.normalize(centred(x), dim=-1) * math.sqrt(WIDTH) * n.weight + n.bias)
with_norm("x / norm", NO_EPS)(
    lambda n, x: (
        centred(x) / torch.linalg.vector_norm(centred(x), dim=-1, keepdim=True) * WIDTH**0.5 * n.weight + n.bias
    )
)
with_norm("a centring matrix")(
    lambda n, x: (x @ (torch.eye(WIDTH).to(x) - 1 / WIDTH)) / torch.sqrt(variance(x) + n.eps) * n.weight + n.bias
)
with_norm("einsum of the squares")(
    lambda n, x: (
        torch.einsum(
            "bnd,bn->bnd",
            centred(x),
            (torch.einsum("bnd,bnd->bn", centred(x), centred(x)) / WIDTH + n.eps).rsqrt(),
        )
        * n.weight
        + n.bias
    )
)
with_norm("group_norm")(
    lambda n, x: F.group_norm(x.flatten(0, 1), 1, n.weight, n.bias, n.eps).unflatten(0, x.shape[:2])
)
with_norm("channels first")(lambda n, x: _channels_first(n, x.mT).mT)
with_norm("RMSNorm: rsqrt", RMS)(lambda n, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps) * n.weight)
with_norm("RMSNorm: / sqrt", RMS)(lambda n, x: n.weight * (x / (x.square().mean(-1, keepdim=True) + n.eps).sqrt()))
with_norm("RMSNorm: a length", RMS)(
    lambda n, x: n.weight * x / (x.norm(2, dim=-1, keepdim=True).pow(2) / WIDTH + n.eps) ** (1 / 2)
)
with_norm("RMSNorm: in place", RMS)(
    lambda n, x: x.clone().div_((x * x).mean(-1, keepdim=True).add_(n.eps).sqrt_()).mul_(n.weight)
)


def _channels_first(norm: Any, x: Tensor) -> Tensor:
    """LayerNorm2d of ConvNeXt and SAM, on [B, d, N]."""
    mean = x.mean(1, keepdim=True)
    square = (x - mean).pow(2).mean(1, keepdim=True)
    return norm.weight[:, None] * ((x - mean) / torch.sqrt(square + norm.eps)) + norm.bias[:, None]


@with_norm("torch.var_mean")
def _var_mean(n: Any, x: Tensor) -> Tensor:
    square, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) / (square + n.eps).sqrt() * n.weight + n.bias


@with_norm("torch.std_mean", NO_EPS)
def _std_mean(n: Any, x: Tensor) -> Tensor:
    deviation, mean = torch.std_mean(x, -1, keepdim=True, correction=0)
    return torch.addcmul(n.bias, (x - mean) / deviation, n.weight)


@with_norm("in place")
def _in_place(n: Any, x: Tensor) -> Tensor:
    y = x - x.mean(-1, keepdim=True)
    y /= (y.pow(2).mean(-1, keepdim=True) + n.eps).sqrt()
    y *= n.weight
    y += n.bias
    return y


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(variance(x) + eps)
        normal = centred(x) * inverse
        ctx.save_for_backward(normal, inverse, weight)
        return normal * weight + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        normal, inverse, weight = ctx.saved_tensors
        g = gradient * weight
        return inverse * (centred(g) - normal * (g * normal).mean(-1, keepdim=True)), None, None, None


with_norm("an autograd function")(lambda n, x: _NormFunction.apply(x, n.weight, n.bias, n.eps))


# Activations


def with_activation(name: str, base: Base = PLAIN) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Register another formula of every MLP's activation."""

    def register(formula: Callable[[Tensor], Tensor]) -> None:
        def change(model: ViT) -> None:
            for block in blocks_of(model):
                block.mlp.act = Written(block.mlp.act, lambda _, z: formula(z))  # type: ignore[assignment]

        variant(f"activation: {name}", base)(change)

    return register


with_activation("F.gelu")(F.gelu)
with_activation("torch._C._nn.gelu")(lambda z: torch._C._nn.gelu(z))
with_activation("aten.gelu")(lambda z: torch.ops.aten.gelu(z))
with_activation("erf")(lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))))
with_activation("erf, another order")(lambda z: z * (torch.erf(z * 0.5**0.5) + 1) / 2)
with_activation("erfc")(lambda z: z * 0.5 * torch.erfc(-z / math.sqrt(2)))
with_activation("special.erf")(lambda z: z * 0.5 * (1.0 + torch.special.erf(z / 2**0.5)))
with_activation("ndtr")(lambda z: z * torch.special.ndtr(z))
with_activation("Normal.cdf")(lambda z: z * torch.distributions.Normal(0.0, 1.0, validate_args=False).cdf(z))
with_activation("in place")(lambda z: z.clone().mul_(torch.special.ndtr(z)))
with_activation("tanh", TANH)(lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))))
with_activation("tanh, powers by products", TANH)(
    lambda z: z * 0.5 * (1.0 + torch.tanh(z * 0.7978845608028654 * (1.0 + 0.044715 * z * z)))
)
with_activation("F.gelu of tanh", TANH)(lambda z: F.gelu(z, approximate="tanh"))
with_activation("SiLU: sigmoid", SILU)(lambda z: z * torch.sigmoid(z))
with_activation("SiLU: z / (1 + exp(−z))", SILU)(lambda z: z / (1 + torch.exp(-z)))
with_activation("SiLU: expit", SILU)(lambda z: torch.special.expit(z) * z)
with_activation("SiLU: aten.silu", SILU)(lambda z: torch.ops.aten.silu(z))
with_activation("SiLU: GLU", SILU)(lambda z: F.glu(torch.cat([z, z], -1)))
with_activation("SiLU: tanh", SILU)(lambda z: 0.5 * z * (1 + torch.tanh(z / 2)))


class _GeluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return F.gelu(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return gradient * (torch.special.ndtr(z) + z * density)


with_activation("an autograd function")(lambda z: _GeluFunction.apply(z))


@variant("activation: gate written with sigmoid", GATED)
def _written_gate(model: ViT) -> None:
    for block in blocks_of(model):
        block.mlp = Written(block.mlp, lambda m, x: m.fc2(m.fc1(x) * torch.sigmoid(m.fc1(x)) * m.up(x)))


@variant("activation: gate by einsum", GATED)
def _einsum_gate(model: ViT) -> None:
    for block in blocks_of(model):
        block.mlp = Written(block.mlp, lambda m, x: m.fc2(torch.einsum("bnd,bnd->bnd", F.silu(m.fc1(x)), m.up(x))))


@variant("activation: gate and value of one layer", GATED)
def _joint_gate(model: ViT) -> None:
    def forward(m: Mlp, x: Tensor) -> Tensor:
        assert m.up is not None
        joint = F.linear(x, torch.cat([m.up.weight, m.fc1.weight]), torch.cat([m.up.bias, m.fc1.bias]))
        value, gate = joint.chunk(2, -1)
        return m.fc2(value * F.silu(gate))

    for block in blocks_of(model):
        block.mlp = Written(block.mlp, forward)


# Linear layers


def with_linear(name: str) -> Callable[[Callable[[nn.Linear, Tensor], Tensor]], None]:
    """Register another formula of every linear layer of the blocks."""

    def register(formula: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        def change(model: ViT) -> None:
            for block in blocks_of(model):
                block.attn.qkv, block.attn.proj = Written(block.attn.qkv, formula), Written(block.attn.proj, formula)
                block.mlp.fc1, block.mlp.fc2 = Written(block.mlp.fc1, formula), Written(block.mlp.fc2, formula)

        variant(f"linear: {name}")(change)

    return register


with_linear("@")(lambda n, x: x @ n.weight.T + n.bias)
with_linear("matmul")(lambda n, x: torch.matmul(x, n.weight.t()).add(n.bias))
with_linear("einsum")(lambda n, x: torch.einsum("bni,oi->bno", x, n.weight) + n.bias)
with_linear("tensordot")(lambda n, x: torch.tensordot(x, n.weight, dims=([2], [1])) + n.bias)
with_linear("addmm")(lambda n, x: torch.addmm(n.bias, x.flatten(0, 1), n.weight.T).unflatten(0, x.shape[:2]))
with_linear("baddbmm")(lambda n, x: torch.baddbmm(n.bias, x, n.weight.T.expand(len(x), -1, -1)))
with_linear("matrix from the left")(lambda n, x: (n.weight @ x.mT).mT + n.bias)
with_linear("1 × 1 convolution")(lambda n, x: F.conv1d(x.mT, n.weight[:, :, None], n.bias).mT)
with_linear("1 × 1 convolution of a plane")(
    lambda n, x: F.conv2d(x.mT[..., None], n.weight[:, :, None, None], n.bias)[..., 0].mT
)
with_linear("sum of products")(lambda n, x: (x.unsqueeze(-2) * n.weight).sum(-1) + n.bias)
with_linear("halves of the outputs")(
    lambda n, x: torch.cat([F.linear(x, w, b) for w, b in zip(n.weight.chunk(2), n.bias.chunk(2), strict=True)], -1)
)
with_linear("halves of the inputs")(
    lambda n, x: sum(F.linear(a, w) for a, w in zip(x.chunk(2, -1), n.weight.chunk(2, 1), strict=True)) + n.bias
)
with_linear("bias as a column")(
    lambda n, x: F.linear(F.pad(x, (0, 1), value=1.0), torch.cat([n.weight, n.bias[:, None]], 1))
)
with_linear("aten.linear")(lambda n, x: torch.ops.aten.linear(x, n.weight, n.bias))


@with_linear("a low-rank part beside it")
def _low_rank(n: nn.Linear, x: Tensor) -> Tensor:
    a, b = n.weight[:2], n.weight[:, :2].T  # [2, in], [2, out]
    return F.linear(x, n.weight - b.T @ a, n.bias) + (x @ a.T) @ b


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.saved_tensors[0], None, None


with_linear("an autograd function")(lambda n, x: _LinearFunction.apply(x, n.weight, n.bias))


@variant("linear: parametrised")
def _parametrised(model: ViT) -> None:
    for block in blocks_of(model):
        nn.utils.parametrizations.weight_norm(block.mlp.fc1)  # type: ignore[arg-type]


# Residual sums


def with_residual(name: str) -> Callable[[Callable[[Tensor, Tensor], Tensor]], None]:
    """Register another formula of x + branch."""

    def register(add: Callable[[Tensor, Tensor], Tensor]) -> None:
        def forward(block: Block, x: Tensor) -> Tensor:
            x = add(x, block.attn(block.norm1(x)))
            return add(x, block.mlp(block.norm2(x)))

        def change(model: ViT) -> None:
            model.blocks = nn.ModuleList(Written(block, forward) for block in blocks_of(model))

        variant(f"residual: {name}")(change)

    return register


with_residual("branch + x")(lambda x, y: y + x)
with_residual("torch.add")(lambda x, y: torch.add(x, y))
with_residual("torch.add with alpha")(lambda x, y: torch.add(x, y, alpha=1))
with_residual("method")(lambda x, y: x.add(y))
with_residual("into a copy")(lambda x, y: x.clone().add_(y))
with_residual("into the branch")(lambda x, y: y.add_(x))
with_residual("sum of a stack")(lambda x, y: torch.stack([x, y]).sum(0))
with_residual("x − (−branch)")(lambda x, y: x - (-y))
with_residual("twice the mean")(lambda x, y: torch.stack([x, y]).mean(0) * 2)
with_residual("addcmul")(lambda x, y: torch.addcmul(x, y, torch.ones_like(y)))
with_residual("lerp")(lambda x, y: torch.lerp(x, y, 0.5) * 2)
with_residual("built-in sum")(lambda x, y: sum([x, y]))  # type: ignore[arg-type, return-value]


@variant("residual: LayerScale")
def _layer_scale(model: ViT) -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        x = x + block.gamma * block.attn(block.norm1(x))  # type: ignore[operator]
        return x + block.mlp(block.norm2(x)) * block.gamma  # type: ignore[operator]

    for block in blocks_of(model):
        block.gamma = nn.Parameter(torch.linspace(0.5, 2, WIDTH).double())
        for layer in (block.attn.proj, block.mlp.fc2):
            layer.weight.data, layer.bias.data = layer.weight.data / block.gamma[:, None], layer.bias.data / block.gamma
    model.blocks = nn.ModuleList(Written(block, forward) for block in blocks_of(model))


@variant("residual: PreNorm wrappers")
def _pre_norm(model: ViT) -> None:
    class PreNorm(nn.Module):
        def __init__(self, norm: nn.Module, function: nn.Module) -> None:
            super().__init__()
            self.norm, self.function = norm, function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.norm(x)) + x

    model.blocks = nn.ModuleList(
        nn.Sequential(PreNorm(block.norm1, block.attn), PreNorm(block.norm2, block.mlp)) for block in blocks_of(model)
    )


# Pooling


def weights_of_mean(x: Tensor) -> Tensor:
    """Return the weight of each patch of x [B, N, d] in their mean, [1, N − 1]."""
    return x.new_full((1, x.shape[1] - 1), 1 / (x.shape[1] - 1))


def with_pooling(name: str, base: Base = PLAIN) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Register another way to pool x [B, N, d]."""

    def register(pool: Callable[[Tensor], Tensor]) -> None:
        def change(model: ViT) -> None:
            model.pool = pool  # type: ignore[method-assign]

        variant(f"pooling: {name}", base)(change)

    return register


with_pooling("select")(lambda x: x.select(1, 0))
with_pooling("index_select")(lambda x: x.index_select(1, torch.tensor([0])).squeeze(1))
with_pooling("gather")(lambda x: x.gather(1, torch.zeros(len(x), 1, WIDTH, dtype=torch.long))[:, 0])
with_pooling("one-hot")(lambda x: torch.einsum("bnd,n->bd", x, F.one_hot(torch.tensor(0), x.shape[1]).to(x)))
with_pooling("unbind")(lambda x: x.unbind(1)[0])
with_pooling("a slice and its mean")(lambda x: x[:, :1].mean(1))
with_pooling("sum / count", MEAN)(lambda x: x[:, 1:].sum(1) / (x.shape[1] - 1))
with_pooling("adaptive_avg_pool1d", MEAN)(lambda x: F.adaptive_avg_pool1d(x[:, 1:].mT, 1)[..., 0])
with_pooling("weights", MEAN)(lambda x: (weights_of_mean(x) @ x[:, 1:]).squeeze(1))
with_pooling("einsum", MEAN)(lambda x: torch.einsum("bnd->bd", x[:, 1:]) / (x.shape[1] - 1))
with_pooling("mean of all, less the class token", MEAN)(lambda x: (x.mean(1) * x.shape[1] - x[:, 0]) / (x.shape[1] - 1))


@variant("pooling: norm behind it")
def _norm_behind(model: ViT) -> nn.Module:
    return Written(model, lambda m, image: m.head(m.norm(m.pool(m.encode(m.tokens(image))))))


@variant("pooling: weights of [B, 1, N], squeezed", MEAN)
def _squeezed_weights(model: ViT) -> None:
    model.pool = lambda x: (x[:, 1:].mT @ weights_of_mean(x).T).squeeze(-1)  # type: ignore[method-assign]


# Embedding and positions


@variant("embedding: patches cut by hand")
def _patches_by_hand(model: ViT) -> None:
    def embed(conv: nn.Conv2d, image: Tensor) -> Tensor:
        rows = SIZE // PATCH
        patches = image.reshape(-1, 3, rows, PATCH, rows, PATCH).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)

    model.embed = Written(model.embed, embed)


@variant("embedding: F.unfold")
def _unfolded(model: ViT) -> None:
    def patches(image: Tensor) -> Tensor:
        conv: Any = model.embed
        return F.linear(F.unfold(image, PATCH, stride=PATCH).mT, conv.weight.flatten(1), conv.bias)

    model.patches = patches  # type: ignore[method-assign]


@variant("embedding: images normalised inside")
def _normalised_inside(model: ViT) -> nn.Module:
    mean, deviation = torch.tensor([0.2, -0.1, 0.3]).double(), torch.tensor([0.5, 0.7, 0.9]).double()
    conv: Any = model.embed
    conv.bias.data = conv.bias.data + (conv.weight.data * mean[None, :, None, None]).sum((1, 2, 3))
    conv.weight.data = conv.weight.data * deviation[None, :, None, None]
    return Written(model, lambda m, image: m((image - mean[:, None, None]) / deviation[:, None, None]))


@variant("positions: before the class token")
def _positions_first(model: ViT) -> None:
    def tokens(image: Tensor) -> Tensor:
        patches = model.patches(image) + model.pos[:, 1:]
        return torch.cat([(model.cls + model.pos[:, :1]).expand(len(patches), -1, -1), patches], 1)

    model.tokens = tokens  # type: ignore[method-assign]


@variant("positions: an embedding table")
def _position_table(model: ViT) -> None:
    def tokens(image: Tensor) -> Tensor:
        patches = model.patches(image)
        x = torch.cat([model.cls.repeat(len(patches), 1, 1), patches], 1)
        return x + F.embedding(torch.arange(x.shape[1]), model.pos[0])

    model.tokens = tokens  # type: ignore[method-assign]


@variant("positions: written into the tokens")
def _positions_in_place(model: ViT) -> None:
    def tokens(image: Tensor) -> Tensor:
        x = torch.zeros(len(image), PATCHES + 1, WIDTH).to(image)
        x[:, 1:] = model.patches(image)
        x[:, :1] = model.cls
        x += model.pos
        return x

    model.tokens = tokens  # type: ignore[method-assign]


@variant("positions: class token by padding")
def _padded_class_token(model: ViT) -> None:
    def tokens(image: Tensor) -> Tensor:
        patches = F.pad(model.patches(image), (0, 0, 1, 0))
        return patches + (model.pos + F.pad(model.cls, (0, 0, 0, PATCHES)))

    model.tokens = tokens  # type: ignore[method-assign]


# Containers


@variant("container: nn.Sequential")
def _sequential(model: ViT) -> None:
    model.blocks = nn.Sequential(*blocks_of(model))
    model.encode = lambda x: model.blocks(x)  # type: ignore[method-assign]


@variant("container: OrderedDict")
def _ordered(model: ViT) -> None:
    model.blocks = nn.Sequential(OrderedDict((f"layer{i}", block) for i, block in enumerate(blocks_of(model))))


@variant("container: one module inside another")
def _nested(model: ViT) -> None:
    class Onion(nn.Module):
        def __init__(self, block: nn.Module, inner: nn.Module | None) -> None:
            super().__init__()
            self.block, self.inner = block, inner

        def forward(self, x: Tensor) -> Tensor:
            x = self.block(x)
            return x if self.inner is None else self.inner(x)

    chain: nn.Module | None = None
    for block in reversed(list(blocks_of(model))):
        chain = Onion(block, chain)
    assert chain is not None
    model.blocks = chain
    model.encode = lambda x: model.blocks(x)  # type: ignore[method-assign]


@variant("container: no blocks, one forward")
def _flat(model: ViT) -> None:
    def encode(x: Tensor) -> Tensor:
        for b in blocks_of(model):
            x = x + b.attn(b.norm1(x))
            x = x + b.mlp(b.norm2(x))
        return x

    model.encode = encode  # type: ignore[method-assign]


@variant("container: functions of parameters alone")
def _functional(model: ViT) -> nn.Module:
    weights = nn.ParameterDict({name.replace(".", "_"): value for name, value in model.named_parameters()})

    def forward(w: nn.ParameterDict, image: Tensor) -> Tensor:
        x = F.conv2d(image, w["embed_weight"], w["embed_bias"], PATCH).flatten(2).mT
        x = torch.cat([w["cls"].expand(len(x), -1, -1), x], 1) + w["pos"]
        for i in range(DEPTH):
            p = f"blocks_{i}_"
            y = F.layer_norm(x, (WIDTH,), w[p + "norm1_weight"], w[p + "norm1_bias"], 1e-6)
            y = merge(attend(*split(F.linear(y, w[p + "attn_qkv_weight"], w[p + "attn_qkv_bias"]))))
            x = x + F.linear(y, w[p + "attn_proj_weight"], w[p + "attn_proj_bias"])
            y = F.layer_norm(x, (WIDTH,), w[p + "norm2_weight"], w[p + "norm2_bias"], 1e-6)
            y = F.gelu(F.linear(y, w[p + "mlp_fc1_weight"], w[p + "mlp_fc1_bias"]))
            x = x + F.linear(y, w[p + "mlp_fc2_weight"], w[p + "mlp_fc2_bias"])
        x = F.layer_norm(x, (WIDTH,), w["norm_weight"], w["norm_bias"], 1e-6)
        return F.linear(x[:, 0], w["head_weight"], w["head_bias"])

    module = Written(nn.Identity(), lambda _, image: forward(weights, image))
    module.weights = weights
    return module


@variant("container: halves of a block")
def _halves(model: ViT) -> None:
    class Half(nn.Module):
        def __init__(self, norm: nn.Module, branch: nn.Module) -> None:
            super().__init__()
            self.norm, self.branch = norm, branch

        def forward(self, x: Tensor) -> Tensor:
            return x + self.branch(self.norm(x))

    halves = [Half(*pair) for b in blocks_of(model) for pair in ((b.norm1, b.attn), (b.norm2, b.mlp))]
    model.blocks = nn.ModuleList(halves)


@variant("container: tokens first")
def _tokens_first(model: ViT) -> None:
    def attention(source: Attention, x: Tensor) -> Tensor:  # [N, B, d]
        return source.proj(merge(attend(*split(source.qkv(x.transpose(0, 1)))))).transpose(0, 1)

    for block in blocks_of(model):
        block.attn = Written(block.attn, attention)
    encode = model.encode
    model.encode = lambda x: encode(x.transpose(0, 1)).transpose(0, 1)  # type: ignore[method-assign]


@variant("container: a wrapper that casts")
def _casting(model: ViT) -> nn.Module:
    return Written(model, lambda m, image: m(image.to(m.cls.dtype)).to(torch.float64))


@variant("container: gradient checkpointing")
def _checkpointed(model: ViT) -> None:
    from torch.utils.checkpoint import checkpoint

    def encode(x: Tensor) -> Tensor:
        for block in blocks_of(model):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    model.encode = encode  # type: ignore[method-assign]


# Outputs


def with_output(name: str) -> Callable[[Callable[[Tensor, Tensor], Any]], None]:
    """Register what is returned, of the tokens [B, N, d] behind the norm and the logits [B, C]."""

    def register(returns: Callable[[Tensor, Tensor], Any]) -> None:
        def forward(model: ViT, image: Tensor) -> Any:
            tokens = model.norm(model.encode(model.tokens(image)))
            return returns(tokens, model.head(model.pool(tokens)))

        variant(f"output: {name}")(lambda model: Written(model, forward))

    return register


Output = namedtuple("Output", ["features", "logits"])

with_output("a tuple of one")(lambda tokens, logits: (logits,))
with_output("(logits, tokens)")(lambda tokens, logits: (logits, tokens))
with_output("(features, logits)")(lambda tokens, logits: (tokens[:, 0], logits))
with_output("(logits, features)")(lambda tokens, logits: (logits, tokens[:, 0]))
with_output("a mapping")(lambda tokens, logits: {"logits": logits})
with_output("a mapping with features first")(lambda tokens, logits: {"features": tokens[:, 0], "logits": logits})
with_output("a named tuple")(lambda tokens, logits: Output(tokens[:, 0], logits))
with_output("a list")(lambda tokens, logits: [logits])
