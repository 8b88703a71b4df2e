"""Home-made tiny ViTs. Each writes its attention in its own way; `attn_drop` is a tap for the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

CLASSES = 7
WIDTH, HEADS, DEPTH = 24, 3, 2
PATCH = 8


class PatchEmbedding(nn.Module):
    """Patches cut by hand, no convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3 * PATCH * PATCH, WIDTH)

    def forward(self, image: Tensor) -> Tensor:
        patches = image.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # [B, 3, rows, cols, p, p]
        return self.project(patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))


class ConvolvedEmbedding(nn.Module):
    """Convolution and BatchNorm, then tokens: the gradient of a single image comes back in an unusual memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.BatchNorm2d(WIDTH)
        self.norm.running_mean.copy_(torch.linspace(-1, 1, WIDTH))
        self.norm.running_var.copy_(torch.linspace(0.5, 2, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(self.project(image)).flatten(2).transpose(1, 2)


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # [B, H, N, dh]


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class MatmulAttention(nn.Module):
    """q @ kᵀ, softmax, @ v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(merge_heads(self.attend(*map(split_heads, self.qkv(x).chunk(3, -1)))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return self.attn_drop(scores.softmax(dim=-1)) @ v


class EinsumAttention(MatmulAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhij,bhjd->bhid", self.attn_drop(nn.functional.softmax(scores, dim=-1)), v)


class TransposedEinsumAttention(MatmulAttention):
    """Heads stay on the third axis, as in JAX code."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, N, H, dh]
        scores = torch.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
        return torch.einsum("bhqk,bkhd->bqhd", self.attn_drop(torch.softmax(scores, -1)), v).transpose(1, 2)


class ValuesFirstEinsumAttention(MatmulAttention):
    """The values stand before the attention, and the heads share them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bjd->bhij", q * q.shape[-1] ** -0.5, k[:, 0])
        return torch.einsum("bjd,bhij->bhid", v[:, 0], self.attn_drop(scores.softmax(-1)))


class BatchedAttention(MatmulAttention):
    """Heads folded into the batch, torch.bmm and torch.baddbmm-free, softmax in float32 whatever the input."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch = len(q)
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        scores = torch.bmm(q / math.sqrt(q.shape[-1]), k.transpose(1, 2))
        A = nn.functional.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=2).to(q.dtype)
        return torch.bmm(self.attn_drop(A), v).unflatten(0, (batch, HEADS))


class FusedAttention(MatmulAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=0.4)


class BiasedAttention(MatmulAttention):
    """A float mask, given by position, that differs from head to head."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, 17, 17))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, self.bias[None], 0.0)


class GroupedAttention(MatmulAttention):
    """All query heads share one key and value head."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class HomeMade(nn.Module):
    """Patches cut by hand, CLS, blocks, norm, head."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = DEPTH, patches: int = 16) -> None:
        super().__init__()
        self.embed = PatchEmbedding()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + patches, WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def tokens(self, image: Tensor) -> Tensor:
        return torch.cat([self.cls_token.expand(len(image), -1, -1), self.embed(image)], 1) + self.pos_embed

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.tokens(image)))[:, 0])


class Lucid(HomeMade):
    """lucidrains' way: attention and MLP are modules, the block around them is a loop."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(
            lambda: nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH), EinsumAttention()), mlp()]), depth=depth
        )

    def through(self, x: Tensor) -> Tensor:
        for attention, feed_forward in self.blocks:
            x = attention(x) + x
            x = feed_forward(x) + x
        return x


class Loop(HomeMade):
    """Everything in one forward: no module holds an attention."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "qkv": nn.Linear(WIDTH, 3 * WIDTH), "mlp": mlp()})
        )
        self.attn_drop = nn.Identity()

    def through(self, x: Tensor) -> Tensor:
        for part in self.blocks:
            q, k, v = map(split_heads, part["qkv"](part["norm"](x)).chunk(3, -1))
            A = self.attn_drop(torch.softmax(torch.matmul(q, k.mT) * q.shape[-1] ** -0.5, -1))
            x = x + merge_heads(torch.matmul(A, v))
            x = x + part["mlp"](x)
        return x


class InPlaceBlock(Block):
    """x += …: the block overwrites its own input (post-norm, so that the gradient does not need what is lost)."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(x)
        return self.mlp(self.norm(x))


class BrokenInPlaceBlock(Block):
    """x += … after a norm that needs x for its gradient: fine for inference, no gradient can pass."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(self.norm(x))
        return self.mlp(x)


