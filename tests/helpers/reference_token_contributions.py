"""What token j adds to token i, as N × N vectors from explicit weights: nothing of clairvit, nothing clever."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.reference_vit import Attention, AttentionRun, Norm


def linear_norm(norm: Norm, v: Tensor, at: Tensor) -> Tensor:
    """The norm of `v` without its bias, with the spread that `at` has."""
    return norm.gamma * norm.centre(v) / norm.sigma(at)


def vectors(part: Attention, run: AttentionRun, *, value_bias: bool = False, residual: float = 1.0) -> Tensor:
    """T [B, i, j, d]: sum_h A_ij^h f^h(x_j) + delta_ij x_i."""
    v = run.v if value_bias else part.split(linear_norm(part.norm, run.x, run.x) @ part.v.W.T)  # [B, H, N, dh]
    looked = torch.einsum("bhij,bhjv->bijhv", run.A, v).flatten(3)  # [B, i, j, H·dh]
    if part.sub_norm is not None:
        looked = linear_norm(part.sub_norm, looked, run.joined[:, :, None])
    T = part.g1 * (looked @ part.out.W.T)
    diagonal = torch.arange(T.shape[1])
    T[:, diagonal, diagonal] += residual * run.x
    return T.detach()


def head_vectors(part: Attention, run: AttentionRun) -> Tensor:
    """[B, H, i, j, d]: each head by itself, without the residual."""
    alone = []
    for h in range(part.heads):
        only = run.A * (torch.arange(part.heads) == h).double()[None, :, None, None]
        single_head = AttentionRun(**{**vars(run), "A": only})
        alone.append(vectors(part, single_head, residual=0.0))
    return torch.stack(alone, 1)


def closeness(T: Tensor, y: Tensor, p: int = 1) -> Tensor:
    """ALTI's matrix, entry by entry."""
    B, N = y.shape[:2]
    C = torch.zeros(B, N, N, dtype=y.dtype)
    for b in range(B):
        for i in range(N):
            for j in range(N):
                C[b, i, j] = max(0.0, float(y[b, i].norm(p) - (y[b, i] - T[b, i, j]).norm(p)))
            total = C[b, i].sum()
            C[b, i] = C[b, i] / total if total > 0 else (torch.arange(N) == i).double()
    return C
