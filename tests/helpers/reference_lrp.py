"""LRP the long way: relevance R itself sent back through a written-out ViT, every rule as its paper writes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from helpers.reference_rules import _ungrouped
from helpers.reference_vit import Attention, AttentionRun, Linear, Mlp, MlpRun, Pool, PoolRun, Run, ViT

LinearRule = Callable[[Linear, Tensor, Tensor], Tensor]
SumRule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def over(R: Tensor, Z: Tensor) -> Tensor:
    return torch.where(Z == 0, torch.zeros_like(R * Z), R / Z)


def shares(parts: Tensor, R: Tensor) -> Tensor:
    """parts [..., out, in] of each output, R [..., out] -> [..., in]."""
    return (parts * over(R, parts.sum(-1)).unsqueeze(-1)).sum(-2)


def contributions(part: Linear, x: Tensor) -> Tensor:
    """x_j w_ij, [..., out, in]."""
    return x.unsqueeze(-2) * part.W


def z_plus(part: Linear, x: Tensor, R: Tensor) -> Tensor:
    return shares(contributions(part, x).clamp(min=0), R)


def z_plus_twice(part: Linear, x: Tensor, R: Tensor) -> Tensor:
    terms = contributions(part, x).clamp(min=0)
    positive = (x > 0).unsqueeze(-2)
    return shares(terms * positive, R) + shares(terms * ~positive, R)


def proportional(a: Tensor, b: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    return over(a * R, a + b), over(b * R, a + b)


def rescaled(a: Tensor, b: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Image by image: the branches' totals become |sum R_a| and |sum R_b| over their sum, of the whole."""
    Ra, Rb = proportional(a, b, R)
    out_a, out_b = torch.empty_like(Ra), torch.empty_like(Rb)
    for i in range(len(R)):
        sum_a, sum_b, total = Ra[i].sum(), Rb[i].sum(), R[i].sum()
        size = sum_a.abs() + sum_b.abs()
        out_a[i] = Ra[i] * (sum_a.abs() / size * total / sum_a)
        out_b[i] = Rb[i] * (sum_b.abs() / size * total / sum_b)
    return out_a, out_b


def positive(a: Tensor, b: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    out_a, out_b = torch.zeros_like(R), torch.zeros_like(R)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in R.shape)):
        i = tuple(at.tolist())
        p, q = float(a[i].clamp(min=0)), float(b[i].clamp(min=0))
        if p + q == 0:
            p, q = float(a[i]), float(b[i])
        out_a[i], out_b[i] = R[i] * p / (p + q), R[i] * q / (p + q)
    return out_a, out_b


