"""Cases for the kernel of decomposition norms, against float64; run in Triton's interpreter and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

Case = tuple[int, int, int, int, int, torch.dtype, int, bool, bool]  # batch, heads, rows, tokens, width, dtype, p, x, y


def distance_cases(device: str) -> list[Case]:
    """Return small cases: tiles that are cut off, rows that are some of the tokens, each norm, without x and y."""
    cases: list[Case] = [
        (2, 3, 5, 21, 40, torch.float32, 1, True, True),
        (1, 2, 17, 17, 70, torch.float32, 2, True, False),
        (1, 1, 70, 70, 20, torch.float16, 1, False, True),
    ]
    if device == "cuda":  # the interpreter multiplies bfloat16 as if it were integers
        cases += [(2, 12, 197, 197, 768, torch.bfloat16, p, True, p == 1) for p in (1, 2)]
        cases += [(2, 20, 50, 130, 100, torch.float32, p, True, True) for p in (1, 2)]
    return cases


def largest_excess(case: Case, device: str) -> float:
    """Return the largest difference between the kernel's norms and those in float64, as a share of its bound.

    The bound is eps(float32) times the number of roundings (the product over heads, the sum over the width, a few for
    x, y and the root; a TF32 product in three parts leaves two bits out) times the norm of the terms' magnitudes.
    """
    from clairvit.cuda.kernels.decomposition import distances

    batch, heads, rows, tokens, width, dtype, p, with_x, with_y = case
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    A = normal(batch, heads, rows, tokens).softmax(-1)
    f = normal(batch, heads, tokens, width).to(dtype)
    x = normal(batch, tokens, width) if with_x else None
    y = normal(batch, rows, width) if with_y else None
    chosen = torch.randperm(tokens, generator=generator)[:rows]
    scale = torch.rand(batch, rows, 1, generator=generator)
    given = [None if tensor is None else tensor.to(device) for tensor in (A, scale, f, x, y, chosen)]
    computed = distances(*given, p).cpu().double()  # type: ignore[arg-type]
    scaled = A.double() * scale.double()[:, None]
    T = torch.einsum("bhij,bhjd->bijd", scaled, f.double())
    size = torch.einsum("bhij,bhjd->bijd", scaled, f.double().abs())
    if x is not None:
        diagonal = (chosen[:, None] == torch.arange(tokens)).double()[None, :, :, None]
        T, size = T + diagonal * x.double()[:, chosen, None], size + diagonal * x.double().abs()[:, chosen, None]
    if y is not None:
        T, size = y.double()[:, :, None] - T, size + y.double().abs()[:, :, None]
    bound = torch.finfo(torch.float32).eps * (4 * heads + width + 8) * size.norm(p, -1)
    return float(((computed - T.norm(p, -1)).abs() / bound).max())


def print_distance_cases() -> None:
    """Run the small cases in Triton's interpreter, which must be switched on; print one line each."""
    for case in distance_cases("cpu"):
        excess = largest_excess(case, "cpu")
        print(case, f"{excess:.3g} of the bound", "ok" if excess <= 1 else "TOO LARGE")
