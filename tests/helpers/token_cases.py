"""Cases for the kernel of tokens' products and norms, against float64; run in Triton's interpreter and on a GPU."""

from __future__ import annotations

import torch

CASES = [(2, 5, 40), (1, 19, 300), (3, 8, 256)]  # images, tokens, width: tiles that are cut off, and whole ones


def largest_excess(case: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    """Return the largest difference to float64, as a share of eps(float32) · width · the sum of magnitudes."""
    from clairvit.cuda.kernels.tokens import products_and_norms

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*case, generator=generator).to(dtype) for _ in range(2))
    b = b.transpose(1, 2).contiguous().transpose(1, 2)  # other strides
    computed = products_and_norms(a.to(device), b.to(device)).cpu().double()
    a, b = a.double(), b.double()
    norms = [a.norm(dim=-1), b.norm(dim=-1)]
    expected = torch.stack([(a * b).sum(-1), *norms], 1)
    size = torch.stack([(a * b).abs().sum(-1), *norms], 1)
    return float(((computed - expected).abs() / (torch.finfo(torch.float32).eps * case[2] * size)).max())


def print_token_cases() -> None:
    """Run the cases in Triton's interpreter, which must be switched on; print one line each."""
    for case in CASES:
        excess = largest_excess(case, torch.float16, "cpu")
        print(case, f"{excess:.3g} of the bound", "ok" if excess <= 1 else "TOO LARGE")
