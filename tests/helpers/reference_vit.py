"""A ViT written out by hand: plain weights, an explicit softmax, every intermediate kept in the autograd graph.

Nothing of clairvit is used here. `written_out(module)` takes the weights out of a module; `forward` runs them with the
notation of METHODS 0.1, so that any gradient a proof needs is one `torch.autograd.grad` away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionVisionTransformer

from helpers.exact_models import HomeViT


@dataclass(frozen=True)
class Linear:
    W: Tensor  # [out, in]
    b: Tensor  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.W.T + self.b


@dataclass(frozen=True)
class Norm:
    """gamma * (x - mean) / sigma + beta; RMSNorm does not centre."""

    gamma: Tensor
    beta: Tensor
    eps: float
    centred: bool = True

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def sigma(self, x: Tensor) -> Tensor:
        return ((self.centre(x) ** 2).mean(-1, keepdim=True) + self.eps).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        return self.gamma * self.centre(x) / self.sigma(x) + self.beta


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda z: z * 0.5 * torch.erfc(-z / math.sqrt(2)),
    "tanh-gelu": lambda z: z * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "quick-gelu": lambda z: z / (1 + torch.exp(-1.702 * z)),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "relu": lambda z: torch.where(z > 0, z, torch.zeros_like(z)),
}


@dataclass(frozen=True)
class Attention:
    """x + g1 * (concat_h O^h W_o^T + b_o), O = softmax(q k^T / sqrt(dh) + bias) v."""

    norm: Norm
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    heads: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    turn: Callable[[Tensor], Tensor] | None = None  # RoPE, a linear map of q and k
    bias: Tensor | None = None  # added to the scores
    sub_norm: Norm | None = None  # on the concatenated heads
    g1: Tensor | float = 1.0

    @property
    def size(self) -> int:
        return self.q.W.shape[0] // self.heads

    def split(self, x: Tensor) -> Tensor:
        """[B, N, heads·dh] -> [B, H, N, dh]; shared key and value heads are repeated for the query heads they serve."""
        parts = x.unflatten(-1, (-1, self.size)).transpose(1, 2)
        return parts.repeat_interleave(self.heads // parts.shape[1], 1)


@dataclass(frozen=True)
class Mlp:
    """x + g2 * (W2 act(W1 LN(x))), or W2 (silu(gate) * W1 LN(x)) where there is a gate."""

    norm: Norm | None
    up: Linear
    down: Linear
    act: str = "gelu"
    gate: Linear | None = None
    sub_norm: Norm | None = None
    g2: Tensor | float = 1.0


@dataclass(frozen=True)
class Pool:
    """Latent queries attend to the tokens from `first` on; the outputs of all latents are averaged."""

    latent: Tensor  # q, [1, H, latents, dh]
    k: Linear
    v: Linear
    out: Linear
    mlp: Mlp
    heads: int
    first: int

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


@dataclass(frozen=True)
class Reader:
    """A row of weights over the tokens, a norm on the pooled vector, a classifier."""

    rows: Tensor  # [N], or [1] behind a pool
    norm: Norm | None
    classifier: Linear
    share: float = 1.0


@dataclass(frozen=True)
class ViT:
    embed: Callable[[Tensor], Tensor]
    blocks: list[tuple[Attention, Mlp]]
    norm: Norm | None  # of every token, before pooling
    pool: Pool | None
    readers: list[Reader]
    grid: tuple[int, int]
    prefix: int


# The forward, with everything on the way kept


@dataclass
class AttentionRun:
    x: Tensor
    h: Tensor  # LN(x)
    raw: tuple[Tensor, Tensor]  # q, k as projected
    normed: tuple[Tensor, Tensor]  # after q_norm, k_norm
    q: Tensor  # [B, H, N, dh], after RoPE
    k: Tensor
    v: Tensor
    products: Tensor  # q k^T / sqrt(dh)
    S: Tensor
    A: Tensor
    O: Tensor  # noqa: E741 - [B, H, N, dh]
    joined: Tensor  # [B, N, H·dh]
    inner: Tensor  # after the sub-norm
    end: Tensor


@dataclass
class MlpRun:
    x: Tensor
    h: Tensor
    z: Tensor  # what goes into the activation
    carried: Tensor  # what the gate multiplies; z where there is no gate
    a: Tensor
    inner: Tensor
    end: Tensor


@dataclass
class PoolRun:
    tokens: Tensor
    k: Tensor
    v: Tensor
    S: Tensor
    A: Tensor  # [B, H, latents, keys]
    O: Tensor  # noqa: E741
    joined: Tensor
    projected: Tensor
    mlp: MlpRun


@dataclass
class Run:
    x: list[Tensor] = field(default_factory=list)  # x^0 … x^L
    blocks: list[tuple[AttentionRun, MlpRun]] = field(default_factory=list)
    normed: Tensor | None = None
    pool: PoolRun | None = None
    pooled: list[Tensor] = field(default_factory=list)  # what each reader's classifier path starts from
    logits: Tensor | None = None

    @property
    def A(self) -> list[Tensor]:
        return [attention.A for attention, _ in self.blocks]


def forward(vit: ViT, x0: Tensor) -> Run:
    run = Run(x=[x0])
    for attention, mlp in vit.blocks:
        first = attend(attention, run.x[-1])
        second = transform(mlp, first.end)
        run.blocks.append((first, second))
        run.x.append(second.end)
    return read_out(vit, run, run.x[-1])


def attend(part: Attention, x: Tensor) -> AttentionRun:
    h = part.norm(x)
    raw = part.split(part.q(h)), part.split(part.k(h))
    normed = tuple(norm(t) if norm else t for norm, t in zip((part.q_norm, part.k_norm), raw, strict=True))
    q, k = (part.turn(t) if part.turn else t for t in normed)
    v = part.split(part.v(h))
    products = q @ k.transpose(-2, -1) / math.sqrt(part.size)
    S = products if part.bias is None else products + part.bias
    A = S.softmax(-1)
    O = A @ v  # noqa: E741
    joined = O.transpose(1, 2).flatten(2)
    inner = part.sub_norm(joined) if part.sub_norm else joined
    end = x + part.g1 * part.out(inner)
    return AttentionRun(x, h, raw, normed, q, k, v, products, S, A, O, joined, inner, end)


def transform(part: Mlp, x: Tensor) -> MlpRun:
    h = part.norm(x) if part.norm else x
    carried = part.up(h)
    z = part.gate(h) if part.gate else carried
    a = ACTIVATIONS[part.act](z) * (carried if part.gate else 1)
    inner = part.sub_norm(a) if part.sub_norm else a
    return MlpRun(x, h, z, carried, a, inner, x + part.g2 * part.down(inner))


def pool_tokens(pool: Pool, tokens: Tensor) -> PoolRun:
    tokens = tokens[:, pool.first :]
    k, v = pool.split(pool.k(tokens)), pool.split(pool.v(tokens))
    S = pool.latent @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
    A = S.softmax(-1)
    O = A @ v  # noqa: E741
    joined = O.transpose(1, 2).flatten(2)
    projected = pool.out(joined)
    return PoolRun(tokens, k, v, S, A, O, joined, projected, transform(pool.mlp, projected))


def read_out(vit: ViT, run: Run, tokens: Tensor) -> Run:
    """The model's head on any tokens [B, N, d]; fills in the rest of the run."""
    run.normed = vit.norm(tokens) if vit.norm else tokens
    if vit.pool is not None:
        run.pool = pool_tokens(vit.pool, run.normed)
        source = run.pool.mlp.end
    else:
        source = run.normed
    run.pooled = [torch.einsum("n,bnd->bd", reader.rows, source) for reader in vit.readers]
    run.logits = sum(
        reader.share * reader.classifier(reader.norm(z) if reader.norm else z)
        for reader, z in zip(vit.readers, run.pooled, strict=True)
    )
    return run


