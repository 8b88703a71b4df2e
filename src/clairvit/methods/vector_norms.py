"""Lengths of what token j adds to token i, without ever making all N × N vectors.

T_ij = r_i (s_i sum_h A_ij^h f_j^h + delta_ij x_i), from `Inside.vectors`. L2 lengths come from the Gram matrices [H, H]
of each token's f; L1 has no such form and goes through the rows in pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from clairvit.tracing.block_decomposition import Vectors

ROOM = 2**20  # numbers in one piece of T, 4 MiB in float32: what a cache can hold
ROOM_ON_GPU = 2**26  # there a piece should be worth starting a kernel for


def lengths(A: Tensor, of: Vectors, rows: Tensor, residual: float = 1.0) -> Tensor:
    """||T_ij||_2 [B, rows, N] for A [B, H, rows, N], with the residual taken `residual` times.

    ||sum_h A_ij^h f_j^h||² = sum_{h,h'} A_ij^h A_ij^h' <f_j^h, f_j^h'>; the residual only changes i = j.
    """
    f = of.f.transpose(1, 2)  # [B, N, H, d]
    gram = f @ f.transpose(-2, -1)  # [B, N, H, H]
    looks = A.permute(0, 3, 2, 1)  # [B, N, rows, H]
    square = ((looks @ gram) * looks).sum(-1).transpose(1, 2)  # [B, rows, N]
    spread, scale = of.spread[:, rows], of.scale[:, rows]  # [B, rows, 1]
    square = square * spread.square()
    if residual:
        own = torch.arange(len(rows), device=rows.device)
        x, f_own = of.x[:, rows], f[:, rows]  # [B, rows, d], [B, rows, H, d]
        added = (A[:, :, own, rows].transpose(1, 2)[..., None] * f_own).sum(2) * spread  # what i adds to itself
        square[:, own, rows] = (added + residual * x).square().sum(-1)
    return square.clamp(min=0).sqrt() * scale


def head_lengths(A: Tensor, of: Vectors, rows: Tensor) -> Tensor:
    """||A_ij^h f_j^h||_2 of each head by itself, [B, H, rows, N]."""
    scale = (of.spread * of.scale)[:, rows]  # [B, rows, 1]
    own: Tensor = vector_norm(of.f, dim=-1)  # [B, H, N]
    return A.abs() * own[:, :, None] * scale[:, None]


def distances(A: Tensor, of: Vectors, rows: Tensor, to: Tensor, p: int) -> Tensor:
    """||y_i - T_ij||_p [B, rows, N] for y = `to` [B, N, d], one image and a few rows at a time."""
    scale = (of.spread * of.scale)[:, None, rows]  # [B, 1, rows, 1]
    looks = (A * scale).permute(0, 3, 2, 1)  # [B, N, rows, H]
    f, x = of.f.transpose(1, 2), of.x * of.scale  # [B, N, H, d], [B, N, d]
    found = A.new_empty(len(A), len(rows), of.x.shape[1])
    size = max(1, (ROOM_ON_GPU if A.is_cuda else ROOM) // of.x[0].numel())
    for image in range(len(A)):
        for first in range(0, len(rows), size):
            at = rows[first : first + size]
            own = torch.arange(len(at), device=at.device)
            piece = looks[image, :, first : first + size]  # [N, piece, H]
            left = torch.baddbmm(to[image, None, at], piece, f[image], alpha=-1)  # y_i - T_ij, [N, piece, d]
            left[at, own] -= x[image, at]
            length = left.abs_().sum(-1) if p == 1 else vector_norm(left, p, -1)  # L1 in place is twice as fast
            found[image, first : first + size] = length.T
    return found


def apportioned(closeness: Tensor, rows: Tensor) -> Tensor:
    """Rows that add up to 1; a row of zeros becomes the token itself."""
    total = closeness.sum(-1, keepdim=True)
    itself = torch.zeros_like(closeness)
    itself[:, torch.arange(len(rows), device=rows.device), rows] = 1
    return torch.where(total > 0, closeness / torch.where(total > 0, total, 1), itself)
