"""One ViT, written with one call for all heads, and with attention calls of one head or two; equal in all numbers.

`single()` is the reference, `apart(form)` the same weights in another form, in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WIDTH, HEADS, DEPTH, SIZE, PATCH = 5, 16, 4, 2, 32, 8
HEAD_WIDTH = WIDTH // HEADS


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


fused = F.scaled_dot_product_attention


class Attention(nn.Module):
    """All heads in one call."""

    attend: Callable[..., Tensor] = staticmethod(explicit)

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Head(nn.Module):
    """One head with layers of its own for q, k and v."""

    def __init__(self, whole: Attention, index: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        rows = slice(index * HEAD_WIDTH, (index + 1) * HEAD_WIDTH)
        self.attend = attend
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEAD_WIDTH) for _ in range(3))
        weights, biases = whole.qkv.weight.view(3, WIDTH, WIDTH), whole.qkv.bias.view(3, WIDTH)
        for number, layer in enumerate((self.q, self.k, self.v)):
            layer.weight.data.copy_(weights[number, rows])
            layer.bias.data.copy_(biases[number, rows])

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.q(x), self.k(x), self.v(x))


class HeadModules(nn.Module):
    """nn.ModuleList([Head(…)]), concatenated, then projected."""

    attend: Callable[..., Tensor] = staticmethod(explicit)

    def __init__(self, whole: Attention) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(whole, index, self.attend) for index in range(HEADS)])
        self.out = whole.out

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))


class FusedHeadModules(HeadModules):
    attend = staticmethod(fused)


class ProjectedHeads(HeadModules):
    """Each head has an output projection of its own; these are summed."""

    def __init__(self, whole: Attention) -> None:
        super().__init__(whole)
        self.outs = nn.ModuleList([nn.Linear(HEAD_WIDTH, WIDTH, bias=False) for _ in range(HEADS)])
        for layer, columns in zip(self.outs, whole.out.weight.split(HEAD_WIDTH, 1), strict=True):
            layer.weight.data.copy_(columns)
        self.bias = nn.Parameter(whole.out.bias.data.clone())

    def forward(self, x: Tensor) -> Tensor:
        return sum(out(head(x)) for out, head in zip(self.outs, self.heads, strict=True)) + self.bias


class LoopOverSlices(nn.Module):
    """One qkv layer, cut into heads in a loop."""

    attend: Callable[..., Tensor] = staticmethod(explicit)

    def __init__(self, whole: Attention) -> None:
        super().__init__()
        self.qkv, self.out = whole.qkv, whole.out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.split(HEAD_WIDTH, -1) for part in self.qkv(x).chunk(3, -1))
        return self.join([self.attend(q[i], k[i], v[i]) for i in range(HEADS)], x)

    def join(self, heads: list[Tensor], x: Tensor) -> Tensor:
        return self.out(torch.cat(heads, -1))


class FusedLoopOverSlices(LoopOverSlices):
    attend = staticmethod(fused)


class HeadsInABuffer(LoopOverSlices):
    """Heads are written into a tensor."""

    def join(self, heads: list[Tensor], x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for index, head in enumerate(heads):
            out[..., index * HEAD_WIDTH : (index + 1) * HEAD_WIDTH] = head
        return self.out(out)


class TwoCallsOfTwoHeads(LoopOverSlices):
    attend = staticmethod(fused)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        halves = [self.attend(q[:, h], k[:, h], v[:, h]) for h in (slice(0, 2), slice(2, 4))]
        return self.out(torch.cat(halves, 1).transpose(1, 2).flatten(2))


class StepByStep(LoopOverSlices):
    """All scores first, then all softmaxes, then all products with the values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.split(HEAD_WIDTH, -1) for part in self.qkv(x).chunk(3, -1))
        scores = [q[i] @ k[i].transpose(-2, -1) * HEAD_WIDTH**-0.5 for i in range(HEADS)]
        A = [part.softmax(-1) for part in scores]
        return self.out(torch.cat([A[i] @ v[i] for i in range(HEADS)], -1))


class NormForEachHead(HeadModules):
    """The same norm is computed anew for each head."""

    norm: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(self.norm(x)) for head in self.heads], -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class HeadsAddedByTurns(nn.Module):
    """x = x + head, one head after the other, all of them of the same normed tokens."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attention = ProjectedHeads(block.attention)
        self.norm1, self.norm2, self.mlp = block.norm1, block.norm2, block.mlp

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        for out, head in zip(self.attention.outs, self.attention.heads, strict=True):
            x = x + out(head(normed))
        x = x + self.attention.bias
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 1 + (SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def tokens(self, image: Tensor) -> Tensor:
        patches = self.embed(image).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(image), -1, -1), patches], 1) + self.positions

    def forward(self, image: Tensor) -> Tensor:
        x = self.tokens(image)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


FORMS: dict[str, type[nn.Module]] = {
    "modules": HeadModules,
    "fused-modules": FusedHeadModules,
    "projected": ProjectedHeads,
    "loop": LoopOverSlices,
    "fused-loop": FusedLoopOverSlices,
    "buffer": HeadsInABuffer,
    "two-calls": TwoCallsOfTwoHeads,
    "step-by-step": StepByStep,
    "norm-each": NormForEachHead,
    "by-turns": HeadsAddedByTurns,
}


def single(seed: int = 0, *, attend: Callable[..., Tensor] = explicit) -> ViT:
    """Return the ViT with one call for all heads, with weights large enough that its layers matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ViT()
    for parameter in model.parameters():
        parameter.data.mul_(1.5 if parameter.ndim > 1 else 1)
    for block in model.blocks:
        block.attention.attend = attend
    return model.double().eval()


def reference(form: str) -> ViT:
    """Return the ViT whose attention is as fused as that of a form."""
    return single(attend=fused if is_fused(form) else explicit)


def is_fused(form: str) -> bool:
    return form in ("fused-modules", "fused-loop", "two-calls")


def apart(form: str) -> ViT:
    """Return the same ViT with heads that are calls of their own."""
    model = single()
    for index, block in enumerate(model.blocks):
        if form == "by-turns":
            model.blocks[index] = HeadsAddedByTurns(block)
            continue
        block.attention = FORMS[form](block.attention)
        if form == "norm-each":
            block.attention.norm, block.norm1 = block.norm1, nn.Identity()
    return model.double().eval()


def images(batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