@dataclass
class Sweep:
    """One way down. `frozen`: attention and gates are weights, and A v is shared out by its positive terms."""

    linear: LinearRule
    add: SumRule
    frozen: bool = False
    x: list[Tensor] = field(default_factory=list)  # R of x^0 … x^L, [B, N, d]
    A: list[Tensor] = field(default_factory=list)  # R of the attention of each layer, the halved one

    def down(self, vit: ViT, run: Run, classes: list[int]) -> Sweep:
        R = self.head(vit, run, torch.nn.functional.one_hot(torch.tensor(classes), run.logits.shape[-1]).double())
        self.x = [R]
        for (attention, mlp), (first, second) in reversed(list(zip(vit.blocks, run.blocks, strict=True))):
            R = self.attention(attention, first, self.mlp(mlp, second, R))
            self.x.insert(0, R)
        return self

    def matmul(self, a: Tensor, b: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
        """Z = a b: each factor as if it were alone, then halved."""
        s = over(R, a @ b)
        return a * (s @ b.transpose(-2, -1)) / 2, b * (a.transpose(-2, -1) @ s) / 2

    def values(self, A: Tensor, v: Tensor, R: Tensor) -> Tensor:
        terms = A.unsqueeze(-1) * v.unsqueeze(-3)  # [B, H, i, j, d]
        good = terms.clamp(min=0)
        terms = torch.where(good.sum(-2, keepdim=True) > 0, good, terms)
        return (terms * over(R, terms.sum(-2)).unsqueeze(-2)).sum(-3)

    def scores(self, S: Tensor, products: Tensor, bias: Tensor | None, R: Tensor) -> Tensor:
        if bias is None:
            return R
        if bias.isinf().any():  # a mask: what is not seen has no relevance
            return R
        return self.add(products, bias.expand_as(products), R)[0]

    def attention(self, part: Attention, run: AttentionRun, R: Tensor) -> Tensor:
        Rx, Rf = self.add(run.x, run.end - run.x, R)
        RO = part.split(self.linear(part.out, run.inner, Rf))  # a sub-norm hands relevance on
        if self.frozen:
            return Rx + self.linear(part.v, run.h, _ungrouped(part, part.v, self.values(run.A, run.v, RO)))
        RA, Rv = self.matmul(run.A, run.v, RO)
        self.A.insert(0, RA)
        RS = self.scores(run.S, run.products, part.bias, RA)
        Rq, Rk = self.matmul(run.q, run.k.transpose(-2, -1) / math.sqrt(part.size), RS)
        branches = ((part.q, Rq), (part.k, Rk.transpose(-2, -1)), (part.v, Rv))
        return Rx + sum(self.linear(linear, run.h, _ungrouped(part, linear, branch)) for linear, branch in branches)

    def mlp(self, part: Mlp, run: MlpRun, R: Tensor) -> Tensor:
        Rx, Rf = self.add(run.x, run.end - run.x, R)
        Ra = self.linear(part.down, run.inner, Rf)
        if part.gate is None or self.frozen:
            return Rx + self.linear(part.up, run.h, Ra)
        return Rx + self.linear(part.up, run.h, Ra / 2) + self.linear(part.gate, run.h, Ra / 2)

    def pool(self, pool: Pool, run: PoolRun, R: Tensor) -> Tensor:
        RO = pool.split(self.linear(pool.out, run.joined, self.mlp(pool.mlp, run.mlp, R)))
        if self.frozen:
            branches = [(pool.v, self.values(run.A, run.v, RO))]
        else:
            RA, Rv = self.matmul(run.A, run.v, RO)
            _, Rk = self.matmul(pool.latent, run.k.transpose(-2, -1) / math.sqrt(run.k.shape[-1]), RA)
            branches = [(pool.v, Rv), (pool.k, Rk.transpose(-2, -1))]
        R = sum(self.linear(linear, run.tokens, branch.transpose(1, 2).flatten(2)) for linear, branch in branches)
        return torch.nn.functional.pad(R, (0, 0, pool.first, 0))

    def head(self, vit: ViT, run: Run, R: Tensor) -> Tensor:
        source = run.normed if run.pool is None else run.pool.mlp.end
        inner = [reader.norm(z) if reader.norm else z for reader, z in zip(vit.readers, run.pooled, strict=True)]
        logits = [reader.share * reader.classifier(h) for reader, h in zip(vit.readers, inner, strict=True)]
        parts = (R,) if len(logits) == 1 else self.add(*logits, R)
        relevance = torch.zeros_like(source)
        for reader, z, h, part_relevance in zip(vit.readers, run.pooled, inner, parts, strict=True):
            Rz = self.linear(reader.classifier, h, part_relevance)
            relevance = relevance + reader.rows[:, None] * source * over(Rz, z).unsqueeze(1)
        return relevance if vit.pool is None else self.pool(vit.pool, run.pool, relevance)


def chefer() -> Sweep:
    return Sweep(z_plus, rescaled)


def lrp() -> Sweep:
    return Sweep(z_plus_twice, proportional)


def deep_taylor() -> Sweep:
    return Sweep(z_plus, positive, frozen=True)
