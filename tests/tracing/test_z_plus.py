"""The z+ rule by three matrix products, against every contribution taken apart; where sums cancel too.

Z⁺ = (W x + |W| |x|) / 2 divides by rounding where all contributions are negative; the rule must not be used there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from clairvit.tracing.rules.chefer_lrp import by_sign, ratio, z_plus
from clairvit.tracing.rules.table import Call

TOKENS, WIDTH, OUT = 40, 96, 64


def call_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Call:
    inputs = x.detach().requires_grad_(True)
    out = F.linear(inputs, weight, bias)
    kept = out.detach()
    arguments = {"weight": weight, "bias": bias}
    return Call(
        (inputs,), get_gradient_edge(out), arguments, lambda x: F.linear(x, weight, bias), (kept, kept._version)
    )


def by_contributions(x: Tensor, weight: Tensor, R: Tensor) -> Tensor:
    """Return R_j = sum_i (x_j w_ij)⁺ / sum_k (x_k w_ik)⁺ · R_i in float64, [N, in]."""
    terms = (x.double()[:, None] * weight.double()).clamp(min=0)  # [N, out, in]
    total = terms.sum(-1)
    s = torch.where(total == 0, 0, R.double() / total)
    return (terms * s[..., None]).sum(1)


def drawn(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x [N, in], W and b of a linear layer whose sums cancel in some way."""
    generator = torch.Generator().manual_seed(7)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((TOKENS, WIDTH), (OUT, WIDTH), (OUT,)))
    if case == "all negative":  # no positive contribution to any output
        x, weight = x.abs(), -weight.abs()
    elif case == "one output negative":
        x, weight[3] = x.abs(), -weight[3].abs()
    elif case == "nearly negative":  # one contribution of 1e-6 is all that is positive
        x, weight = x.abs(), -weight.abs()
        weight[:, 0] = 1e-6
    elif case == "zeros":
        x[5], weight[4], x[:, 9] = 0, 0, 0
    elif case == "large bias":
        bias *= 1e6
    elif case == "outlier":  # a massive activation
        x[:, 11] = 300
    return x.to(dtype), weight.to(dtype), None if case == "no bias" else bias.to(dtype)


CASES = [
    "ordinary",
    "no bias",
    "all negative",
    "one output negative",
    "nearly negative",
    "zeros",
    "large bias",
    "outlier",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_relevance_is_that_of_all_contributions(case: str, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(case, dtype)
    call = call_of(x, weight, bias)
    c = torch.randn(TOKENS, OUT, generator=torch.Generator().manual_seed(8)).to(dtype)
    R = F.linear(x, weight, bias) * c
    with torch.no_grad():
        (relevance,) = z_plus(call, c)
    expected = by_contributions(x, weight, R)
    rounding = 64 * torch.finfo(dtype).eps * R.double().abs().sum(-1, keepdim=True)  # per token, of all its relevance
    assert relevance is not None
    assert ((relevance.double() * x.double() - expected).abs() <= rounding).all()
    assert relevance.isfinite().all()


class Products(TorchDispatchMode):
    """Count matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_three_products_are_enough_where_sums_keep_their_digits(case: str) -> None:
    call = call_of(*drawn(case, torch.float32))
    with torch.no_grad(), Products() as products:
        z_plus(call, torch.ones(TOKENS, OUT))
    assert (products.count <= 3) == (case in ("ordinary", "no bias"))


def test_relevance_of_a_token_does_not_depend_on_the_tokens_beside_it() -> None:
    """A token of zeros has no positive contribution, so the rule takes every token's contributions apart."""
    x, weight, bias = drawn("ordinary", torch.float64)
    c = torch.randn(TOKENS + 1, OUT, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    call, with_zeros = (call_of(tokens, weight, bias) for tokens in (x, torch.cat([x, torch.zeros(1, WIDTH)])))
    with torch.no_grad():
        (alone,) = z_plus(call, c[:-1])
        with Products() as products:
            (beside,) = z_plus(with_zeros, c)
    assert products.count > 3, "two ways"
    assert alone is not None
    assert beside is not None
    torch.testing.assert_close(beside[:-1], alone, rtol=1e-12, atol=1e-12)


def test_choice_by_sign_is_exact() -> None:
    """Zeros of both signs count as not positive, and what is not chosen may be infinite."""
    x = torch.tensor([2.0, -1.0, 0.0, -0.0, 1e-45, -1e-45])
    up, down = torch.arange(6.0), -torch.arange(6.0) - 1
    torch.testing.assert_close(by_sign(x, up, down), torch.where(x > 0, up, down), rtol=0, atol=0)
    up[1], down[0] = torch.inf, torch.nan
    torch.testing.assert_close(by_sign(x, up, down), torch.where(x > 0, up, down), rtol=0, atol=0)


@pytest.mark.parametrize("zero", [None, 0.0, -0.0])
def test_ratio_over_zero_is_zero(zero: float | None) -> None:
    denominator = torch.tensor([2.0, -4.0, 1e-30])
    if zero is not None:
        denominator[1] = zero
    expected = torch.where(denominator == 0, 0, torch.ones(3) / denominator)
    torch.testing.assert_close(ratio(torch.ones(3), denominator), expected, rtol=0, atol=0)
