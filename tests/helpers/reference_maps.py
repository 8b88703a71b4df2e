"""Every method of METHODS 1-3 from full N×N matrices: A, G by brute force, products multiplied out, rows read last."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helpers.reference_vit import (
    Gradients,
    Run,
    ViT,
    attend,
    brute_force,
    forward,
    read_out,
    score,
    transform,
    written_out,
)


@dataclass(frozen=True)
class Proof:
    """One model, one batch, one class per image, and the gradients of their scores by autograd."""

    module: nn.Module
    pixels: Tensor
    classes: list[int]
    vit: ViT
    true: Gradients

    @property
    def A(self) -> list[Tensor]:
        return self.true.A  # [B, H, N, N] per layer

    @property
    def G(self) -> list[Tensor]:
        return self.true.G

    @property
    def ixg(self) -> list[Tensor]:
        return self.true.ixg  # [B, N], l = 0 … L

    @property
    def x(self) -> list[Tensor]:
        return [x.detach() for x in self.true.run.x]

    @property
    def depth(self) -> int:
        return len(self.vit.blocks)

    @property
    def identity(self) -> Tensor:
        return torch.eye(self.A[0].shape[-1], dtype=torch.float64)

    @property
    def read_row(self) -> Tensor:
        """METHODS 0.2: [B, N], what the head reads of each row."""
        run, pool = self.true.run, self.vit.pool
        if pool is None:
            row = sum(reader.share * reader.rows for reader in self.vit.readers)
            return row.expand(len(self.pixels), -1)
        a = run.pool.A.detach().mean(1)  # head mean, [B, latents, keys]
        return torch.nn.functional.pad(a.mean(1), (pool.first, 0))

    def read(self, M: Tensor) -> Tensor:
        return torch.einsum("bi,bij->bj", self.read_row, M)

    def on_grid(self, row: Tensor) -> Tensor:
        return row[:, self.vit.prefix :].unflatten(1, self.vit.grid)


def prove(module: nn.Module, pixels: Tensor, classes: list[int]) -> Proof:
    vit = written_out(module)
    return Proof(module, pixels, classes, vit, brute_force(vit, pixels, classes))


# Matrices


def later_left(matrices: list[Tensor]) -> Tensor:
    R = matrices[0]
    for M in matrices[1:]:
        R = M @ R
    return R


def forward_order(matrices: list[Tensor]) -> Tensor:
    return later_left(matrices[::-1])


def row_normalised(M: Tensor) -> Tensor:
    return M / M.sum(-1, keepdim=True)


def without_keepdim(M: Tensor) -> Tensor:
    """jacobgil: column j is divided by the sum of row j."""
    return torch.stack([image / image.sum(dim=-1) for image in M])


def discarded(M: Tensor, ratio: float, protect: str = "none") -> Tensor:
    """The smallest `ratio` of all N² entries of an image become zero."""
    kept = M.clone()
    for image in kept:
        flat = image.view(-1)
        smallest = flat.argsort()[: int(len(flat) * ratio)].tolist()
        for index in smallest:
            row, column = divmod(index, image.shape[1])
            if not ((protect == "cls_cell" and row == column == 0) or (protect == "cls_column" and column == 0)):
                image[row, column] = 0
    return kept


# Layer maps, [B, N, N]


def positive(p: Proof) -> list[Tensor]:
    return [(A * G).clamp(min=0).mean(1) for A, G in zip(p.A, p.G, strict=True)]


def shares(G: Tensor, power: int) -> Tensor:
    """w_h = r_h / sum r, r the entrywise L1 or L2 norm of a head's gradient, [B, H, 1, 1]."""
    r = G.abs().sum((-2, -1)) if power == 1 else (G * G).sum((-2, -1)).sqrt()
    return (r / r.sum(1, keepdim=True))[..., None, None]


def head_weighted(p: Proof, power: int) -> list[Tensor]:
    return [(shares(G, power) * A).sum(1) for A, G in zip(p.A, p.G, strict=True)]


def attention_cam(p: Proof, first: int) -> list[Tensor]:
    """w_hi a_hi with w the mean gradient of row i over the keys from `first` on; mean over heads."""
    return [(G[..., first:].mean(-1, keepdim=True) * A).mean(1) for A, G in zip(p.A, p.G, strict=True)]


# Rollouts


