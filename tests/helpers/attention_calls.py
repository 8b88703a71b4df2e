"""Attention calls with random q, k, v and dO, and the cases that the Triton kernels are checked on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clairvit._entries import ENTRIES, WeightedEntries, entry_values
from clairvit.cuda.reductions import KernelReductions
from clairvit.tracing.attention_call import AttentionCall

Case = tuple[Any, ...]  # batch, heads, queries, keys, width of q and k, width of v, dtype, mask


def attention_call(
    batch: int,
    heads: int,
    queries: int,
    keys: int | None = None,
    *,
    width: int,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    mask: str | None = None,
    device: str = "cpu",
) -> tuple[AttentionCall, Tensor]:
    """Return an attention call and the gradient dO of its output; q and k are laid out as a model's [B, N, H, dh]."""
    keys, value_width = queries if keys is None else keys, width if value_width is None else value_width
    generator = torch.Generator().manual_seed(queries * 1000 + keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, k = normal(batch, queries, heads, width).transpose(1, 2), normal(batch, keys, heads, width).transpose(1, 2)
    v, dO = normal(batch, heads, keys, value_width), normal(batch, heads, queries, value_width)
    added: Tensor | None = None
    if mask == "added":
        added = normal(1, heads, queries, keys)
    elif mask == "bool":
        added = (torch.rand(batch, 1, queries, keys, generator=generator) > 0.3).to(device)
        added[..., 0] = True
    return AttentionCall(v=v, outputs=(v,), forms=(lambda out: out,), q=q, k=k, scale=width**-0.5, mask=added), dO


def kernel_cases(device: str) -> list[Case]:
    """Return small cases: tiles that are cut off, widths that are padded, masks, half precision."""
    cases: list[Case] = [
        (2, 3, 37, 37, 16, 16, torch.float32, None),
        (1, 2, 70, 70, 24, 24, torch.float32, "added"),
        (2, 1, 65, 33, 8, 40, torch.float32, "bool"),
        (1, 2, 50, 70, 32, 32, torch.float16, None),
    ]
    if device == "cuda":  # the interpreter multiplies bfloat16 as if it were integers
        cases += [(2, 2, 197, 197, 64, 64, torch.bfloat16, mask) for mask in (None, "added")]
        cases += [(2, 2, 197, 197, 64, 64, torch.float16, "added"), (1, 2, 300, 300, 128, 128, torch.float32, None)]
        cases += [(1, 2, 130, 130, 80, 80, torch.bfloat16, "bool"), (1, 2, 130, 130, 128, 128, torch.float16, None)]
    return cases


def largest_excess(case: Case, device: str) -> float:
    """Return the largest difference between the kernels' sums and those of the matrices, as a share of its bound.

    The bound is eps(float32) times the number of roundings of a chain (the products over the width, the exponential
    with its argument, the sum over rows or keys) times the sum of the terms' magnitudes. Inputs in half precision are
    exact in float64, where the expected sums are computed.
    """
    batch, heads, queries, keys, width, value_width, dtype, mask = case
    call, dO = attention_call(
        batch, heads, queries, keys, width=width, value_width=value_width, dtype=dtype, mask=mask, device=device
    )
    generator = torch.Generator().manual_seed(1)
    places = [*ENTRIES, "A"]  # A twice: two sums of one entry
    weights = torch.randn(len(places), batch, heads, queries, generator=generator).to(device)
    weighted = [WeightedEntries(entry, w) for entry, w in zip(places, weights, strict=True)]
    sums = KernelReductions(call, dO, 1)
    heads_weights = torch.randn(batch, heads, generator=generator).to(device)
    matrices = [sums.weighted_heads(entry, heads_weights) for entry in ENTRIES]
    computed = [*sums.row_sums(ENTRIES), *sums.column_sums(weighted), *matrices]
    chosen = torch.randperm(queries, generator=generator).to(device)
    computed += [sums.row_entries("G", chosen), *([] if mask else [sums.row_entries("S", chosen[:3])])]
    A, G, terms = _float64_matrices(call, dO)
    values = {entry: entry_values(entry, A, G) for entry in ENTRIES}
    sizes = {entry: A if entry == "A" else terms if entry in ("G+", "|G|") else A * terms for entry in ENTRIES}
    sizes["G²"] = 2 * terms.square()
    expected = [values[entry].sum(-1) for entry in ENTRIES]
    expected += [(w.double()[..., None] * values[entry]).sum((1, 2)) for entry, w in zip(places, weights, strict=True)]
    by_head = heads_weights.double()[:, :, None, None]
    expected += [(by_head * values[entry]).sum(1) for entry in ENTRIES]
    assert call.q is not None
    assert call.k is not None
    q, k = call.q.double(), call.k.double().transpose(-2, -1)
    expected += [G[:, :, chosen], *([] if mask else [call.scale * (q @ k)[:, :, chosen[:3]]])]
    size = [sizes[entry].sum(-1) for entry in ENTRIES]
    size += [(w.abs().double()[..., None] * sizes[entry]).sum((1, 2)) for entry, w in zip(places, weights, strict=True)]
    size += [(by_head.abs() * sizes[entry]).sum(1) for entry in ENTRIES]
    size += [terms[:, :, chosen], *([] if mask else [call.scale * (q.abs() @ k.abs())[:, :, chosen[:3]]])]
    # An error d of a score changes its exponential by the factor exp(d): |S| · eps each.
    roundings = width + value_width + heads * queries + keys + 8 * (1 + float(_scores_size(call)))
    bound = torch.finfo(torch.float32).eps * roundings
    return max(
        float(((a.double() - b).abs() / (bound * s).clamp(min=1e-300)).max())
        for a, b, s in zip(computed, expected, size, strict=True)
    )


def _float64_matrices(call: AttentionCall, dO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, G and sum_d |dO_id v_jd|, [B, H, queries, keys], in float64."""
    assert call.q is not None
    assert call.k is not None
    mask = call.mask if call.mask is None or call.mask.dtype == torch.bool else call.mask.double()
    exact = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double(), mask=mask)
    gradient = dO.double()
    return exact.A(), exact.G(gradient), gradient.abs() @ exact.v.abs().transpose(-2, -1)


def _scores_size(call: AttentionCall) -> Tensor:
    """Return the largest sum of magnitudes behind a score."""
    assert call.q is not None
    assert call.k is not None
    size = (call.q.double().abs() @ call.k.double().abs().transpose(-2, -1)).max() * call.scale
    return size if call.mask is None or call.mask.dtype == torch.bool else size + call.mask.double().abs().max()


def print_kernel_cases() -> None:
    """Run the small cases in Triton's interpreter, which must be switched on; print one line each."""
    for case in kernel_cases("cpu"):
        excess = largest_excess(case, "cpu")
        print(case, f"{excess:.3g} of the bound", "ok" if excess <= 1 else "TOO LARGE")