def score(logits: Tensor, classes: list[int]) -> Tensor:
    """The sum over images of each one's target logit: its gradient is every image's own."""
    return logits[torch.arange(len(classes)), torch.tensor(classes)].sum()


@dataclass
class Gradients:
    """Brute force: autograd through the explicit softmax."""

    run: Run
    G: list[Tensor]  # dy/dA
    dx: list[Tensor]  # dy/dx^l, l = 0 … L
    dO: list[Tensor]  # noqa: N815

    @property
    def A(self) -> list[Tensor]:
        return [A.detach() for A in self.run.A]

    @property
    def ixg(self) -> list[Tensor]:
        return [(x * dx).sum(-1).detach() for x, dx in zip(self.run.x, self.dx, strict=True)]


def brute_force(vit: ViT, pixels: Tensor, classes: list[int]) -> Gradients:
    run = forward(vit, vit.embed(pixels).detach().requires_grad_(True))
    y = score(run.logits, classes)
    O = [attention.O for attention, _ in run.blocks]  # noqa: E741
    gradients = torch.autograd.grad(y, [*run.A, *run.x, *O])
    count = len(run.blocks)
    return Gradients(
        run, list(gradients[:count]), list(gradients[count : 2 * count + 1]), list(gradients[2 * count + 1 :])
    )