class ClipBlock(nn.Module):
    """OpenAI's CLIP: tokens are [N, B, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ln_1, self.ln_2 = nn.MultiheadAttention(WIDTH, HEADS), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=None)[0]
        y = self.c_fc(self.ln_2(x))
        return x + self.c_proj(y * torch.sigmoid(1.702 * y))  # QuickGELU


class SequenceFirst(HomeMade):
    def __init__(self) -> None:
        super().__init__(ClipBlock)

    def through(self, x: Tensor) -> Tensor:
        return super().through(x.permute(1, 0, 2)).permute(1, 0, 2)


def encoder_layer(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 40, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )


class TorchEncoder(HomeMade):
    """nn.TransformerEncoder around nn.TransformerEncoderLayer."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.encoder = nn.TransformerEncoder(encoder_layer(norm_first=True), DEPTH, enable_nested_tensor=False)

    def through(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Convolved(HomeMade):
    def __init__(self) -> None:
        super().__init__(lambda: Block(FusedAttention))
        self.embed = ConvolvedEmbedding()


class ClassTokenLast(HomeMade):
    """[patches, CLS] instead of [CLS, patches]."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(MatmulAttention))

    def tokens(self, image: Tensor) -> Tensor:
        return super().tokens(image).roll(-1, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.tokens(image)))[:, -1])


class Arranged(HomeMade):
    """[prefix, patches, suffix] of five learned tokens, `prefix` of them first; the head reads the last of the five."""

    OTHERS = 5

    def __init__(self, prefix: int, attention: type[nn.Module] = MatmulAttention) -> None:
        super().__init__(lambda: Block(attention))
        self.prefix = prefix
        self.other_tokens = nn.Parameter(torch.zeros(1, self.OTHERS, WIDTH))

    def tokens(self, image: Tensor) -> Tensor:
        others = self.other_tokens.expand(len(image), -1, -1)
        patches = self.embed(image) + self.pos_embed[:, 1:]
        return torch.cat([others[:, : self.prefix], patches, others[:, self.prefix :]], 1)

    def forward(self, image: Tensor) -> Tensor:
        read = self.OTHERS - 1 if self.prefix == self.OTHERS else -1
        return self.head(self.norm(self.through(self.tokens(image)))[:, read])


class CausalAttention(MatmulAttention):
    """Each token attends to itself and to those before it, by a fused kernel."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class MaskedCausalAttention(MatmulAttention):
    """The same with a mask of the lowest number, as transformers writes it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        future = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        return self.attn_drop((scores + future).softmax(-1)) @ v


class LanguageModel(HomeMade):
    """A vision tower [CLS, patches] whose patches stand between three and two words of a causal language model."""

    BEFORE, AFTER = 3, 2

    def __init__(self, attention: type[nn.Module] = CausalAttention) -> None:
        super().__init__(lambda: Block(attention), depth=3)
        self.tower = nn.ModuleList(Block(MatmulAttention) for _ in range(2))
        self.word_tokens = nn.Parameter(torch.zeros(1, self.BEFORE + self.AFTER, WIDTH))

    def sequence(self, image: Tensor) -> Tensor:
        x = self.tokens(image)
        for block in self.tower:
            x = block(x)
        words = self.word_tokens.expand(len(image), -1, -1)
        return torch.cat([words[:, : self.BEFORE], x[:, 1:], words[:, self.BEFORE :]], 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.sequence(image)))[:, -1])


class SortedByWindows(HomeMade):
    """Hiera's way: the tokens of a window stand side by side."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(MatmulAttention), patches=64)

    def tokens(self, image: Tensor) -> Tensor:
        cells = super().tokens(image)[:, 1:].unflatten(1, (2, 4, 2, 4))  # windows of 4 × 4 in a grid of 8 × 8
        return cells.transpose(2, 3).flatten(1, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.tokens(image))).mean(1))


class MeanPool(HomeMade):
    """No class token: the head reads the mean of all patches."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(MatmulAttention), patches=15)
        del self.cls_token

    def tokens(self, image: Tensor) -> Tensor:
        return self.embed(image) + self.pos_embed[:, 1:]

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.tokens(image)).mean(1)))


class Halving(Block):
    """x + 0, then half of x taken away: the terms are |x|, and then |x| + |x|/2 over |x|/2, so C = 1 and 3."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0 * self.attention(self.norm(x))
        return x + (-0.5 * x)


class HalvingInPlace(Block):
    """The same, with the second sum written into its first term."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0 * self.attention(self.norm(x))
        x += -0.5 * x.clone()
        return x
