"""Stand-ins for the Triton kernels, in plain torch: what is decided around the kernels can be tested on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from clairvit._entries import Entry, WeightedEntries, entry_values
from clairvit.cuda import kernels
from clairvit.tracing.attention_call import AttentionCall


def use_reference_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let fused attention, tokens and decompositions be read by these functions; return the names of those called."""
    called: list[str] = []

    def module(name: str, *functions: Any) -> None:
        stand_in = ModuleType(name)
        for function in functions:

            def counted(*args: Any, _function: Any = function, **kwargs: Any) -> Any:
                called.append(_function.__name__)
                return _function(*args, **kwargs)

            setattr(stand_in, function.__name__, counted)
        package, _, short = name.rpartition(".")
        monkeypatch.setitem(sys.modules, name, stand_in)
        monkeypatch.setattr(sys.modules[package], short, stand_in, raising=False)

    module("clairvit.cuda.kernels.attention", row_sums, column_sums, weighted_heads, row_products)
    module("clairvit.cuda.kernels.tokens", products_and_norms)
    module("clairvit.cuda.kernels.decomposition", distances)
    module("clairvit.cuda.kernels.rollout", product_steps)
    monkeypatch.setattr(kernels, "attention_applies", lambda call: call.q is not None and call.weights is None)
    monkeypatch.setattr(kernels, "tokens_apply", lambda *tensors: True)
    monkeypatch.setattr(kernels, "decomposition_applies", lambda A, f: True)
    monkeypatch.setattr(kernels, "rollout_applies", lambda maps: True)
    return called


def _matrices(call: AttentionCall, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return call.A(), None if gradient is None else call.G(gradient)


def row_sums(call: AttentionCall, gradient: Tensor | None, entries: Sequence[Entry]) -> tuple[list[Tensor], Tensor]:
    A, G = _matrices(call, gradient)
    return [entry_values(entry, A, G).sum(-1) for entry in entries], call.S().logsumexp(-1)


def column_sums(
    call: AttentionCall, gradient: Tensor | None, log_sums: Tensor | None, weighted: Sequence[WeightedEntries]
) -> list[Tensor]:
    A, G = _matrices(call, gradient)
    return [(pair.weights[..., None] * entry_values(pair.entry, A, G)).sum((1, 2)) for pair in weighted]


def weighted_heads(
    call: AttentionCall,
    gradient: Tensor | None,
    log_sums: Tensor | None,
    entry: Entry,
    weights: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    matrix = (weights.expand(call.lead, -1)[:, :, None, None] * entry_values(entry, *_matrices(call, gradient))).sum(1)
    return matrix if out is None else out.copy_(matrix)


def row_products(a: Tensor, b: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    return a.detach()[:, :, rows] @ b.detach().transpose(-2, -1) * scale


def products_and_norms(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([(a * b).sum(-1), a.norm(dim=-1), b.norm(dim=-1)], 1)


def distances(
    A: Tensor, scale: Tensor, f: Tensor, x: Tensor | None, y: Tensor | None, tokens: Tensor, p: int
) -> Tensor:
    T = torch.einsum("bhij,bhjd->bijd", A * scale[:, None], f)
    if x is not None:
        diagonal = (tokens[:, None] == torch.arange(A.shape[-1])).to(A.dtype)
        T = T + diagonal[None, :, :, None] * x[:, tokens, None]
    return (T if y is None else y[:, :, None] - T).norm(p, -1)


def product_steps(
    row: Tensor, layer_maps: Tensor, totals: Tensor | None, losses: Tensor | None, weight: float, residual: float
) -> Tensor:
    start, shift, added = row.unbind(1)
    identity = torch.eye(layer_maps.shape[-1], dtype=row.dtype)
    for layer, matrix in enumerate(layer_maps):
        total = torch.ones_like(start) if totals is None else totals[layer]
        loss = torch.full_like(start, residual - 1) if losses is None else losses[layer]
        full = (weight * matrix + residual * identity) / total[:, :, None]
        passed = start + shift
        added = (added[:, None] @ full)[:, 0] + weight * ((passed / total)[:, None] @ matrix)[:, 0]
        shift = shift + passed * loss
    return torch.stack([start, shift, added], 1)