# Taking the weights out of modules


def linear(module: nn.Linear) -> Linear:
    return _linear(module.weight, module.bias)


def _linear(W: Tensor, b: Tensor | None) -> Linear:
    return Linear(W.detach(), W.new_zeros(len(W)).detach() if b is None else b.detach())


def norm(module: nn.Module) -> Norm | None:
    if isinstance(module, nn.Identity):
        return None
    beta = getattr(module, "bias", None)
    centred = isinstance(module, nn.LayerNorm)
    gamma = module.weight.detach()
    return Norm(gamma, torch.zeros_like(gamma) if beta is None else beta.detach(), module.eps, centred)


def _gain(module: nn.Module) -> Tensor | float:
    return 1.0 if isinstance(module, nn.Identity) else module.gamma.detach()


def _act(module: nn.Module) -> str:
    name = type(module).__name__
    if name == "GELU":
        return "tanh-gelu" if getattr(module, "approximate", "none") == "tanh" else "gelu"
    return {"QuickGELU": "quick-gelu", "SiLU": "silu", "ReLU": "relu"}[name]


def _thirds(W: Tensor, b: Tensor | None) -> tuple[Linear, Linear, Linear]:
    biases = (None,) * 3 if b is None else b.chunk(3)
    return tuple(_linear(w, bias) for w, bias in zip(W.chunk(3), biases, strict=True))  # type: ignore[return-value]


def _timm_attention(
    module: Any, before: nn.Module, gain: nn.Module, turn: Callable[[Tensor], Tensor] | None
) -> Attention:
    if module.qkv is not None:
        q, k, v = _thirds(module.qkv.weight, module.qkv.bias)
    else:
        q, k, v = linear(module.q_proj), linear(module.k_proj), linear(module.v_proj)
    relative = getattr(module, "rel_pos", None)
    return Attention(
        norm=norm(before),
        q=q,
        k=k,
        v=v,
        out=linear(module.proj),
        heads=module.num_heads,
        q_norm=norm(module.q_norm),
        k_norm=norm(module.k_norm),
        turn=turn,
        bias=None if relative is None else relative.get_bias().detach(),
        sub_norm=norm(getattr(module, "norm", nn.Identity())),
        g1=_gain(gain),
    )


def _timm_mlp(module: Any, before: nn.Module, gain: nn.Module) -> Mlp:
    sub_norm = norm(getattr(module, "norm", nn.Identity()))
    shared = {"norm": norm(before), "down": linear(module.fc2), "act": _act(module.act), "sub_norm": sub_norm}
    if hasattr(module, "fc1_g"):
        return Mlp(up=linear(module.fc1_x), gate=linear(module.fc1_g), g2=_gain(gain), **shared)
    if hasattr(module, "gate_last"):
        gate, up = (_linear(W, b) for W, b in zip(module.fc1.weight.chunk(2), module.fc1.bias.chunk(2), strict=True))
        return Mlp(up=up, gate=gate, g2=_gain(gain), **shared)
    return Mlp(up=linear(module.fc1), g2=_gain(gain), **shared)


def _rope(module: Eva) -> Callable[[Tensor], Tensor]:
    embedding, first = module.rope.get_embed().detach(), module.num_prefix_tokens

    def turn(t: Tensor) -> Tensor:
        return torch.cat([t[:, :, :first], apply_rot_embed_cat(t[:, :, first:], embedding)], 2)

    return turn


def _timm_pool(module: Any, first: int) -> Pool:
    k, v = (_linear(W, b) for W, b in zip(module.kv.weight.chunk(2), module.kv.bias.chunk(2), strict=True))
    latent = module.q(module.latent).unflatten(-1, (module.num_heads, -1)).transpose(1, 2).detach()
    mlp = _timm_mlp(module.mlp, module.norm, nn.Identity())
    return Pool(latent, k, v, linear(module.proj), mlp, module.num_heads, first)