def rolled(
    p: Proof,
    layers: list[Tensor],
    *,
    weight: float = 1.0,
    residual: float = 1.0,
    normalise: Callable[[Tensor], Tensor] = lambda M: M,
    order: Callable[[list[Tensor]], Tensor] = later_left,
) -> Tensor:
    """read(prod_l N(weight·M + residual·I)), less what the identities alone give to each patch, where that is no news.

    No news: the head reads all patches alike, so the identities would pass the same on to all of them; where rows are
    normalised it differs by the rows' sums, and the smallest value is what all patches have.
    """
    matrices = [weight * M + residual * p.identity for M in layers]
    row = p.read(order([normalise(M) for M in matrices]))
    scale = torch.ones_like(row)
    for M in matrices:
        scale = scale * residual / (M.sum(-1) if normalise(M) is not M else 1)
    patches = p.read_row[:, p.vit.prefix :]
    if not torch.equal(patches, patches[:, :1].expand_as(patches)):
        return row
    return row - (p.read_row * scale)[:, p.vit.prefix :].min(1, keepdim=True).values


def rollout(p: Proof, alpha: float = 0.5, fuse: Callable[[Tensor], Tensor] | None = None, start: int = 0) -> Tensor:
    fuse = fuse or (lambda A: A.mean(1))
    layers = [fuse(A) for A in p.A[start:]]
    return rolled(p, layers, weight=alpha, residual=1 - alpha, normalise=row_normalised)


def rollout_of_equation_2(p: Proof, matrices: list[Tensor]) -> Tensor:
    """SkipPLUS's: prod_l (0.5 I + 0.5 M̄_l), the rows of M̄ add up to 1 before the identity is added."""
    return rolled(p, [row_normalised(M) for M in matrices], weight=0.5, residual=0.5)


def rollout_with_discard(p: Proof, ratio: float, protect: str) -> Tensor:
    return rollout(p, fuse=lambda A: discarded(A.mean(1), ratio, protect))


def rollout_jacobgil(p: Proof) -> Tensor:
    fused = [discarded(A.mean(1), 0.9, "cls_cell") for A in p.A]
    return rolled(p, fused, normalise=without_keepdim)


def rollout_forward(p: Proof, alpha: float = 0.5) -> Tensor:
    layers = [A.mean(1) for A in p.A]
    return rolled(p, layers, weight=alpha, residual=1 - alpha, normalise=row_normalised, order=forward_order)


def rollout_cmi(p: Proof, fuse: Callable[[Tensor], Tensor], alpha: float = 1.0) -> Tensor:
    """prod_l (alpha A + (1 - alpha) I), the first layer on the left, nothing normalised."""
    matrices = [alpha * fuse(A) + (1 - alpha) * p.identity for A in p.A]
    product = matrices[0]
    for matrix in matrices[1:]:
        product = product @ matrix
    return p.read(product)


def genatt(p: Proof) -> Tensor:
    return rolled(p, positive(p))


def grad_rollout(p: Proof) -> Tensor:
    return rolled(p, positive(p), normalise=row_normalised)


def grad_rollout_jacobgil(p: Proof) -> Tensor:
    """ReLU after the head mean, gradients of the scores, from the wrong end of the network, the missing keepdim."""
    run = forward(p.vit, p.x[0].requires_grad_(True))
    dS = torch.autograd.grad(score(run.logits, p.classes), [attention.S for attention, _ in run.blocks])
    fused = [discarded((A * g).mean(1).clamp(min=0), 0.9) for A, g in zip(p.A, dS[::-1], strict=True)]
    return rolled(p, fused, normalise=without_keepdim)


def grad_rollout_cmi(p: Proof, fuse: Callable[[Tensor], Tensor] = lambda A: A.mean(1)) -> Tensor:
    return p.read(forward_order([(fuse(G) * fuse(A)).clamp(min=0) for A, G in zip(p.A, p.G, strict=True)]))


def gmar(p: Proof, power: int) -> Tensor:
    return rolled(p, head_weighted(p, power), normalise=row_normalised)


def gmar_joita(p: Proof, power: int) -> Tensor:
    heads = p.A[0].shape[1]
    return rolled(p, head_weighted(p, power), weight=1 / heads, normalise=row_normalised, order=forward_order)


def gmar_forward(p: Proof, power: int) -> Tensor:
    return rolled(p, head_weighted(p, power), normalise=row_normalised, order=forward_order)


def gmar_raw(p: Proof, power: int) -> Tensor:
    return rolled(p, head_weighted(p, power))


# Coporan's report


def cam_coporan(p: Proof) -> Tensor:
    """Section 6.3: gradient times attention of the last layer, averaged, no less than 0."""
    return p.read((p.G[-1] * p.A[-1]).mean(1)).clamp(min=0)


