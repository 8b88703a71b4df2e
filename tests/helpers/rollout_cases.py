"""Cases for the kernel of rollouts, against float64; run in Triton's interpreter and on a GPU."""

from __future__ import annotations

import torch

from clairvit.methods.aggregation import Product

Case = tuple[int, int, int, Product]  # layers, images, tokens
CASES: list[Case] = [
    (3, 2, 21, Product()),
    (2, 1, 16, Product(residual=0.5)),
    (4, 2, 37, Product(normalise="rows")),
    (3, 1, 130, Product(residual=2.5, normalise="rows")),
]


def largest_excess(case: Case, device: str) -> float:
    """Return the largest difference to float64, as a share of eps(float32) · tokens · layers · the largest value."""
    from clairvit.cuda.kernels.rollout import product_steps

    layers, images, tokens, product = case
    generator = torch.Generator().manual_seed(0)
    maps = torch.rand(layers, images, tokens, tokens, generator=generator).transpose(2, 3) / tokens  # other strides
    row = torch.rand(images, 3, tokens, generator=generator)
    totals = losses = None
    if product.normalise == "rows":
        totals = maps.sum(-1) + product.residual
        losses = product.residual / totals - 1
    given = [None if tensor is None else tensor.to(device) for tensor in (row, maps, totals, losses)]
    computed = product_steps(*given, 1.0, product.residual).cpu().double()  # type: ignore[arg-type]
    expected = product.steps(row.double(), maps.double(), row[:, 0].double())
    bound = torch.finfo(torch.float32).eps * tokens * layers * expected.abs().amax()
    return float((computed - expected).abs().max() / bound)


def print_rollout_cases() -> None:
    """Run the cases in Triton's interpreter, which must be switched on; print one line each."""
    for case in CASES:
        excess = largest_excess(case, "cpu")
        print(case, f"{excess:.3g} of the bound", "ok" if excess <= 1 else "TOO LARGE")