def _timm_embed(module: Any) -> Callable[[Tensor], Tensor]:
    if isinstance(module, Eva):
        return lambda pixels: module._pos_embed(module.patch_embed(pixels))[0]
    if hasattr(module, "_pos_embed"):
        return lambda pixels: module.norm_pre(module._pos_embed(module.patch_embed(pixels)))

    def relative(pixels: Tensor) -> Tensor:
        patches = module.patch_embed(pixels)
        return torch.cat([module.cls_token.expand(len(pixels), -1, -1), patches], 1)

    return relative


def _timm(module: Any) -> ViT:
    turn = _rope(module) if isinstance(module, Eva) else None
    blocks = []
    for block in module.blocks:
        gain = getattr(block, "ls1", nn.Identity()), getattr(block, "ls2", nn.Identity())
        attention = _timm_attention(block.attn, block.norm1, gain[0], turn)
        blocks.append((attention, _timm_mlp(block.mlp, block.norm2, gain[1])))
    grid, prefix = tuple(module.patch_embed.grid_size), module.num_prefix_tokens
    patches = grid[0] * grid[1]
    first, second, mean = (torch.zeros(prefix + patches, dtype=torch.float64) for _ in range(3))
    mean[prefix:] = 1 / patches
    fc_norm, pool = norm(getattr(module, "fc_norm", nn.Identity())), None
    if isinstance(module, VisionTransformerDistilled):
        first[0] = second[1] = 1
        readers = [Reader(first, None, linear(module.head), 0.5), Reader(second, None, linear(module.head_dist), 0.5)]
    elif getattr(module, "attn_pool", None) is not None:
        pool = _timm_pool(module.attn_pool, prefix)
        latents = module.attn_pool.latent_len
        readers = [Reader(torch.full((latents,), 1 / latents, dtype=torch.float64), fc_norm, linear(module.head))]
    elif module.global_pool == "avg":
        readers = [Reader(mean, fc_norm, linear(module.head))]
    else:
        first[0] = 1
        readers = [Reader(first, fc_norm, linear(module.head))]
    return ViT(_timm_embed(module), blocks, norm(module.norm), pool, readers, grid, prefix)


def _mha(module: nn.MultiheadAttention, before: nn.Module) -> Attention:
    q, k, v = _thirds(module.in_proj_weight, module.in_proj_bias)
    return Attention(norm(before), q, k, v, linear(module.out_proj), module.num_heads)


def _cls_reader(tokens: int, head: nn.Linear) -> Reader:
    rows = torch.zeros(tokens, dtype=torch.float64)
    rows[0] = 1
    return Reader(rows, None, linear(head))


def _torchvision(module: TorchvisionVisionTransformer) -> ViT:
    def embed(pixels: Tensor) -> Tensor:
        patches = module._process_input(pixels)
        return torch.cat([module.class_token.expand(len(pixels), -1, -1), patches], 1) + module.encoder.pos_embedding

    blocks = [
        (_mha(block.self_attention, block.ln_1), Mlp(norm(block.ln_2), linear(block.mlp[0]), linear(block.mlp[3])))
        for block in module.encoder.layers
    ]
    side = module.image_size // module.patch_size
    reader = _cls_reader(side * side + 1, module.heads.head)
    return ViT(embed, blocks, norm(module.encoder.ln), None, [reader], (side, side), 1)


def _home(module: HomeViT) -> ViT:
    def attention(block: Any) -> Attention:
        if isinstance(block.attn, nn.MultiheadAttention):
            return _mha(block.attn, block.norm1)
        module_attention = block.attn
        if hasattr(module_attention, "qkv"):
            q, k, v = _thirds(module_attention.qkv.weight, module_attention.qkv.bias)
            mask = getattr(module_attention, "mask", None)
            bias = None if mask is None else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
            return Attention(
                norm(block.norm1), q, k, v, linear(module_attention.proj), module_attention.heads, bias=bias
            )
        return Attention(
            norm(block.norm1),
            linear(module_attention.q),
            linear(module_attention.k),
            linear(module_attention.v),
            linear(module_attention.out),
            module_attention.heads,
        )

    blocks = [(attention(b), Mlp(norm(b.norm2), linear(b.fc1), linear(b.fc2))) for b in module.blocks]
    return ViT(module.embed, blocks, norm(module.norm), None, [_cls_reader(16, module.head)], (3, 5), 1)


def written_out(module: nn.Module) -> ViT:
    if isinstance(module, TorchvisionVisionTransformer):
        return _torchvision(module)
    return _home(module) if isinstance(module, HomeViT) else _timm(module)