def ag_cam_coporan(p: Proof) -> Tensor:
    """Equation 5.3, channel by channel: mean gradient of the value times the value times its head's attention."""
    run = forward(p.vit, p.x[0].requires_grad_(True))
    last, _ = run.blocks[-1]
    (gradient,) = torch.autograd.grad(score(run.logits, p.classes), [last.v])
    alpha = gradient[:, :, p.vit.prefix :].mean(2)  # [B, H, dh]
    row = torch.zeros_like(p.read_row.expand(len(p.pixels), -1))
    for head in range(last.v.shape[1]):
        attention = p.read(p.A[-1][:, head])
        for channel in range(last.v.shape[3]):
            row = row + alpha[:, head, channel, None] * last.v[:, head, :, channel].detach() * attention
    return row


# Sums


def gradsam(p: Proof) -> Tensor:
    """1/(L H N) sum over layers, heads and queries of A * relu(G)."""
    products = torch.stack([A * G.clamp(min=0) for A, G in zip(p.A, p.G, strict=True)])  # [L, B, H, N, N]
    return products.mean((0, 2, 3))


def focusvit(p: Proof, start: int) -> Tensor:
    layers = [(shares(G, 1) * (A * G).clamp(min=0)).sum(1) for A, G in zip(p.A, p.G, strict=True)]
    return sum(p.read(M) for M in layers[start:])


def attcat(p: Proof, pair: str) -> Tensor:
    attended = [A.mean((1, 2)) for A in p.A]
    if pair == "input":
        return sum(a * p.ixg[layer] for layer, a in enumerate(attended))
    return sum(a * p.ixg[layer + 1] for layer, a in enumerate(attended[:-1]))  # the last block is left out


def half(p: Proof) -> int:
    return math.ceil(p.depth / 2)


# Class activation maps


def gradcam(p: Proof, layer: nn.Module) -> Tensor:
    """pytorch-grad-cam by hand: hook a module of the real model, w_k = mean over the patches, before the ReLU."""
    outputs: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, args, out: outputs.append(out))
    y = score(p.module(p.pixels), p.classes)
    hook.remove()
    (g,) = torch.autograd.grad(y, outputs[0])
    a, g = outputs[0].detach()[:, p.vit.prefix :], g[:, p.vit.prefix :]
    return (g.mean(1, keepdim=True) * a).sum(-1).unflatten(1, p.vit.grid)


def gradcam_plus(p: Proof) -> Tensor:
    """SkipPLUS: block inputs, the mean over all tokens, signed."""
    pairs = list(zip(p.x, p.true.dx, strict=True))[:-1]
    return sum((dx.mean(1, keepdim=True) * x).sum(-1) for x, dx in pairs)


# LeGrad


def legrad(p: Proof, pool: str = "mean") -> list[Tensor]:
    """[B, N] per layer: mean_{h,i} relu(ds^l/dA^l), by autograd through block l alone."""
    layer_maps = []
    for (attention, mlp), x in zip(p.vit.blocks, p.x[:-1], strict=True):
        run = attend(attention, x.requires_grad_(True))
        Z = transform(mlp, run.end).end
        logits = read_mean(p.vit, Z) if pool == "mean" else read_out(p.vit, Run(), Z).logits
        (G,) = torch.autograd.grad(score(logits, p.classes), run.A)
        layer_maps.append(G.clamp(min=0).mean((1, 2)))
    return layer_maps


def read_mean(vit: ViT, Z: Tensor) -> Tensor:
    """head(final_norm(mean of all tokens)), whatever the model itself pools."""
    z = Z.mean(1)
    z = vit.norm(z) if vit.norm else z
    return sum(reader.share * reader.classifier(reader.norm(z) if reader.norm else z) for reader in vit.readers)


def legrad_at_pool(p: Proof) -> list[Tensor]:
    """An attention pool reads x^{l+1}: the gradient at the pool's own attention, mean over heads and latents."""
    layer_maps = []
    for Z in p.x[1:]:
        run = read_out(p.vit, Run(), Z.requires_grad_(True))
        (G,) = torch.autograd.grad(score(run.logits, p.classes), run.pool.A)
        layer_maps.append(torch.nn.functional.pad(G.clamp(min=0).mean((1, 2)), (p.vit.pool.first, 0)))
    return layer_maps


def legrad_joita(p: Proof) -> Tensor:
    """relu(G * A) of the final score, patches only, averaged over keys, then over layers."""
    first = p.vit.prefix
    layers = [(A * G).clamp(min=0)[..., first:, first:].mean((1, 3)) for A, G in zip(p.A, p.G, strict=True)]
    return (sum(layers) / len(layers)).unflatten(1, p.vit.grid)
