"""Inner products and norms of tokens: without a kernel, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from clairvit.cuda import kernels
from clairvit.cuda.kernels import inner_products, products_and_norms
from helpers.rounding import assert_same
from helpers.token_cases import CASES, largest_excess
from helpers.triton_interpreter import interpreted_lines


def test_without_a_kernel_half_precision_is_widened_first() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 5, 40, generator=generator).bfloat16() for _ in range(2))
    assert not kernels.tokens_apply(a, b)
    wide = products_and_norms(a.double(), b.double())
    assert products_and_norms(a, b).dtype == inner_products(a, b).dtype == torch.float32
    assert torch.allclose(products_and_norms(a, b).double(), wide, rtol=1e-5, atol=1e-5)
    assert_same(inner_products(a.double(), b.double()), wide[:, 0])


def test_kernel_in_the_interpreter() -> None:
    lines = interpreted_lines("helpers.token_cases", "print_token_cases")
    assert len(lines) == len(CASES)
    assert [line for line in lines if not line.endswith("ok")] == []


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_on_a_gpu(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert largest_excess(case, dtype, "cuda") <= 1
