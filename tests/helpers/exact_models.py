"""Small seeded float64 ViTs of every kind, with no weight left at a trivial value: what the exact proofs run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import AttentionPoolLatent, QuickGELU, RmsNorm, SwiGLU, SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torchvision.models import VisionTransformer as TorchvisionVisionTransformer

import clairvit as cv

CLASSES = 5
TARGETS = [1, 3]  # one for each of the two images
SMALL: dict[str, Any] = {
    "img_size": (12, 20),  # a 3 × 5 grid
    "patch_size": 4,
    "embed_dim": 24,
    "num_heads": 3,
    "mlp_ratio": 2.0,
    "num_classes": CLASSES,
}


class GroupedAttention(nn.Module):
    """Four query heads share two key and value heads."""

    def __init__(self, width: int, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, shared * self.size)
        self.v = nn.Linear(width, shared * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        o = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


class MaskedAttention(nn.Module):
    """Fused attention under a boolean mask: True = may look."""

    def __init__(self, width: int, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        visible = torch.rand(16, 16, generator=torch.Generator().manual_seed(2)) < 0.7
        self.register_buffer("mask", visible | torch.eye(16, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = scaled_dot_product_attention(q, k, v, self.mask)
        return self.proj(o.transpose(1, 2).flatten(2))


class EinsumAttention(nn.Module):
    """Written step by step, heads last, as in many research repositories."""

    def __init__(self, width: int, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B, N, H, dh]
        scores = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k)
        o = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), v)
        return self.proj(o.flatten(2))


class WeighedAttention(nn.MultiheadAttention):
    """torch's own attention, asked for its weights: the explicit path inside multi_head_attention_forward."""

    def __init__(self, width: int, heads: int = 3) -> None:
        super().__init__(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=True, average_attn_weights=False)[0]


class HomeBlock(nn.Module):
    def __init__(self, width: int, attention: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), attention(width)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


class HomeViT(nn.Module):
    """A ViT as people write it themselves."""

    def __init__(self, attention: Callable[[int], nn.Module], depth: int = 3, width: int = 24) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.zeros(1, 16, width))
        self.blocks = nn.ModuleList(HomeBlock(width, attention) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def embed(self, pixels: Tensor) -> Tensor:
        patches = self.patch(pixels).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(pixels), -1, -1), patches], 1) + self.pos

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def _vit(**options: Any) -> Callable[[int], nn.Module]:
    return lambda depth: VisionTransformer(**SMALL, depth=depth, **options)


def _two_latents(depth: int) -> nn.Module:
    """An attention pool with two latent queries whose outputs are averaged."""
    module = VisionTransformer(**SMALL, depth=depth, class_token=False, global_pool="map")
    module.attn_pool = AttentionPoolLatent(24, num_heads=3, mlp_ratio=2, latent_len=2, pool_type="avg")
    return module


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "plain": _vit(),
    "layer-scale": _vit(init_values=0.5),
    "qk-norm": _vit(qk_norm=True),
    "avg": _vit(global_pool="avg"),
    "avg-no-cls": _vit(global_pool="avg", class_token=False),
    "avg-token-norm": _vit(global_pool="avg", class_token=False, fc_norm=False),
    "registers": _vit(reg_tokens=4, init_values=0.5, qk_norm=True),
    "distilled": lambda depth: VisionTransformerDistilled(**SMALL, depth=depth),
    "tanh-gelu": _vit(act_layer=partial(nn.GELU, approximate="tanh")),
    "quick-gelu": _vit(act_layer=QuickGELU),
    "relu": _vit(act_layer=nn.ReLU),
    "swiglu-packed": _vit(mlp_layer=SwiGLUPacked),
    "swiglu-norm": _vit(mlp_layer=SwiGLU, scale_mlp_norm=True),
    "sub-norm": _vit(scale_attn_norm=True, scale_mlp_norm=True, pre_norm=True),
    "rms-norm": _vit(norm_layer=RmsNorm),
    "map": _vit(global_pool="map", class_token=False),
    "map-cls": _vit(global_pool="map", reg_tokens=1),
    "map-two": _two_latents,
    "relative-bias": lambda depth: VisionTransformerRelPos(
        **SMALL, depth=depth, rel_pos_type="bias", init_values=0.5, class_token=True, global_pool="token"
    ),
    "rope-swiglu": lambda depth: Eva(
        **SMALL,
        depth=depth,
        qkv_fused=False,
        swiglu_mlp=True,
        scale_mlp=True,
        use_rot_pos_emb=True,
        global_pool="token",
    ),
    "torchvision": lambda depth: TorchvisionVisionTransformer(16, 4, depth, 3, 24, 48, num_classes=CLASSES),
    "grouped": lambda depth: HomeViT(GroupedAttention, depth),
    "weighed": lambda depth: HomeViT(WeighedAttention, depth),
    "bool-mask": lambda depth: HomeViT(MaskedAttention, depth),
    "einsum": lambda depth: HomeViT(EinsumAttention, depth),
}
ONE_WAY = ("torchvision", "grouped", "weighed", "bool-mask", "einsum")  # how attention is computed is theirs to say


def build(kind: str, *, fused: bool = True, depth: int = 3, seed: int = 0) -> nn.Module:
    module = KINDS[kind](depth)
    for part in module.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = fused
    return randomised(module.double().eval(), seed)


def randomised(module: nn.Module, seed: int) -> nn.Module:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            value = torch.randn(p.shape, generator=noise, dtype=p.dtype)
            if p.ndim > 1 and "bias_table" not in name:
                embedded = any(word in name for word in ("token", "pos", "cls", "latent"))
                value *= 0.7 if embedded else 1.2 / p[0].numel() ** 0.5
            elif name.endswith("weight") or "gamma" in name:  # norms and LayerScale
                value = 0.8 + 0.3 * value
            else:
                value *= 0.3
            p.copy_(value)
    return module


def images_for(module: nn.Module, count: int = 2, seed: int = 1) -> Tensor:
    size = (16, 16) if isinstance(module, TorchvisionVisionTransformer) else (12, 20)
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wrapped(module: nn.Module) -> cv.Model:
    return cv.wrap(module, mean=(0.5,) * 3, std=(0.5,) * 3, size=(12, 20))


def both_ways(*kinds: str) -> list[tuple[str, bool]]:
    """(kind, fused attention?) for the kinds that leave the choice."""
    return [(kind, fused) for kind in kinds for fused in ((True,) if kind in ONE_WAY else (True, False))]
