"""Lengths of what token j adds to token i, without ever making all N × N vectors.

T_ij = r_i (s_i sum_h A_ij^h f_j^h + delta_ij x_i), from `Inside.vectors`. L2 lengths come from the Gram matrices [H, H]
of each token's f; L1 has no such form and goes through the rows in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import vector_norm

from clairvit.trace.inside import Vectors

ROOM = 2**25  # numbers in one piece of T: 128 MiB in float32


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
    """||y_i - T_ij||_p [B, rows, N] for y = `to` [B, N, d], a few rows at a time."""
    return torch.cat([vector_norm(y[:, :, None] - T, p, -1) for y, T in _pieces(A, of, rows, to)], 1)


def _pieces(A: Tensor, of: Vectors, rows: Tensor, to: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """y [B, piece, d] and T [B, piece, N, d] for some of the rows, then for the next."""
    f = of.f.transpose(1, 2)  # [B, N, H, d]
    size = max(1, ROOM // f[:, :, 0].numel())
    for first in range(0, len(rows), size):
        at = rows[first : first + size]
        T = (A[:, :, first : first + size].permute(0, 3, 2, 1) @ f).transpose(1, 2)  # [B, piece, N, d]
        T = T * of.spread[:, at, :, None]
        T[:, torch.arange(len(at), device=at.device), at] += of.x[:, at]
        yield to[:, at], T * of.scale[:, at, :, None]


def apportioned(closeness: Tensor, rows: Tensor) -> Tensor:
    """Rows that add up to 1; a row of zeros becomes the token itself."""
    total = closeness.sum(-1, keepdim=True)
    itself = torch.zeros_like(closeness)
    itself[:, torch.arange(len(rows), device=rows.device), rows] = 1
    return torch.where(total > 0, closeness / torch.where(total > 0, total, 1), itself)
