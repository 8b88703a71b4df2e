"""The kernel of rollouts: in Triton's interpreter and on a GPU, against the product in float64."""

from __future__ import annotations

import pytest
import torch

from clairvit.methods.aggregation import Product
from helpers.rollout_cases import CASES, Case, largest_excess
from helpers.triton_interpreter import interpreted_lines


def test_kernel_in_the_interpreter() -> None:
    lines = interpreted_lines("helpers.rollout_cases", "print_rollout_cases")
    assert len(lines) == len(CASES)
    assert [line for line in lines if not line.endswith("ok")] == []


@pytest.mark.cuda
@pytest.mark.parametrize("case", [*CASES, (12, 4, 197, Product()), (12, 4, 256, Product(normalise="rows"))], ids=str)
def test_kernel_on_a_gpu(case: Case) -> None:
    assert largest_excess(case, "cuda") <= 1


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [197, 300], ids=["kernel", "too large for it"])
def test_products_on_a_gpu_are_those_of_the_cpu(tokens: int) -> None:
    maps = torch.rand(5, 2, tokens, tokens, generator=torch.Generator().manual_seed(0)) / tokens
    for product in (Product(), Product(normalise="rows"), Product(normalise="columns")):
        row = product.start_row(torch.eye(tokens)[:1])
        expected = product.steps(row, maps, torch.eye(tokens)[:1])
        assert row is not None
        computed = product.steps(row.cuda(), maps.cuda(), torch.eye(tokens)[:1].cuda())
        assert torch.allclose(computed.cpu(), expected, rtol=1e-4, atol=1e-6)
